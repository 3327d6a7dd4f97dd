"""Blocks, states and pending rows of sequences under any order of calls, against lists of tokens."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from cache_shape import Shape
from coldstream.errors import InvalidRequestError, OutOfMemoryError
from coldstream.kernels.cpu_ops import CpuOps
from coldstream.kernels.ops import BLOCK_POSITIONS, MIN_FORK_ROWS, Array
from coldstream.kvcache import sequence_cache
from coldstream.kvcache.batch import BatchArrays, BatchSize, CheckedSegment, PathArrays, path_in_windows
from coldstream.kvcache.cache import AttentionState, CacheSize, DeltaNetState
from coldstream.kvcache.cache_bytes import block_bytes, state_bytes_of
from coldstream.kvcache.groups import blocks_of
from coldstream.kvcache.pool import BlockPool
from coldstream.kvcache.sequence import Checkpoint, Sequence
from coldstream.kvcache.sequence_cache import Demand, SequenceCache
from coldstream.kvcache.windows import blocks_at_rest, blocks_of_pool

SIZE = CacheSize(num_blocks=9, num_states=5, num_tree_rows=70)
COUNTS = st.sampled_from((1, 2, 63, 200, BLOCK_POSITIONS - 1, BLOCK_POSITIONS, BLOCK_POSITIONS + 1))


WINDOWS = (1, 2, 200, 256, 257, 258, 700)
STEP_ROWS = 4 * (BLOCK_POSITIONS + 1) + MIN_FORK_ROWS


def with_windows(window: int, *, is_recurrent: bool) -> SequenceCache:
    """A cache with as few blocks of windows as a plan has, and enough others."""
    first = "delta_net" if is_recurrent else "attention"
    kv_windows = (None, window) if is_recurrent else (None, None, window)
    shape = Shape((first, "attention", "attention"), ((2, 8),) * len(kv_windows), kv_windows)
    least = blocks_of_pool(window, SIZE.num_states, STEP_ROWS)
    size = replace(SIZE, num_blocks=60, num_window_blocks=least)
    return SequenceCache(shape, CpuOps(1), size, "f32", STEP_ROWS)


class Sequences(RuleBasedStateMachine):
    """Every token is a number of its own; keys hold it, and a state the sum of the numbers before.

    Of layers with windows only what a next row sees is compared.
    """

    def __init__(self) -> None:
        super().__init__()
        self.ops = CpuOps(1)
        self.window = 0
        self.cache = SequenceCache(Shape(), self.ops, SIZE, "f32")
        self.tokens: dict[Sequence, list[int]] = {}
        self.trees: dict[Sequence, list[int]] = {}
        self.kept: dict[Checkpoint, list[int]] = {}
        self.num_tokens = 0

    @initialize(window=st.sampled_from((0, *WINDOWS)), is_recurrent=st.booleans())
    def choose(self, window: int, is_recurrent: bool) -> None:
        if window:
            self.window, self.cache = window, with_windows(window, is_recurrent=is_recurrent)

    @property
    def recurrent(self) -> list[Array]:
        layer = self.cache.tensors.layers[0]
        return [layer.state, layer.conv_state] if isinstance(layer, DeltaNetState) else []

    @property
    def attention(self) -> AttentionState:
        layer = self.cache.tensors.layers[1]
        assert isinstance(layer, AttentionState)
        assert not layer.is_windowed
        return layer

    @property
    def windowed(self) -> AttentionState:
        layer = self.cache.tensors.layers[2]
        assert isinstance(layer, AttentionState)
        assert layer.is_windowed
        return layer

    def parts(self, sequence: Sequence) -> list[tuple[Array, list[int], int]]:
        """Arrays, the blocks of the sequence in them, and the first position that a next row reads."""
        found = [(each, sequence.blocks, 0) for each in self.attention.arrays]
        if self.window:
            first = max(0, sequence.length - self.window + 1)
            found += [(each, sequence.windows, first) for each in self.windowed.arrays]
        return found

    def draw(self, data: st.DataObject) -> Sequence:
        return data.draw(st.sampled_from(list(self.tokens)))

    def fresh(self, count: int) -> list[int]:
        self.num_tokens += count
        return list(range(self.num_tokens - count + 1, self.num_tokens + 1))

    def write(self, sequence: Sequence, tokens: list[int]) -> None:
        """What attention does: keys and values at the indices behind what is committed."""
        indices = sequence.length + np.arange(len(tokens))
        for tensor, held, _ in self.parts(sequence):
            blocks = np.array(held)[indices // BLOCK_POSITIONS]
            tensor[blocks, indices % BLOCK_POSITIONS] = np.array(tokens)[:, None, None]

    def advance(self, sequence: Sequence, tokens: list[int]) -> None:
        """What the recurrence does."""
        for each in self.recurrent:
            each[sequence.state] += sum(tokens)

    def reserve(self, *demands: Demand) -> bool:
        unchanged = self.snapshot()
        try:
            self.cache.check_room(demands)
        except OutOfMemoryError:
            free, need = self.cache.free, self.cache.need_of(demands)
            assert need.num_window_blocks <= free.num_window_blocks or not need.num_states <= free.num_states
            assert self.snapshot() == unchanged
            return False
        before, need = self.cache.free, self.cache.need_of(demands)
        self.cache.reserve(demands)
        after = self.cache.free
        assert need.num_blocks == before.num_blocks - after.num_blocks
        assert need.num_states == before.num_states - after.num_states
        assert need.num_tree_rows == before.num_tree_rows - after.num_tree_rows
        assert need.num_window_blocks == before.num_window_blocks - after.num_window_blocks
        return True

    def snapshot(self) -> object:
        return [
            (each.length, tuple(each.blocks), tuple(each.windows), each.first_held, each.state)
            for each in self.tokens
        ], self.cache.free

    @rule()
    def new(self) -> None:
        self.tokens[self.cache.new()] = []

    @precondition(lambda self: self.tokens)
    @rule(data=st.data(), counts=st.lists(COUNTS, min_size=1, max_size=3))
    def chains(self, data: st.DataObject, counts: list[int]) -> None:
        settled = [each for each in self.tokens if each not in self.trees]
        chosen = data.draw(st.lists(st.sampled_from(settled), unique=True, max_size=3)) if settled else []
        demands = [Demand(sequence, count) for sequence, count in zip(chosen, counts, strict=False)]
        if self.reserve(*demands):
            for demand in demands:
                tokens = self.fresh(demand.num_rows)
                self.write(demand.sequence, tokens)
                self.advance(demand.sequence, tokens)
                self.cache.append(demand.sequence, demand.num_rows)
                self.tokens[demand.sequence] += tokens

    @precondition(lambda self: self.tokens)
    @rule(data=st.data(), counts=st.lists(COUNTS, min_size=2, max_size=4), fails=st.booleans())
    def chain_with_forks(self, data: st.DataObject, counts: list[int], fails: bool) -> None:
        """The state advances from slot to slot, as the rows of the step name them."""
        sequence = self.draw(data)
        if sequence in self.trees:
            return
        boundaries = [sum(counts[:i]) for i in range(1, len(counts))]
        forks = tuple((MIN_FORK_ROWS + boundary, self.cache.new()) for boundary in boundaries)
        count = MIN_FORK_ROWS + sum(counts)
        segment = CheckedSegment(sequence, np.zeros(count, np.int32), None, np.arange(0), None, forks=forks)
        if not self.reserve(segment.demand):
            return
        if fails:
            for each in segment.sequences:
                self.cache.clear(each)
            self.tokens |= {each: [] for each in segment.sequences}
            return
        memory = BatchSize(count, 1, self.cache.blocks.num_blocks, self.window > 0)
        arrays = BatchArrays(np.zeros(memory.num_values, np.int32), memory)
        arrays.write([segment])
        tokens, state_ids = self.fresh(count), arrays.rows.state_ids.tolist()
        self.write(sequence, tokens)
        before = state_ids[0]
        for token, state_id in zip(tokens, state_ids, strict=True):
            if state_id != before:
                self.copy_state(before, state_id)
            for each in self.recurrent:
                each[state_id] += token
            before = state_id
        self.cache.append(sequence, count, forks)
        held = self.tokens[sequence]
        self.tokens |= {fork: held + tokens[:boundary] for boundary, fork in forks}
        self.tokens[sequence] = held + tokens

    def copy_state(self, source: int, target: int) -> None:
        for each in self.recurrent:
            each[target] = each[source]

    @precondition(lambda self: self.tokens)
    @rule(data=st.data())
    def left_out_row(self, data: st.DataObject) -> None:
        """A step that computes none of it writes nothing."""
        sequence = self.draw(data)
        if sequence not in self.trees and self.reserve(Demand(sequence, 1)):
            self.cache.append(sequence, 1)
            self.cache.take_back(sequence)

    @precondition(lambda self: self.tokens)
    @rule(data=st.data(), count=st.integers(1, 64))
    def tree(self, data: st.DataObject, count: int) -> None:
        sequence = self.draw(data)
        if sequence in self.trees:
            with pytest.raises(InvalidRequestError, match="wait for a commit"):
                self.cache.check(sequence)
            return
        parents = tuple(data.draw(st.integers(max(-1, row - 3), row - 1)) for row in range(count))
        if self.reserve(Demand(sequence, count, parents)):
            self.trees[sequence] = self.fresh(count)
            self.write(sequence, self.trees[sequence])

    @precondition(lambda self: self.trees)
    @rule(data=st.data())
    def commit(self, data: st.DataObject) -> None:
        sequence = data.draw(st.sampled_from(list(self.trees)))
        assert sequence.pending is not None
        parents = sequence.pending.parents
        row = data.draw(st.integers(-1, len(parents) - 1))
        path: list[int] = []
        while row >= 0:
            path.insert(0, row)
            row = parents[row]
        if len(path) > 1:
            with pytest.raises(InvalidRequestError, match="cannot be committed"):
                self.cache.accept(sequence, path[1:])
        kept = sequence.pending.kept
        try:
            accepted = self.cache.accept(sequence, path)
        except OutOfMemoryError:
            assert sequence.pending is not None
            return
        assert accepted.rows == tuple(path)
        assert accepted.kept == tuple(kept[row] for row in path)
        num_blocks, has_windows = self.cache.blocks.num_blocks, self.window > 0
        memory = np.zeros(PathArrays.num_values(num_blocks, has_windows=has_windows), np.int32)
        arrays = PathArrays(memory, num_blocks, has_windows=has_windows)
        arrays.write(accepted)
        self.ops.commit_attention([self.attention.arrays], arrays.path)
        if self.window:
            self.ops.commit_attention([self.windowed.arrays], path_in_windows(arrays.path))
        tree = self.trees.pop(sequence)
        tokens = [tree[row] for row in path]
        if path:
            self.advance(sequence, tokens)
        self.cache.settle(sequence, len(path))
        self.tokens[sequence] += tokens

    @precondition(lambda self: self.tokens)
    @rule(data=st.data())
    def fork(self, data: st.DataObject) -> None:
        sequence = self.draw(data)
        if sequence in self.trees:
            with pytest.raises(InvalidRequestError, match="wait for a commit"):
                self.cache.fork(sequence)
        else:
            self.tokens[self.cache.fork(sequence)] = list(self.tokens[sequence])

    @precondition(lambda self: self.tokens)
    @rule(data=st.data())
    def checkpoint(self, data: st.DataObject) -> None:
        sequence = self.draw(data)
        if sequence not in self.trees:
            self.kept[self.cache.checkpoint(sequence)] = list(self.tokens[sequence])

    @precondition(lambda self: self.kept and self.tokens)
    @rule(data=st.data())
    def restore(self, data: st.DataObject) -> None:
        sequence, checkpoint = self.draw(data), data.draw(st.sampled_from(list(self.kept)))
        if sequence in self.trees:
            return
        if checkpoint not in sequence.checkpoints:
            with pytest.raises(InvalidRequestError, match="no such checkpoint"):
                self.cache.restore(sequence, checkpoint)
            return
        self.cache.restore(sequence, checkpoint)
        self.tokens[sequence] = list(self.kept[checkpoint])

    @precondition(lambda self: self.tokens)
    @rule(data=st.data())
    def truncate(self, data: st.DataObject) -> None:
        sequence = self.draw(data)
        if sequence in self.trees or sequence.checkpoints or self.cache.is_recurrent:
            return
        least = self.cache.least_length(sequence)
        assert least <= sequence.length
        if least:
            with pytest.raises(InvalidRequestError, match=f"to {least - 1}: .* to {least} and more"):
                self.cache.truncate(sequence, least - 1)
        length = data.draw(st.integers(least, sequence.length))
        self.cache.truncate(sequence, length)
        del self.tokens[sequence][length:]

    @precondition(lambda self: self.tokens)
    @rule(data=st.data())
    def written_bytes(self, data: st.DataObject) -> None:
        """What one sequence holds, in another that shares nothing with it."""
        sequence = self.draw(data)
        if sequence in self.trees or not sequence.length:
            return
        count = len(sequence.blocks)
        blocks = [bytes(self.cache.read_block(sequence, index)) for index in range(count)]
        state = bytes(self.cache.read_state(sequence))
        assert len(state) == self.cache.state_bytes(sequence.length)
        before, need = self.cache.free, self.cache.need_of_written(sequence.length, 0)
        try:
            copy = self.cache.written(sequence.length, blocks, state)
        except OutOfMemoryError:
            assert not before.covers(need)
            return
        assert self.cache.free.with_more(need) == before
        assert bytes(self.cache.read_state(copy)) == state
        self.tokens[copy] = list(self.tokens[sequence])

    @precondition(lambda self: self.tokens)
    @rule(data=st.data(), for_good=st.booleans())
    def clear(self, data: st.DataObject, for_good: bool) -> None:
        sequence = self.draw(data)
        self.trees.pop(sequence, None)
        if for_good:
            self.cache.release(sequence)
            del self.tokens[sequence]
            with pytest.raises(InvalidRequestError, match="released"):
                self.cache.fork(sequence)
        else:
            self.cache.clear(sequence)
            self.tokens[sequence] = []

    @invariant()
    def every_sequence_holds_its_tokens(self) -> None:
        for sequence, tokens in self.tokens.items():
            assert sequence.length == len(tokens)
            for tensor, table, first in self.parts(sequence):
                indices = np.arange(first, len(tokens))
                blocks = np.array(table, np.int64)[indices // BLOCK_POSITIONS]
                held = tensor[blocks, indices % BLOCK_POSITIONS]
                assert (held == np.array(tokens[first:]).reshape(-1, 1, 1)).all()
            if tokens:
                assert all((each[sequence.state] == sum(tokens)).all() for each in self.recurrent)

    @invariant()
    def only_windows_are_kept(self) -> None:
        if not self.window:
            return
        for sequence in self.tokens:
            num_held = len(sequence.windows) - sequence.first_held
            assert num_held <= blocks_at_rest(self.window) + (sequence.pending is not None)

    @invariant()
    def counts_are_those_of_the_holders(self) -> None:
        blocks = [block for each in self.tokens for block in each.blocks]
        holders = [held for each in self.tokens for held in (each, *each.checkpoints)]
        states = [holder.state for holder in holders if holder.state is not None]
        rows = [row for each in self.tokens if each.pending for row in each.pending.kept]
        pools = [(self.cache.blocks, blocks), (self.cache.states, states), (self.cache.tree_rows, rows)]
        if self.cache.windows is not None:
            windows = [block for each in self.tokens for block in blocks_of(each, each.checkpoints)]
            pools.append((self.cache.windows.group.pool, windows))
        for pool, held in pools:
            assert [pool.count(block) for block in range(pool.num_blocks)] == [
                held.count(block) for block in range(pool.num_blocks)
            ]
            assert pool.num_free == pool.num_blocks - len(set(held))
        assert len(set(rows)) == len(rows)


TestSequences = Sequences.TestCase
TestSequences.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)


def test_a_row_that_was_left_out_gives_its_block_back() -> None:
    cache = SequenceCache(Shape(), CpuOps(1), SIZE, "f32")
    sequence = cache.new()
    cache.reserve([Demand(sequence, BLOCK_POSITIONS)])
    cache.append(sequence, BLOCK_POSITIONS)
    cache.reserve([Demand(sequence, 1)])
    cache.append(sequence, 1)
    assert len(sequence.blocks) == 2
    cache.take_back(sequence)
    assert (sequence.length, len(sequence.blocks)) == (BLOCK_POSITIONS, 1)
    cache.checkpoint(sequence)
    for each in (sequence, cache.new()):
        with pytest.raises(InvalidRequestError, match=f"no row after {each.length} tokens"):
            cache.take_back(each)


@pytest.mark.parametrize("kind", ["state", "block"])
def test_bytes_that_cannot_be_written_leave_no_memory_taken(
    monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    cache = SequenceCache(Shape(), CpuOps(1), SIZE, "f32")
    before = cache.free
    block, state = block_bytes(cache.tensors), state_bytes_of(cache.tensors)

    def fails(*arguments: object) -> None:
        raise MemoryError

    with monkeypatch.context() as patched:
        patched.setattr(sequence_cache, f"write_{kind}", fails)
        for _ in range(2):
            with pytest.raises(MemoryError):
                cache.written(BLOCK_POSITIONS, [bytes(block)], bytes(state))
            assert cache.free == before
    cache.release(cache.written(BLOCK_POSITIONS, [bytes(block)], bytes(state)))
    assert cache.free == before


@pytest.mark.parametrize("length", [0, 1, BLOCK_POSITIONS, BLOCK_POSITIONS + 1, 2 * BLOCK_POSITIONS + 5])
def test_a_truncation_leaves_blocks_for_what_remains(length: int) -> None:
    cache = SequenceCache(Shape(layer_kinds=("attention",)), CpuOps(1), SIZE, "f32")
    sequence, count = cache.new(), 2 * BLOCK_POSITIONS + 5
    cache.reserve([Demand(sequence, count)])
    cache.append(sequence, count)
    cache.truncate(sequence, length)
    assert sequence.length == length
    assert len(sequence.blocks) == -(-length // BLOCK_POSITIONS) == SIZE.num_blocks - cache.blocks.num_free
    for wrong in (-1, length + 1):
        with pytest.raises(InvalidRequestError, match=f"of {length} positions and 0 .* truncated to {wrong}"):
            cache.truncate(sequence, wrong)
    cache.checkpoint(sequence)
    with pytest.raises(InvalidRequestError, match="and 1 checkpoints"):
        cache.truncate(sequence, 0)


def test_a_recurrent_sequence_is_not_truncated() -> None:
    cache = SequenceCache(Shape(), CpuOps(1), SIZE, "f32")
    with pytest.raises(AssertionError, match="only at its end"):
        cache.truncate(cache.new(), 0)


def test_a_pool_says_how_many_blocks_there_are_and_what_to_do() -> None:
    pool = BlockPool(3, "blocks", "release some")
    taken = pool.take(2)
    with pytest.raises(OutOfMemoryError, match="2 more blocks are needed and 1 of 3 are free: release some"):
        pool.take(2)
    assert pool.num_free == 1
    pool.share(taken)
    pool.release(taken)
    assert pool.num_free == 1
    pool.release(taken)
    assert sorted(pool.take(3)) == [0, 1, 2]


@pytest.mark.parametrize("size", [CacheSize(0, 1), CacheSize(1, 0), CacheSize(1, 1, -1)])
def test_a_cache_of_nothing_is_refused(size: CacheSize) -> None:
    with pytest.raises(ValueError, match="holds nothing"):
        SequenceCache(Shape(), CpuOps(1), size)
