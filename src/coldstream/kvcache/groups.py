"""What sequences have of the blocks of a group of layers.

Layers that see all positions are one group, and layers with windows may be another. Each has a pool. A
sequence has a list of blocks in each, in order of position. Only `sequence_cache.py` uses them.
"""

from collections.abc import Collection
from collections.abc import Sequence as Listed
from dataclasses import dataclass

from coldstream.kernels.ops import BLOCK_POSITIONS
from coldstream.kvcache.cache import ModelCache, num_blocks_of
from coldstream.kvcache.pool import BlockPool
from coldstream.kvcache.sequence import Checkpoint, HeldWindow, Sequence
from coldstream.kvcache.windows import VOID, blocks_at_rest, blocks_of_rows, first_kept, first_read


@dataclass(frozen=True)
class BlockGroup:
    """The blocks of a group. Methods take the list that a sequence of `length` positions has of them."""

    pool: BlockPool
    is_windowed: bool

    def extend(self, blocks: list[int], length: int, num_rows: int, tensors: ModelCache) -> None:
        """Unshared blocks for rows after the sequence's positions. There has to be room."""
        for block in blocks[length // BLOCK_POSITIONS :]:
            if self.pool.count(block) > 1:
                (copy,) = self.pool.take(1)
                positions = length % BLOCK_POSITIONS
                tensors.copy_block(block, copy, positions, is_windowed=self.is_windowed)
                blocks[-1] = copy
                self.pool.release([block])
        missing = num_blocks_of(length + num_rows) - len(blocks)
        if missing:
            blocks += self.pool.take(missing)

    def owns_next_row(self, blocks: list[int], length: int) -> bool:
        """Whether there is room for a further row in a block that is not shared."""
        block = length // BLOCK_POSITIONS
        return block < len(blocks) and self.pool.count(blocks[block]) == 1

    def num_copies(self, blocks: list[int], length: int, given_up: dict[int, int]) -> int:
        """Blocks that `extend` copies. given_up: references that earlier calls give up, by block."""
        for block in blocks[length // BLOCK_POSITIONS :]:
            before = given_up.get(block, 0)
            if self.pool.count(block) - before > 1:
                given_up[block] = before + 1
                return 1
        return 0

    def trim(self, blocks: list[int], length: int, first: int = 0) -> None:
        """Gives back blocks behind `length` positions. first: entries before it are void."""
        count = num_blocks_of(length)
        behind = blocks[max(count, first) :]
        del blocks[count:]
        self.pool.release(behind)


@dataclass(frozen=True)
class WindowGroup:
    """The group of layers with windows, of which the greatest is `window`."""

    group: BlockGroup
    window: int
    step_rows: int  # of a step, at most

    def give_back(self, sequence: Sequence, length: int) -> None:
        """Gives back blocks that rows from position `length` on do not read, nor the row before them."""
        first = first_kept(length, self.window)
        if first > sequence.first_held:
            behind = sequence.windows[sequence.first_held : first]
            sequence.windows[sequence.first_held : first] = [VOID] * len(behind)
            sequence.first_held = first
            self.group.pool.release(behind)

    def held(self, sequence: Sequence, length: int) -> HeldWindow:
        """References to what a sequence keeps at a length up to its own, for another holder."""
        first = max(sequence.first_held, first_kept(length, self.window))
        blocks = tuple(sequence.windows[first : num_blocks_of(length)])
        self.group.pool.share(blocks)
        return HeldWindow(first, blocks)

    def hand(self, held: HeldWindow, sequence: Sequence) -> None:
        """Gives references to a sequence in place of its own."""
        self.empty(sequence)
        sequence.windows = [VOID] * held.first + list(held.blocks)
        sequence.first_held = held.first

    def empty(self, sequence: Sequence) -> None:
        """Gives back all blocks of a sequence."""
        self.group.trim(sequence.windows, 0, sequence.first_held)
        sequence.first_held = 0

    def least_length(self, sequence: Sequence) -> int:
        """The least length from which the sequence could go on."""
        first = sequence.first_held
        return first * BLOCK_POSITIONS + self.window - 1 if first else 0

    def first_saved(self, length: int) -> int:
        """The first block that a sequence of so many positions needs to go on."""
        return first_read(length, self.window)

    def need(self, rows: Collection[tuple[Sequence, int]]) -> int:
        """Blocks that further rows of sequences take at a time, copies of what is shared included.

        More rows than a step has are those of several, between which blocks are given back.
        """
        given_up: dict[int, int] = {}
        copies = at_once = at_rest = 0
        for sequence, num_rows in rows:
            copies += self.group.num_copies(sequence.windows, sequence.length, given_up)
            missing = num_blocks_of(sequence.length + num_rows) - len(sequence.windows)
            at_once += missing
            num_held = len(sequence.windows) - sequence.first_held
            at_rest += min(missing, max(0, blocks_at_rest(self.window) + 1 - num_held))
        if sum(num_rows for _, num_rows in rows) > self.step_rows:
            at_once = min(at_once, at_rest + blocks_of_rows(self.step_rows))
        return copies + at_once


def blocks_of(sequence: Sequence, checkpoints: Listed[Checkpoint]) -> list[int]:
    """Blocks of windows that a sequence and its checkpoints have, one for each reference."""
    held = sequence.windows[sequence.first_held :]
    return [*held, *(block for each in checkpoints for block in each.window.blocks)]
