"""Whatever moves while a model runs on a GPU, moved at random, for tests that it changes no answer."""

from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np
import pytest

from coldstream.decoding.draft_sizes import TriedDraft
from coldstream.decoding.fused_sizes import FixedFusedSizes, FusedSizes
from coldstream.decoding.token_tree import TokenTree
from coldstream.decoding.tree_size import SizeReason
from coldstream.experts import miss_shares
from coldstream.experts.cpu_part import CpuPart
from coldstream.experts.cpu_share import CpuShare, Lookahead, Share
from coldstream.experts.miss_shares import MissShares
from coldstream.kernels.experts.shapes import MAX_MAILBOX_ROWS, MAX_RANKS
from coldstream.kernels.experts.split import (
    BY_FETCHES,
    BY_MISSES,
    BY_SHARED_CPU,
    BY_SHARED_FETCHES,
    WHOLE,
    MissTimes,
)
from coldstream.kvcache.batch import CheckedSegment
from coldstream.models.cuda.runner import CudaRunner

THREADS = 4
_MOST_COPIED = 2**20  # bytes, between two steps


def random_times(rng: np.random.Generator) -> MissTimes:
    """From places that take nothing to places that take a second."""
    bus, row_bus, answer, *cpu = (int(10 ** rng.uniform(0, 9)) for _ in range(3 + MAX_MAILBOX_ROWS))
    left = (int(each) for each in rng.integers(1, WHOLE + 1, 2))
    return MissTimes(bus, tuple(cpu), answer, *left, row_bus)


@contextmanager
def random_controls(rng: np.random.Generator) -> Iterator[None]:
    """Inside, tables of shares and what the host decides of prompts are drawn each time."""

    def words(shares: MissShares) -> tuple[np.ndarray, ...]:
        tables = [np.array(random_times(rng).words(), np.int32) for _ in range(2)]
        for table in tables:
            for counts in (BY_MISSES, BY_FETCHES, BY_SHARED_FETCHES, BY_SHARED_CPU):
                table[counts] = rng.integers(0, np.arange(MAX_RANKS + 1) + 1)
        return tuple(tables)

    def split(share: CpuShare, rows: int, experts: np.ndarray, *_: int) -> Share:
        """Now and then a layer is all the bus's instead."""
        return Share(int(rng.integers(0, len(experts) + 1)), 1.0, float(rng.choice([1.0, np.inf])))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(miss_shares, "STEPS_OF_AN_UPDATE", 1)
        patch.setattr(MissShares, "words", words)
        threads = property(lambda shares: int(rng.integers(1, THREADS + 1)))
        patch.setattr(MissShares, "num_threads", threads)
        patch.setattr(MissShares, "copies_ahead", property(lambda shares: bool(rng.integers(0, 2))))
        patch.setattr(CpuShare, "split", split)
        patch.setattr(CpuPart, "choose", lambda part, rows: bool(rng.integers(0, 2)))
        patch.setattr(Lookahead, "learn", lambda ahead, *_: setattr(ahead, "count", int(rng.integers(1, 9))))
        yield


@dataclass
class RandomSizes:
    """Draws whether a step has drafts, how many nodes are asked for, and how many of them are verified."""

    rng: np.random.Generator
    most: int
    num_verified: Counter[int] = field(default_factory=Counter)  # drafts by their number of nodes
    drafts_beside_prompts: ClassVar[bool] = True
    reason: ClassVar[SizeReason] = SizeReason.PROBE
    _asked: int = 0  # of the next draft

    @property
    def fused(self) -> FusedSizes:
        return FixedFusedSizes(self.most)

    def will_draft(self, most: int, num_sequences: int = 1) -> bool:
        return self.budget(most, num_sequences) > 0

    def budget(self, most: int, num_sequences: int = 1) -> int:
        return min(most, self._asked)

    def is_idle(self, num_sequences: int = 1) -> bool:
        return False

    def sizes(self, trees: Sequence[TokenTree], draft_s: float) -> list[int]:
        found = [int(self.rng.integers(0, len(tree) + 1)) for tree in trees]
        self.num_verified.update(found)
        return found

    def record(self, drafts: Sequence[TriedDraft], seconds: float, *, is_usual: bool = True) -> None:
        self._asked = int(self.rng.integers(0, self.most + 1))


def move_at_random(runner: CudaRunner, rng: np.random.Generator) -> None:
    """What is set between two steps: tables of shares, bytes of copies into slots, and the longest step with
    the CPU's part.
    """
    partial = runner._partial
    assert partial is not None
    if partial._shares is not None:
        partial._shares._write()
    partial.cache._max_bytes = int(rng.integers(0, _MOST_COPIED))
    partial.host.max_rows = int(rng.integers(0, len(partial.host.bulk.x) + 1))


@contextmanager
def moving_at_random(runner: CudaRunner, rng: np.random.Generator) -> Iterator[None]:
    """Inside, `move_at_random` comes before each step."""
    launch = runner._launch

    def launched(segments: Collection[CheckedSegment]) -> None:
        move_at_random(runner, rng)
        launch(segments)

    with random_controls(rng), pytest.MonkeyPatch.context() as patch:
        patch.setattr(runner, "_launch", launched)
        yield
