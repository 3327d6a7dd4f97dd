"""Lines of system prompts that change: what the option leaves out of requests, and that all else stays."""

import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coldstream.server.http.volatile_lines import DROPPED, without_volatile
from http_serving import Connect

PAGE = (Path(__file__).parents[2] / "docs" / "server.md").read_text()
BILLING = "x-anthropic-billing-header: cc_version=2.1.177.01c; cc_entrypoint=cli; cch=36ee5;"
CLAUDE_CODE = """You are an agent.

<env>
Working directory: /home/u/project
Is directory a git repo: Yes
Platform: linux
Today's date: 2026-11-25
</env>

gitStatus: This is the git status at the start of the conversation.
Current branch: main

Main branch (you will usually use this for PRs): main

Git user: u

Status:
 M src/a.py
?? notes.txt

Recent commits:
521877a Serve a page
87fdb6c Put it back

Answer in one line.
Status: of what is said here nothing is git's."""
KEPT = """You are an agent.

<env>
Is directory a git repo: Yes
Platform: linux
</env>


Answer in one line.
Status: of what is said here nothing is git's."""


def system(text: Any) -> list[dict[str, Any]]:
    return [{"role": "system", "content": text}, {"role": "user", "content": CLAUDE_CODE}]


def test_what_claude_code_sends_loses_these_lines_and_no_others() -> None:
    assert without_volatile(system(CLAUDE_CODE)) == system(KEPT)
    assert without_volatile(system(f"{BILLING}\n{CLAUDE_CODE}")) == system(KEPT)
    assert without_volatile(system(f"{KEPT}\n{BILLING}")) == system(f"{KEPT}\n")


@pytest.mark.parametrize(
    "line",
    [
        BILLING,
        "Today's date: Tue Nov 25 2026",
        "Today’s date is 2026-11-25.",
        "  Working directory: /home/u",
        " - Primary working directory: /home/u",
        "gitStatus: a snapshot\nCurrent branch: main\n\nStatus:\n(clean)\n\nRecent commits:\n521877a Serve",
    ],
)
def test_each_kind_is_left_out_wherever_it_stands(line: str) -> None:
    for text, kept in ((line, ""), (f"a\n{line}\nb", "a\nb"), (f"a\n{line}", "a\n"), (f"{line}\nb", "b")):
        assert without_volatile(system(text))[:-1] == ([{"role": "system", "content": kept}] if kept else [])


def test_lines_that_only_speak_of_them_stay() -> None:
    text = (
        "Say x-anthropic-billing-header: once.\nAsk for Today's date: it changes.\nThe Working directory: no."
    )
    assert without_volatile(system(text)) == system(text)


@given(
    st.lists(
        st.sampled_from([each.name for each in DROPPED] + ["a", "", " b", "Status:", "## x"]), max_size=12
    )
)
def test_texts_without_such_lines_are_left_alone(lines: list[str]) -> None:
    text = "\n".join(lines)
    assert without_volatile(system(text)) == system(text)


def test_parts_of_a_message_are_looked_at_one_by_one_and_given_messages_are_not_changed() -> None:
    parts = [{"type": "text", "text": BILLING}, {"type": "text", "text": "Be brief."}]
    given_messages = system(parts)
    assert without_volatile(given_messages) == system([{"type": "text", "text": "Be brief."}])
    assert given_messages == system(parts)


async def test_a_changed_header_line_costs_no_prefix_with_the_option_and_only_with_it(
    connect: Connect,
) -> None:
    async def cached(is_on: bool, cch: str) -> int:
        header = {"type": "text", "text": BILLING.replace("36ee5", cch)}
        rules = {"type": "text", "text": f"{is_on} " + "Follow all of the rules. " * 40}
        body = {
            "max_tokens": 1,
            "system": [header, rules],
            "messages": [{"role": "user", "content": "import os"}],
        }
        async with connect(drop_volatile=is_on) as http:
            response = await http.post("/v1/messages", json=body)
        return int(response.json()["usage"]["cache_read_input_tokens"])

    for is_on in (False, True):
        await cached(is_on, "00001")
        await cached(is_on, "00002")
        assert (await cached(is_on, "00003") > 100) == is_on


async def test_openai_s_routes_drop_them_too(connect: Connect) -> None:
    async def tokens(is_on: bool) -> tuple[int, int]:
        async with connect(drop_volatile=is_on) as http:
            chat = await http.post(
                "/v1/chat/completions", json={"messages": system(BILLING), "max_tokens": 1}
            )
            body = {"instructions": BILLING, "input": "import os", "max_output_tokens": 1}
            response = await http.post("/v1/responses", json=body)
        return chat.json()["usage"]["prompt_tokens"], response.json()["usage"]["input_tokens"]

    with_lines, without = await tokens(False), await tokens(True)
    assert with_lines[0] > without[0]
    assert with_lines[1] > without[1]


@pytest.mark.parametrize("is_on", [False, True])
async def test_props_say_what_is_dropped(connect: Connect, is_on: bool) -> None:
    async with connect(drop_volatile=is_on) as http:
        dropped = (await http.get("/props")).json()["dropped_lines"]
    assert dropped == ([each.name for each in DROPPED] if is_on else [])


def test_the_page_says_exactly_what_is_dropped() -> None:
    section = PAGE.split("## Lines that change")[1].split("\n## ")[0]
    rows = re.findall(r"^\| (.+) \| (.+) \| (.+) \|$", section, re.MULTILINE)[1:]
    assert rows == [(each.name, each.agents, each.what) for each in DROPPED]
