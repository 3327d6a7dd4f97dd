"""The end of a `with` block closes, once, and hides no exception."""

import pytest

from coldstream.cli.terminal import ProgressLine
from coldstream.closing import Closing
from coldstream.engine import LLM, Stream
from coldstream.gguf.reader import GGUFFile
from coldstream.models.runner import ModelRunner


class Held(Closing):
    closed = 0

    def close(self) -> None:
        self.closed += 1


def test_a_block_closes_what_it_is_given() -> None:
    held = Held()
    with held as inside:
        assert inside is held
        assert held.closed == 0
    assert held.closed == 1


def test_what_a_block_raises_is_raised_when_all_is_closed() -> None:
    held = Held()
    with pytest.raises(ZeroDivisionError), held:
        raise ZeroDivisionError
    assert held.closed == 1


def test_there_is_no_other_end() -> None:
    for kind in (LLM, Stream, ModelRunner, GGUFFile, ProgressLine):
        assert (kind.__enter__, kind.__exit__) == (Closing.__enter__, Closing.__exit__)
