"""The kernels of the first layer of each kind are those of all layers."""

from collections.abc import Sequence
from itertools import product
from pathlib import Path

import pytest
from runner_cases import FAMILIES, MIX, VARIANTS, write_variant

from bench.runners import open_model_file
from builders import Dims, write_gguf
from coldstream.experts.prefetch import Prefetching
from coldstream.kernels.cuda import limits
from coldstream.kernels.cuda.limits import DeviceLimits
from coldstream.kernels.cuda.memory import MemoryPlan
from coldstream.kernels.cuda.program import note_kernels
from coldstream.kernels.sample.admit import PROGRAM as ADMISSION
from coldstream.kernels.sample.cuda import PROGRAM as SAMPLER
from coldstream.kvcache import CacheSize
from coldstream.models.cuda import memory_plan
from coldstream.models.cuda.inputs import StepShape
from coldstream.models.cuda.limits import Limits, padded_rows
from coldstream.models.cuda.loaded_model import Loaded
from coldstream.models.cuda.memory_plan import distinct_layers, distinct_mixers, kernels_of
from coldstream.models.loader import Block

RESIDENT = Limits(CacheSize.of(2, 1024, 1), 1024, "i16")
PARTIAL = Limits(
    CacheSize.of(2, 1024),
    1024,
    "i16",
    expert_bytes=0,
    whole_layers=frozenset({1}),
    ring_bytes=2**23,
    prefetching=Prefetching(2, 1),
)


@pytest.fixture(autouse=True)
def device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Launchers choose kernels for an H100, which need not be there."""
    monkeypatch.setattr(limits, "_limits_of", lambda index: DeviceLimits(132, 232448, 233472, True))


def blocks_of(path: Path, sizes: Limits) -> Sequence[Block]:
    file, spec = open_model_file(path)
    return Loaded.into(MemoryPlan(), file, spec, sizes, 64).model.blocks


@pytest.mark.sharded(9)
@pytest.mark.parametrize(
    ("variant", "sizes"),
    [*((variant, RESIDENT) for variant in VARIANTS), *((family, PARTIAL) for family in FAMILIES)],
)
def test_they_launch_what_all_layers_launch(
    variant: str, sizes: Limits, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, spec = open_model_file(write_variant(tmp_path, variant))
    found = kernels_of(file, spec, sizes, 256)
    monkeypatch.setattr(memory_plan, "distinct_layers", lambda blocks, distance: range(len(blocks)))
    assert found == kernels_of(file, spec, sizes, 256)


@pytest.mark.sharded(of="models on a GPU")
@pytest.mark.parametrize(("variant", "sizes"), [("moe", RESIDENT), ("moe", PARTIAL), ("qwen3next", PARTIAL)])
def test_they_launch_what_all_layers_launch_in_steps_of_every_kind(
    variant: str, sizes: Limits, tmp_path: Path
) -> None:
    """Steps whose rows are chains or trees, short or long, near or deep, of all sizes up to a chunk."""
    file, spec = open_model_file(write_variant(tmp_path, variant))
    found = kernels_of(file, spec, sizes, 256)
    loaded = Loaded.into(MemoryPlan(), file, spec, sizes, 256, notes_kernels=True)
    with note_kernels() as noted:
        for count in (*range(1, 40), 64, 128, 256):
            for flags in product((False, True), repeat=4):
                trees, branching, prompts, deep = flags
                if trees <= sizes.has_trees and branching <= trees:
                    (loaded.kept_step if sizes.keeps_hidden(count) else loaded.step)(
                        StepShape(count, trees, branching, has_prompts=prompts or count > 128, is_deep=deep)
                    )
    assert noted <= found.all


@pytest.mark.parametrize("sizes", [RESIDENT, PARTIAL])
@pytest.mark.parametrize("rows", [1, 3, 9, 20, 40, 200, 4000])
def test_kernels_of_a_first_prompt_come_before_others(sizes: Limits, rows: int, tmp_path: Path) -> None:
    """It launches all of them, but for those that choose a token. The next token's are second."""
    file, spec = open_model_file(write_variant(tmp_path, "moe"))
    found = kernels_of(file, spec, sizes, 256, rows)
    assert found.all == kernels_of(file, spec, sizes, 256).all
    loaded = Loaded.into(MemoryPlan(), file, spec, sizes, 256, notes_kernels=True)
    count = padded_rows(min(rows, 256)) if sizes.is_captured(min(rows, 256)) else min(rows, 256)
    launched = []
    for shape in (StepShape.prompt(count), StepShape(1)):
        with note_kernels() as noted:
            step = loaded.kept_step if sizes.keeps_hidden(shape.num_rows) else loaded.step
            loaded.model.logits(step(shape).rows(0, 1))
        launched.append(noted)
    prompt, token = launched
    first, second, *_ = found.groups
    choosing = {(program, each) for program in (SAMPLER, ADMISSION) for each in program.instances}
    assert first == prompt | choosing
    assert first | second == first | token
    assert sum(map(len, found.groups)) == len(found.all)


@pytest.mark.sharded(of="models on a GPU")
def test_a_model_repeats_its_kinds_of_layers(tmp_path: Path) -> None:
    path = tmp_path / "plain.gguf"
    write_gguf(path, types=MIX, dims=Dims(layers=12, interval=4))
    assert distinct_layers(blocks_of(path, RESIDENT)) == (0, 3)
    assert distinct_mixers(blocks_of(path, RESIDENT)) == (0, 3)


@pytest.mark.sharded(of="models on a GPU")
def test_one_tensor_of_another_type_is_a_kind_of_its_own(tmp_path: Path) -> None:
    path = tmp_path / "other.gguf"
    write_gguf(path, types={**MIX, "blk.5.ffn_down_exps.weight": "Q5_K"}, dims=Dims(layers=12, interval=4))
    assert distinct_layers(blocks_of(path, RESIDENT)) == (0, 3, 5)
    assert distinct_mixers(blocks_of(path, RESIDENT)) == (0, 3), "experts are no part of a mixer"


def test_the_last_layers_guess_at_none_behind_them(tmp_path: Path) -> None:
    path = tmp_path / "guesses.gguf"
    write_gguf(path, types=MIX, dims=Dims(layers=12, interval=12))
    blocks = blocks_of(path, PARTIAL)
    assert distinct_layers(blocks) == (0, 1, 11), "layer 1 has all its experts, the last one attention"
    assert distinct_layers(blocks, distance=2) == (0, 1, 10, 11)
