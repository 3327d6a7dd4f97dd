"""The memory and the kernels of a drafter on a GPU are known before it is loaded. Needs no device."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("cuda.bindings")

from test_cuda_dflash import CASES

from coldstream.kernels.cuda import limits
from coldstream.kernels.cuda.array import ELEMENT_BYTES
from coldstream.kernels.cuda.limits import DeviceLimits
from coldstream.kernels.cuda.memory import MemoryPlan
from coldstream.kernels.cuda.program import note_kernels
from coldstream.models.cuda.dflash_block import (
    MOST_APPENDED,
    MOST_WAITING,
    BlockMemory,
    DflashBlock,
    DraftTarget,
    kernels_of,
)
from coldstream.models.cuda.features import FEATURE_TYPE
from coldstream.models.dflash.file import DflashFile
from coldstream.models.dflash.spec import tensor_shapes
from dflash_cases import random_tensors, spec_of, types_of, write_gguf_drafter

APPENDED = (*range(1, 70), 100, 128, 129, 300, 513, MOST_APPENDED)
QUANTS = ("F32", "BF16", "Q8_0", "Q4_K", "Q2_K")
Step = Callable[[DflashBlock], None]


@pytest.fixture(
    params=[(name, quant) for name in ("mixed, yarn", "second", "Laguna", "gpt-oss") for quant in QUANTS],
    ids=str,
)
def drafter(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[DflashFile]:
    name, quant = request.param
    spec = spec_of(CASES[name])
    tensors, types = random_tensors(spec), types_of(spec, quant)
    path = write_gguf_drafter(tmp_path / "drafter.gguf", spec, tensors, types=types)
    with DflashFile.open(path) as file:
        yield file


def steps_of(block: DflashBlock) -> None:
    """Blocks of any size, and any number of committed rows."""
    memory = MemoryPlan()
    length = memory.persistent((1,), "int32")
    for num_rows in range(2, block.spec.block_size + 1):
        block.draft(num_rows, length, length)
    for num_rows in APPENDED:
        features = memory.persistent((num_rows, block.spec.feature_size), FEATURE_TYPE)
        block.append(features, block.contexts, 3)


def test_no_step_takes_more_than_was_counted(drafter: DflashFile) -> None:
    counted, memory = BlockMemory.of(drafter), MemoryPlan()
    block = DflashBlock.load(drafter, memory, DraftTarget.planned(drafter.spec))
    steps_of(block)
    assert memory.persistent_bytes == counted.persistent
    assert memory.workspace_bytes == counted.workspace
    assert counted.total == counted.persistent + counted.workspace


def test_scaled_embeddings_and_capped_logits_take_no_more(drafter: DflashFile) -> None:
    counted, memory = BlockMemory.of(drafter), MemoryPlan()
    target = replace(DraftTarget.planned(drafter.spec), embedding_scale=16.0, logit_softcap=4.0)
    steps_of(DflashBlock.load(drafter, memory, target))
    assert (memory.persistent_bytes, memory.workspace_bytes) == (counted.persistent, counted.workspace)


def test_weights_take_as_many_bytes_as_in_the_file(drafter: DflashFile) -> None:
    """But for features that wait, and for what does not grow with a drafter's width."""
    tensors = [drafter.tensor(name) for name in tensor_shapes(drafter.spec)]
    in_file = sum(tensor.num_bytes for tensor in tensors)
    waiting = MOST_WAITING * drafter.spec.feature_size * ELEMENT_BYTES[FEATURE_TYPE]
    beside = BlockMemory.of(drafter).persistent - in_file - waiting
    assert 0 < beside < 256 * (len(tensors) + 8) + 16_384


@pytest.mark.sharded(6)
def test_all_kernels_are_known(drafter: DflashFile, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "_limits_of", lambda index: DeviceLimits(132, 227 * 1024, 228 * 1024))
    target = DraftTarget.planned(drafter.spec)
    known = kernels_of(drafter, target)
    with note_kernels() as used:
        block = DflashBlock.load(drafter, MemoryPlan(), target.without_memory(), notes_kernels=True)
        steps_of(block)
    assert used <= known
    names = " ".join(instance for _, instance in known)
    for part in ("linear_one", "add_rms_norm_rows", "attend_draft<32, 8>", "place_committed_rows"):
        assert part in names
    for part in ("place_draft_rows<true>", "place_committed_rows<true>"):
        assert (part in names) == drafter.spec.has_attention_bias
