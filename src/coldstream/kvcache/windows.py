"""How far back layers with windows reach, in blocks of positions. Pure.

Layers with windows are a group of their own, with a pool of blocks and a list of them for each sequence. Its
window is the greatest of theirs. A list has an entry for every block of positions, as that of other layers
has. Blocks that end before the window are given back, and their entries are void.
"""

from typing import Final

from coldstream.kernels.ops import BLOCK_POSITIONS

VOID: Final = 0  # an entry that no row reads; a number of a block, as some readers check all entries


def first_read(length: int, window: int) -> int:
    """The first block that a row at position `length` reads."""
    return max(0, length - window + 1) // BLOCK_POSITIONS


def first_kept(length: int, window: int) -> int:
    """The first block that a sequence of so many positions keeps, of which the last may be taken back."""
    return first_read(max(0, length - 1), window)


def blocks_at_rest(window: int) -> int:
    """Blocks that a sequence keeps between steps, at most."""
    return -(-(window - 1) // BLOCK_POSITIONS) + 1


def blocks_of_rows(num_rows: int) -> int:
    """Blocks that the rows of a step take at most, beside one for each of its sequences."""
    return -(-num_rows // BLOCK_POSITIONS)


def blocks_of_pool(window: int, num_states: int, num_rows: int) -> int:
    """Blocks with which states run out before blocks do.

    Whoever has a state keeps blocks between steps. num_rows: of a step.
    """
    return num_states * blocks_at_rest(window) + blocks_of_rows(num_rows) + min(num_states, num_rows)
