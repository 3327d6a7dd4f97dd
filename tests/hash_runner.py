"""A model whose logits are a hash of all tokens so far, for tests of engine logic: exact, quick, and
sensitive to every token of its state. Not a language model.
"""

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from builders import Dims, write_gguf
from coldstream.decoding import Logits, Progress
from coldstream.engine import EngineConfig, OpenedModel, SamplingParams
from coldstream.engine.opened_model import ModelHandle
from coldstream.gguf.chat_template import ChatTemplate
from coldstream.gguf.reader import GGUFFile
from coldstream.gguf.tokenizer import Tokenizer
from coldstream.models.cpu_runner import ALL_BYTES, CpuRunner
from coldstream.models.spec import ModelSpec
from coldstream.placement.plan import PlanOptions
from coldstream.placement.run_plan import RunPlan

CHUNK = 8


class HashRunner:
    """Implements `ModelHandle`. `computed` counts the tokens given; from position `fail_at` on it raises."""

    tier = "hash"
    threads = 1
    warnings: tuple[str, ...] = ()
    disk = None
    gpu_experts = None
    expert_uses: tuple[int, int] | None = None

    def __init__(self, file: GGUFFile) -> None:
        self.file = file
        self.spec = ModelSpec.from_gguf(file.metadata, file.tensors)
        self.token_ids: list[int] = []
        self.computed = 0
        self.fail_at: int | None = None
        self.closed = False

    @property
    def position(self) -> int:
        return len(self.token_ids)

    def reset(self) -> None:
        self.token_ids = []

    def extend(self, token_ids: Sequence[int], progress: Progress | None = None) -> Logits:
        for start in range(0, len(token_ids), CHUNK):
            self._append(token_ids[start : start + CHUNK])
            if progress is not None:
                progress(min(start + CHUNK, len(token_ids)), len(token_ids))
        return self.current_logits()

    def prefill(self, token_ids: Sequence[int], progress: Progress | None = None) -> Logits:
        return self.extend(token_ids, progress)

    def decode(self, token_id: int) -> Logits:
        return self.extend([token_id])

    def logits(self, token_ids: Sequence[int]) -> Logits:
        self.reset()
        return np.stack([self.decode(token_id) for token_id in token_ids])

    def close(self) -> None:
        assert not self.closed, "closed twice"
        self.closed = True
        self.file.close()

    def _append(self, token_ids: Sequence[int]) -> None:
        self.token_ids += token_ids
        self.computed += len(token_ids)
        if self.fail_at is not None and self.position >= self.fail_at:
            raise RuntimeError("made to fail")

    def current_logits(self) -> Logits:
        return np.random.default_rng(self.token_ids).normal(size=self.spec.vocab_size).astype(np.float32)


def open_hash_model(
    path: Path, ctx_size: int = 256, default_sampling: SamplingParams | None = None
) -> OpenedModel:
    """A tiny file's tokenizer and template around a `HashRunner`."""
    (path,) = write_gguf(
        path, dims=Dims(layers=1, hidden=32, experts=2, expert_ffn=32, shared_ffn=32, state=32)
    )
    return opened_with(HashRunner(GGUFFile.open(path)), ctx_size, default_sampling)


def opened_with(
    runner: ModelHandle, ctx_size: int, default_sampling: SamplingParams | None = None
) -> OpenedModel:
    """The tokenizer and the template of a runner's file around it."""
    metadata = runner.file.metadata
    tokenizer = Tokenizer.from_metadata(metadata)
    needs = CpuRunner.needs(runner.file, runner.spec, 1, "auto", ctx_size, "f16")
    placement = needs.place(ALL_BYTES, None, PlanOptions())
    return OpenedModel(
        config=EngineConfig(str(runner.file.paths[0]), ctx_size=ctx_size, threads=1),
        plan=RunPlan(placement, threads=1),
        runner=runner,
        tokenizer=tokenizer,
        chat_template=ChatTemplate.from_metadata(metadata, tokenizer.vocabulary),
        has_chat_template=True,
        default_sampling=default_sampling or SamplingParams(),
    )
