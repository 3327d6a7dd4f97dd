"""A model on the CPU: weights mapped, forward pass captured once, the state of one sequence.

The unit of work is a step: up to CHUNK tokens in, their hidden states out; the head runs only on rows whose
logits somebody wants. Knows nothing of text, sampling or requests.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np

from coldstream.errors import InvalidRequestError
from coldstream.gguf.reader import GGUFFile
from coldstream.kernels.cpu_ops import CpuOps
from coldstream.kernels.ops import Rows
from coldstream.kvcache.cache import ModelCache
from coldstream.models.footprint import bytes_per_token
from coldstream.models.qwen35 import Qwen35Model
from coldstream.models.spec import ModelSpec
from coldstream.placement.hardware import Hardware

# Rows of the captured graph: enough to keep matrix units busy, few enough for activations to stay small.
CHUNK = 512
HEAD_ROWS = 16

Array = np.ndarray[Any, Any]
Progress = Callable[[int, int], None]


class ModelRunner:
    """One model, one sequence. `position` tokens are in its state; `prefill` and `decode` append to it.

    After an exception the state is empty (`position == 0`), never half-advanced.
    """

    def __init__(
        self, file: GGUFFile, spec: ModelSpec, ops: CpuOps, context_length: int, kv_dtype: str
    ) -> None:
        self.file = file
        self.spec = spec
        self.context_length = context_length
        self.position = 0
        self._ops = ops
        self._model = Qwen35Model.load(file, spec, ops)
        self._cache = ModelCache(spec, ops, num_slots=1, context_length=context_length, kv_dtype=kv_dtype)
        self._token_ids = ops.zeros((CHUNK,), "int32")
        self._rows = Rows(positions=ops.zeros((CHUNK,), "int32"), slots=ops.zeros((CHUNK,), "int32"))
        self._trunk = ops.capture(
            CHUNK, lambda: self._model.forward(self._token_ids, self._rows, self._cache)
        )
        self._head_input = ops.zeros((HEAD_ROWS, spec.hidden_size), "float32")
        self._head = ops.capture(HEAD_ROWS, lambda: self._model.logits(self._head_input))

    @classmethod
    def open(
        cls,
        path: Path,
        *,
        threads: int,
        tier: str = "auto",
        context_length: int = 4096,
        kv_dtype: str = "float16",
        progress: Progress | None = None,
    ) -> Self:
        """`load` of the model at `path`. Raises ModelNotFoundError and ModelFormatError besides."""
        file = GGUFFile.open(path)
        try:
            spec = ModelSpec.from_gguf(file.metadata, file.tensors)
            return cls.load(
                file,
                spec,
                threads=threads,
                tier=tier,
                context_length=context_length,
                kv_dtype=kv_dtype,
                progress=progress,
            )
        except BaseException:
            file.close()
            raise

    @classmethod
    def load(
        cls,
        file: GGUFFile,
        spec: ModelSpec,
        *,
        threads: int,
        tier: str,
        context_length: int,
        kv_dtype: str,
        progress: Progress | None = None,
    ) -> Self:
        """Maps the weights of an open file and captures the forward pass; the runner then closes the file.

        context_length positions are reserved (touched only as they fill). progress is called with (done,
        total) bytes while the file is read ahead. Raises InconsistentError for weights that contradict the
        format's conventions, UnsupportedError for a tier this machine lacks; the file stays open then.
        """
        ops = CpuOps(threads, tier)
        runner = cls(file, spec, ops, context_length, kv_dtype)
        if progress is not None:
            ops.read_ahead(progress, Hardware.measure().ram_available_bytes)
        return runner

    @property
    def tier(self) -> str:
        """The instruction-set tier that runs."""
        return self._ops.tier

    @property
    def threads(self) -> int:
        """Threads that compute."""
        return self._ops.threads

    @property
    def bytes_per_token(self) -> int:
        """Weight bytes that decoding one token reads."""
        return bytes_per_token(self.spec, self.file.tensors)

    @property
    def warnings(self) -> tuple[str, ...]:
        """What looks wrong with the file and may be right, for people."""
        return self._model.warnings

    @property
    def activation_bytes(self) -> int:
        """Memory between the operations of a step."""
        return self._trunk.arena.num_bytes + self._head.arena.num_bytes

    def reset(self) -> None:
        """Forgets the sequence."""
        self._cache.reset(0)
        self.position = 0

    def prefill(self, token_ids: Sequence[int], progress: Progress | None = None) -> Array:
        """Appends `token_ids` (at least one) and returns the float32 logits [vocab] after the last.

        progress is called with (tokens done, tokens in all) after each chunk. Raises InvalidRequestError for
        ids outside the vocabulary or more tokens than the context has left, before anything is computed.
        """
        ids = self._checked(token_ids)
        for start in range(0, len(ids), CHUNK):
            chunk = ids[start : start + CHUNK]
            self._step(chunk)
            if progress is not None:
                progress(start + len(chunk), len(ids))
        logits: Array = self._logits(len(chunk) - 1, 1)[0].copy()
        return logits

    def decode(self, token_id: int) -> Array:
        """Appends one token; otherwise as `prefill`."""
        return self.prefill((token_id,))

    def logits(self, token_ids: Sequence[int]) -> Array:
        """float32 logits [T, vocab] after each token of a fresh sequence, which is left as the state."""
        self.reset()
        ids = self._checked(token_ids)
        result = np.empty((len(ids), self.spec.vocab_size), np.float32)
        for start in range(0, len(ids), CHUNK):
            chunk = ids[start : start + CHUNK]
            self._step(chunk)
            for row in range(0, len(chunk), HEAD_ROWS):
                count = min(HEAD_ROWS, len(chunk) - row)
                result[start + row : start + row + count] = self._logits(row, count)
        return result

    def _checked(self, token_ids: Sequence[int]) -> Array:
        left = self.context_length - self.position
        if not 0 < len(token_ids) <= left:
            raise InvalidRequestError(
                f"{len(token_ids)} tokens, but between 1 and {left} fit: the context holds "
                f"{self.context_length} and {self.position} are in use; try a larger --ctx-size"
            )
        ids = np.asarray(token_ids, dtype=np.int64)
        if ids.min() < 0 or ids.max() >= self.spec.vocab_size:
            raise InvalidRequestError(
                f"token ids must be in 0 … {self.spec.vocab_size - 1}, found {ids.min()} … {ids.max()}"
            )
        return ids.astype(np.int32)

    def _step(self, ids: Array) -> None:
        count = len(ids)
        self._token_ids[:count] = ids
        self._rows.positions[:count] = np.arange(self.position, self.position + count)
        try:
            self._trunk.run(count)
        except BaseException:
            self.reset()
            raise
        self.position += count

    def _logits(self, first: int, count: int) -> Array:
        """A view of the head's output, valid until the next call."""
        self._head_input[:count] = self._trunk.outputs[first : first + count]
        try:
            self._head.run(count)
        except BaseException:
            self.reset()
            raise
        logits: Array = self._head.outputs[:count]
        return logits

    def close(self) -> None:
        """Closes the file; the runner cannot be used afterwards."""
        self.file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
