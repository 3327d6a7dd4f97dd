"""The types that keys and values are kept in, and how a row of them lies in memory.

A cache is an array [slots, positions, G, row]: `row` is D numbers for the float types and `row_bytes(D)`
bytes (uint8) for the quantised ones. Those cut a head's D values into blocks of 32 with one float16 scale
each; a row holds the codes of all its blocks, then the scales, then unused bytes up to a multiple of 16, so
that every row can be read in aligned pieces of 16 bytes:

    q8_0: a signed byte a value;
    q4_0: four bits a value, code + 8, even values in the low half of a byte;
    tq3_0: three bits a value, first the low two of all blocks, eight bytes each, then the highest, four
           bytes each. Value v = 8p + r of a block has its bits at bit 4r + 2(p mod 2) of the low bytes' word
           p div 2, and at bit 4r + p of the high bytes' word: a shift and a mask of either leave the codes
           of eight values in eight nibbles, with which one instruction of a GPU looks up four of them.

A value is code · scale, of tq3_0 level(code) · scale, exact in float32. How codes and scales are chosen:
docs/arithmetic.md, Attention.
"""

from dataclasses import dataclass

BLOCK_VALUES = 32  # that share one scale
ROW_ALIGNMENT = 16  # bytes
ELEMENT_BYTES = {"float16": 2, "float32": 4, "uint8": 1}


@dataclass(frozen=True)
class CacheLayout:
    """Name, element type of the array, and bits of a value without its scale."""

    name: str
    element: str
    value_bits: int
    is_turned: bool = False  # holds values after the transformation of `turn.py`

    @property
    def is_quantised(self) -> bool:
        return self.element == "uint8"

    def row_bytes(self, head_dim: int) -> int:
        """Bytes of one head's keys or values at one position. ValueError if the head has no such row."""
        multiple = BLOCK_VALUES if self.is_quantised else 1
        if head_dim < 1 or head_dim % multiple:
            raise ValueError(
                f"{self.name} caches hold heads of multiples of {multiple} values, not {head_dim}"
            )
        num_bytes = head_dim * self.value_bits // 8
        if not self.is_quantised:
            return num_bytes
        num_bytes += head_dim // BLOCK_VALUES * 2
        return -(-num_bytes // ROW_ALIGNMENT) * ROW_ALIGNMENT

    def row_elements(self, head_dim: int) -> int:
        """The same in elements of the array: its last dimension."""
        return self.row_bytes(head_dim) // ELEMENT_BYTES[self.element]


CACHE_LAYOUTS = {
    layout.name: layout
    for layout in (
        CacheLayout("f16", "float16", 16),
        CacheLayout("f32", "float32", 32),
        CacheLayout("q8_0", "uint8", 8),
        CacheLayout("q4_0", "uint8", 4),
        CacheLayout("tq3_0", "uint8", 3, is_turned=True),
    )
}
