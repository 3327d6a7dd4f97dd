"""Answers on channels and of gemma-4 in a terminal: a thought between tags, and the answer."""

from pathlib import Path

import pytest

from coldstream.cli.readable_answer import ReadableAnswer
from coldstream.gguf.tokenizer import MARKS, marked

HARMONY = Path(__file__).parent.parent.joinpath("gguf", "harmony.jinja").read_text()
GEMMA = "<|turn>model <|tool_call>call: <|channel>thought"


def joined(answer: ReadableAnswer, text: str) -> str:
    shown = "".join(answer.push(character, is_last=False) for character in text)
    return shown + answer.push("", is_last=True)


@pytest.mark.parametrize("is_thinking", [True, False])
def test_channels(is_thinking: bool) -> None:
    answer = ReadableAnswer(HARMONY)
    thought = f"{marked('<|channel|>')}analysis{marked('<|message|>')}So.{marked('<|end|>')}"
    text = f"{marked('<|channel|>')}final{marked('<|message|>')}Hi <|end|> there."
    text = f"{thought}{marked('<|start|>')}assistant{text}" if is_thinking else text
    shown = joined(answer, text)
    assert shown == ("<think>\nSo.\n</think>\n\n" if is_thinking else "") + "Hi <|end|> there."
    assert answer.content == "Hi <|end|> there."
    assert not set(shown) & set(MARKS)


def test_gemma() -> None:
    answer = ReadableAnswer(GEMMA)
    text = f"{marked('<|channel>')}thought\nSo.\n{marked('<channel|>')}Hi."
    assert joined(answer, text) == "<think>\nSo.\n</think>\n\nHi."
    assert answer.content == "Hi."
