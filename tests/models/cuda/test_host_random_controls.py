"""Whatever moves while a model runs, moved at random before every step, changes no bit."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cuda_runner_cases import open_partly
from one_sequence import OneSequence, open_cpu
from runner_cases import token_ids, write_mixed_layers

from coldstream.experts import miss_shares
from coldstream.experts.cpu_part import CpuPart
from coldstream.experts.cpu_share import CpuShare, Lookahead
from coldstream.experts.miss_shares import MissShares
from coldstream.experts.prefetch import Prefetching
from coldstream.kernels.experts.shapes import MAX_MAILBOX_ROWS, MAX_RANKS, MAX_SHARED_ROWS
from coldstream.kernels.experts.split import (
    BY_FETCHES,
    BY_MISSES,
    BY_SHARED_CPU,
    BY_SHARED_FETCHES,
    WHOLE,
    MissTimes,
)
from coldstream.placement.controls import Controls, Moves

CONTEXT, MIB, THREADS = 512, 2**20, 4
STEPS = (1, 1, 3, 1, 1, 70, 1, 1, 17, 1, 1, 130, 1, 1)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_mixed_layers(tmp_path_factory.mktemp("models"), "qwen35moe")


@pytest.fixture(scope="module")
def expected(path: Path) -> list[np.ndarray]:
    """Logits behind each step, by the CPU alone."""
    with open_cpu(path, threads=1, context_length=CONTEXT) as plain:
        return [plain.prefill(tokens) for tokens in steps()]


def steps() -> Iterator[list[int]]:
    tokens = iter(token_ids(sum(STEPS)))
    for rows in STEPS:
        yield [next(tokens) for _ in range(rows)]


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

    def split(share: CpuShare, rows: int, experts: np.ndarray, *_: int) -> int:
        return int(rng.integers(0, len(experts) + 1))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(miss_shares, "STEPS_OF_AN_UPDATE", 1)
        patch.setattr(MissShares, "words", words)
        threads = property(lambda shares: int(rng.integers(1, THREADS + 1)))
        patch.setattr(MissShares, "num_threads", threads)
        patch.setattr(CpuShare, "split", split)
        patch.setattr(CpuPart, "choose", lambda part, rows: bool(rng.integers(0, 2)))
        patch.setattr(Lookahead, "learn", lambda ahead, *_: setattr(ahead, "count", int(rng.integers(1, 9))))
        yield


def move_at_random(runner: Any, rng: np.random.Generator) -> None:
    """What is set between two steps: bytes of copies into slots, and the longest step with the CPU's part."""
    partial = runner._partial
    partial.cache._max_bytes = int(rng.integers(0, MIB))
    partial.host.max_rows = int(rng.integers(0, len(partial.host.bulk.x) + 1))


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize("ring", ["for all steps", "for short steps"])
@pytest.mark.parametrize("share", [0.0, 0.5])
def test_no_bit_depends_on_what_moves(
    path: Path, expected: list[np.ndarray], share: float, ring: str
) -> None:
    rng = np.random.default_rng(int(10 * share))
    sizes: dict[str, Any] = {"context_length": CONTEXT, "prefetching": Prefetching(1, 2), "threads": THREADS}
    sizes["ring_bytes"] = 8 * MIB if ring == "for all steps" else MIB // 2
    with random_controls(rng), open_partly(path, share, streamed=0.5, **sizes) as runner:
        runner.runner.control(Controls(Moves.ALWAYS, Moves.ALWAYS))
        longest = MAX_SHARED_ROWS if ring == "for all steps" else MAX_MAILBOX_ROWS
        assert runner.runner.limits.shared_rows == longest
        for tokens, logits in zip(steps(), expected, strict=True):
            move_at_random(runner.runner, rng)
            assert np.array_equal(runner.prefill(tokens), logits), len(tokens)
        check_both_places(runner, len(STEPS))


def check_both_places(runner: OneSequence, num_steps: int) -> None:
    """The CPU and the bus had work, and tables were drawn."""
    found = runner.gpu_experts
    assert found is not None
    assert found.shares is not None
    assert found.shares.updates > num_steps // 4
    assert 1 <= found.shares.threads <= THREADS
    assert sum(found.cpu_pairs) > 0
    assert sum(found.step_times.bus_pairs) > 0
