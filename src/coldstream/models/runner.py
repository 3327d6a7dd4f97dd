"""A model on a device and the state of one sequence: what all devices have in common.

The unit of work is a step: up to `chunk_size` tokens in, their hidden states out; the head runs only on rows
whose logits somebody wants. Knows nothing of text, sampling or requests.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import TracebackType
from typing import Any, Self

import numpy as np

from coldstream.errors import InvalidRequestError, host_memory_errors
from coldstream.experts.disk_tier import DiskStatistics
from coldstream.experts.gpu_statistics import GpuExpertStatistics
from coldstream.gguf.reader import GGUFFile
from coldstream.models.footprint import bytes_per_token
from coldstream.models.sanity import check_logits
from coldstream.models.spec import ModelSpec

Array = np.ndarray[Any, Any]
Progress = Callable[[int, int], None]


class ModelRunner(ABC):
    """One model, one sequence. `position` tokens are in its state; `prefill` and `decode` append to it.

    After an exception the state is empty (`position == 0`), never half-advanced. The runner closes the file.

    A file that steps read from is looked at before anything is computed, and again before logits are given
    out: all that went into them are the bytes that were opened, or there is a ModelChangedError, now and from
    then on.
    """

    chunk_size: int  # tokens of a step
    head_rows: int  # rows of one call of the head

    def __init__(self, file: GGUFFile, spec: ModelSpec, context_length: int) -> None:
        self.file = file
        self.spec = spec
        self.context_length = context_length
        self.position = 0

    @abstractmethod
    def _compute(self, token_ids: Array, first_position: int) -> None:
        """Advance the state by int32 token_ids [T], T at most `chunk_size`, and keep their hidden states."""

    @abstractmethod
    def _compute_logits(self, first: int, count: int) -> Array:
        """float32 [count, vocab], valid until the next call, of rows of the last step; count ≤ head_rows.

        Ends with `_check_file`.
        """

    @abstractmethod
    def _clear(self) -> None:
        """Make the state that of an empty sequence."""

    @property
    @abstractmethod
    def reads_file(self) -> bool:
        """Whether steps read weights from the file. If not, loading has copied them all, and what becomes of
        the file changes nothing.
        """

    @property
    @abstractmethod
    def tier(self) -> str:
        """The kernels that run."""

    @property
    @abstractmethod
    def threads(self) -> int:
        """CPU threads that compute."""

    @property
    @abstractmethod
    def warnings(self) -> tuple[str, ...]:
        """What looks wrong with the file and may be right, for people."""

    @property
    def disk(self) -> DiskStatistics | None:
        """What reading experts from the disk has taken; None if all weights are in memory."""
        return None

    @property
    def gpu_experts(self) -> GpuExpertStatistics | None:
        """What became of experts that the GPU does not hold; None if it holds all, or if there is none."""
        return None

    @property
    def expert_uses(self) -> tuple[int, int] | None:
        """Uses of experts so far that found them in fast memory, and that did not; None: all are there."""
        return None if self.disk is None else (self.disk.hits, self.disk.misses)

    @property
    def bytes_per_token(self) -> int:
        """Weight bytes that decoding one token reads."""
        return bytes_per_token(self.spec, self.file.tensors)

    def reset(self) -> None:
        """Forgets the sequence."""
        self.position = 0
        self._clear()

    @host_memory_errors()
    def extend(self, token_ids: Sequence[int], progress: Progress | None = None) -> Any:
        """Appends `token_ids` (at least one); float32 logits [vocab] after the last, valid until a next call.

        They may lie on the device: `numpy.asarray` brings them. progress is called with (tokens done, tokens
        in all) after each chunk. Raises InvalidRequestError for ids outside the vocabulary or more tokens
        than the context has left, before anything is computed, OutOfMemoryError, and ModelChangedError.
        """
        ids = self._checked(token_ids)
        with self._whole_or_empty():
            self._check_file()
            for start in range(0, len(ids), self.chunk_size):
                chunk = ids[start : start + self.chunk_size]
                self._step(chunk)
                if progress is not None:
                    progress(start + len(chunk), len(ids))
            return self._last_logits(len(chunk) - 1)

    def prefill(self, token_ids: Sequence[int], progress: Progress | None = None) -> Array:
        """`extend`, with logits in an array of their own."""
        return np.array(self.extend(token_ids, progress))

    def decode(self, token_id: int) -> Array:
        """`prefill` of one token."""
        return self.prefill((token_id,))

    @host_memory_errors()
    def logits(self, token_ids: Sequence[int]) -> Array:
        """float32 logits [T, vocab] after each token of a fresh sequence, which is left as the state.

        Raises as `extend`, and GenerationFault if a logit is not finite.
        """
        self.reset()
        ids = self._checked(token_ids)
        result = np.empty((len(ids), self.spec.vocab_size), np.float32)
        with self._whole_or_empty():
            self._check_file()
            for start in range(0, len(ids), self.chunk_size):
                chunk = ids[start : start + self.chunk_size]
                self._step(chunk)
                for row in range(0, len(chunk), self.head_rows):
                    count = min(self.head_rows, len(chunk) - row)
                    rows = result[start + row : start + row + count]
                    rows[:] = self._compute_logits(row, count)
                    check_logits(rows, start + row + 1)
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
        self._compute(ids, self.position)
        self.position += len(ids)

    def _last_logits(self, row: int) -> Any:
        """What `extend` returns, of row `row` of the last step."""
        return self._compute_logits(row, 1)[0]

    @contextmanager
    def _whole_or_empty(self) -> Iterator[None]:
        """What is interrupted inside leaves an empty state."""
        try:
            yield
        except BaseException:
            self.reset()
            raise

    def _check_file(self) -> None:
        """Raises ModelChangedError if steps read a file that may have other bytes than it was opened with."""
        if self.reads_file:
            self.file.check_unchanged()

    def close(self) -> None:
        """Closes the file; the runner cannot be used afterwards."""
        self.file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
