"""A DFlash drafter beside a model on a GPU computes what the one on the CPU does; on the host too.

Products have the same bits there, and features and kept keys and values are rounded alike. Sums of attention
and of convolutions have other orders.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

pytest.importorskip("cuda.bindings")

from one_sequence import open_cpu

from bench.runners import open_model_file
from builders import SMALL_EXPERTS, write_gguf
from coldstream.decoding import NO_DRAFT
from coldstream.decoding.drafters.dflash import DflashDrafter
from coldstream.errors import ConfigError, OutOfMemoryError
from coldstream.kernels.cuda.contents import CudaArray
from coldstream.kvcache import CacheSize
from coldstream.models.cpu.dflash import CpuDflash, CpuDflashSequence
from coldstream.models.cuda import dflash as cuda_dflash
from coldstream.models.cuda.dflash import CudaDflash, CudaDflashSequence, RowSpans, room_for
from coldstream.models.cuda.dflash_block import MOST_WAITING
from coldstream.models.cuda.runner import CudaRunner
from coldstream.models.dflash.context import ContextRows, Rows
from coldstream.models.dflash.file import DflashFile
from coldstream.models.dflash.spec import check_gpu
from coldstream.models.runner_capacity import DraftMemory
from device_arrays import array_of
from dflash_cases import (
    ALL_SLIDING,
    ANCHOR,
    GPT_OSS_YARN,
    LAGUNA,
    MIXED,
    SECOND,
    YARN,
    config,
    features,
    random_tensors,
    spec_of,
    types_of,
    write_gguf_drafter,
)
from tree_plans import plan_with_trees

CONTEXT, VOCAB = 96, 320
WIDTH, WIDE = SMALL_EXPERTS.hidden, 256  # of rows; the latter for types with blocks of so many values
SIZE = CacheSize.of(2, CONTEXT, num_trees=1)
AUX_LAYERS = (0, 1)
CHUNKS = (1, 20, 10, 7)  # rows that are committed between drafts
TOLERANCE = 1e-3  # keys and values between two bfloat16 may be rounded to either
# Once a code of an activation differs, which lay between two integers, many behind it do.
TOLERANCE_OF_CODES = 0.1


def tiny_config(second: bool = False, **changes: Any) -> dict[str, Any]:
    sizes = {"hidden_size": WIDTH, "vocab_size": VOCAB, "num_target_layers": 2}
    values = config(**sizes | changes)
    values["dflash_config"] = {"target_layer_ids": list(AUX_LAYERS), "mask_token_id": VOCAB - 1}
    if second:
        values["dflash_config"] |= SECOND
        values["architectures"] = ["DFlash2DraftModel"]
    return values


def laguna_config() -> dict[str, Any]:
    sizes = {"hidden_size": WIDTH, "vocab_size": VOCAB, "draft_vocab_size": VOCAB, "num_target_layers": 2}
    section = {"target_layer_ids": list(AUX_LAYERS), "mask_token_id": VOCAB - 1, "block_size": 8}
    return LAGUNA | sizes | {"dflash_config": section}


CASES = {
    "full": tiny_config(),
    "mixed, yarn": tiny_config(**MIXED, rope_scaling=YARN),
    "causal": tiny_config(**MIXED, is_causal=True),
    "second": tiny_config(True, **ALL_SLIDING, is_causal=False),
    "second, narrow": tiny_config(True, **ALL_SLIDING | {"sliding_window": 4}, is_causal=False),
    "second, full": tiny_config(True, is_causal=False),
    "Laguna": laguna_config(),
    "gpt-oss": tiny_config(attention_bias=True, rope_theta=150000.0, rope_scaling=GPT_OSS_YARN),
    "second, biases": tiny_config(True, is_causal=False, attention_bias=True),
}


class RoundedRows(ContextRows):
    """Keys and values as a GPU keeps them, those of the block included."""

    def _write(self, keys: Rows, values: Rows, positions: np.ndarray) -> int:
        return super()._write(rounded(keys), rounded(values), positions)


class Pair(NamedTuple):
    """The same drafter on a GPU and on the CPU, beside the same target."""

    on_gpu: CudaDflashSequence
    on_cpu: CpuDflashSequence

    @classmethod
    def of(cls, on_gpu: CudaDflash, on_cpu: CpuDflash) -> "Pair":
        pair, spec = cls(on_gpu.new_sequence(), on_cpu.new_sequence()), on_cpu.spec
        sizes = (spec.num_kv_heads, spec.head_dim)
        pair.on_cpu._contexts = tuple(RoundedRows(*sizes, layer.window) for layer in spec.layers)
        return pair

    def append(self, rows: np.ndarray) -> None:
        self.on_cpu.append(rows)
        self.on_gpu.append(on_device(rows))

    def truncate(self, length: int) -> None:
        self.on_cpu.truncate(length)
        self.on_gpu.truncate(length)

    def check(self, num_rows: int, tolerance: float = TOLERANCE) -> None:
        """What both say of the next block. tolerance: of states, as a share of their length."""
        found = self.on_gpu.draft(ANCHOR, num_rows, 5)
        states = self.states(num_rows)
        expected = self.on_cpu.hidden(ANCHOR, num_rows)[1:]
        errors = np.linalg.norm(states - expected, axis=1) / np.linalg.norm(expected, axis=1)
        assert errors.max() < tolerance
        # Logits of the same states have the same bits on both devices.
        lattice = self.on_cpu._model.lattice(states, ANCHOR, 5)
        assert np.array_equal(found.token_ids, lattice.token_ids)
        assert found.token_ids.dtype == lattice.token_ids.dtype
        assert found.log_probs.shape == lattice.log_probs.shape
        assert np.abs(found.log_probs - lattice.log_probs).max() < 1e-4

    def states(self, num_rows: int) -> np.ndarray:
        """Those of the last draft."""
        drafting = self.on_gpu._drafting
        places = drafting._staged.values
        root, length = (places[at : at + 1] for at in (cuda_dflash.ROOT, cuda_dflash.LENGTH))
        return np.asarray(drafting.block.states(num_rows, root, length).values)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_target(tmp_path_factory.mktemp("target"), WIDTH)


@pytest.fixture(scope="module")
def wide_target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_target(tmp_path_factory.mktemp("target"), WIDE)


def write_target(folder: Path, width: int, quant: str = "Q8_0") -> Path:
    dims = replace(SMALL_EXPERTS, hidden=width)
    return write_gguf(folder / "tiny.gguf", "qwen35moe", dims=dims, quant=quant)[0]


@pytest.fixture(params=["host", pytest.param("gpu", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> str:
    if request.param == "host":
        request.getfixturevalue("gpu")
    return "cpu" if request.param == "host" else "cuda"


def on_device(rows: np.ndarray) -> CudaArray:
    """Features as a step leaves them."""
    return array_of(torch.from_numpy(rows).bfloat16())


def rounded(values: np.ndarray) -> np.ndarray:
    """To what bfloat16 holds."""
    return torch.from_numpy(values).bfloat16().float().numpy()


@contextmanager
def opened_drafter(
    folder: Path, target: Path, values: dict[str, Any], share: float | None = None, quant: str = "F32"
) -> Iterator[tuple[CudaRunner, CudaDflash]]:
    """share: of the target's experts that are in slots; None: all are on the device."""
    folder.mkdir()
    drafter_spec = spec_of(values)
    types, tensors = types_of(drafter_spec, quant), random_tensors(drafter_spec)
    path = write_gguf_drafter(folder / "drafter.gguf", drafter_spec, tensors, types=types)
    file, spec = open_model_file(target)
    plan = plan_with_trees(file, spec, CONTEXT, SIZE, share, DraftMemory(aux_layers=AUX_LAYERS), "dflash")
    with (
        DflashFile.open(path) as drafter,
        CudaRunner.load(file, spec, plan, cache_size=SIZE, aux_layers=AUX_LAYERS) as runner,
    ):
        yield runner, runner.load_dflash(drafter)


@contextmanager
def pair(folder: Path, target: Path, values: dict[str, Any], quant: str = "F32") -> Iterator[Pair]:
    with (
        opened_drafter(folder, target, values, quant=quant) as (_, drafting),
        DflashFile.open(folder / "drafter.gguf") as drafter,
        open_cpu(target, threads=1, context_length=CONTEXT) as cpu,
    ):
        yield Pair.of(drafting, cpu.runner.load_dflash(drafter))


@pytest.mark.parametrize("error", [MemoryError(), OutOfMemoryError("the GPU's memory ran out")])
def test_errors_of_memory_say_how_to_do_without(error: Exception) -> None:
    with pytest.raises(OutOfMemoryError, match=r"no memory for a test.*in another way"), room_for("a test"):
        raise error


KINDS = [
    *((name, "F32") for name in CASES),
    *(("mixed, yarn", quant) for quant in ("BF16", "F16", "Q4_K", "Q2_K")),
    *(("second", quant) for quant in ("BF16", "Q8_0", "Q6_K")),
]


@pytest.mark.sharded
@pytest.mark.parametrize(("name", "quant"), KINDS)
def test_drafts_are_those_of_the_drafter_on_the_cpu(
    tmp_path: Path,
    request: pytest.FixtureRequest,
    device: str,
    name: str,
    quant: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Behind more and more rows, whose memory grows and whose windows wrap around; then of another text."""
    monkeypatch.setattr(cuda_dflash, "FIRST_CONTEXT_ROWS", 8)
    tolerance = TOLERANCE if quant in ("F32", "F16", "BF16") else TOLERANCE_OF_CODES
    is_wide = quant.endswith("_K")
    target = request.getfixturevalue("wide_target" if is_wide else "target")
    values = CASES[name] | {"hidden_size": WIDE if is_wide else WIDTH}
    with pair(tmp_path / "drafter", target, values, quant) as both:
        rows = rounded(features(both.on_cpu.spec, sum(CHUNKS)))
        done = 0
        for count in CHUNKS:
            both.append(rows[done : done + count])
            done += count
            both.check(6, tolerance)
            assert both.on_gpu.has_last
        both.check(8, tolerance)
        both.truncate(3)
        both.append(rows[30:34])
        both.check(6, tolerance)


def test_a_head_of_a_k_type_multiplies_the_states_of_this_draft(tmp_path: Path, device: str) -> None:
    """Such a head reads codes with one scale for 256 values, which another launch writes."""
    target = write_target(tmp_path, WIDE, "Q6_K")
    with pair(tmp_path / "drafter", target, CASES["full"] | {"hidden_size": WIDE}) as both:
        rows = rounded(features(both.on_cpu.spec, 40))
        for part in (rows[:20], rows[20:]):
            both.append(part)
            both.check(6)


def test_a_target_scales_its_embedding_and_caps_its_logits(tmp_path: Path, device: str) -> None:
    """As gemma-4 does, with the same bits on both devices, and for drafters as well."""
    dims = replace(SMALL_EXPERTS, hidden=WIDTH)
    (target,) = write_gguf(tmp_path / "tiny.gguf", "gemma4", dims=dims, quant="Q8_0")
    with pair(tmp_path / "drafter", target, CASES["full"] | {"final_logit_softcapping": 4.0}) as both:
        rows = rounded(features(both.on_cpu.spec, 40))
        for part in (rows[:20], rows[20:]):
            both.append(part)
            both.check(6)
        plain = CpuDflash.lattice
        model = both.on_cpu._model
        states = both.on_cpu.hidden(ANCHOR, 6)[1:]
        capped = plain(model, states, ANCHOR, 5)
        model._logit_softcap = 0.0
        assert not np.array_equal(capped.log_probs, plain(model, states, ANCHOR, 5).log_probs)


@pytest.mark.parametrize("name", ["full", "second"])
def test_rows_that_are_missing_are_not_seen(tmp_path: Path, target: Path, device: str, name: str) -> None:
    """Neither rows of tokens that it did not observe, nor what an earlier text left at their positions."""
    with pair(tmp_path / "drafter", target, CASES[name]) as both:
        rows = rounded(features(both.on_cpu.spec, 40))
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
        other = Pair.of(one.on_gpu._drafting, one.on_cpu._model)
        rows = rounded(features(one.on_cpu.spec, 40))
        one.append(rows[:20])
        other.append(rows[20:29])
        for each in (one, other, one):
            each.check(5)
        other.append(rows[29:30])
        other.check(5)


def test_rows_between_drafts_are_one_captured_step(tmp_path: Path, target: Path, device: str) -> None:
    with pair(tmp_path / "drafter", target, CASES["second"]) as both:
        rows = rounded(features(both.on_cpu.spec, 20))
        both.append(rows[:8])
        both.check(5)
        steps = both.on_gpu._drafting._steps
        captured = steps.num_captured
        for first, end in ((8, 9), (9, 14), (14, 20)):
            both.append(rows[first:end])
            both.check(5)
        assert steps.num_captured == captured


@pytest.mark.sharded(of="models on a GPU")
def test_rows_that_are_appended_end_no_step_of_the_model(
    tmp_path: Path, target: Path, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whose logits are read later."""

    def begin() -> None:
        raise AssertionError("the model's outputs are forgotten")

    with pair(tmp_path / "drafter", target, CASES["second"]) as both:
        rows = rounded(features(both.on_cpu.spec, MOST_WAITING))
        with monkeypatch.context() as patch:
            patch.setattr(both.on_gpu._drafting, "_begin", begin)
            both.append(rows)
        assert not both.on_gpu._num_waiting
        both.check(5)


@pytest.mark.sharded(of="models on a GPU")
@pytest.mark.usefixtures("gpu")
def test_a_drafter_that_fails_proposes_nothing(
    tmp_path: Path, target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_memory(*_: object, **__: object) -> None:
        raise OutOfMemoryError("out of memory")

    with pair(tmp_path / "drafter", target, CASES["second"]) as both:
        rows = on_device(features(both.on_cpu.spec, 9))
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


@pytest.mark.sharded(of="models on a GPU")
@pytest.mark.usefixtures("gpu")
def test_features_that_are_not_finite_draft_nothing(tmp_path: Path, target: Path) -> None:
    with pair(tmp_path / "drafter", target, CASES["second, full"]) as both:
        rows = features(both.on_cpu.spec, 9)
        rows[4, 7] = np.nan
        both.on_gpu.append(on_device(rows))
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
    with pytest.raises(ConfigError, match=r"rows of 128 and 100 values.*multiples of 32"):
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
