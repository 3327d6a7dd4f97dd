"""Sequences of which a failure leaves nothing half-done."""

from collections.abc import Collection
from types import TracebackType

from coldstream.kvcache.sequence import Sequence
from coldstream.kvcache.sequence_cache import SequenceCache


class WholeOrCleared:
    """A context that empties sequences if an exception interrupts the work inside."""

    def __init__(self, cache: SequenceCache, sequences: Collection[Sequence]) -> None:
        self._cache, self._sequences = cache, sequences

    def __enter__(self) -> None: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            for sequence in self._sequences:
                if not sequence.is_released:
                    self._cache.clear(sequence)
