"""Slots of a GPU, a pool in RAM and the disk: where experts are changes speed and no bit."""

import math
import os
import shutil
from pathlib import Path

import numpy as np
import pytest
from cuda_runner_cases import open_cuda, open_partly, poisoned_blocks
from one_sequence import OneSequence
from runner_cases import VARIANTS, reference_logits, token_ids, write_family, write_variant

from coldstream.assets import demo_model_path
from coldstream.errors import ModelChangedError
from coldstream.experts.cpu_share import CpuShare, Share
from coldstream.experts.prefetch import Prefetching
from coldstream.kvcache import CacheSize
from random_residency import RandomResidency

pytestmark = pytest.mark.gpu

CONTEXT = 640
LENGTHS = (1, 8, 65, 300)


@pytest.fixture(scope="module", params=["demo", "qwen3moe", "qwen3next", "qwen4exp"])
def path(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_family(tmp_path_factory.mktemp("models"), request.param)


def outputs(runner: OneSequence, length: int) -> tuple[np.ndarray, np.ndarray]:
    """Logits after each token of a prompt, and after some that follow it."""
    runner.reset()
    logits = runner.logits(token_ids(length)).copy()
    return logits, np.stack([runner.decode(token) for token in token_ids(12)])


@pytest.fixture(scope="module")
def expected(path: Path) -> dict[int, tuple[np.ndarray, np.ndarray]]:
    """With all experts on the GPU."""
    with open_cuda(path, CONTEXT) as runner:
        return {length: outputs(runner, length) for length in LENGTHS}


def check_outputs(runner: OneSequence, expected: dict[int, tuple[np.ndarray, np.ndarray]]) -> None:
    for length, wanted in expected.items():
        for found, each in zip(outputs(runner, length), wanted, strict=True):
            assert np.array_equal(found, each), length


@pytest.mark.parametrize("variant", [name for name in VARIANTS if name != "dense-tied"])
@pytest.mark.parametrize(("share", "in_ram"), [(0.0, 0.0), (0.25, 0.5)])
def test_every_kind_of_model(variant: str, share: float, in_ram: float, tmp_path: Path) -> None:
    path, ids = write_variant(tmp_path, variant), token_ids(70)
    expected = reference_logits(path, ids, "i16").numpy()
    with open_partly(path, share, in_ram=in_ram) as runner:
        assert np.array_equal(runner.logits(ids), expected)
        for count in (1, 9, 64):
            runner.reset()
            assert np.array_equal(runner.prefill(ids[:count]), expected[count - 1])
        runner.reset()
        assert np.array_equal(np.stack([runner.decode(token) for token in ids[:20]]), expected[:20])


@pytest.mark.parametrize("share", [0.0, 0.25, 0.75])
@pytest.mark.parametrize("in_ram", [0.0, 0.2, 0.75])
def test_trap_10_the_answer_does_not_depend_on_where_experts_are(
    path: Path, expected: dict[int, tuple[np.ndarray, np.ndarray]], share: float, in_ram: float
) -> None:
    pinned = (0, 3) if share == 0.25 else ()
    with open_partly(path, share, in_ram=in_ram, context_length=CONTEXT, pinned=pinned) as runner:
        check_outputs(runner, expected)
        check_outputs(runner, expected)
        assert runner.disk is not None
        assert runner.disk.hits + runner.disk.misses > 0


@pytest.mark.parametrize("cpu_share", [0.0, 0.5, 1.0])
def test_whoever_computes_what_a_prompt_lacks(
    path: Path,
    expected: dict[int, tuple[np.ndarray, np.ndarray]],
    cpu_share: float,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(
        CpuShare,
        "split",
        lambda self, rows, experts, *rest: Share(round(cpu_share * len(experts)), 1.0, math.inf),
    )
    with open_partly(path, 0.1, in_ram=0.3, context_length=CONTEXT) as runner:
        check_outputs(runner, expected)


def test_ex07_experts_move_between_all_tiers(
    path: Path, expected: dict[int, tuple[np.ndarray, np.ndarray]]
) -> None:
    policy = RandomResidency(seed=3)
    with open_partly(path, 0.3, in_ram=0.3, context_length=CONTEXT, policy=policy) as runner:
        for _ in range(4):
            check_outputs(runner, expected)
        assert runner.expert_cache.counters.evictions.sum() > 20


@pytest.mark.parametrize(
    ("streamed", "prefetching"),
    [(1.0, None), (0.5, None), (0.5, Prefetching(2, 3)), (0.8, Prefetching(1, 8))],
    ids=["in place", "shared", "ahead", "all ahead"],
)
def test_ex07_the_gpu_reads_a_pool_whose_experts_move(
    path: Path,
    expected: dict[int, tuple[np.ndarray, np.ndarray]],
    streamed: float,
    prefetching: Prefetching | None,
) -> None:
    policy = RandomResidency(seed=5)
    with open_partly(
        path,
        0.25,
        in_ram=0.5,
        streamed=streamed,
        context_length=CONTEXT,
        policy=policy,
        prefetching=prefetching,
    ) as runner:
        for _ in range(3):
            check_outputs(runner, expected)
        statistics = runner.gpu_experts
        assert statistics is not None
        assert sum(statistics.evictions) > 20
        if statistics.prefetch is None:
            assert sum(statistics.step_times.bus_pairs) > 5


def test_trap_3_memory_that_was_never_written_holds_nan_and_leaks_none(
    path: Path, expected: dict[int, tuple[np.ndarray, np.ndarray]], monkeypatch: pytest.MonkeyPatch
) -> None:
    poisoned_blocks(monkeypatch)
    with open_partly(path, 0.25, in_ram=0.25, context_length=CONTEXT) as runner:
        check_outputs(runner, expected)


def test_several_sequences_in_a_step(path: Path) -> None:
    size = CacheSize.of(40, CONTEXT)
    with (
        open_cuda(path, CONTEXT, cache_size=size) as whole,
        open_partly(path, 0.25, in_ram=0.25, context_length=CONTEXT, cache_size=size) as tiers,
    ):
        for runner in (whole, tiers):
            sequences = [runner.new_sequence() for _ in range(6)]
            logits = [
                np.array(runner.runner.extend(each, token_ids(3 + i))) for i, each in enumerate(sequences)
            ]
            if runner is whole:
                expected = logits
        assert all(np.array_equal(one, other) for one, other in zip(logits, expected, strict=True))


@pytest.mark.parametrize("length", [1, 300])
def test_fl01_a_file_that_shrinks_is_an_error(tmp_path: Path, length: int) -> None:
    path = Path(shutil.copy(demo_model_path(), tmp_path / "copy.gguf"))
    with open_partly(path, 0.0, in_ram=0.0, context_length=CONTEXT) as runner:
        runner.prefill(token_ids(3))
        os.truncate(path, path.stat().st_size // 8)
        with pytest.raises(ModelChangedError, match=r"copy\.gguf"):
            runner.prefill(token_ids(length))
