"""Numbers that the kernels of experts and their launchers share."""

from typing import Final

from coldstream.gguf.quant_types import QuantType

MATRICES: Final = 3  # gate, up, down
MAX_GROUP: Final = 64  # experts whose addresses one launch writes
MAX_MAILBOX_ROWS: Final = 64  # of a decode step, which may ask the CPU for experts
MAX_CARD_ROWS: Final = 8  # of a step that asks a further card for experts
MAX_SHARED_ROWS: Final = 128  # of a captured step, whose experts the device shares out
MAX_RANKS: Final = 16  # experts of a token
MAX_EXPERTS: Final = 1024  # of a layer
EXPERT_ROWS: Final = (1, 2, 4, 8, 16, 32, 64)  # for which the CPU is measured
MEASURED_TYPE: Final = QuantType.Q4_K  # of the experts with which machines are measured
