"""A dense model on a model of a GPU that lacks layers: the bits of the CPU, wherever they are computed."""

from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

import pytest
from cuda.bindings import driver
from cuda_runner_cases import check_chains
from layer_cases import ALL, ONLY_CPU, open_layers, write_dense
from one_sequence import OneSequence, open_cpu
from tree_cases import CONTEXT, Oracle, Prompts, check_batch_of_trees

from coldstream.experts.dense_layers import LayerExecutor
from coldstream.kvcache import CacheSize

SIZE = CacheSize.of(80, CONTEXT, num_trees=8)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_dense(tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="module")
def plain(path: Path) -> Iterator[OneSequence]:
    with open_cpu(path, threads=1, context_length=CONTEXT, cache_size=SIZE) as runner:
        yield runner


@pytest.mark.sharded
@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize(
    ("missing", "streamed", "num_places", "lengths"),
    [
        (ALL, 1.0, 1, (1, 20, 65)),
        (ALL, ONLY_CPU, 2, (1, 5, 64, 130)),
        (ALL, 0.5, 2, (1, 5, 64, 65)),
        ((1, 2, 5), 0.3, 3, (1, 20, 130)),
        ((4,), 1.0, 2, (1, 5, 64, 65)),
    ],
    ids=str,
)
def test_wherever_layers_are(
    path: Path,
    plain: OneSequence,
    missing: tuple[int, ...],
    streamed: float,
    num_places: int,
    lengths: tuple[int, ...],
) -> None:
    """With the shortest prompts, of up to 64 and of more; `test_cuda_layers.py` has them all everywhere."""
    options: Any = {"num_places": num_places, "context_length": CONTEXT}
    with open_layers(path, missing, streamed, **options) as runner:
        check_chains(runner, plain, lengths)
        requests = [count for count, _, _ in runner.runner._partial.host.server.work()]
    is_asked = [count > 0 for count in requests]
    assert len(is_asked) == len(missing)
    assert sum(is_asked) == round(len(missing) * (1 - streamed))


@pytest.mark.usefixtures("gpu")
def test_trees_and_chains(path: Path, plain: OneSequence) -> None:
    with open_layers(path, ALL, 0.5, context_length=CONTEXT, cache_size=SIZE) as runner:
        prompts, oracle = Prompts(runner), Oracle(plain)
        check_batch_of_trees(
            prompts, oracle, Random(5), num_trees=3, lengths_of_prompts=(0, 5, 130), num_next=4
        )


@pytest.mark.usefixtures("gpu")
def test_where_the_system_refuses_to_lock_the_file_layers_are_copied_from_a_copy(
    path: Path, plain: OneSequence
) -> None:
    refused = (driver.CUresult.CUDA_ERROR_NOT_PERMITTED,)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(driver, "cuMemHostRegister", lambda *_: refused)
        with open_layers(path, ALL, 0.5, context_length=CONTEXT) as runner:
            executor = runner.runner._loaded.ops.model_executor
            assert isinstance(executor, LayerExecutor)
            assert len(executor._pinned) == 3 * len(ALL)
            check_chains(runner, plain, (5, 65))


@pytest.mark.usefixtures("gpu")
def test_the_block_for_drafts_is_on_the_device(path: Path) -> None:
    """It is none of the layers whose copies a step has begun."""
    with open_layers(path, ALL, 0.5, context_length=CONTEXT, has_mtp=True) as runner:
        mtp = runner.runner._loaded.mtp
        assert mtp is not None
        executor = runner.runner._loaded.ops.model_executor
        assert isinstance(executor, LayerExecutor)
        ops = runner.runner._loaded.ops
        out = ops.ffn(ops.activations(1, runner.spec.hidden_size), mtp.model.layer.blocks[0].ffn)
        assert tuple(out.shape) == (1, runner.spec.hidden_size)
        assert not executor._has_begun
