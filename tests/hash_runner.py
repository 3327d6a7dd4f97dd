"""A model whose logits are a hash of all tokens so far, for tests of engine logic: exact, quick, and
sensitive to every token of its state. Not a language model.
"""

from collections.abc import Collection
from pathlib import Path

import numpy as np

from bench.runners import ram_needs
from builders import Dims, write_gguf
from coldstream.decoding import Logits
from coldstream.engine import EngineConfig, OpenedModel, SamplingParams
from coldstream.gguf.chat_template import ChatTemplate
from coldstream.gguf.reader import GGUFFile
from coldstream.gguf.tokenizer import Tokenizer
from coldstream.kernels.cpu_ops import CpuOps
from coldstream.kvcache import CacheSize, Sequence, SequenceCache
from coldstream.kvcache.batch import BatchLimits, CheckedSegment
from coldstream.kvcache.sequence_cache import AcceptedPath
from coldstream.models.read_spec import read_spec
from coldstream.models.runner import ModelRunner
from coldstream.placement.hardware import Hardware
from coldstream.placement.plan import PlanOptions
from coldstream.placement.run_plan import RunPlan
from coldstream.planning.choose import ALL_BYTES
from coldstream.planning.planned import Planned
from coldstream.planning.unknowns import RamShape


class HashRunner(ModelRunner):
    """`computed` counts tokens; from position `fail_at` on it raises."""

    chunk_size = 8
    head_rows = 8
    tier = "hash"
    threads = 1
    warnings: tuple[str, ...] = ()
    reads_file = False
    expert_uses: tuple[int, int] | None = None

    def __init__(self, file: GGUFFile, ctx_size: int) -> None:
        spec = read_spec(file.metadata, file.tensors)
        super().__init__(file, spec, ctx_size)
        self.cache_size = CacheSize.of(400, ctx_size)
        self._sequences = SequenceCache(spec, CpuOps(1), self.cache_size, "f32")
        self._limits = BatchLimits(spec.vocab_size, ctx_size, self.chunk_size, self.chunk_size)
        self._tokens: dict[Sequence, list[int]] = {}
        self._last: Sequence | None = None
        self._contexts: list[list[int]] = []  # of the rows of the last step
        self.computed = 0
        self.fail_at: int | None = None
        self.closed = False

    @property
    def token_ids(self) -> list[int]:
        """Tokens of the sequence that was computed last."""
        return [] if self._last is None else self._tokens[self._last][: self._last.length]

    @property
    def position(self) -> int:
        return len(self.token_ids)

    def current_logits(self) -> Logits:
        return self._logits(self.token_ids)

    def fork(self, sequence: Sequence) -> Sequence:
        fork = super().fork(sequence)
        self._tokens[fork] = list(self._tokens[sequence])
        return fork

    def close(self) -> None:
        assert not self.closed, "closed twice"
        self.closed = True
        super().close()

    def _launch(self, segments: Collection[CheckedSegment]) -> None:
        self._sequences.reserve([segment.demand for segment in segments])
        self._contexts = []
        for segment in segments:
            self._last = sequence = segment.sequence
            tokens = self._tokens.setdefault(sequence, [])
            tokens[sequence.length :] = segment.token_ids.tolist()
            self._tokens |= {fork: tokens[: sequence.length + each] for each, fork in segment.forks}
            ends = range(sequence.length + 1, len(tokens) + 1)
            self._contexts += [tokens[:end] for end in ends]
            self.computed += len(ends)
            if self.fail_at is not None and len(tokens) >= self.fail_at:
                raise RuntimeError("made to fail")

    def _logits_of(self, rows: np.ndarray) -> np.ndarray:
        empty = np.empty((0, self.spec.vocab_size), np.float32)
        return np.concatenate([empty, *(self._logits(self._contexts[row])[None] for row in rows)])

    def _commit(self, path: AcceptedPath) -> None:
        raise NotImplementedError

    def _logits(self, token_ids: list[int]) -> Logits:
        return np.random.default_rng(token_ids).normal(size=self.spec.vocab_size).astype(np.float32)


def open_hash_model(
    path: Path, ctx_size: int = 256, default_sampling: SamplingParams | None = None
) -> OpenedModel:
    """A tiny file's tokenizer and template around a `HashRunner`."""
    (path,) = write_gguf(
        path, dims=Dims(layers=1, hidden=32, experts=2, expert_ffn=32, shared_ffn=32, state=32)
    )
    return opened_with(HashRunner(GGUFFile.open(path), ctx_size), ctx_size, default_sampling)


def opened_with(
    runner: ModelRunner, ctx_size: int, default_sampling: SamplingParams | None = None
) -> OpenedModel:
    """The tokenizer and the template of a runner's file around it."""
    metadata = runner.file.metadata
    tokenizer = Tokenizer.from_metadata(metadata)
    needs = ram_needs(runner.file, runner.spec, RamShape(1, "auto", ctx_size, "f32"))
    placement = needs.place(ALL_BYTES, None, PlanOptions())
    config = EngineConfig(str(runner.file.paths[0]), ctx_size=ctx_size, threads=1)
    return OpenedModel(
        planned=Planned(RunPlan(placement, 1), None, needs.mapped, config, Hardware.measure(), None),
        runner=runner,
        tokenizer=tokenizer,
        chat_template=ChatTemplate.from_metadata(metadata, tokenizer.vocabulary),
        has_chat_template=True,
        default_sampling=default_sampling or SamplingParams(),
    )
