"""An MTP block on the CPU: captured once and replayed by C++, with keys and values of its own.

Of rows that are appended only the last one's output is read. So the others are computed no further than
their keys and values, which takes a fifth of a row.

It reads the embedding and the head of the trunk that it was loaded beside, and computes with its threads.
"""

from collections.abc import Callable, Generator
from collections.abc import Sequence as TokenIds
from functools import partial
from typing import Any, Final, TypeVar

import numpy as np

from coldstream import kvcache
from coldstream.errors import GenerationFault, host_memory_errors
from coldstream.gguf.reader import GGUFFile
from coldstream.kernels.cpu_ops import CapturedGraph, CpuOps
from coldstream.kernels.fused.reference import FusedText
from coldstream.kernels.ops import Rows
from coldstream.kvcache.batch import BatchArrays, BatchSize, CheckedSegment
from coldstream.kvcache.cache import CacheSize, num_blocks_of
from coldstream.kvcache.sequence_cache import SequenceCache
from coldstream.models.causal_lm import CausalLM
from coldstream.models.footprint import nextn_bytes
from coldstream.models.mtp.model import MAX_DRAFT_IDS, MtpModel, MtpOutputs, MtpRows

Array = np.ndarray[Any, Any]
Captured = TypeVar("Captured")
BRANCHING: Final = 4  # candidates after a row, by default; deeper ranks are right 1 % of the time


class CpuMtp:
    """The block of a file, and memory for its sequences.

    ops: the trunk's, or others `CpuOps.beside` them. A sequence takes up to context_length rows. All of them
    together hold up to cache_size.
    """

    chunk_size = 256  # rows of a run: activations stay small beside the trunk's

    def __init__(
        self,
        file: GGUFFile,
        trunk: CausalLM,
        ops: CpuOps,
        context_length: int,
        kv_type: str,
        cache_size: CacheSize,
        branching: int,
    ) -> None:
        """branching: candidates after each row. Raises as `MtpModel.load`."""
        self.context_length = context_length
        self.weight_bytes = nextn_bytes(trunk.spec, file.tensors)  # mapped ones included, shared ones not
        self._model = model = MtpModel.load(file, trunk, ops)
        spec = model.layer.spec
        self._sequences = SequenceCache(spec, ops, cache_size, kv_type)
        state_size = trunk.spec.nextn_state_size
        self._waiting = _Rows(ops, state_size, self.chunk_size, num_blocks_of(context_length))
        self._last = _Rows(ops, state_size, 1, num_blocks_of(context_length))
        caches = self._sequences.tensors
        self._store = self._waiting.capture(partial(model.store, cache=caches))
        self._block = self._last.capture(partial(model.forward, cache=caches))
        self._head_input = ops.zeros((1, spec.hidden_size), "float32")
        output = model.layer.output
        head = output.rows(0, min(MAX_DRAFT_IDS, output.num_rows))
        self._head = ops.capture(
            1, lambda: ops.top_log_probs(ops.linear(self._head_input, (head,))[0], branching)
        )

    @property
    def cache_bytes(self) -> int:
        """Address space of keys and values, which take memory once they are written."""
        return self._sequences.tensors.num_bytes

    @property
    def activation_bytes(self) -> int:
        """Memory between the operations of a run, its inputs included."""
        graphs = (self._store, self._block, self._head)
        scratch = max(graph.graph.scratch_bytes for graph in graphs)
        arrays = sum(graph.arena.num_bytes for graph in graphs)
        return arrays + scratch + self._waiting.hidden.nbytes + self._last.hidden.nbytes

    @property
    def num_bytes(self) -> int:
        """All memory that it takes beside the trunk."""
        return self.weight_bytes + self.cache_bytes + self.activation_bytes

    def new_sequence(self) -> "MtpSequence":
        """An empty sequence. It takes no memory before its first row."""
        return MtpSequence(self, self._sequences.new())

    @host_memory_errors()
    def append(self, sequence: kvcache.Sequence, token_ids: TokenIds[int], hidden: Array) -> MtpOutputs:
        """Appends rows after states [rows, …]; what the last gives. See `MtpSequence.append`."""
        first, num_stored = sequence.length, len(token_ids) - 1
        try:
            for start in range(0, num_stored, self.chunk_size):
                part = slice(start, min(start + self.chunk_size, num_stored))
                self._run(self._store, self._waiting, sequence, token_ids[part], hidden[part])
            self._run(self._block, self._last, sequence, token_ids[-1:], hidden[-1:])
        except BaseException:
            # Only keys and values behind the end have changed.
            self._sequences.truncate(sequence, first)
            raise
        found = self._block.outputs
        outputs = found.outputs[0].copy()
        return MtpOutputs(outputs, outputs if found.states is found.outputs else found.states[0].copy())

    def _run(
        self,
        graph: CapturedGraph[Any],
        rows: "_Rows",
        sequence: kvcache.Sequence,
        token_ids: TokenIds[int],
        hidden: Array,
    ) -> None:
        segment = CheckedSegment.chain(sequence, np.array(token_ids, np.int32), np.arange(0))
        self._sequences.check_room([segment.demand])
        self._sequences.reserve([segment.demand])
        count = rows.inputs.write([segment])
        rows.hidden[:count] = hidden
        graph.run(count)
        self._sequences.append(sequence, count)

    def candidates(self, output: Array) -> tuple[list[int], list[float]]:
        """The likeliest tokens after a row, the best first, and their log-probabilities, from its output."""
        self._head_input[0] = output
        self._head.run(1)
        token_ids, log_probs = self._head.outputs
        return token_ids[0].tolist(), log_probs[0].tolist()

    def truncate(self, sequence: kvcache.Sequence, length: int) -> None:
        """See `MtpRows.truncate`."""
        self._sequences.truncate(sequence, length)
        if length == 0:
            self._sequences.clear(sequence)


class _Rows:
    """What a graph of the block reads of up to `capacity` rows."""

    def __init__(self, ops: CpuOps, state_size: int, capacity: int, num_blocks: int) -> None:
        size = BatchSize(capacity, 1, num_blocks)
        self._ops, self._capacity = ops, capacity
        self.inputs = BatchArrays(ops.zeros((size.num_values,), "int32"), size)
        self.hidden = ops.zeros((capacity, state_size), "float32")

    def capture(self, compute: Callable[[Array, Array, Rows], Captured]) -> CapturedGraph[Captured]:
        """A graph of what `compute` does with the rows' tokens, hidden states and places."""
        inputs = self.inputs
        return self._ops.capture(self._capacity, lambda: compute(inputs.token_ids, self.hidden, inputs.rows))


class MtpSequence(MtpRows[CpuMtp]):
    """Rows of one sequence of `CpuMtp`."""

    def __init__(self, block: CpuMtp, sequence: kvcache.Sequence) -> None:
        super().__init__(block, sequence)
        self.last: MtpOutputs | None = None  # what the last row that was appended gives: float32, both

    def keep(self, hidden: Array) -> list[Array]:
        """Copies of hidden states [rows, …], one for each row."""
        return list(np.array(hidden, np.float32))

    def append(self, token_ids: TokenIds[int], states: TokenIds[Array]) -> None:
        """Appends at least one row and at most `room`: each a token and the state before it, float32.

        Raises GenerationFault for states that are not finite, OutOfMemoryError and ModelChangedError, each
        with no row appended.
        """
        self.check(token_ids, states)
        hidden = np.stack(states)
        if not np.isfinite(hidden).all():
            raise GenerationFault("hidden states that a draft is to follow are not finite")
        self.last = self._block.append(self._sequence, token_ids, hidden)

    def chain(self, num_steps: int) -> Generator[tuple[list[int], list[float]], None, None]:
        """Candidates after the last row that was appended, then after the best of them, and so on.

        They come at most num_steps times, while there is room, and each is computed when it is asked for.
        Log-probabilities are NaN if a logit is not finite. The rows in between are gone at the generator's
        end, or when it is closed. Raises as `append`.
        """
        assert self.last is not None, "candidates follow rows that were appended"
        num_rows, last = self.length, self.last
        try:
            for step in range(num_steps):
                candidates = self._block.candidates(last.outputs)
                yield candidates
                if step + 1 == num_steps or not self.room:
                    return
                last = self._block.append(self._sequence, candidates[0][:1], last.states[None])
        finally:
            self.truncate(num_rows)

    has_fused_steps = False  # the host takes part in every step here

    def begin_fused(self, sequence: kvcache.Sequence, text: FusedText) -> None:
        """None, see `has_fused_steps`."""
