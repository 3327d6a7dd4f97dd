"""A quantised matrix, or a stack of them, in GGUF's own block layout.

The bytes are those of the file; `dequantize/` defines their values and `linear/` multiplies with them.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Self

from coldstream.gguf.quant_types import QuantType
from coldstream.kernels.cuda.array import name_of


@dataclass(frozen=True)
class QuantTensor:
    """Blocks, their type, and the shape of their values.

    blocks: uint8 [..., rows, row_bytes], unit stride along the last dimension; shape: [..., rows, values].
    A vector has only the last dimension. Views share memory with their origin.
    """

    blocks: Any
    quant_type: QuantType
    shape: tuple[int, ...]

    def __post_init__(self) -> None:
        if not self.shape:
            raise ValueError("a quantised tensor needs at least one dimension")
        expected = (*self.shape[:-1], self.quant_type.row_bytes(self.shape[-1]))
        if name_of(self.blocks.dtype) != "uint8" or tuple(self.blocks.shape) != expected:
            raise ValueError(
                f"{self.quant_type.name} values of shape {self.shape} are uint8 blocks of shape {expected}, "
                f"not {name_of(self.blocks.dtype)} of shape {tuple(self.blocks.shape)}"
            )
        if self.blocks.stride(-1) != 1:
            raise ValueError("the bytes of a quantised row must be adjacent")

    @classmethod
    def from_bytes(cls, data: Any, quant_type: QuantType, shape: Sequence[int]) -> Self:
        """uint8 `data` of any shape as rows of `quant_type`. ValueError unless it has just those bytes."""
        row_bytes = quant_type.row_bytes(shape[-1])
        return cls(data.reshape(*shape[:-1], row_bytes), quant_type, tuple(shape))

    def __getitem__(self, index: int) -> Self:
        """Matrix `index` of a stack, or row `index` of a matrix: a view."""
        if len(self.shape) < 2 or not 0 <= index < self.shape[0]:
            raise IndexError(f"no element {index} in a quantised tensor of shape {self.shape}")
        return type(self)(self.blocks[index], self.quant_type, self.shape[1:])

    def take_rows(self, row_ids: Any) -> Self:
        """A copy of the rows of a matrix that int `row_ids` [T] names, all of which must exist."""
        return type(self)(self.blocks[row_ids], self.quant_type, (len(row_ids), self.shape[-1]))

    def split_rows(self, sizes: Sequence[int]) -> tuple[Self, ...]:
        """Views of `sizes` consecutive rows each, of every matrix in a stack. ValueError if rows are left."""
        if len(self.shape) < 2 or sum(sizes) != self.shape[-2]:
            raise ValueError(f"row counts {list(sizes)} do not add up to the rows of shape {self.shape}")
        return tuple(
            type(self)(part, self.quant_type, (*self.shape[:-2], size, self.shape[-1]))
            for part, size in zip(self._parts(sizes), sizes, strict=True)
        )

    def _parts(self, sizes: Sequence[int]) -> Iterator[Any]:
        """Consecutive rows of the blocks of every matrix."""
        stack, begin = (slice(None),) * (len(self.shape) - 2), 0
        for size in sizes:
            yield self.blocks[(*stack, slice(begin, begin + size))]
            begin += size
