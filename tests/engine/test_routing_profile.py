"""Recording routing: the same experts however tokens are divided, and those that the definition chooses."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from bench.runners import open_cpu_runner
from builders import write_gguf
from coldstream.engine.routing_profile import profile_text, record_routing
from coldstream.errors import InvalidRequestError, UnsupportedError
from coldstream.gguf.reader import GGUFFile
from coldstream.gguf.tokenizer import Tokenizer
from coldstream.kernels.ops import RouterWeights, Rows
from coldstream.kernels.reference_ops import ReferenceOps
from coldstream.kvcache.cache import ModelCache
from coldstream.models import read_spec
from coldstream.models.causal_lm import CausalLM
from coldstream.models.cpu.runner import CpuRunner
from coldstream.models.footprint import routed_model
from coldstream.placement import RoutingTrace
from coldstream.planning.config import EngineConfig

CHUNK = CpuRunner.chunk_size


class ListeningOps(ReferenceOps):
    """The exact definition, keeping what the routers chose."""

    def __init__(self) -> None:
        super().__init__(exact=True)
        self.topk_ids: list[np.ndarray] = []

    def choose_experts(self, x: torch.Tensor, weights: RouterWeights) -> tuple[torch.Tensor, torch.Tensor]:
        ids, topk_weights = super().choose_experts(x, weights)
        self.topk_ids.append(ids.numpy())
        return ids, topk_weights


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_gguf(tmp_path_factory.mktemp("models") / "moe.gguf")[0]


def token_ids(count: int) -> list[int]:
    return np.random.default_rng(count).integers(0, 256, count).tolist()


def open_runner(path: Path, context_length: int) -> CpuRunner:
    return open_cpu_runner(path, threads=2, context_length=context_length)


def record(path: Path, ids: Sequence[int], context_length: int) -> np.ndarray:
    with open_runner(path, context_length) as runner:
        return record_routing(runner, routed_model(runner.file, runner.spec), ids).topk_ids


@pytest.mark.sharded(of="models on the CPU")
def test_the_routing_is_what_the_definition_chooses(path: Path) -> None:
    ids = token_ids(9)
    with GGUFFile.open(path) as file:
        spec = read_spec(file.metadata, file.tensors)
        ops = ListeningOps()
        model = CausalLM.load(file, spec, ops)
    cache = ModelCache(spec, ops, num_states=1, context_length=len(ids), kv_type="f16")
    rows = Rows(torch.arange(len(ids), dtype=torch.int32), torch.zeros(len(ids), dtype=torch.int32))
    model.forward(torch.tensor(ids, dtype=torch.int32), rows, cache)
    assert np.array_equal(record(path, ids, 16), np.stack(ops.topk_ids, axis=1))


@pytest.mark.sharded(of="models on the CPU")
def test_decoding_chooses_the_experts_of_prefill(path: Path) -> None:
    ids = token_ids(CHUNK + 40)
    together = record(path, ids, len(ids))
    with open_runner(path, len(ids)) as runner:
        alone, sequence = [], runner.new_sequence()
        for token_id in ids:
            runner.extend(sequence, (token_id,))
            alone.append(runner.topk_ids(1)[0])
    assert np.array_equal(together, np.stack(alone))
    assert len(np.unique(together, axis=0)) > len(ids) // 2  # else equality would say little


def test_recording_changes_no_logit(path: Path) -> None:
    ids = token_ids(30)
    with (
        open_runner(path, 64) as recording,
        open_cpu_runner(path, threads=2, context_length=64) as plain,
    ):
        assert np.array_equal(recording.logits(ids), plain.logits(ids))


def test_a_long_text_is_split_into_parts_that_start_from_nothing(path: Path) -> None:
    ids = token_ids(70)
    parts = [record(path, ids[start : start + 30], 30) for start in (0, 30, 60)]
    assert np.array_equal(record(path, ids, 30), np.concatenate(parts))


def test_a_text_is_profiled_under_its_model(path: Path, tmp_path: Path) -> None:
    calls: list[tuple[str, int, int]] = []
    config = EngineConfig(str(path), threads=2, device="cpu")
    trace = profile_text(config, "def f(x): return x\n" * 60, lambda *call: calls.append(call))
    with GGUFFile.open(path) as file:
        spec = read_spec(file.metadata, file.tensors)
        model = routed_model(file, spec)
        ids = Tokenizer.from_metadata(file.metadata).encode("def f(x): return x\n" * 60)
    assert calls[-1] == ("recording", len(ids), len(ids))
    assert np.array_equal(trace.topk_ids, record(path, ids, len(ids)))
    trace.save(tmp_path / "trace")
    assert np.array_equal(RoutingTrace.load(tmp_path / "trace", model).topk_ids, trace.topk_ids)


def test_budgets_leave_the_trace_alone_and_a_window_does_not(path: Path) -> None:
    config, text = EngineConfig(str(path), threads=2, device="cpu"), "def f(x): return x\n" * 5
    whole = profile_text(config, text).topk_ids
    assert np.array_equal(profile_text(replace(config, ram=0), text).topk_ids, whole)
    assert not np.array_equal(profile_text(replace(config, attention_window=1), text).topk_ids, whole)


def test_what_cannot_be_profiled_is_refused(path: Path, tmp_path: Path) -> None:
    with pytest.raises(InvalidRequestError, match="the text has 0 tokens"):
        profile_text(EngineConfig(str(path)), "")
    (dense,) = write_gguf(tmp_path / "dense.gguf", "qwen35")
    with pytest.raises(UnsupportedError, match=r"dense\.gguf is a dense model"):
        profile_text(EngineConfig(str(dense)), "text")
