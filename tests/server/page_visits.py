"""What tests of the page share: a server, a browser's visit to it, and answers that a test writes itself."""

import asyncio
import gc
import queue
import shutil
import socket
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

from playwright.sync_api import (
    Browser,
    BrowserContext,
    ConsoleMessage,
    Locator,
    Page,
    Request,
    ViewportSize,
    expect,
    sync_playwright,
)

from coldstream.engine.events import Delta, Event, Failed
from coldstream.engine.request import FinishReason, Piece, Statistics
from coldstream.engine.submission import Submission
from coldstream.errors import ColdstreamError
from coldstream.server.event_stream import EventStream
from coldstream.server.http import ServerSettings, create_app
from coldstream.server.local_client import LocalClient
from coldstream.server.web_server import WebServer, bind, url_of

WAIT_S = 30.0
WIDE: ViewportSize = {"width": 1280, "height": 900}
CHROMIUM = shutil.which("chromium")

MARKDOWN = """# Title

Some *text* of **two** lines
with `code`, https://example.com/a and \\(a_1 + b_1\\).

| left | right |
|:-----|------:|
| a    | 1     |

1. one
   - inner
2. two

```python
print("<b>")
```

[good](https://example.com "of a link") [bad](javascript:alert(1)) [data](data:text/html,x)
![seen](https://example.com/x.png) <img src=x onerror=alert(1)> <script>alert(2)</script>
"""


# A transaction over the same tables begins when those before it have ended.
_STORED = """() => new Promise((stored, failed) => {
    const opening = indexedDB.open("coldstream", 1);
    opening.onerror = failed;
    opening.onsuccess = () => {
        const tables = ["heads", "conversations"];
        const transaction = opening.result.transaction(tables, "readwrite");
        transaction.objectStore("heads").count();
        transaction.oncomplete = () => { opening.result.close(); stored(); };
        transaction.onabort = failed;
    };
})"""


# In the first frame observers of sizes are called after this; what they change is drawn in the second.
_DRAWN = """async () => {
    for (const _ of [1, 2]) await new Promise(done => requestAnimationFrame(done));
}"""


@dataclass
class Visit:
    """A page under way, and what it did."""

    page: Page
    origin: str
    complaints: list[str] = field(default_factory=list)  # errors and warnings in its console
    requests: list[str] = field(default_factory=list)  # their addresses

    def hear(self, message: ConsoleMessage) -> None:
        if message.type in ("error", "warning"):
            self.complaints.append(message.text)

    def note(self, request: Request) -> None:
        self.requests.append(request.url)

    def reload(self) -> None:
        """Loads the page again, once all is stored: else the browser gives up what is not."""
        self.stored()
        self.page.evaluate(_STORED)
        self.page.reload()

    def stored(self) -> None:
        """Waits until all that was said is stored.

        The page writes one state of a conversation after the other, so some may not have begun yet.
        """
        expect(self.page.locator("#conversations[aria-busy=true]")).to_have_count(0)

    def drawn(self) -> None:
        """Waits until the page has drawn itself, and so has observed new sizes."""
        self.page.evaluate(_DRAWN)

    def say(self, text: str) -> None:
        """With the keyboard alone: the message has the focus when the page is there."""
        expect(self.prompt).to_be_focused()
        self.page.keyboard.insert_text(text)
        self.page.keyboard.press("Enter")

    def answered(self) -> None:
        """Waits until the last answer is whole."""
        expect(self.messages.last).to_have_attribute("aria-busy", "false")

    def opened(self, name: str) -> None:
        """Presses a button in the header."""
        self.page.locator("header").get_by_role("button", name=name, exact=True).press("Enter")

    def set(self, **settings: str) -> None:
        """Enters settings by their labels."""
        self.opened("Settings")
        for name, value in settings.items():
            self.page.get_by_label(name.replace("_", " "), exact=True).fill(value)
        self.page.get_by_role("button", name="Done").press("Enter")
        self.prompt.focus()

    def button(self, name: str) -> Locator:
        return self.page.get_by_role("button", name=name, exact=True)

    @property
    def prompt(self) -> Locator:
        return self.page.get_by_label("Message", exact=True)

    @property
    def messages(self) -> Locator:
        return self.page.locator("#messages article")

    @property
    def texts(self) -> list[str]:
        return self.page.locator("#messages article > .text").all_inner_texts()

    @property
    def kept(self) -> Locator:
        """The titles in the list of conversations."""
        return self.page.locator("#conversations .open")

    @property
    def answer(self) -> str:
        return self.page.locator(".message.assistant > .text").last.inner_text()

    @property
    def picture(self) -> str:
        return str(self.page.evaluate("document.getElementById('experts').toDataURL()"))


@contextmanager
def browsing() -> Iterator[Browser]:
    """The Chromium of the system."""
    # What other tests left is not looked through again after each visit.
    gc.collect()
    gc.freeze()
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox", "--disable-gpu"])
        yield browser
        browser.close()


@contextmanager
def serving(client: Any, port: int = 0, **settings: Any) -> Iterator[str]:
    """The address of a server in a thread of its own."""
    with bind("127.0.0.1", port) as listener:
        server = WebServer(create_app(client, ServerSettings(**settings)), listener)
        thread = threading.Thread(target=lambda: asyncio.run(server.run()))
        thread.start()
        try:
            yield url_of(listener)
        finally:
            server.stop()
            thread.join()
            _close_unserved()


def _close_unserved() -> None:
    """Closes connections that a server's loop has accepted and not served before it ended.

    asyncio leaves these to the garbage collector, whose warning would fail any later test. A browser opens
    connections at any time.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)
        gc.collect()


class Relay:
    """A way to a server that can be down: until it is mended, connections end and new ones are refused."""

    def __init__(self, listener: socket.socket, port: int) -> None:
        self.url = url_of(listener)
        self._listener = listener
        self._port = port  # of the server
        self._open: set[asyncio.StreamWriter] = set()
        self._is_down = False
        self._loop = asyncio.new_event_loop()
        self._is_over = asyncio.Event()

    def run(self) -> None:
        """Passes on what comes, until `close`. In a thread of its own."""
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
            runner.run(self._serve())

    def truncate(self) -> None:
        self._is_down = True
        self._loop.call_soon_threadsafe(self._drop)

    def mend(self) -> None:
        self._is_down = False

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._is_over.set)

    async def _serve(self) -> None:
        server = await asyncio.start_server(self._pass, sock=self._listener)
        await self._is_over.wait()
        server.close()
        self._drop()
        passing = asyncio.all_tasks() - {asyncio.current_task()}
        await asyncio.gather(*passing, return_exceptions=True)

    async def _pass(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self._is_down:
            writer.transport.abort()
            return
        reader_there, writer_there = await asyncio.open_connection("127.0.0.1", self._port)
        self._open |= {writer, writer_there}
        if self._is_down:  # since it was looked at
            self._drop()
        await asyncio.gather(_copy(reader, writer_there), _copy(reader_there, writer))
        self._open -= {writer, writer_there}

    def _drop(self) -> None:
        for each in self._open:
            each.transport.abort()


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with suppress(OSError):
        while part := await reader.read(1 << 16):
            writer.write(part)
            await writer.drain()
    writer.transport.abort()


@contextmanager
def relaying(url: str) -> Iterator[Relay]:
    """A relay to the server at `url`, in a thread of its own."""
    with bind("127.0.0.1", 0) as listener:
        relay = Relay(listener, int(url.rpartition(":")[2]))
        thread = threading.Thread(target=relay.run)
        thread.start()
        try:
            yield relay
        finally:
            relay.close()
            thread.join()
            _close_unserved()


@contextmanager
def visiting(context: BrowserContext, url: str) -> Iterator[Visit]:
    """A page of the server at `url`, in a browser's context that is closed at the end."""
    context.set_default_timeout(1000 * WAIT_S)
    expect.set_options(timeout=1000 * WAIT_S)
    try:
        yield visit_of(context, url)
    finally:
        context.close()


def visit_of(context: BrowserContext, url: str) -> Visit:
    """A visit in a tab of its own."""
    visit = Visit(context.new_page(), url)
    visit.page.on("console", visit.hear)
    visit.page.on("pageerror", lambda error: visit.complaints.append(str(error)))
    visit.page.on("request", visit.note)
    visit.page.goto(url)
    return visit


def colour(page: Page, name: str) -> tuple[int, ...]:
    """A variable of the style sheet, as red, green and blue."""
    text = str(page.evaluate("n => getComputedStyle(document.documentElement).getPropertyValue(n)", name))
    return tuple(int(text.strip()[i : i + 2], 16) for i in (1, 3, 5))


def contrast(one: tuple[int, ...], other: tuple[int, ...]) -> float:
    """As WCAG 2 defines it."""

    def luminance(rgb: tuple[int, ...]) -> float:
        parts = [value / 255 for value in rgb]
        linear = [v / 12.92 if v <= 0.04045 else ((v + 0.055) / 1.055) ** 2.4 for v in parts]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    high, low = sorted((luminance(one), luminance(other)), reverse=True)
    return (high + 0.05) / (low + 0.05)


class Author:
    """A client whose answers a test writes piece by piece, from its own thread; the model is a real one."""

    def __init__(self, client: LocalClient) -> None:
        self.model = client.model
        self.refusal: ColdstreamError | None = None  # of all requests while it is set
        self._client = client
        self._answers: queue.Queue[Answer] = queue.Queue()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._client, name)

    async def submit(self, submission: Submission) -> EventStream:
        if self.refusal is not None:
            raise self.refusal
        answer = Answer(submission, self.model.tokenizer.decode(submission.request.prompt_token_ids))
        self._answers.put(answer)
        return answer.stream

    def asked(self) -> "Answer":
        """The answer to the next request, once it has come."""
        return self._answers.get(timeout=WAIT_S)

    def answers(self, visit: Visit, text: str, ending: FinishReason = "stop") -> "Answer":
        """Writes the whole answer to the next request, and waits until it is shown."""
        answer = self.asked()
        answer.write(text)
        answer.end(ending)
        visit.answered()
        return answer


class Answer:
    """An answer under way. `prompt` is what the model was given."""

    def __init__(self, submission: Submission, prompt: str) -> None:
        self.prompt = prompt
        self.params = submission.request.params
        self.is_left = threading.Event()  # its reader has gone
        self.stream = EventStream(submission.request_id, 1, lambda stream: self.is_left.set())
        self._request = submission.request
        self._loop = asyncio.get_running_loop()

    def write(self, text: str) -> None:
        self._push(Delta(self.stream.request_id, 0, Piece(text, (1,))))

    def end(self, reason: FinishReason = "stop") -> None:
        statistics = Statistics(len(self._request.prompt_token_ids), 7, 42, 0.1, 1.0, "generic", 1, 0)
        piece = Piece("", (), finish_reason=reason, statistics=statistics)
        self._push(Delta(self.stream.request_id, 0, piece))

    def fail(self, error: ColdstreamError) -> None:
        self._push(Failed(self.stream.request_id, error))

    def _push(self, event: Event) -> None:
        self._loop.call_soon_threadsafe(self.stream.push, event)
