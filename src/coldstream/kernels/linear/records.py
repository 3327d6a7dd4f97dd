"""What products with dense weights give, as `Ops` has it."""

from dataclasses import dataclass
from typing import Any

Array = Any  # of the implementation of `Ops`


@dataclass(frozen=True)
class BiasedOutput:
    """A projection's output without its bias, for operations that add both."""

    values: Array  # [T, E]
    bias: Array  # [E]
