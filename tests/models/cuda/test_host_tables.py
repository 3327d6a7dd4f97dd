"""An embedding in page-locked RAM instead of the GPU's memory: the same bits, and no bytes of the GPU's."""

from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
from one_sequence import OneSequence
from runner_cases import token_ids

from bench.runners import open_model_file, partial_plan, resident_plan
from builders import Dims, write_gguf
from coldstream.models.cuda.runner import CudaRunner
from coldstream.placement.run_plan import RunPlan

CONTEXT = 256
DIMS = Dims(layers=2, interval=2, experts=8, experts_used=2)


class Run(NamedTuple):
    """What a runner takes of the GPU's memory, and its logits."""

    num_bytes: int
    logits: list[np.ndarray]


def plan_of(path: Path, *, is_whole: bool) -> RunPlan:
    file, spec = open_model_file(path)
    with file:
        if is_whole:
            return resident_plan(file, spec, CONTEXT)
        options = {"context_length": CONTEXT, "chunk_size": 512, "ring_bytes": 2**23, "threads": 1}
        return partial_plan(file, spec, 3, **options)  # type: ignore[arg-type]


def run(path: Path, plan: RunPlan, host_tables: int) -> Run:
    placement = plan.placement
    fixed = replace(placement.fixed, host_tables=host_tables)
    plan = replace(plan, placement=replace(placement, fixed=fixed))
    file, spec = open_model_file(path)
    runner = CudaRunner.load(file, spec, plan)
    with OneSequence(runner) as model:
        logits = [model.prefill(token_ids(length)).copy() for length in (90, 3)]
        return Run(runner.plan.total, logits + [model.decode(token).copy() for token in (3, 1, 2)])


@pytest.mark.sharded(of="models on a GPU")
@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize("is_whole", [True, False], ids=["all experts", "some experts"])
@pytest.mark.parametrize("embedding", ["Q4_K", "F32"])
def test_an_embedding_in_ram_changes_no_bit_and_takes_none_of_the_gpus_memory(
    tmp_path: Path, *, is_whole: bool, embedding: str
) -> None:
    path = tmp_path / "tiny.gguf"
    write_gguf(path, types={"token_embd.weight": embedding}, dims=DIMS)
    file, _ = open_model_file(path)
    with file:
        table_bytes = file.tensors["token_embd.weight"].num_bytes
    plan = plan_of(path, is_whole=is_whole)
    here, there = (run(path, plan, host_tables) for host_tables in (0, table_bytes))
    assert here.num_bytes - there.num_bytes == table_bytes
    assert all(np.array_equal(*both) for both in zip(here.logits, there.logits, strict=True))
