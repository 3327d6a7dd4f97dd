"""How many positions attention takes at a time, a part of its arithmetic: docs/arithmetic.md."""

from typing import Final

CHUNK_SIZE: Final = 256  # positions whose results are merged with those of other chunks
BLOCK_SIZE: Final = 64  # positions of a chunk that are weighted together
