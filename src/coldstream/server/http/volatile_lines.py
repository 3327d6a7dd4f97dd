"""Lines of system prompts that coding agents change from one request or one day to the next.

A changed line near the beginning of a prompt makes all that follows new to the prefix cache. With
`ServerSettings.drop_volatile` these lines are left out of system and developer messages, and of nothing else:
the model does not see them. Which lines they are is `DROPPED`, and nothing beside it.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final


@dataclass(frozen=True)
class VolatileLines:
    """Lines that are left out, with their ends."""

    name: str
    agents: str  # which agents send them
    what: str  # description for users of the option
    pattern: "re.Pattern[str]"


_GIT_LINES: Final = (
    r"(?:Current branch:.*|Main branch .*|Git user:.*|Status:|\(clean\)|Recent commits:"
    r"|[ MADRCTU?!]{2} \S.*|[MADRCTU?!] \S.*|[0-9a-f]{7,40} .*)"
)
DROPPED: Final = (
    VolatileLines(
        "billing header",
        "Claude Code",
        "lines that begin with `x-anthropic-billing-header:`",
        re.compile(r"^x-anthropic-billing-header:.*(?:\n|\Z)", re.MULTILINE),
    ),
    VolatileLines(
        "date",
        "Claude Code, OpenCode",
        "lines that begin with `Today's date:` or `Today's date is`",
        re.compile(r"^[ \t]*(?:- )?Today['’]s date(?::| is).*(?:\n|\Z)", re.MULTILINE),
    ),
    VolatileLines(
        "working directory",
        "Claude Code, OpenCode",
        "lines that begin with `Working directory:` or `Primary working directory:`",
        re.compile(r"^[ \t]*(?:- )?(?:Primary w|W)orking directory:.*(?:\n|\Z)", re.MULTILINE),
    ),
    VolatileLines(
        "git status",
        "Claude Code",
        "a line that begins with `gitStatus:`, and the branches, changed files and commits listed below it",
        re.compile(rf"^gitStatus:.*(?:\n|\Z)(?:\n*{_GIT_LINES}(?:\n|\Z))*", re.MULTILINE),
    ),
)


def without_volatile(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The messages, in the shape that templates read, without `DROPPED` in those of the system.

    A system message of which nothing is left is left out. The given ones are not changed.
    """
    kept = []
    for message in messages:
        if message["role"] not in ("system", "developer"):
            kept.append(dict(message))
            continue
        content = message["content"]
        if isinstance(content, str):
            shorter: Any = _shortened(content)
        else:
            parts = [
                {**part, "text": _shortened(part["text"])} if part.get("text") else part for part in content
            ]
            shorter = [part for part in parts if part.get("text") != ""]
        if shorter or not content:
            kept.append({**message, "content": shorter})
    return kept


def _shortened(text: str) -> str:
    for each in DROPPED:
        text = each.pattern.sub("", text)
    return text
