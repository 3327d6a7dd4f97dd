"""The page at `/` in a real browser, over a real server: what people do on it, and what it may not do."""

import asyncio
import re
import shutil
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
from playwright.sync_api import Browser, ConsoleMessage, Page, Request, expect, sync_playwright

from coldstream.server.http import ServerSettings, create_app
from coldstream.server.local_client import LocalClient
from coldstream.server.web_server import WebServer, bind, url_of
from http_serving import WithTemplate, open_demo

CHROMIUM = shutil.which("chromium")
KEY = "correct-horse"
WIDE, PHONE = {"width": 1200, "height": 900}, {"width": 360, "height": 740}

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium: apt-get install chromium")


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

    def say(self, text: str) -> None:
        """With the keyboard alone: the message has the focus when the page is there."""
        self.page.keyboard.type(text)
        self.page.keyboard.press("Enter")

    def answered(self) -> None:
        expect(self.page.locator("#messages article").last).to_have_attribute("aria-busy", "false")

    @property
    def answer(self) -> str:
        return self.page.locator(".message.assistant > .text").last.inner_text()

    @property
    def picture(self) -> str:
        return str(self.page.evaluate("document.getElementById('experts').toDataURL()"))


Open = Callable[..., AbstractContextManager[Visit]]


@pytest.fixture(scope="module")
def client() -> Iterator[LocalClient]:
    opened = open_demo()
    with LocalClient(opened, "demo") as client:
        yield client
    opened.close()


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


@contextmanager
def serving(client: Any, **settings: Any) -> Iterator[str]:
    """The address of a server in a thread of its own."""
    with bind("127.0.0.1", 0) as listener:
        server = WebServer(create_app(client, ServerSettings(**settings)), listener)
        thread = threading.Thread(target=lambda: asyncio.run(server.run()))
        thread.start()
        try:
            yield url_of(listener)
        finally:
            server.stop()
            thread.join()


@pytest.fixture
def visit(browser: Browser, client: LocalClient) -> Open:
    @contextmanager
    def opened(
        served: Any = client, viewport: Any = WIDE, scheme: Any = "light", **settings: Any
    ) -> Iterator[Visit]:
        with serving(served, **settings) as url:
            context = browser.new_context(viewport=viewport, color_scheme=scheme)
            context.set_default_timeout(60_000)
            expect.set_options(timeout=60_000)
            visit = Visit(context.new_page(), url)
            visit.page.on("console", visit.hear)
            visit.page.on("pageerror", lambda error: visit.complaints.append(str(error)))
            visit.page.on("request", visit.note)
            visit.page.goto(url)
            try:
                yield visit
            finally:
                context.close()

    return opened


def test_a_chat_by_keyboard_with_settings_and_nothing_from_elsewhere(visit: Open) -> None:
    with visit() as first:
        page = first.page
        page.locator("#settings summary").press("Enter")
        page.get_by_label("Temperature").fill("0.7")
        page.get_by_label("Seed").fill("5")
        page.get_by_label("Most tokens of an answer").fill("12")
        page.get_by_label("Message", exact=True).focus()
        expect(page.locator("#state")).to_have_text("ready")
        expect(page.locator("#model")).to_have_text("demo")
        before = first.picture
        first.say("import os")
        first.answered()
        once = first.answer
        assert once.strip()
        assert "12 tokens" in page.locator(".note").last.inner_text()
        page.wait_for_function(
            "before => document.getElementById('experts').toDataURL() !== before", arg=before
        )
        expect(page.locator("#experts-summary")).to_have_text(
            re.compile(r"^\d+ experts in \d+ layers, [1-9]\d* used lately")
        )
        page.get_by_role("button", name="New chat").press("Enter")
        expect(page.locator("#messages article")).to_have_count(0)
        first.say("import os")
        first.answered()
        assert first.answer == once, "the same seed is the same answer"
        assert first.complaints == []
        assert {url.removeprefix(first.origin).split("/")[0] for url in first.requests} == {""}


def test_stop_keeps_what_was_said_and_another_turn_follows(visit: Open) -> None:
    with visit() as each:
        page = each.page
        page.locator("#settings summary").click()
        page.get_by_label("Temperature").fill("0")  # with which this answer is long
        page.get_by_label("Message", exact=True).focus()
        each.say("import os")
        begun = "() => document.querySelector('.message.assistant > .text').textContent.length > 20"
        page.wait_for_function(begun)
        page.get_by_role("button", name="Stop").click()
        expect(page.locator(".note").last).to_have_text("Stopped.")
        expect(page.locator("#stop")).to_be_disabled()
        expect(page.locator("#prompt")).to_be_focused()
        expect(page.locator("#running")).to_have_text("0")
        each.say("and sys")
        expect(page.locator(".message.assistant")).to_have_count(2)
        page.keyboard.press("Escape")
        each.answered()
        assert each.complaints == []


def test_what_the_server_complains_of_is_shown_and_the_message_is_kept(visit: Open) -> None:
    long = "import os " * 3000
    with visit() as each:
        each.page.get_by_label("Message", exact=True).fill(long)
        each.page.keyboard.press("Enter")
        expect(each.page.get_by_role("alert")).to_contain_text("maximum context length")
        assert each.page.locator("#prompt").input_value().strip() == long.strip()
        expect(each.page.locator("#messages article")).to_have_count(0)
        each.page.locator("#settings summary").click()
        each.page.get_by_label("Temperature").fill("9")
        each.page.get_by_role("button", name="Send").click()
        expect(each.page.get_by_role("alert")).to_contain_text("Temperature:")


def test_markup_in_messages_is_text_and_code_is_a_block(visit: Open) -> None:
    with visit() as each:
        message = each.page.get_by_label("Message", exact=True)
        message.fill("<img src=x onerror=alert(1)> ``\n```html\n<b>x</b>\n```\ny")
        message.press("Enter")
        expect(each.page.locator(".message.user pre")).to_have_text("<b>x</b>\n")
        assert each.page.locator(".message.user img, .message.user b").count() == 0
        each.page.keyboard.press("Escape")
        each.answered()
        assert each.complaints == []


def test_a_thought_is_folded_and_can_be_opened(visit: Open, client: LocalClient) -> None:
    thinker = WithTemplate(client)
    try:
        with visit(thinker) as each:
            each.page.locator("#settings summary").click()
            each.page.get_by_label("Reasoning").select_option("on")
            each.page.get_by_label("Temperature").fill("0")  # with which this answer begins with a thought
            each.page.get_by_label("Most tokens of an answer").fill("20")
            each.page.get_by_label("Message", exact=True).focus()
            each.say("import os")
            each.answered()
            thought = each.page.locator(".message.assistant details")
            expect(thought.locator(".text")).to_be_hidden()
            thought.locator("summary").press("Enter")
            expect(thought.locator(".text")).to_be_visible()
            assert thought.locator(".text").inner_text().strip()
    finally:
        thinker.model.chat_template.close()


def test_a_key_is_asked_for_and_kept_for_the_tab(visit: Open) -> None:
    with visit(api_keys=(KEY,)) as each:
        page = each.page
        page.get_by_label("API key").fill(KEY)
        page.keyboard.press("Enter")
        expect(page.locator("#state")).to_have_text("ready")
        page.reload()
        expect(page.locator("#state")).to_have_text("ready")
        assert page.locator("#key-form").is_hidden()
        assert all(KEY not in url for url in each.requests)


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_phone_needs_no_sideways_scrolling_and_texts_have_contrast(visit: Open, scheme: str) -> None:
    with visit(viewport=PHONE, scheme=scheme) as each:
        page = each.page
        page.locator("#settings summary").click()
        expect(page.locator("#experts-summary")).to_contain_text("experts in")
        each.page.get_by_label("Message", exact=True).focus()
        each.say("x" * 400)
        each.page.keyboard.press("Escape")
        each.answered()
        assert page.evaluate("document.documentElement.scrollWidth") <= PHONE["width"]
        for name in ("--text", "--quiet", "--accent", "--bad"):
            for ground in ("--page", "--panel"):
                assert contrast(colour(page, name), colour(page, ground)) >= 4.5, (name, ground)
        sizes = page.locator("button:visible").evaluate_all("all => all.map(b => b.offsetHeight)")
        assert min(sizes) >= 44


def test_every_control_has_a_name_and_the_map_is_read_by_keys(visit: Open) -> None:
    with visit() as each:
        page = each.page
        page.locator("#settings summary").click()
        unnamed = page.locator("input, textarea, select").evaluate_all(
            "all => all.filter(each => each.labels.length !== 1).map(each => each.id)"
        )
        assert unnamed == []
        expect(page.locator("#experts-summary")).to_contain_text("experts in")
        page.locator("#experts").press("ArrowRight")
        expect(page.locator("#experts-cell")).to_have_text(re.compile(r"Layer 0, expert 1: used by \d+ %"))
        page.keyboard.press("ArrowDown")
        expect(page.locator("#experts-cell")).to_contain_text("Layer 1, expert 1")


def test_the_policy_lets_nothing_but_the_files_of_the_server_run(visit: Open) -> None:
    with visit() as each:
        ran = each.page.evaluate(
            """() => {
                const script = document.createElement('script');
                script.textContent = 'window.wasRun = true';
                document.body.append(script);
                return window.wasRun === true;
            }"""
        )
        assert not ran
        refused = each.page.evaluate("fetch('http://127.0.0.1:9/').then(() => 'sent', () => 'refused')")
        assert refused == "refused"
        assert any("Content Security Policy" in text for text in each.complaints)


def colour(page: Page, name: str) -> tuple[int, ...]:
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
