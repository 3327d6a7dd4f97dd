"""The types of cached keys and values, and the layout of a row.

A cache is an array [sequences, positions, G, row]. `row` is D numbers for the float types, which are for CPUs
alone, and `row_bytes(D)` bytes for the integer types (int8), over which attention is one of integers. These
keep a head's D values, after a Hadamard rotation, as codes, then one float32 scale, then zeros up to a
multiple of 16 bytes, so that every row can be read in aligned pieces of 16 bytes:

    i16: two planes of D signed bytes, high and low; a value is (high + low / 256) · scale;
    i8: one plane; a value is code · scale;
    i4: four bits a value, code + 8, even values in the low half of a byte;
    i3: three bits a value, which is level(code) · scale: first the low two of all blocks of 32 values, eight
        bytes each, then the highest, four bytes each. Value v = 8p + r of a block has its bits at bit
        4r + 2(p mod 2) of the low bytes' word p div 2, and at bit 4r + p of the high bytes' word: a shift
        and a mask of either leave the codes of eight values in eight nibbles.

Both small types unpack to bytes in order by interleaving the two halves of 16 bytes and one look-up of
nibbles, which for i3 are first built by shifts and masks of 32 values at a time.

How codes and scales are chosen: docs/arithmetic.md, Attention over integers.
"""

from dataclasses import dataclass
from typing import Any, Self

from coldstream.kernels.cuda.array import name_of

ROW_ALIGNMENT = 16  # bytes
ELEMENT_BYTES = {"float16": 2, "float32": 4, "int8": 1}
INTEGER_SCALE_BYTES = 4
INTEGER_MULTIPLE = 16  # of head_dim for integer types, so that every plane has aligned pieces
PACKED_MULTIPLE = 32  # of head_dim for types whose values share bytes
# Products of 512 pairs of 16-bit codes, as attention over integers adds them, still fit 32 bits.
LARGEST_INTEGER_HEAD = 512


@dataclass(frozen=True)
class CacheLayout:
    """Name, element type of the array, and bits of a value without its scale."""

    name: str
    element: str
    value_bits: int

    @classmethod
    def of(cls, cache: Any, head_dim: int) -> Self:
        """The type of a cache [..., row] of heads of `head_dim`. ValueError if none fits."""
        found = name_of(cache.dtype), cache.shape[-1]
        for layout in CACHE_LAYOUTS.values():
            if layout.holds(head_dim) and (layout.element, layout.row_elements(head_dim)) == found:
                return cls(**vars(layout))
        raise ValueError(f"rows of {found[1]} {found[0]} hold no head of {head_dim} values")

    @property
    def is_integer(self) -> bool:
        """Whether attention multiplies integers; values are then kept rotated, see `hadamard.py`."""
        return self.element == "int8"

    @property
    def num_planes(self) -> int:
        """For integer types: signed bytes of an unpacked value."""
        return 2 if self.value_bits == 16 else 1

    @property
    def is_packed(self) -> bool:
        """Whether values share bytes."""
        return self.value_bits < 8

    @property
    def head_multiple(self) -> int:
        """The number of which head_dim must be a multiple."""
        if not self.is_integer:
            return 1
        return PACKED_MULTIPLE if self.is_packed else INTEGER_MULTIPLE

    def holds(self, head_dim: int) -> bool:
        """Whether the type supports heads of `head_dim` values."""
        if self.is_integer and head_dim > LARGEST_INTEGER_HEAD:
            return False
        return head_dim >= 1 and head_dim % self.head_multiple == 0

    def row_bytes(self, head_dim: int) -> int:
        """Bytes of one head's keys or values at one position. ValueError if the head has no such row."""
        if not self.holds(head_dim):
            most = f" up to {LARGEST_INTEGER_HEAD}" if self.is_integer else ""
            raise ValueError(
                f"{self.name} caches hold heads of multiples of {self.head_multiple} values{most}, "
                f"not {head_dim}"
            )
        num_bytes = head_dim * self.value_bits // 8
        if not self.is_integer:
            return num_bytes
        return -(-(num_bytes + INTEGER_SCALE_BYTES) // ROW_ALIGNMENT) * ROW_ALIGNMENT

    def row_elements(self, head_dim: int) -> int:
        """The same in elements of the array: its last dimension."""
        return self.row_bytes(head_dim) // ELEMENT_BYTES[self.element]


CACHE_LAYOUTS = {
    layout.name: layout
    for layout in (
        CacheLayout("f16", "float16", 16),
        CacheLayout("f32", "float32", 32),
        CacheLayout("i16", "int8", 16),
        CacheLayout("i8", "int8", 8),
        CacheLayout("i4", "int8", 4),
        CacheLayout("i3", "int8", 3),
    )
}
INTEGER_CACHE_TYPES = tuple(name for name, layout in CACHE_LAYOUTS.items() if layout.is_integer)
