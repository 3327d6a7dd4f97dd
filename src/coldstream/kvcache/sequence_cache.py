"""The sequences of a model: their committed positions, shared memory and pending draft trees.

Blocks of keys and values, and recurrent states, have reference counts. A fork shares both with its origin. A
sequence copies a shared block or state before it writes to it. Every method checks its arguments, and that
there is room, before it changes anything.
"""

from collections import Counter
from collections.abc import Collection
from collections.abc import Sequence as Listed
from dataclasses import dataclass
from types import TracebackType

from coldstream.errors import InvalidRequestError
from coldstream.kernels.ops import BLOCK_POSITIONS, Ops
from coldstream.kvcache.cache import CacheShape, CacheSize, DeltaNetState, ModelCache, num_blocks_of
from coldstream.kvcache.cache_bytes import (
    Content,
    block_bytes,
    read_block,
    read_state,
    state_bytes_of,
    write_block,
    write_state,
)
from coldstream.kvcache.pool import BlockPool
from coldstream.kvcache.sequence import Checkpoint, Forks, PendingTree, Sequence


@dataclass
class Demand:
    """Rows that a step writes for a sequence. parents: of a draft tree; None for a chain.

    Not frozen, because making one is part of the time of every token.

    forks: empty sequences that are left behind within the rows, see `Segment`.
    """

    sequence: Sequence
    num_rows: int
    parents: tuple[int, ...] | None = None
    forks: Collection[Sequence] = ()


@dataclass(frozen=True)
class AcceptedPath:
    """Rows of a draft tree that a sequence keeps, each the parent of the next."""

    rows: tuple[int, ...]
    kept: tuple[int, ...]  # rows of `KeptInputs`, the layers' inputs to the recurrence
    first: int  # positions committed before
    state: int
    blocks: tuple[int, ...]


class SequenceCache:
    """Sequences over a `ModelCache` in blocks, `tensors`."""

    def __init__(self, shape: CacheShape, ops: Ops, size: CacheSize, kv_type: str = "i16") -> None:
        self.tensors = ModelCache.in_blocks(shape, ops, size, kv_type)
        self.blocks = BlockPool(
            size.num_blocks,
            f"blocks of {BLOCK_POSITIONS} positions",
            "release sequences, or open the model with more blocks",
        )
        self.states = BlockPool(
            size.num_states,
            "recurrent states",
            "release sequences and checkpoints, or open the model with more states",
        )
        self.tree_rows = BlockPool(
            size.num_tree_rows,
            "rows of draft trees",
            "commit trees that are pending, or open the model with room for more",
        )

    def close(self) -> None:
        """Frees the memory of keys, values and states. Sequences can only be released afterwards."""
        self.__dict__.pop("tensors", None)

    def freed_by(self, sequences: Collection[Sequence]) -> CacheSize:
        """What releasing these sequences, each named once and without pending trees, would free."""
        blocks = Counter(block for sequence in sequences for block in sequence.blocks)
        states = Counter(
            state
            for sequence in sequences
            for state in (sequence.state, *(each.state for each in sequence.checkpoints))
            if state is not None
        )
        return CacheSize(self.blocks.num_freed(blocks), self.states.num_freed(states))

    @property
    def is_recurrent(self) -> bool:
        """Whether sequences have states that describe their end only, so that `truncate` is impossible."""
        return any(isinstance(layer, DeltaNetState) for layer in self.tensors.layers)

    def new(self) -> Sequence:
        """An empty sequence. It takes no memory before its first step."""
        return Sequence(self)

    def fork(self, sequence: Sequence) -> Sequence:
        """A new sequence with the same tokens, without checkpoints. Nothing is copied."""
        self.check(sequence)
        copy = Sequence(self, sequence.length, list(sequence.blocks), sequence.state)
        self.blocks.share(copy.blocks)
        self.states.share(_states_of(copy.state))
        return copy

    def read_block(self, sequence: Sequence, index: int) -> Content:
        """Keys and values of the committed positions in the sequence's block number `index`."""
        self.check(sequence)
        positions = min(BLOCK_POSITIONS, sequence.length - index * BLOCK_POSITIONS)
        return read_block(self.tensors, sequence.blocks[index], positions)

    def read_state(self, sequence: Sequence) -> Content:
        """The recurrent state of a sequence that is not empty."""
        self.check(sequence)
        assert sequence.state is not None, "an empty sequence has no state"
        return read_state(self.tensors, sequence.state)

    def written(
        self, length: int, blocks: Listed[Content], state: Content, base: Sequence | None = None
    ) -> Sequence:
        """A new sequence with what `read_block`, from some block on, and `read_state` gave.

        It shares the blocks before them with `base`, whose tokens there have to be the same. Raises
        OutOfMemoryError, and InvalidRequestError for bytes of other sizes, with nothing changed.
        """
        first = num_blocks_of(length) - len(blocks)
        indices = range(first, first + len(blocks))
        sizes = [min(BLOCK_POSITIONS, length - index * BLOCK_POSITIONS) for index in indices]
        if (
            length < 1
            or first < 0
            or [len(block) for block in blocks] != [block_bytes(self.tensors, size) for size in sizes]
            or len(state) != state_bytes_of(self.tensors)
        ):
            raise InvalidRequestError(
                f"{len(blocks)} blocks and a state are not those of {length} positions of this cache: they "
                "are of another model or type of cache"
            )
        shared: list[int] = []
        if first:
            assert base is not None, "a sequence begins with its first block"
            self.check(base)
            assert base.length >= first * BLOCK_POSITIONS, "shared blocks are whole"
            shared = base.blocks[:first]
        self.blocks.check(len(blocks))
        self.states.check(1)
        (state_id,) = self.states.take(1)
        taken = self.blocks.take(len(blocks))
        try:
            for block, size, content in zip(taken, sizes, blocks, strict=True):
                write_block(self.tensors, block, size, content)
            write_state(self.tensors, state_id, state)
        except BaseException:
            self.blocks.release(taken)
            self.states.release([state_id])
            raise
        self.blocks.share(shared)
        return Sequence(self, length, [*shared, *taken], state_id)

    def checkpoint(self, sequence: Sequence) -> Checkpoint:
        """Keeps the recurrent state as it is now. Nothing is copied."""
        self.check(sequence)
        checkpoint = Checkpoint(sequence.length, sequence.state)
        self.states.share(_states_of(checkpoint.state))
        sequence.checkpoints.append(checkpoint)
        return checkpoint

    def restore(self, sequence: Sequence, checkpoint: Checkpoint) -> None:
        """Truncates the sequence to the checkpoint, which stays. Later checkpoints are dropped.

        Raises InvalidRequestError for a checkpoint that the sequence does not have.
        """
        self.check(sequence)
        self._check_checkpoint(sequence, checkpoint)
        later = sequence.checkpoints[sequence.checkpoints.index(checkpoint) + 1 :]
        for each in later:
            self.drop(sequence, each)
        self.states.share(_states_of(checkpoint.state))
        self.states.release(_states_of(sequence.state))
        sequence.state, sequence.length = checkpoint.state, checkpoint.length
        self._trim(sequence)

    def drop(self, sequence: Sequence, checkpoint: Checkpoint) -> None:
        """Forgets a checkpoint of the sequence. Raises InvalidRequestError if it does not have it."""
        self._check(sequence)
        self._check_checkpoint(sequence, checkpoint)
        sequence.checkpoints.remove(checkpoint)
        self.states.release(_states_of(checkpoint.state))

    def clear(self, sequence: Sequence) -> None:
        """Empties the sequence and drops its checkpoints and its pending tree."""
        self._check(sequence)
        for checkpoint in tuple(sequence.checkpoints):
            self.drop(sequence, checkpoint)
        self._forget_tree(sequence)
        sequence.length = 0
        self._trim(sequence)
        state_ids, sequence.state = _states_of(sequence.state), None
        self.states.release(state_ids)

    def clear_all(self, sequences: Collection[Sequence]) -> None:
        """Empties those that are not released, after work on them that was interrupted."""
        for sequence in sequences:
            if not sequence.is_released:
                self.clear(sequence)

    def release(self, sequence: Sequence) -> None:
        """Frees the memory of the sequence, which cannot be used afterwards."""
        self.clear(sequence)
        sequence.is_released = True

    def reserve(self, demands: Collection[Demand]) -> None:
        """Gives every sequence, each named once, unshared memory for its rows.

        There has to be room (`check_room`). Rows of trees are pending afterwards. Until `append` each fork
        owns the slot in which the rows after it leave their state. To clear a fork frees that slot.
        """
        for demand in demands:
            sequence = demand.sequence
            self._own_last_block(sequence)
            missing = num_blocks_of(sequence.length + demand.num_rows) - len(sequence.blocks)
            if missing:
                sequence.blocks += self.blocks.take(missing)
            if sequence.state is None:
                (sequence.state,) = self.states.take(1)
                self.tensors.reset(sequence.state)
            if demand.parents is None:
                self._own_state(sequence)
                for fork in demand.forks:
                    (fork.state,) = self.states.take(1)
            else:
                sequence.pending = PendingTree(demand.parents, tuple(self.tree_rows.take(demand.num_rows)))

    def lengthen(self, sequence: Sequence, num_rows: int) -> bool:
        """Gives the sequence blocks for `num_rows` rows after its positions. True if it had too few.

        Raises OutOfMemoryError with nothing changed.
        """
        missing = num_blocks_of(sequence.length + num_rows) - len(sequence.blocks)
        self.blocks.check(max(0, missing))
        sequence.blocks += self.blocks.take(max(0, missing))
        return missing > 0

    def append(self, sequence: Sequence, num_rows: int, forks: Forks = ()) -> None:
        """Commits a chain of rows that a step has computed, and what it has left behind."""
        if forks:
            _leave_forks(sequence, forks, self.blocks)
        sequence.length += num_rows

    def take_back(self, sequence: Sequence) -> None:
        """Removes the last committed row, which the step that was to compute it has left out.

        Raises InvalidRequestError if it has none, or a checkpoint after it.
        """
        self.check(sequence)
        if sequence.length <= max([0, *(each.length for each in sequence.checkpoints)]):
            raise InvalidRequestError(f"no row after {sequence.length} tokens can have been left out")
        sequence.length -= 1
        self._trim(sequence)

    def truncate(self, sequence: Sequence, length: int) -> None:
        """Truncates a sequence without checkpoints to its first `length` positions, if no layer is recurrent.

        Raises InvalidRequestError for a length that it does not have, and for a sequence with checkpoints.
        """
        self.check(sequence)
        assert not self.is_recurrent, "only at its end"
        if not 0 <= length <= sequence.length or sequence.checkpoints:
            raise InvalidRequestError(
                f"a sequence of {sequence.length} positions and {len(sequence.checkpoints)} checkpoints "
                f"cannot be truncated to {length}"
            )
        sequence.length = length
        self._trim(sequence)

    def accept(self, sequence: Sequence, rows: Collection[int]) -> AcceptedPath:
        """The path `rows` of the pending tree; unless it is empty, the sequence's state is unshared then.

        The caller updates keys, values and the state along the path before `settle`. Raises
        InvalidRequestError if rows is no path or no tree is pending, OutOfMemoryError if there is no room for
        an unshared state.
        """
        self._check(sequence)
        if sequence.pending is None:
            raise InvalidRequestError(
                "there are no rows to commit: no draft tree of this sequence is pending"
            )
        path = tuple(rows)
        check_path(path, sequence.pending.parents)
        if path:
            self._own_state(sequence)
        assert sequence.state is not None
        kept = tuple(sequence.pending.kept[row] for row in path)
        return AcceptedPath(path, kept, sequence.length, sequence.state, tuple(sequence.blocks))

    def settle(self, sequence: Sequence, num_rows: int) -> None:
        """Commits the next `num_rows` positions and forgets the pending tree."""
        self._forget_tree(sequence)
        sequence.length += num_rows
        self._trim(sequence)

    def _check(self, sequence: Sequence) -> None:
        if sequence.owner is not self:
            raise InvalidRequestError("the sequence belongs to another model: make one with new_sequence()")
        if sequence.is_released:
            raise InvalidRequestError("the sequence has been released: make another with new_sequence()")

    def check(self, sequence: Sequence) -> None:
        """Raises InvalidRequestError if the sequence can't take part in a step."""
        self._check(sequence)
        if sequence.pending is not None:
            raise InvalidRequestError(
                f"{len(sequence.pending.parents)} rows of a draft tree wait for a commit: commit some or none"
            )

    def _check_checkpoint(self, sequence: Sequence, checkpoint: Checkpoint) -> None:
        if checkpoint not in sequence.checkpoints:
            raise InvalidRequestError(
                f"the sequence has no such checkpoint of {checkpoint.length} tokens: it was dropped, was "
                "made after one that was restored, or is another sequence's"
            )

    @property
    def free(self) -> CacheSize:
        """What nobody has."""
        return CacheSize(self.blocks.num_free, self.states.num_free, self.tree_rows.num_free)

    def check_room(self, demands: Collection[Demand]) -> None:
        """Raises OutOfMemoryError if there is no room for what `reserve` would take."""
        is_row = [
            each.num_rows == 1 and each.parents is None and self.owns_next_row(each.sequence)
            for each in demands
        ]
        if all(is_row):
            return  # as for most tokens
        need = self.need_of(demands)
        self.blocks.check(need.num_blocks)
        self.states.check(need.num_states)
        self.tree_rows.check(need.num_tree_rows)

    def owns_next_row(self, sequence: Sequence) -> bool:
        """Whether a further row takes nothing: neither a block nor a state, nor a copy of either."""
        block = sequence.length // BLOCK_POSITIONS
        return (
            sequence.state is not None
            and self.states.count(sequence.state) == 1
            and block < len(sequence.blocks)
            and self.blocks.count(sequence.blocks[block]) == 1
        )

    def need_of(self, demands: Collection[Demand]) -> CacheSize:
        """What `reserve` would take, copies of what is shared included."""
        num_blocks = num_states = num_tree_rows = 0
        given_up: dict[int, int] = {}  # references that earlier demands give up, by block
        states_given_up: dict[int, int] = {}
        for demand in demands:
            sequence = demand.sequence
            num_blocks += num_blocks_of(sequence.length + demand.num_rows) - len(sequence.blocks)
            for block in _last_block(sequence):
                before = given_up.get(block, 0)
                if self.blocks.count(block) - before > 1:
                    given_up[block] = before + 1
                    num_blocks += 1
            if sequence.state is None:
                num_states += 1
            elif demand.parents is None:
                before = states_given_up.get(sequence.state, 0)
                if self.states.count(sequence.state) - before > 1:
                    states_given_up[sequence.state] = before + 1
                    num_states += 1
            num_states += len(demand.forks)
            num_tree_rows += 0 if demand.parents is None else demand.num_rows
        return CacheSize(num_blocks, num_states, num_tree_rows)

    def _own_last_block(self, sequence: Sequence) -> None:
        for block in _last_block(sequence):
            if self.blocks.count(block) > 1:
                (copy,) = self.blocks.take(1)
                self.tensors.copy_block(block, copy, sequence.length % BLOCK_POSITIONS)
                sequence.blocks[-1] = copy
                self.blocks.release([block])

    def _own_state(self, sequence: Sequence) -> None:
        assert sequence.state is not None
        if self.states.count(sequence.state) > 1:
            (copy,) = self.states.take(1)
            self.tensors.copy_state(sequence.state, copy)
            shared, sequence.state = sequence.state, copy
            self.states.release([shared])

    def _forget_tree(self, sequence: Sequence) -> None:
        if sequence.pending is not None:
            kept, sequence.pending = sequence.pending.kept, None
            self.tree_rows.release(kept)

    def _trim(self, sequence: Sequence) -> None:
        count = num_blocks_of(sequence.length)
        behind = sequence.blocks[count:]
        del sequence.blocks[count:]
        self.blocks.release(behind)


def _last_block(sequence: Sequence) -> list[int]:
    """The block that has committed positions and room for more, if there is one."""
    return sequence.blocks[sequence.length // BLOCK_POSITIONS :]


def _states_of(state: int | None) -> list[int]:
    return [] if state is None else [state]


class WholeOrCleared:
    """A context that empties sequences if an exception interrupts the work inside."""

    def __init__(self, cache: SequenceCache, sequences: Collection[Sequence]) -> None:
        self._cache, self._sequences = cache, sequences

    def __enter__(self) -> None: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            self._cache.clear_all(self._sequences)


def check_path(path: tuple[int, ...], parents: tuple[int, ...]) -> None:
    """Raises InvalidRequestError unless the rows are one path of the tree, from what is committed on."""
    before = -1
    for row in path:
        if not 0 <= row < len(parents):
            raise InvalidRequestError(
                f"row {row} cannot be committed: the pending tree has {len(parents)} rows"
            )
        if parents[row] != before:
            raise InvalidRequestError(
                f"row {row} cannot be committed after {_row_name(before)}: it follows "
                f"{_row_name(parents[row])}; a path begins at what is committed and goes from parent to child"
            )
        before = row


def _row_name(row: int) -> str:
    return "what is committed" if row < 0 else f"row {row}"


def _leave_forks(sequence: Sequence, forks: Forks, blocks: BlockPool) -> None:
    """Gives each fork its tokens: blocks, which the sequence shares then, and the state in its slot.

    The sequence has blocks for all rows of the step, of which it has not committed any. Nothing is copied, as
    the rows after a fork went on in another slot. Until now that slot was the fork's, and the sequence had
    the first one. So if a step fails, clearing the sequence and its forks frees each slot once.
    """
    states = [sequence.state, *(fork.state for _, fork in forks)]
    for (num_rows, fork), state in zip(forks, states, strict=False):
        length = sequence.length + num_rows
        held = sequence.blocks[: num_blocks_of(length)]
        blocks.share(held)
        fork.blocks, fork.length, fork.state = held, length, state
    sequence.state = states[-1]
