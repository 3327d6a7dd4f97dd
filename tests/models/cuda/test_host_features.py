"""The residual streams that a GPU has for a drafter are those of the CPU; on the host."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from one_sequence import open_cpu

from bench.runners import open_model_file
from builders import Dims, write_gguf
from coldstream.errors import UnsupportedError
from coldstream.kvcache import Batch, CacheSize, Segment
from coldstream.models.cuda.runner import CudaRunner
from coldstream.models.runner_capacity import DraftMemory
from device_arrays import tensor_of
from tree_plans import plan_with_trees

CONTEXT = 192
SIZE = CacheSize.of(3, CONTEXT, num_trees=1)
AUX_LAYERS = (0, 1)


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    dims = Dims(layers=2, interval=2)
    (path,) = write_gguf(tmp_path / "tiny.gguf", "qwen35moe", dims=dims, quant="Q8_0")
    return path


def open_keeping(path: Path, share: float | None, aux_layers: tuple[int, ...] = AUX_LAYERS) -> CudaRunner:
    """With room for trees."""
    file, spec = open_model_file(path)
    plan = plan_with_trees(file, spec, CONTEXT, SIZE, share, DraftMemory(aux_layers=aux_layers))
    return CudaRunner.load(file, spec, plan, cache_size=SIZE, aux_layers=aux_layers)


def rounded(features: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(features).to(torch.bfloat16)


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize("share", [None, 0.5])
def test_features_are_those_of_the_cpu_rounded(tiny: Path, share: float | None) -> None:
    """Of prompts in steps of all kinds, of rows in any order, and of a tree."""
    with (
        open_cpu(tiny, threads=1, context_length=CONTEXT, aux_layers=AUX_LAYERS, cache_size=SIZE) as cpu,
        open_keeping(tiny, share) as runner,
    ):
        both = [(each, each.new_sequence()) for each in (cpu.runner, runner)]
        for token_ids in ([1, 2, 3], [4] * 20, [*range(5, 75)], [9]):
            found: list[Any] = []
            for each, sequence in both:
                each.extend(sequence, token_ids)
                found.append(each.features(range(len(token_ids))))
            assert torch.equal(tensor_of(found[1]), rounded(found[0]))
        found = []
        for each, sequence in both:
            each.step(Batch((Segment(sequence, [1, 2, 3, 4], [-1, 0, 0, 2]),)))
            found.append(each.features(np.array([3, 0, 2])))
            each.commit(sequence, [0, 2, 3])
        assert torch.equal(tensor_of(found[1]), rounded(found[0]))


@pytest.mark.usefixtures("gpu")
def test_without_aux_layers_there_are_no_features(tiny: Path) -> None:
    with open_keeping(tiny, None, aux_layers=()) as runner:
        runner.extend(runner.new_sequence(), [1, 2])
        with pytest.raises(UnsupportedError, match="without keeping residual streams"):
            runner.features(range(2))
