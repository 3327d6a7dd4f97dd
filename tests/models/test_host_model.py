"""A model of a GPU on the host, runner, operations, launchers and kernels: the bits of the CPU."""

from collections.abc import Iterator
from pathlib import Path
from random import Random

import numpy as np
import pytest
from cuda_runner_cases import open_cuda, open_partly
from one_sequence import OneSequence, open_cpu
from runner_cases import MIX, token_ids
from tree_cases import CONTEXT, Oracle, Prompts, check_batch_of_trees

from builders import Dims, write_gguf
from coldstream.experts.prefetching import Prefetching
from coldstream.kernels.attention.cache_layout import GPU_CACHE_TYPES
from coldstream.kernels.ops import SHORT_CONTEXT
from coldstream.kvcache import CacheSize
from coldstream.models import cuda_runner
from host_device import HostDevice
from host_gpu import gpu_on

SIZE = CacheSize.of(80, CONTEXT, num_trees=8)
LENGTHS = (0, 5, 64, 130, 257)


@pytest.fixture(scope="module")
def small_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("models") / "small.gguf"
    write_gguf(path, types=MIX, dims=Dims(layers=2, interval=2))
    return path


@pytest.fixture(scope="module", params=GPU_CACHE_TYPES)
def cpu(request: pytest.FixtureRequest, small_path: Path) -> Iterator[tuple[str, OneSequence]]:
    with open_cpu(
        small_path, threads=1, context_length=CONTEXT, cache_size=SIZE, kv_type=request.param
    ) as runner:
        yield request.param, runner


@pytest.fixture
def gpu(compiled_for_the_host: HostDevice) -> Iterator[None]:
    with gpu_on(compiled_for_the_host):
        yield


def check_chains(runner: OneSequence, plain: OneSequence, counts: tuple[int, ...] = (1, 5, 20, 130)) -> None:
    for count in counts:
        for each in (runner, plain):
            each.reset()
            each.prefill(token_ids(count))
        for token in (3, 1, 2):
            assert np.array_equal(runner.decode(token), plain.decode(token)), count


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize("short_context", [SHORT_CONTEXT, 0], ids=["short", "deep"])
def test_a_chain(
    small_path: Path, cpu: tuple[str, OneSequence], monkeypatch: pytest.MonkeyPatch, short_context: int
) -> None:
    """Short contexts have kernels of their own."""
    monkeypatch.setattr(cuda_runner, "SHORT_CONTEXT", short_context)
    kv_type, plain = cpu
    with open_cuda(small_path, context_length=CONTEXT, kv_type=kv_type, cache_size=SIZE) as runner:
        check_chains(runner, plain)


@pytest.mark.usefixtures("gpu")
def test_trees_and_chains(small_path: Path, cpu: tuple[str, OneSequence]) -> None:
    kv_type, plain = cpu
    with open_cuda(small_path, context_length=CONTEXT, kv_type=kv_type, cache_size=SIZE) as runner:
        prompts, oracle = Prompts(runner), Oracle(plain)
        check_batch_of_trees(prompts, oracle, Random(5), num_trees=3, lengths_of_prompts=LENGTHS)


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize(
    ("share", "streamed", "prefetching"),
    [(0.0, 0.0, None), (0.0, 1.0, None), (0.5, 0.5, None), (0.25, 0.0, Prefetching(1, 4))],
    ids=str,
)
def test_wherever_experts_are(
    small_path: Path, share: float, streamed: float, prefetching: Prefetching | None
) -> None:
    options = {"streamed": streamed, "context_length": CONTEXT, "prefetching": prefetching}
    with (
        open_cpu(small_path, threads=1, context_length=CONTEXT) as plain,
        open_partly(small_path, share, **options) as runner,
    ):
        check_chains(runner, plain, (1, 5, 20, 90))
