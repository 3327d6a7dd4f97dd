"""A model of a GPU on the host, operations, launchers and kernels: the bits of plain decoding on the CPU."""

from collections.abc import Iterator
from pathlib import Path
from random import Random

import numpy as np
import pytest
from host_model import open_host
from one_sequence import OneSequence, open_cpu
from runner_cases import MIX, token_ids
from tree_cases import CONTEXT, Oracle, Prompts, check_batch_of_trees

from builders import Dims, write_gguf
from coldstream.kernels.attention.cache_layout import GPU_CACHE_TYPES
from coldstream.kvcache import CacheSize

pytestmark = pytest.mark.usefixtures("host")

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


@pytest.mark.parametrize("is_deep", [False, True], ids=["short", "deep"])
def test_a_chain(small_path: Path, cpu: tuple[str, OneSequence], is_deep: bool) -> None:
    kv_type, plain = cpu
    with open_host(small_path, kv_type, SIZE, CONTEXT, is_deep=is_deep) as model:
        runner = OneSequence(model)
        for count in (1, 5, 20, 130):
            for each in (runner, plain):
                each.reset()
                each.prefill(token_ids(count))
            for token in (3, 1):
                assert np.array_equal(runner.decode(token), plain.decode(token)), count


def test_trees_and_chains(small_path: Path, cpu: tuple[str, OneSequence]) -> None:
    kv_type, plain = cpu
    with open_host(small_path, kv_type, SIZE, CONTEXT) as model:
        prompts, oracle = Prompts(OneSequence(model)), Oracle(plain)
        check_batch_of_trees(prompts, oracle, Random(5), num_trees=3, lengths_of_prompts=LENGTHS)
