"""The types that keys and values are kept in, and how a row of them lies in memory.

A cache is an array [slots, positions, G, row]: `row` is D numbers for the float types and `row_bytes(D)`
bytes for the others. The quantised ones (uint8) cut a head's D values into blocks of 32 with one float16
scale each; a row holds the codes of all its blocks, then the scales, then unused bytes up to a multiple of
16, so that every row can be read in aligned pieces of 16 bytes:

    q8_0: a signed byte a value;
    q4_0: four bits a value, code + 8, even values in the low half of a byte;
    tq3_0: three bits a value, first the low two of all blocks, eight bytes each, then the highest, four
           bytes each. Value v = 8p + r of a block has its bits at bit 4r + 2(p mod 2) of the low bytes' word
           p div 2, and at bit 4r + p of the high bytes' word: a shift and a mask of either leave the codes
           of eight values in eight nibbles, with which one instruction of a GPU looks up four of them.

A value is code · scale, of tq3_0 level(code) · scale, exact in float32. Attention over these types and the
float ones is one of floats.

The integer types (int8), for CPUs alone so far, are for attention over integers. They keep a head's D
values, after a Hadamard rotation, as codes, then one float32 scale, then zeros up to a multiple of 16 bytes:

    i16: two planes of D signed bytes, high and low; a value is (high + low / 256) · scale;
    i8: one plane; a value is code · scale;
    i4: four bits a value, code + 8, packed as those of q4_0;
    i3: three bits a value, packed as those of tq3_0; a value is level(code) · scale.

Both small types unpack to bytes in order with an interleave of the two halves of 16 bytes and one look-up of
nibbles: those of i3 are made first, by shifts and masks that take 32 values at once.

How codes and scales are chosen: docs/arithmetic.md, Attention.
"""

from dataclasses import dataclass

BLOCK_VALUES = 32  # that share one scale
ROW_ALIGNMENT = 16  # bytes
ELEMENT_BYTES = {"float16": 2, "float32": 4, "int8": 1, "uint8": 1}
INTEGER_SCALE_BYTES = 4
INTEGER_MULTIPLE = 16  # of values in a head that integer types keep, so that every plane can be read likewise
# Products of 512 pairs of 16-bit codes, as attention over integers adds them, still fit 32 bits.
LARGEST_INTEGER_HEAD = 512


@dataclass(frozen=True)
class CacheLayout:
    """Name, element type of the array, and bits of a value without its scale."""

    name: str
    element: str
    value_bits: int
    is_turned: bool = False  # holds values after a transformation of `turn.py`

    @property
    def is_quantised(self) -> bool:
        return self.element == "uint8"

    @property
    def is_integer(self) -> bool:
        """Whether attention over it is one of integers."""
        return self.element == "int8"

    @property
    def num_planes(self) -> int:
        """Of an integer type: signed bytes of a value once it is unpacked."""
        return 2 if self.value_bits == 16 else 1

    @property
    def is_packed(self) -> bool:
        """Whether values share bytes."""
        return self.value_bits < 8

    @property
    def head_multiple(self) -> int:
        """What the number of values of a head must be a multiple of."""
        if self.is_integer and not self.is_packed:
            return INTEGER_MULTIPLE
        return BLOCK_VALUES if self.is_quantised or self.is_integer else 1

    def holds(self, head_dim: int) -> bool:
        """Whether heads of so many values have a row."""
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
        if not self.is_quantised and not self.is_integer:
            return num_bytes
        num_bytes += INTEGER_SCALE_BYTES if self.is_integer else head_dim // BLOCK_VALUES * 2
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
        CacheLayout("i16", "int8", 16, is_turned=True),
        CacheLayout("i8", "int8", 8, is_turned=True),
        CacheLayout("i4", "int8", 4, is_turned=True),
        CacheLayout("i3", "int8", 3, is_turned=True),
    )
}
CPU_CACHE_TYPES = tuple(name for name, layout in CACHE_LAYOUTS.items() if not layout.is_quantised)
GPU_CACHE_TYPES = tuple(
    name for name, layout in CACHE_LAYOUTS.items() if layout.is_integer and not layout.is_packed
)
