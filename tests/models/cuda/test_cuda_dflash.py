"""A DFlash drafter beside a model on a GPU computes what the one in PyTorch does; on the host too.

It computes in bfloat16, and the other one in float32 from the same rounded weights and features.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

pytest.importorskip("cuda.bindings")

from one_sequence import open_cpu

from bench.runners import open_model_file
from builders import Dims, write_gguf
from coldstream.decoding import NO_DRAFT
from coldstream.decoding.drafters.dflash import DflashDrafter
from coldstream.errors import ConfigError, GenerationFault, OutOfMemoryError
from coldstream.kvcache import CacheSize
from coldstream.models.cuda import dflash as cuda_dflash
from coldstream.models.cuda.dflash import CudaDflash, CudaDflashSequence, RowSpans, torch_errors
from coldstream.models.cuda.runner import CudaRunner
from coldstream.models.dflash.file import DflashFile
from coldstream.models.dflash.spec import DraftLattice, check_gpu
from coldstream.models.runner_capacity import DraftMemory
from dflash_cases import (
    ALL_SLIDING,
    ANCHOR,
    MIXED,
    SECOND,
    YARN,
    config,
    features,
    random_tensors,
    spec_of,
    write_converted,
)
from dflash_reference import DflashModel, DflashSequence, _marginals, tables_of
from tree_plans import plan_with_trees

CONTEXT, VOCAB, WIDTH = 96, 320, 256
SIZE = CacheSize.of(2, CONTEXT, num_trees=1)
AUX_LAYERS = (0, 1)
CHUNKS = (1, 20, 10, 7)  # rows that are committed between drafts
TOLERANCE = 0.08  # of the length of a row: bfloat16 has 0.004, and some thirty roundings follow each other


def tiny_config(second: bool = False, **changes: Any) -> dict[str, Any]:
    sizes = {"hidden_size": WIDTH, "vocab_size": VOCAB, "num_target_layers": 2}
    values = config(**sizes | changes)
    values["dflash_config"] = {"target_layer_ids": list(AUX_LAYERS), "mask_token_id": VOCAB - 1}
    if second:
        values["dflash_config"] |= SECOND
        values["architectures"] = ["DFlash2DraftModel"]
    return values


CASES = {
    "full": tiny_config(),
    "mixed, yarn": tiny_config(**MIXED, rope_scaling=YARN),
    "causal": tiny_config(**MIXED, is_causal=True),
    "second": tiny_config(True, **ALL_SLIDING, is_causal=False),
    "second, narrow": tiny_config(True, **ALL_SLIDING | {"sliding_window": 4}, is_causal=False),
    "second, full": tiny_config(True, is_causal=False),
}


class Pair(NamedTuple):
    """The same drafter on a GPU and in PyTorch on the CPU, beside the same target."""

    on_gpu: CudaDflashSequence
    plain: DflashSequence

    def append(self, rows: np.ndarray) -> None:
        self.plain.append(rows)
        self.on_gpu.append(torch.from_numpy(rows).to(self.on_gpu._drafting.device))

    def truncate(self, length: int) -> None:
        self.plain.truncate(length)
        self.on_gpu.truncate(length)

    def check(self, num_rows: int) -> None:
        """What both say of the next block."""
        found = self.on_gpu.draft(ANCHOR, num_rows, 5)
        block, expected = self.on_gpu._drafting.block, self.plain.hidden(ANCHOR, num_rows)
        hidden = block._normed[:num_rows].float().cpu()
        errors = (hidden - expected).norm(dim=1) / expected.norm(dim=1)
        assert errors.max() < TOLERANCE
        lattice = self.candidates(hidden[1:])
        assert np.array_equal(found.token_ids, lattice.token_ids)
        assert found.token_ids.dtype == lattice.token_ids.dtype
        assert found.log_probs.shape == lattice.log_probs.shape
        assert np.abs(found.log_probs - lattice.log_probs).max() < 0.1

    def candidates(self, hidden: torch.Tensor) -> DraftLattice:
        """What the drafter in PyTorch makes of these states, whose logits are the same on both devices."""
        model = self.plain._model
        logits = torch.as_tensor(model.head(hidden.numpy()))
        if model.selector is None:
            return _marginals(logits, 5)
        return self.plain._selected(model.selector, hidden, logits, ANCHOR)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("target")
    return write_gguf(folder / "tiny.gguf", "qwen35moe", dims=Dims(layers=2, interval=2), quant="Q8_0")[0]


@pytest.fixture(params=["host", pytest.param("gpu", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> str:
    if request.param == "host":
        request.getfixturevalue("gpu")
    return "cpu" if request.param == "host" else "cuda"


def rounded(values: np.ndarray) -> np.ndarray:
    """To what bfloat16 holds."""
    return torch.from_numpy(values).bfloat16().float().numpy()


@contextmanager
def opened_drafter(
    folder: Path, target: Path, values: dict[str, Any], share: float | None = None
) -> Iterator[tuple[CudaRunner, CudaDflash]]:
    """share: of the target's experts that are in slots; None: all are on the device."""
    tensors = {name: rounded(value) for name, value in random_tensors(spec_of(values)).items()}
    file, spec = open_model_file(target)
    plan = plan_with_trees(file, spec, CONTEXT, SIZE, share, DraftMemory(aux_layers=AUX_LAYERS), "dflash")
    with (
        DflashFile.open(write_converted(folder, values, tensors)) as drafter,
        CudaRunner.load(file, spec, plan, cache_size=SIZE, aux_layers=AUX_LAYERS) as runner,
    ):
        yield runner, runner.load_dflash(drafter)


@contextmanager
def pair(folder: Path, target: Path, values: dict[str, Any]) -> Iterator[Pair]:
    with (
        opened_drafter(folder, target, values) as (_, drafting),
        DflashFile.open(folder / "drafter.gguf") as drafter,
        open_cpu(target, threads=1, context_length=CONTEXT) as cpu,
    ):
        plain = DflashModel.load(drafter, *tables_of(cpu.runner))
        yield Pair(drafting.new_sequence(), plain.new_sequence())


def test_errors_of_pytorch_are_ours() -> None:
    with pytest.raises(OutOfMemoryError, match="no memory for a test"), torch_errors("a test"):
        torch.empty(1 << 60, dtype=torch.uint8)
    with pytest.raises(GenerationFault, match="a test failed"), torch_errors("a test"):
        torch.zeros(2) @ torch.zeros(3)


@pytest.mark.parametrize("name", CASES)
def test_drafts_are_those_of_the_drafter_in_pytorch(
    tmp_path: Path, target: Path, device: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Behind more and more rows, whose memory grows and whose windows wrap around; then of another text."""
    monkeypatch.setattr(cuda_dflash, "FIRST_CONTEXT_ROWS", 8)
    with pair(tmp_path / "drafter", target, CASES[name]) as both:
        rows = rounded(features(both.plain.spec, sum(CHUNKS)))
        done = 0
        for count in CHUNKS:
            both.append(rows[done : done + count])
            done += count
            both.check(6)
            assert both.on_gpu.has_last
        both.check(8)
        both.truncate(3)
        both.append(rows[30:34])
        both.check(6)


def test_a_head_of_a_k_type_multiplies_the_states_of_this_draft(tmp_path: Path, device: str) -> None:
    """Such a head reads codes with one scale for 256 values, which another launch writes."""
    dims = Dims(layers=2, interval=2)
    target = write_gguf(tmp_path / "k-type.gguf", "qwen35moe", dims=dims, quant="Q6_K")[0]
    with pair(tmp_path / "drafter", target, CASES["full"]) as both:
        rows = rounded(features(both.plain.spec, 40))
        for part in (rows[:20], rows[20:]):
            both.append(part)
            both.check(6)


@pytest.mark.parametrize("name", ["full", "second"])
def test_rows_that_are_missing_are_not_seen(tmp_path: Path, target: Path, device: str, name: str) -> None:
    """Neither rows of tokens that it did not observe, nor what an earlier text left at their positions."""
    with pair(tmp_path / "drafter", target, CASES[name]) as both:
        rows = rounded(features(both.plain.spec, 40))
        both.append(rows[:20])
        both.check(4)
        both.truncate(12)
        both.truncate(17)
        assert not both.on_gpu.has_last
        both.append(rows[20:23])
        assert both.on_gpu.has_last
        both.check(4)


def test_sequences_alternate(tmp_path: Path, target: Path, device: str) -> None:
    with pair(tmp_path / "drafter", target, CASES["second"]) as one:
        other = Pair(one.on_gpu._drafting.new_sequence(), one.plain._model.new_sequence())
        rows = rounded(features(one.plain.spec, 40))
        one.append(rows[:20])
        other.append(rows[20:29])
        for each in (one, other, one):
            each.check(5)
        other.append(rows[29:30])
        other.check(5)


@pytest.mark.usefixtures("gpu")
def test_a_drafter_that_fails_proposes_nothing(
    tmp_path: Path, target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_memory(*_: object, **__: object) -> None:
        raise torch.OutOfMemoryError("out of memory")

    with pair(tmp_path / "drafter", target, CASES["second"]) as both:
        rows = torch.from_numpy(features(both.plain.spec, 9))
        drafter = DflashDrafter(both.on_gpu)
        drafter.extend([1] * 8, rows[:8])
        with monkeypatch.context() as failing:
            failing.setattr(both.on_gpu._drafting.block, "append", no_memory)
            with pytest.raises(OutOfMemoryError, match="the context of a drafter"):
                both.on_gpu.draft(ANCHOR, 4, 5)
            assert not both.on_gpu.has_last
        drafter.extend([2], rows[8:])
        with monkeypatch.context() as failing:
            failing.setattr(both.on_gpu._drafting.block, "draft", no_memory)
            assert drafter.propose([1] * 8 + [2, ANCHOR], 3) is NO_DRAFT
        drafter.truncate(9)
        assert len(drafter.propose([1] * 8 + [2, ANCHOR], 3)) == 3


@pytest.mark.usefixtures("gpu")
def test_features_that_are_not_finite_draft_nothing(tmp_path: Path, target: Path) -> None:
    with pair(tmp_path / "drafter", target, CASES["second, full"]) as both:
        rows = features(both.plain.spec, 9)
        rows[4, 7] = np.nan
        both.on_gpu.append(torch.from_numpy(rows))
        assert not both.on_gpu.draft(ANCHOR, 4, 5).is_finite


def test_sizes_without_kernels_are_refused() -> None:
    spec = spec_of(tiny_config(head_dim=40))
    with pytest.raises(ConfigError, match="heads of 40"):
        check_gpu(spec)
    check_gpu(spec_of(tiny_config()))
    wide, narrow = tiny_config(True), tiny_config(intermediate_size=100)
    wide["dflash_config"]["selector_top_k"] = 17
    with pytest.raises(ConfigError, match="selects of 17 tokens"):
        check_gpu(spec_of(wide))
    with pytest.raises(ConfigError, match="rows of 256 and 100 values"):
        check_gpu(spec_of(narrow))


def test_spans_of_rows() -> None:
    spans = RowSpans()
    assert spans.last == -1
    spans.append(0, 5, 8)
    spans.append(7, 2, 8)
    assert spans.last == 8
    spans.truncate(7)
    assert spans.last == 4
    spans.append(5, 20, 8)
    spans.truncate(17)
    assert spans.last == -1, "a ring of eight has nothing of before"
