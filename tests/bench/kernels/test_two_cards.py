"""Questions and answers of two cards, which run at the same time on the host."""

import ctypes
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from all_pairs import all_pairs
from bench.kernels.two_cards import FLAG_BYTES, KERNELS, SOURCE, THREADS, UNWRITTEN, Counts, Way
from coldstream.kernels.cuda.program import CudaProgram
from host_device import HostDevice, HostKernel
from second_device import beside, meanwhile

QUESTIONS, FIRST_TIMED = 12, 3
PROGRAM = CudaProgram(SOURCE, KERNELS)


@dataclass
class Box:
    """A way's memory."""

    memory: np.ndarray

    @classmethod
    def of(cls, num_bytes: int) -> "Box":
        memory = np.zeros(FLAG_BYTES + num_bytes, np.uint8)
        memory[FLAG_BYTES:].view(np.uint32).fill(UNWRITTEN)
        return cls(memory)

    @property
    def way(self) -> Way:
        return Way.at(self.memory.ctypes.data, len(self.memory) - FLAG_BYTES)


@dataclass(frozen=True)
class Address:
    """As launches take an array."""

    counts: Counts

    def data_ptr(self) -> int:
        return ctypes.addressof(self.counts)


@pytest.fixture
def cards(host: HostDevice, tmp_path: Path) -> Iterator[list[HostDevice]]:
    with beside(host, tmp_path) as second:
        yield [host, second]


def ask(
    cards: list[HostDevice], question: Box, answer: Box, questions: int, *, is_marked: bool
) -> list[Counts]:
    """What both cards counted, of so many questions that the second answers."""
    counts = [Counts(), Counts()]
    asking, answering = (
        HostKernel(card, PROGRAM, name) for card, name in zip(cards, ("ask", "answer"), strict=True)
    )
    args = question.way, answer.way, questions
    with meanwhile(lambda: answering.launch((1, 1, 1), THREADS, (*args, Address(counts[1])))):
        args = question.way, answer.way, QUESTIONS
        asking.launch((1, 1, 1), THREADS, (*args, FIRST_TIMED, is_marked, Address(counts[0])))
    return counts


@all_pairs(num_bytes=[16, 2048, 8192], is_marked=[False, True])
def test_every_float_arrives(cards: list[HostDevice], num_bytes: int, *, is_marked: bool) -> None:
    question, answer = Box.of(num_bytes), Box.of(num_bytes)
    counts = ask(cards, question, answer, QUESTIONS, is_marked=is_marked)
    assert [(each.wrong, each.late) for each in counts] == [(0, 0), (0, 0)]
    assert counts[0].ends > counts[0].begins > 0
    marks = answer.memory[FLAG_BYTES:].view(np.uint32) == UNWRITTEN
    assert marks.all() == is_marked


def test_a_card_that_stops_answering_ends_the_wait(cards: list[HostDevice]) -> None:
    question, answer = Box.of(64), Box.of(64)
    asking, answering = ask(cards, question, answer, QUESTIONS - 1, is_marked=False)
    assert (asking.late, answering.late) == (1, 0)
