"""Whatever moves while a model runs, moved at random before every step, changes no bit."""

from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
from cuda_runner_cases import open_partly
from one_sequence import OneSequence, open_cpu
from runner_cases import token_ids, write_mixed_layers
from tree_cases import LENGTHS, Oracle, Prompts, check_batch_of_trees

from coldstream.experts.prefetch import Prefetching
from coldstream.kernels.cuda.runtime.graphs import Pieces
from coldstream.kernels.experts.shapes import MAX_MAILBOX_ROWS, MAX_SHARED_ROWS
from coldstream.kvcache import CacheSize
from coldstream.placement.controls import Controls, Moves
from random_controls import THREADS, moving_at_random

CONTEXT, MIB = 512, 2**20
STEPS = (1, 1, 3, 1, 1, 70, 1, 1, 17, 1, 70, 1, 66, 130, 71, 1, 1)  # those of about 70 rows have one shape


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


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize("ring", ["for all steps", "for short steps"])
@pytest.mark.parametrize("share", [0.0, 0.5])
def test_no_bit_depends_on_what_moves(
    path: Path, expected: list[np.ndarray], share: float, ring: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = np.random.default_rng(int(10 * share))
    sizes: dict[str, Any] = {"context_length": CONTEXT, "prefetching": Prefetching(1, 2), "threads": THREADS}
    sizes["ring_bytes"] = 8 * MIB if ring == "for all steps" else MIB // 2
    launch, replays = Pieces.launch, []
    monkeypatch.setattr(Pieces, "launch", lambda pieces: (replays.append(pieces), launch(pieces)))
    with open_partly(path, share, streamed=0.5, **sizes) as runner, moving_at_random(runner.runner, rng):
        runner.runner.control(Controls(Moves.ALWAYS, Moves.ALWAYS))
        longest = MAX_SHARED_ROWS if ring == "for all steps" else MAX_MAILBOX_ROWS
        assert runner.runner.limits.shared_rows == longest
        for tokens, logits in zip(steps(), expected, strict=True):
            assert np.array_equal(runner.prefill(tokens), logits), len(tokens)
        check_both_places(runner)
    assert bool(replays) == (ring == "for short steps"), "long steps that the host shares out, in pieces"


@pytest.mark.usefixtures("gpu")
def test_no_bit_of_a_tree_depends_on_what_moves(path: Path) -> None:
    """In one step with other trees and chains, and behind the path of each that is committed."""
    size, lengths = CacheSize.of(24, CONTEXT, num_trees=8), tuple(each for each in LENGTHS if each < 260)
    sizes: dict[str, Any] = {"context_length": CONTEXT, "prefetching": Prefetching(1, 2), "threads": THREADS}
    rng = np.random.default_rng(3)
    with (
        open_cpu(path, threads=1, context_length=CONTEXT, cache_size=size) as plain,
        open_partly(path, 0.3, streamed=0.5, cache_size=size, **sizes) as runner,
        moving_at_random(runner.runner, rng),
    ):
        runner.runner.control(Controls(Moves.ALWAYS, Moves.ALWAYS))
        prompts, oracle = Prompts(runner), Oracle(plain)
        for number in range(3):
            check_batch_of_trees(prompts, oracle, Random(number), 2, lengths, num_next=3)


def check_both_places(runner: OneSequence) -> None:
    """The CPU and the bus had work, and tables were drawn."""
    found = runner.gpu_experts
    assert found is not None
    assert found.shares is not None
    assert found.shares.updates > 0
    assert 1 <= found.shares.threads <= THREADS
    assert sum(found.cpu_pairs) > 0
    assert sum(found.step_times.bus_pairs) > 0
