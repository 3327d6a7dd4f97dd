"""The sessions of a page: what is typed, what the page says is printed, and what is printed here.

A block of ```console holds one or more commands, each after `$ `, and their output. A block in which lines
begin with `>>> ` is a chat, typed on a terminal.
"""

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from terminals import Terminal, without_controls

from short_rates import PROGRAM

_BLOCK = re.compile(r"^```console\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_PROMPT = ">>> "
_TYPED = re.compile(r"^(>>> |\.\.\. )(.*)$", re.MULTILINE)
_WIDE = 250  # columns, so that no terminal breaks the statistics

# What belongs to the machine: pattern, and what stands for it.
_MASKS = (
    (re.compile(r"[\d.]+(?= (?:tok/s|GB/s|s|ms)\b)"), "#"),
    (re.compile(r"[\d.]+ ± [\d.]+"), "# ± #"),
    (re.compile(r"\d+%(?= \|$)"), "#%"),
    (re.compile(r"(?<=tok/s )(?: *[\d.]+)+$"), "#"),
    (re.compile(r" · [\d.]+ tokens a step by \w+(, \d+ experts a draft, \d+ not at hand)?"), ""),
    (re.compile(r"\b(?:generic|avx2|avx_vnni|avx512|amx|neon|dotprod)\b"), "TIER"),
    (re.compile(r"\d{4}-\d\d-\d\d \d\d:\d\d"), "DATE"),
    (re.compile(r"\S+(?=/models--)"), "CACHE"),
    (re.compile(r"(?<=^coldstream )\d\S*(?= runs)"), "VERSION"),
)
_RULE = re.compile(r"[─ ]+|[-|]+")


@dataclass(frozen=True)
class Session:
    """One command of a page and its output there."""

    command: str
    expected: str

    @property
    def is_chat(self) -> bool:
        return _PROMPT in self.expected


def sessions(page: str) -> list[Session]:
    """All of a page, in order."""
    found = []
    for block in _BLOCK.findall(page):
        _, *parts = re.split(r"^\$ ", block, flags=re.MULTILINE)
        for part in parts:
            command, _, expected = part.partition("\n")
            found.append(Session(command, expected))
    return found


def play(session: Session, environment: Mapping[str, str], home: Path) -> str:
    """What the command prints on both its streams, in the current folder."""
    if session.is_chat:
        return _play_chat(session, environment, home)
    program = home / "bin" / "coldstream"
    program.parent.mkdir(exist_ok=True)
    command = shlex.join([sys.executable, *PROGRAM])
    program.write_text(f'#!/bin/sh\nexec {command} "$@"\n')
    program.chmod(0o755)
    path = f"{program.parent}:{os.environ['PATH']}"
    done = subprocess.run(
        ["bash", "-c", session.command],
        env={**os.environ, **environment, "PATH": path},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        check=True,
    )
    return done.stdout.decode()


def masked(text: str) -> str:
    """`text` without what belongs to the machine. Lines of which something is masked, and tables, lose their
    alignment too. Whether other programs were busy is the machine's too.
    """
    lines = [line for line in text.splitlines() if not line.startswith("that was under load (")]
    return "\n".join(_masked_line(line, in_table) for line, in_table in _with_tables(lines))


def _play_chat(session: Session, environment: Mapping[str, str], home: Path) -> str:
    command = [sys.executable, "-m", *shlex.split(session.command)]
    plain = {**environment, "TERM": "dumb"}
    typed = _TYPED.findall(session.expected)
    with Terminal(command, home=str(home), columns=_WIDE, environment=plain) as terminal:
        ends = [0]
        for prompt, line in typed:
            ends.append(terminal.read_until(prompt, ends[-1]))
            terminal.type(f"{line}\r")
        terminal.read_to_the_end()
    parts = [terminal.screen[start:end] for start, end in pairwise([*ends, len(terminal.screen)])]
    transcript = parts[0]
    for (_, line), part in zip(typed, parts[1:], strict=True):
        # Both the terminal and the line editor may show what is typed.
        transcript += f"{line}\n" + re.sub(rf"^(?:{re.escape(line)}|[\r\n])+", "", without_controls(part))
    return without_controls(transcript).lstrip("\n")


def _with_tables(lines: list[str]) -> Iterator[tuple[str, bool]]:
    """Each line, and whether it belongs to a table: from the line above a rule to the next empty one."""
    in_table = False
    for line, following in zip(lines, [*lines[1:], ""], strict=True):
        is_head = bool(following) and _RULE.fullmatch(following) is not None
        in_table = bool(line) and (in_table or is_head)
        yield line, in_table


def _masked_line(line: str, in_table: bool) -> str:
    result = " ".join(line.split()) if in_table else line
    if in_table and _RULE.fullmatch(line):
        return "RULE"
    for pattern, replacement in _MASKS:
        result = pattern.sub(replacement, result)
    return result
