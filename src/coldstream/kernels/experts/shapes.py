"""Numbers that kernels of experts share with those who launch them."""

from typing import Final

MATRICES: Final = 3  # gate, up, down
MAX_GROUP: Final = 64  # experts whose addresses one launch writes
