"""A dense model on a GPU that lacks layers: the bits of the CPU, also in steps that are captured."""

from pathlib import Path
from random import Random
from typing import Any

import pytest
from cuda_runner_cases import check_chains
from layer_cases import ALL, ONLY_CPU, open_layers, write_dense
from one_sequence import open_cpu
from tree_cases import CONTEXT, Oracle, Prompts, check_batch_of_trees

from coldstream.kvcache import CacheSize

pytestmark = pytest.mark.gpu
SIZE = CacheSize.of(80, CONTEXT, num_trees=8)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_dense(tmp_path_factory.mktemp("models"))


@pytest.mark.parametrize(
    ("missing", "streamed", "num_places"),
    [(ALL, 1.0, 1), (ALL, ONLY_CPU, 2), (ALL, 0.5, 2), ((1, 2, 5), 0.3, 3), ((4,), 1.0, 2)],
    ids=str,
)
def test_wherever_layers_are(path: Path, missing: tuple[int, ...], streamed: float, num_places: int) -> None:
    options: Any = {"num_places": num_places, "context_length": CONTEXT}
    with (
        open_cpu(path, threads=2, context_length=CONTEXT) as plain,
        open_layers(path, missing, streamed, **options) as runner,
    ):
        for _ in range(3):  # the first step of a shape is not captured
            check_chains(runner, plain, (1, 5, 20, 64, 65, 130))


def test_trees_and_chains(path: Path) -> None:
    with (
        open_cpu(path, threads=2, context_length=CONTEXT, cache_size=SIZE) as plain,
        open_layers(path, ALL, 0.5, context_length=CONTEXT, cache_size=SIZE) as runner,
    ):
        prompts, oracle = Prompts(runner), Oracle(plain)
        for seed in range(3):
            check_batch_of_trees(prompts, oracle, Random(seed), num_trees=3, lengths_of_prompts=(0, 5, 130))
