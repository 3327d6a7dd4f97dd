"""The sequences of a model: their committed positions, shared memory and pending draft trees.

Blocks of keys and values, and recurrent states, have reference counts. Layers with windows may have blocks of
their own, which are given back once no later row reads them. A fork shares both with its origin. A
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
from coldstream.kvcache.cache import (
    CacheShape,
    CacheSize,
    DeltaNetState,
    ModelCache,
    group_window,
    num_blocks_of,
)
from coldstream.kvcache.cache_bytes import (
    Content,
    StatePlace,
    block_bytes,
    read_block,
    read_state,
    state_bytes_of,
    write_block,
    write_state,
)
from coldstream.kvcache.groups import BlockGroup, WindowGroup, blocks_of
from coldstream.kvcache.pool import BlockPool
from coldstream.kvcache.sequence import NO_WINDOW, Checkpoint, Forks, HeldWindow, PendingTree, Sequence


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
    windows: tuple[int, ...] = ()  # blocks of layers with windows, where these are a group of their own


class SequenceCache:
    """Sequences over a `ModelCache` in blocks, `tensors`."""

    def __init__(
        self, shape: CacheShape, ops: Ops, size: CacheSize, kv_type: str = "i16", step_rows: int = 1
    ) -> None:
        """step_rows: of a step, at most, which counts where layers with windows are a group of their own."""
        self.tensors = ModelCache.in_blocks(shape, ops, size, kv_type)
        self.blocks = BlockPool(
            size.num_blocks,
            f"blocks of {BLOCK_POSITIONS} positions",
            "release sequences, or open the model with more blocks",
        )
        self._group = BlockGroup(self.blocks, is_windowed=False)
        self.windows: WindowGroup | None = None
        if size.num_window_blocks:
            pool = BlockPool(
                size.num_window_blocks,
                f"blocks of {BLOCK_POSITIONS} positions in windows",
                "release sequences and checkpoints, or open the model with more states",
            )
            group = BlockGroup(pool, is_windowed=True)
            self.windows = WindowGroup(group, group_window(shape), step_rows)
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
        num_window_blocks = 0
        if self.windows is not None:
            held = Counter(
                block for sequence in sequences for block in blocks_of(sequence, sequence.checkpoints)
            )
            num_window_blocks = self.windows.group.pool.num_freed(held)
        return CacheSize(
            self.blocks.num_freed(blocks),
            self.states.num_freed(states),
            num_window_blocks=num_window_blocks,
        )

    @property
    def is_recurrent(self) -> bool:
        """Whether sequences have states that describe their end only, so that `truncate` is impossible."""
        return any(isinstance(layer, DeltaNetState) for layer in self.tensors.layers)

    @property
    def truncates_anywhere(self) -> bool:
        """Whether sequences without checkpoints can be truncated to any length."""
        return self.windows is None and not self.is_recurrent

    def least_length(self, sequence: Sequence) -> int:
        """The least length to which `truncate` takes a sequence without checkpoints."""
        if self.is_recurrent:
            return sequence.length
        return 0 if self.windows is None else self.windows.least_length(sequence)

    def new(self) -> Sequence:
        """An empty sequence. It takes no memory before its first step."""
        return Sequence(self)

    def fork(self, sequence: Sequence) -> Sequence:
        """A new sequence with the same tokens, without checkpoints. Nothing is copied."""
        self.check(sequence)
        copy = Sequence(self, sequence.length, list(sequence.blocks), sequence.state)
        self.blocks.share(copy.blocks)
        self.states.share(_states_of(copy.state))
        if self.windows is not None:
            self.windows.hand(self.windows.held(sequence, sequence.length), copy)
        return copy

    def read_block(self, sequence: Sequence, index: int) -> Content:
        """Keys and values of the committed positions in the sequence's block number `index`."""
        self.check(sequence)
        positions = min(BLOCK_POSITIONS, sequence.length - index * BLOCK_POSITIONS)
        return read_block(self.tensors, sequence.blocks[index], positions)

    def read_state(self, sequence: Sequence) -> Content:
        """The recurrent state of a sequence that is not empty, and its last blocks of layers with windows."""
        self.check(sequence)
        assert sequence.state is not None, "an empty sequence has no state"
        first = 0 if self.windows is None else self.windows.first_saved(sequence.length)
        place = _place(sequence.state, first, sequence.windows[first:], sequence.length)
        return read_state(self.tensors, place)

    def state_bytes(self, length: int) -> int:
        """Bytes that `read_state` gives of a sequence of so many positions."""
        if self.windows is None:
            return state_bytes_of(self.tensors)
        return state_bytes_of(self.tensors, length - self.windows.first_saved(length) * BLOCK_POSITIONS)

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
            or len(state) != self.state_bytes(length)
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
        sequence = Sequence(self)
        self._take_window(sequence, length)
        (sequence.state,) = self.states.take(1)
        sequence.blocks = self.blocks.take(len(blocks))
        try:
            for block, size, content in zip(sequence.blocks, sizes, blocks, strict=True):
                write_block(self.tensors, block, size, content)
            held = sequence.windows[sequence.first_held :]
            write_state(self.tensors, _place(sequence.state, sequence.first_held, held, length), state)
        except BaseException:
            self.release(sequence)
            raise
        self.blocks.share(shared)
        sequence.blocks, sequence.length = [*shared, *sequence.blocks], length
        return sequence

    def need_of_written(self, length: int, num_shared: int) -> CacheSize:
        """What `written` takes for so many positions, of which it shares so many blocks."""
        windows = self.windows
        of_windows = 0 if windows is None else num_blocks_of(length) - windows.first_saved(length)
        return CacheSize(num_blocks_of(length) - num_shared, 1, num_window_blocks=of_windows)

    def _take_window(self, sequence: Sequence, length: int) -> None:
        """Gives an empty sequence what it needs to go on at `length`. Raises OutOfMemoryError."""
        if self.windows is not None:
            first = self.windows.first_saved(length)
            taken = self.windows.group.pool.take(num_blocks_of(length) - first)
            self.windows.hand(HeldWindow(first, tuple(taken)), sequence)

    def checkpoint(self, sequence: Sequence) -> Checkpoint:
        """Keeps the recurrent state and the window as they are now. Nothing is copied."""
        self.check(sequence)
        window = NO_WINDOW if self.windows is None else self.windows.held(sequence, sequence.length)
        checkpoint = Checkpoint(sequence.length, sequence.state, window)
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
        if self.windows is not None:
            self.windows.group.pool.share(checkpoint.window.blocks)
            self.windows.hand(checkpoint.window, sequence)
        self._trim(sequence)

    def drop(self, sequence: Sequence, checkpoint: Checkpoint) -> None:
        """Forgets a checkpoint of the sequence. Raises InvalidRequestError if it does not have it."""
        self._check(sequence)
        self._check_checkpoint(sequence, checkpoint)
        sequence.checkpoints.remove(checkpoint)
        self.states.release(_states_of(checkpoint.state))
        if self.windows is not None:
            self.windows.group.pool.release(checkpoint.window.blocks)

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
            sequence, length, num_rows = demand.sequence, demand.sequence.length, demand.num_rows
            self._group.extend(sequence.blocks, length, num_rows, self.tensors)
            if self.windows is not None:
                self.windows.group.extend(sequence.windows, length, num_rows, self.tensors)
            if sequence.state is None:
                (sequence.state,) = self.states.take(1)
                self.tensors.reset(sequence.state)
            if demand.parents is None:
                self._own_state(sequence)
                for fork in demand.forks:
                    (fork.state,) = self.states.take(1)
            else:
                sequence.pending = PendingTree(demand.parents, tuple(self.tree_rows.take(demand.num_rows)))

    def lengthen(self, sequence: Sequence, num_rows: int, num_known: int) -> bool:
        """Gives the sequence blocks for `num_rows` rows after its positions. True if it had too few.

        num_known: of these rows, the first that the device has committed and all later rows follow. What
        those do not read of layers with windows is given back. Raises OutOfMemoryError, with no more changed.
        """
        end, windows = num_blocks_of(sequence.length + num_rows), self.windows
        missing = max(0, end - len(sequence.blocks))
        self.blocks.check(missing)
        if windows is not None:
            windows.give_back(sequence, sequence.length + num_known)
            sequence.windows += windows.group.pool.take(max(0, end - len(sequence.windows)))
        sequence.blocks += self.blocks.take(missing)
        return missing > 0

    def append(self, sequence: Sequence, num_rows: int, forks: Forks = ()) -> None:
        """Commits a chain of rows that a step has computed, and what it has left behind."""
        if forks:
            self._leave_forks(sequence, forks)
        sequence.length += num_rows
        if self.windows is not None:
            self.windows.give_back(sequence, sequence.length)

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

        Raises InvalidRequestError for a length that it does not have or, as `least_length` says, cannot go on
        from, and for a sequence with checkpoints.
        """
        self.check(sequence)
        assert not self.is_recurrent, "only at its end"
        least = self.least_length(sequence)
        if not least <= length <= sequence.length or sequence.checkpoints:
            raise InvalidRequestError(
                f"a sequence of {sequence.length} positions and {len(sequence.checkpoints)} checkpoints "
                f"cannot be truncated to {length}: without checkpoints to {least} and more"
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
        lists = tuple(sequence.blocks), tuple(sequence.windows)
        return AcceptedPath(path, kept, sequence.length, sequence.state, *lists)

    def settle(self, sequence: Sequence, num_rows: int) -> None:
        """Commits the next `num_rows` positions and forgets the pending tree."""
        self._forget_tree(sequence)
        sequence.length += num_rows
        self._trim(sequence)
        if self.windows is not None:
            self.windows.give_back(sequence, sequence.length)

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
        of_windows = 0 if self.windows is None else self.windows.group.pool.num_free
        return CacheSize(self.blocks.num_free, self.states.num_free, self.tree_rows.num_free, of_windows)

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
        if self.windows is not None:
            self.windows.group.pool.check(need.num_window_blocks)

    def owns_next_row(self, sequence: Sequence) -> bool:
        """Whether a further row takes nothing: neither a block nor a state, nor a copy of either."""
        windows, length = self.windows, sequence.length
        return (
            sequence.state is not None
            and self.states.count(sequence.state) == 1
            and self._group.owns_next_row(sequence.blocks, length)
            and (windows is None or windows.group.owns_next_row(sequence.windows, length))
        )

    def need_of(self, demands: Collection[Demand]) -> CacheSize:
        """What `reserve` would take, copies of what is shared included."""
        num_blocks = num_states = num_tree_rows = 0
        given_up: dict[int, int] = {}  # references that earlier demands give up, by block
        states_given_up: dict[int, int] = {}
        for demand in demands:
            sequence = demand.sequence
            num_blocks += num_blocks_of(sequence.length + demand.num_rows) - len(sequence.blocks)
            num_blocks += self._group.num_copies(sequence.blocks, sequence.length, given_up)
            if sequence.state is None:
                num_states += 1
            elif demand.parents is None:
                before = states_given_up.get(sequence.state, 0)
                if self.states.count(sequence.state) - before > 1:
                    states_given_up[sequence.state] = before + 1
                    num_states += 1
            num_states += len(demand.forks)
            num_tree_rows += 0 if demand.parents is None else demand.num_rows
        of_windows = 0
        if self.windows is not None:
            of_windows = self.windows.need([(demand.sequence, demand.num_rows) for demand in demands])
        return CacheSize(num_blocks, num_states, num_tree_rows, of_windows)

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
        """Gives back blocks behind its positions."""
        self._group.trim(sequence.blocks, sequence.length)
        if self.windows is not None:
            if not sequence.length:
                self.windows.empty(sequence)
            self.windows.group.trim(sequence.windows, sequence.length, sequence.first_held)

    def _leave_forks(self, sequence: Sequence, forks: Forks) -> None:
        """Gives each fork its tokens: blocks, which the sequence shares then, and the state in its slot.

        The sequence has blocks for all rows of the step, of which it has not committed any. Nothing is
        copied, as the rows after a fork went on in another slot. Until now that slot was the fork's, and the
        sequence had the first one. So if a step fails, clearing the sequence and its forks frees each slot
        once.
        """
        states = [sequence.state, *(fork.state for _, fork in forks)]
        for (num_rows, fork), state in zip(forks, states, strict=False):
            length = sequence.length + num_rows
            held = sequence.blocks[: num_blocks_of(length)]
            self.blocks.share(held)
            fork.blocks, fork.length, fork.state = held, length, state
            if self.windows is not None:
                self.windows.hand(self.windows.held(sequence, length), fork)
        sequence.state = states[-1]


def _place(state_id: int, first: int, blocks: Listed[int], length: int) -> StatePlace:
    """Where a state is, with blocks of layers with windows from number `first` on."""
    numbered = enumerate(blocks, first)
    sizes = ((block, min(BLOCK_POSITIONS, length - i * BLOCK_POSITIONS)) for i, block in numbered)
    return StatePlace(state_id, tuple(sizes))


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
