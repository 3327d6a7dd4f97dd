"""Numbers that the kernels of experts and their launchers share."""

from typing import Final

MATRICES: Final = 3  # gate, up, down
MAX_GROUP: Final = 64  # experts whose addresses one launch writes
MAX_MAILBOX_ROWS: Final = 64  # of a captured step, which may ask the CPU for experts
MAX_RANKS: Final = 16  # experts of a token
MAX_EXPERTS: Final = 1024  # of a layer
