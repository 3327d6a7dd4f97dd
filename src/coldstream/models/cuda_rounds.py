"""Rounds of drafts on a GPU: draft, step, choice, commit and the next draft without the host in between.

A round is one captured graph. `kernels/rounds/reference.py` defines what the device decides in it; the host
launches rounds, follows behind, and reads which tokens were chosen. All experts are on the device.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Self

import torch

from coldstream import kvcache
from coldstream.errors import OutOfMemoryError
from coldstream.kernels.cuda.device import device_errors
from coldstream.kernels.cuda.staged import ReadBack, StagedRing
from coldstream.kernels.ops import MAX_SHORT_CHAIN, SHORT_CONTEXT, CommittedPath, Ops, Rows
from coldstream.kernels.rounds.cuda import MAX_ROUND_ROWS, RoundArrays, RoundKernels
from coldstream.kernels.rounds.reference import NUM_COLUMNS, Accepted, RoundState, RoundText
from coldstream.kernels.sample.admit import MAX_ENDS
from coldstream.kernels.sample.cuda import write_rows
from coldstream.kvcache.batch import rows_of
from coldstream.kvcache.cache import num_blocks_of
from coldstream.kvcache.sequence_cache import Demand, SequenceCache
from coldstream.models.captured_steps import CapturedSteps
from coldstream.models.step_inputs import StepShape
from coldstream.models.whole_or_cleared import WholeOrCleared

if TYPE_CHECKING:
    from coldstream.models.cuda_model import Loaded

NUM_AHEAD = ReadBack.NUM_COPIES  # rounds whose results may wait for the host


@dataclass(frozen=True)
class RoundMemory:
    """What rounds read and write, in memory that captured graphs know."""

    staged: StagedRing
    arrays: RoundArrays  # on the device
    results: ReadBack
    num_blocks: int  # of a sequence, at most

    @classmethod
    def into(cls, ops: Ops, context_length: int) -> Self:
        """For sequences of up to `context_length` positions."""
        num_blocks = num_blocks_of(context_length)
        staged = StagedRing(ops.zeros((RoundArrays.num_values(num_blocks),), "int32"))
        arrays = RoundArrays(staged.values, num_blocks)
        return cls(staged, arrays, ReadBack(arrays.result), num_blocks)

    @property
    def path(self) -> CommittedPath:
        """What a round keeps: its first rows, as many as agree."""
        arrays = self.arrays
        one = (arrays.state_id, arrays.count, arrays.first)
        return CommittedPath(*one, arrays.sources, arrays.kept, arrays.table)


@dataclass(frozen=True)
class RoundShape:
    """The properties of a round that select its captured graph."""

    num_rows: int  # of the model's step: the root and the draft
    is_deep: bool
    draws: bool  # whether tokens are drawn rather than the likeliest


class CudaRounds:
    """Runs rounds of a model and its block.

    begin, make_room: as `CudaMtp` has them.
    """

    kind = "round"  # of captured steps

    def __init__(
        self, loaded: "Loaded", steps: CapturedSteps, begin: Callable[[], None], make_room: Callable[[], bool]
    ) -> None:
        assert loaded.mtp is not None
        assert loaded.rounds is not None
        self.memory, self.mtp = loaded.rounds, loaded.mtp
        self.loaded = loaded
        self._steps, self._begin, self._make_room = steps, begin, make_room

    def start(
        self, sequence: kvcache.Sequence, block_rows: kvcache.Sequence, text: RoundText
    ) -> "TextRounds | None":
        """Rounds of a text whose tokens but the root are in `sequence`. `block_rows` has the root, which is
        the row that the block computed last.

        The sequence has a pending tree until `TextRounds.end`. None, with nothing changed, if there is no
        room, or the text has more end tokens than the device takes. Raises DeviceError, with both empty.
        """
        if len(text.end_ids) > MAX_ENDS or text.left < 2:
            return None
        rounds = TextRounds(self, sequence, block_rows, text)
        try:
            rounds.reserve()
        except OutOfMemoryError:
            return None
        with (
            device_errors(),
            WholeOrCleared(self.loaded.sequences, [sequence]),
            WholeOrCleared(self.mtp.sequences, [block_rows]),
        ):
            rounds.write()
        return rounds

    def launch(self, shape: RoundShape) -> None:
        """Queues a round. Raises DeviceError, OutOfMemoryError."""
        self._begin()
        self._steps.run(
            (self.kind, shape), partial(self.compute, shape), lambda nothing: nothing, self._make_room
        )

    def compute(self, shape: RoundShape) -> None:
        """A round, over what the one before it left."""
        loaded, mtp, arrays = self.loaded, self.mtp, self.memory.arrays
        num_rows = shape.num_rows
        kernels = RoundKernels(arrays, num_rows, mtp.candidates[0, :1])
        if num_rows > 1:
            self.draft(kernels, shape)
        kernels.write_model_rows()
        columns = arrays.model_columns[: NUM_COLUMNS * num_rows].view(NUM_COLUMNS, num_rows)
        step = StepShape(num_rows, has_trees=True, is_deep=shape.is_deep)
        logits = loaded.logits_after(*_rows_of(columns, arrays.table, step))
        chosen = arrays.chosen[:num_rows]
        loaded.sampler.choose(logits, arrays.settings[:num_rows], chosen, draws=shape.draws)
        kernels.accept_rows()
        loaded.model.commit(self.memory.path, loaded.sequences.tensors)
        columns = arrays.block_columns[: NUM_COLUMNS * num_rows].view(NUM_COLUMNS, num_rows)
        step = StepShape(num_rows, has_prompts=num_rows > MAX_SHORT_CHAIN, is_deep=shape.is_deep)
        token_ids, rows = _rows_of(columns, arrays.block_table, step)
        mtp.follow(mtp.compute_rows(token_ids, mtp.trunk_states[:num_rows], rows), arrays.last_row)

    def draft(self, kernels: RoundKernels, shape: RoundShape) -> None:
        """The chain of likeliest tokens after the block's last output, into the model's rows."""
        arrays, step = self.memory.arrays, StepShape(1, is_deep=shape.is_deep)
        columns = arrays.link_columns.view(NUM_COLUMNS, 1)
        self.mtp.run_head()
        kernels.extend_draft(0)
        for depth in range(1, shape.num_rows - 1):
            self.mtp.compute_link(*_rows_of(columns, arrays.block_table, step))
            kernels.extend_draft(depth)


def _rows_of(columns: torch.Tensor, table: torch.Tensor, step: StepShape) -> tuple[torch.Tensor, Rows]:
    token_ids, rows = rows_of(columns, table.view(1, -1))
    assert rows.batch is not None
    batch = replace(
        rows.batch,
        has_trees=step.has_trees,
        has_branches=step.has_branches,
        has_prompts=step.has_prompts,
        has_several=step.has_several,
        is_deep=step.is_deep,
    )
    return token_ids, replace(rows, batch=batch)


class TextRounds:
    """The rounds of one text; see `CudaRounds.start`. Implements decoding's `Rounds`."""

    def __init__(
        self,
        rounds: CudaRounds,
        sequence: kvcache.Sequence,
        block_rows: kvcache.Sequence,
        text: RoundText,
    ) -> None:
        self._rounds, self._text = rounds, text
        self._sequence, self._block_rows = sequence, block_rows
        self._cache: SequenceCache = rounds.loaded.sequences
        self._block_cache: SequenceCache = rounds.mtp.sequences
        self._first, self._block_first = sequence.length, block_rows.length
        self._most_rows = min(1 + text.most_nodes, text.left, MAX_ROUND_ROWS)
        self._num_held = 0  # rows that rounds have kept, as far as the host knows
        self._left = text.left  # tokens that may be chosen after those
        self._last_row: int | None = None  # of the last round that was taken, if it kept any
        self._in_flight: list[tuple[int, Any, torch.cuda.Event]] = []  # rows, results, when they are there

    def launch(self, num_nodes: int) -> None:
        """Queues a round with a draft of so many tokens, at most those of the text, behind those before.

        Raises DeviceError, OutOfMemoryError.
        """
        assert len(self._in_flight) < NUM_AHEAD, "a result would be overwritten before it was read"
        num_rows = min(1 + num_nodes, self._most_rows)
        num_more = min(num_rows + sum(rows for rows, _, _ in self._in_flight), self._left)
        is_longer = self._cache.lengthen(self._sequence, self._num_held + num_more)
        is_longer |= self._block_cache.lengthen(self._block_rows, self._num_held + num_more)
        with device_errors():
            if is_longer:
                self._write_tables(self._rounds.memory.staged.next_on_host())
                self._rounds.memory.staged.copy(2 * self._rounds.memory.num_blocks)
            end = max(self._first, self._block_first) + self._num_held + num_more
            draws = self._text.settings.temperature != 0
            self._rounds.launch(RoundShape(num_rows, end > SHORT_CONTEXT, draws))
            results, ended = self._rounds.memory.results.copy(), torch.cuda.Event()  # type: ignore[no-untyped-call]
            ended.record(torch.cuda.current_stream())
        self._in_flight.append((num_rows, results, ended))

    def take(self) -> Accepted:
        """Waits for the oldest round in flight; what came of it. Raises DeviceError."""
        num_rows, results, ended = self._in_flight.pop(0)
        with device_errors():
            ended.synchronize()
        count, fault, *token_ids = results.tolist()
        num_nodes = max(0, min(num_rows, self._left) - 1)
        self._num_held += count
        self._last_row = count - 1 if count else None
        is_over = fault != 0 or (count > 0 and token_ids[count - 1] in self._text.end_ids)
        self._left = 0 if is_over else self._left - count
        return Accepted(tuple(token_ids[:count]), fault, num_nodes, self._left == 0)

    def end(self) -> tuple[int, torch.Tensor | None]:
        """Waits for all rounds; then the sequences have what was kept.

        Returns how many rows that are, and the model's hidden state [E] of the last one, if no round after it
        has written over it.
        """
        while self._in_flight:
            self.take()
        self._cache.settle(self._sequence, self._num_held)
        self._block_cache.append(self._block_rows, self._num_held)
        self._block_cache.cut(self._block_rows, self._block_rows.length)
        row = self._last_row
        return self._num_held, None if row is None else self._rounds.mtp.trunk_states[row].clone()

    def reserve(self) -> None:
        """Takes memory for a round, with room for a state that nobody shares.

        Raises OutOfMemoryError with nothing changed.
        """
        parents = tuple(range(-1, self._most_rows - 1))
        demand = Demand(self._sequence, self._most_rows)
        tree, block = replace(demand, parents=parents), Demand(self._block_rows, self._most_rows)
        self._block_cache.check_room([block])
        self._cache.states.check(self._cache.need_of([demand]).num_states)
        self._cache.check_room([tree])
        self._block_cache.reserve([block])
        self._cache.reserve([tree])

    def write(self) -> None:
        """Queues what the first round reads."""
        path = self._cache.accept(self._sequence, range(self._most_rows))
        memory, text = self._rounds.memory, self._text
        host = memory.staged.next_on_host()
        arrays = RoundArrays(host, memory.num_blocks)
        self._write_tables(host)
        state = RoundState(self._first, self._block_first, self._left, text.root)
        block_state = self._block_rows.state
        assert block_state is not None
        arrays.write_state(state, path.state, block_state, len(text.end_ids))
        arrays.kept[: self._most_rows] = path.kept
        arrays.sources[: self._most_rows] = path.rows
        settings = [text.settings] * self._most_rows
        write_rows(settings, range(self._most_rows), arrays.settings[: self._most_rows], host[:0])
        arrays.ends[: len(text.end_ids)] = list(text.end_ids)
        memory.staged.copy(arrays.num_written)

    def _write_tables(self, host: Any) -> None:
        arrays = RoundArrays(host, self._rounds.memory.num_blocks)
        arrays.table[: len(self._sequence.blocks)] = self._sequence.blocks
        arrays.block_table[: len(self._block_rows.blocks)] = self._block_rows.blocks
