"""What a chat keeps for the next one, and how it goes on with it."""

import json
import os
import stat
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coldstream.cli.chat import ChatSession
from coldstream.cli.kept_chat import Conversation, KeptChat
from coldstream.engine import LLM, SamplingParams
from coldstream.errors import InvalidRequestError, StorageError

PARAMS = SamplingParams(seed=4, max_tokens=6, ignore_eos=True)


@pytest.fixture
def kept(tmp_path: Path) -> KeptChat:
    kept = KeptChat(tmp_path / "coldstream", "0123")
    assert kept.prepare()
    return kept


@pytest.mark.sharded(of="processes")
@given(st.none() | st.text(), st.lists(st.tuples(st.text(), st.text()), max_size=3))
def test_a_conversation_comes_back_as_it_was(
    tmp_path: Path, system_prompt: str | None, turns: list[tuple[str, str]]
) -> None:
    kept = KeptChat(tmp_path, "any")
    kept.prepare()
    messages = [
        {"role": role, "content": text}
        for turn in turns
        for role, text in zip(("user", "assistant"), turn, strict=True)
    ]
    kept.write(system_prompt, messages)
    assert kept.read() == Conversation(system_prompt, tuple(messages))


def test_only_the_owner_can_read_what_is_kept(kept: KeptChat) -> None:
    old = os.umask(0)
    try:
        kept.write(None, [])
    finally:
        os.umask(old)
    for path in (kept.folder, kept.path.parent, kept.path, kept.typed_lines):
        assert stat.S_IMODE(path.stat().st_mode) & 0o077 == 0, path


def test_a_chat_goes_on_where_the_last_one_ended(llm: LLM, kept: KeptChat) -> None:
    first = ChatSession(llm, PARAMS, "be brief", kept=kept)
    first.keep("def", "answer")
    second = ChatSession(llm, PARAMS, kept=kept)
    second.resume()
    assert second.messages == first.messages
    system, user = {"role": "system", "content": "be brief"}, {"role": "user", "content": "and"}
    (expected,) = llm.chat([system, *first.messages, user], PARAMS)
    assert "".join(piece.text for piece in second.ask("and")) == expected.text
    second.keep("and", expected.text)
    assert len(kept.read().messages) == 4


def test_nothing_is_kept_without_a_place_or_of_texts_that_are_continued(llm: LLM, kept: KeptChat) -> None:
    chat = ChatSession(llm, PARAMS)
    chat.keep("def", "answer")
    with pytest.raises(InvalidRequestError, match="leave --no-history out"):
        chat.resume()
    ChatSession(llm, PARAMS, raw=True, kept=kept).keep("def", "answer")
    with pytest.raises(InvalidRequestError, match="no conversation with this model is kept"):
        ChatSession(llm, PARAMS, kept=kept).resume()


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"[" * 100_000,
        b"\xff",
        json.dumps({"version": 2, "system_prompt": None, "messages": []}).encode(),
        json.dumps({"version": 1, "system_prompt": 3, "messages": []}).encode(),
        json.dumps({"version": 1, "system_prompt": None, "messages": [1, 2]}).encode(),
        json.dumps(
            {"version": 1, "system_prompt": None, "messages": [{"role": "user", "content": "a"}]}
        ).encode(),
        json.dumps(
            {"version": 1, "system_prompt": None, "messages": [{"role": "assistant", "content": "a"}] * 2}
        ).encode(),
    ],
)
def test_a_file_of_something_else_is_refused_and_the_conversation_stays(
    llm: LLM, kept: KeptChat, content: bytes
) -> None:
    kept.path.write_bytes(content)
    chat = ChatSession(llm, PARAMS, kept=kept)
    chat.messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    with pytest.raises(InvalidRequestError, match="no conversation that this version can read: start afresh"):
        chat.resume()
    assert len(chat.messages) == 2


def test_a_place_that_cannot_be_written_is_reported(tmp_path: Path) -> None:
    (tmp_path / "coldstream").write_text("a file")
    kept = KeptChat(tmp_path / "coldstream", "0123")
    assert not kept.prepare()
    with pytest.raises(StorageError, match="cannot be written"):
        kept.write(None, [])
