"""Reference counts of a fixed number of blocks. Pure: knows numbers, not memory."""

from collections.abc import Mapping, Sequence

from coldstream.errors import OutOfMemoryError


class BlockPool:
    """Blocks 0 … num_blocks − 1 with reference counts.

    what and advice are texts for errors: the name of the blocks, and what to do if too few are free.
    """

    def __init__(self, num_blocks: int, what: str, advice: str) -> None:
        self.num_blocks = num_blocks
        self._what = what
        self._advice = advice
        self._counts = [0] * num_blocks
        self._free = list(range(num_blocks))[::-1]

    @property
    def num_free(self) -> int:
        return len(self._free)

    def check(self, count: int) -> None:
        """Raises OutOfMemoryError if fewer than `count` blocks are free."""
        if count > len(self._free):
            raise OutOfMemoryError(
                f"{count} more {self._what} are needed and {self.num_free} of {self.num_blocks} are free: "
                f"{self._advice}"
            )

    def take(self, count: int) -> list[int]:
        """Takes free blocks, with one reference each. Raises OutOfMemoryError with nothing changed."""
        self.check(count)
        taken = [self._free.pop() for _ in range(count)]
        for block in taken:
            self._counts[block] = 1
        return taken

    def share(self, blocks: Sequence[int]) -> None:
        """Adds a reference to each of `blocks`, which must be in use."""
        assert all(self._counts[block] for block in blocks), "a free block has nothing to share"
        for block in blocks:
            self._counts[block] += 1

    def release(self, blocks: Sequence[int]) -> None:
        """Removes a reference from each of `blocks`, and frees blocks without any."""
        assert all(self._counts[block] for block in blocks), "a free block has no reference to give up"
        for block in blocks:
            self._counts[block] -= 1
            if not self._counts[block]:
                self._free.append(block)

    def count(self, block: int) -> int:
        """References to `block`."""
        return self._counts[block]

    def num_freed(self, references: Mapping[int, int]) -> int:
        """Blocks without any reference, once so many of each block's were given up."""
        return sum(self._counts[block] == count for block, count in references.items())
