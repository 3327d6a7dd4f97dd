"""One conversation of an agent with a server: held turn by turn, and what came of it."""

import json
import subprocess
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Final

from tools.agents.clients import Client, Site
from tools.agents.conversations import Turn, prepare
from tools.agents.proxy import Exchange, Proxy

MODEL: Final = "qwen"  # its name for the agents
BEYOND_CONTEXT: Final = ("context_length_exceeded", "prompt is too long")
SHOWN_OF_OUTPUT: Final = 400  # characters of what an agent wrote before it failed


@dataclass(frozen=True)
class Outcome:
    """The counts of one conversation."""

    client: str
    version: str
    template: str
    context: int
    turns: int
    requests: int
    refused: int  # other than those that are longer than the context
    too_long: int
    problems: tuple[str, ...]


@dataclass
class Talk:
    """A conversation in `folder`, over a proxy in front of the server at `url`."""

    client: Client
    template: str
    url: str
    context: int
    folder: Path
    exchanges: list[list[Exchange]] = field(default_factory=list)  # by turn
    problems: list[str] = field(default_factory=list)
    prompts: list[str] = field(default_factory=list)

    @property
    def home(self) -> Path:
        return self.folder / "home"

    @property
    def work(self) -> Path:
        return self.folder / "work"

    def hold(self, turns: Callable[[Path], list[Turn]], bin_folder: Path) -> None:
        """Say everything up to a turn that goes wrong: what follows would only repeat its fault."""
        for folder in (self.home, self.work):
            folder.mkdir()
        prepare(self.work)
        with Proxy(self.url) as proxy:
            site = Site(self.home, self.work, proxy.url, MODEL, self.context)
            self.client.configure(site)
            for turn in turns(self.work):
                self.prompts.append(turn.prompt)
                proxy.expect(turn.steps)
                try:
                    ended = self.client.run(bin_folder, site, turn.prompt, turn.begins or not self.exchanges)
                except subprocess.TimeoutExpired as error:
                    ended = subprocess.CompletedProcess(
                        error.cmd, -1, "", f"stopped after {error.timeout:.0f} s"
                    )
                exchanges, left = proxy.taken()
                self.exchanges.append(exchanges)
                self._judge(turn, ended, exchanges, len(left))
                if self.problems:
                    return
            if ended.returncode:
                self.problems.append(f"the last turn: exit status {ended.returncode}")

    def check_that_it_went_beyond(self) -> None:
        """Note a problem if no request was longer than the context."""
        if not any(map(_is_beyond_context, chain(*self.exchanges))):
            self.problems.append(f"no request was longer than {self.context} tokens")

    def outcome(self, version: str) -> Outcome:
        """What the conversation so far has come to."""
        everything = list(chain(*self.exchanges))
        failed = [exchange for exchange in everything if exchange.status != 200 or exchange.error]
        too_long = sum(_is_beyond_context(exchange) for exchange in failed)
        return Outcome(
            client=self.client.name,
            version=version,
            template=self.template,
            context=self.context,
            turns=len(self.exchanges),
            requests=len(everything),
            refused=len(failed) - too_long,
            too_long=too_long,
            problems=tuple(self.problems),
        )

    def _judge(
        self, turn: Turn, ended: subprocess.CompletedProcess[str], exchanges: list[Exchange], num_left: int
    ) -> None:
        where = f"turn {len(self.exchanges)} ({turn.prompt[:40]})"
        for exchange in exchanges:
            if (exchange.status != 200 or exchange.error) and not _is_beyond_context(exchange):
                self.problems.append(f"{where}: {exchange.path} {exchange.status} {exchange.error[:300]}")
        if ended.returncode and not any(map(_is_beyond_context, exchanges)):
            reported = f"{ended.stdout[-SHOWN_OF_OUTPUT:]}{ended.stderr[-SHOWN_OF_OUTPUT:]}"
            self.problems.append(f"{where}: exit status {ended.returncode}: {reported}")
        if num_left and not any(map(_is_beyond_context, exchanges)):
            self.problems.append(f"{where}: {num_left} of {len(turn.steps)} steps were not asked for")
        if turn.written not in (self.work / "door.txt").read_text():
            self.problems.append(f"{where}: the file is without {turn.written!r}")
        asked = [json.dumps(each.body) for each in exchanges if each.body and each.body.get("tools")]
        missing = [text for text in turn.shown if not asked or text not in asked[-1]]
        if missing:
            self.problems.append(f"{where}: the last request is without {missing}")


def _is_beyond_context(exchange: Exchange) -> bool:
    return exchange.status == 400 and any(words in exchange.error for words in BEYOND_CONTEXT)
