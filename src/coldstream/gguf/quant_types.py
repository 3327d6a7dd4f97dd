"""The one table of GGUF tensor types: ids and block geometry.

A row of a quantised tensor is a sequence of blocks; a block holds `block_elements` values in `block_bytes`
bytes. Everything that needs these numbers (reader, reference kernels, C++) takes them from here; a test holds
the C++ copy against this table. Source: the GGUF specification and the block layouts in ggml's public
headers.
"""

from enum import IntEnum


class QuantType(IntEnum):
    """A GGUF tensor type; the value is the id in the file."""

    block_elements: int
    block_bytes: int

    def __new__(cls, type_id: int, block_elements: int, block_bytes: int) -> "QuantType":
        member = int.__new__(cls, type_id)
        member._value_ = type_id
        member.block_elements = block_elements
        member.block_bytes = block_bytes
        return member

    F32 = (0, 1, 4)
    F16 = (1, 1, 2)
    Q4_0 = (2, 32, 18)
    Q4_1 = (3, 32, 20)
    Q5_0 = (6, 32, 22)
    Q5_1 = (7, 32, 24)
    Q8_0 = (8, 32, 34)
    Q2_K = (10, 256, 84)
    Q3_K = (11, 256, 110)
    Q4_K = (12, 256, 144)
    Q5_K = (13, 256, 176)
    Q6_K = (14, 256, 210)
    IQ2_XXS = (16, 256, 66)
    IQ2_XS = (17, 256, 74)
    IQ3_XXS = (18, 256, 98)
    IQ1_S = (19, 256, 50)
    IQ4_NL = (20, 32, 18)
    IQ3_S = (21, 256, 110)
    IQ2_S = (22, 256, 82)
    IQ4_XS = (23, 256, 136)
    IQ1_M = (29, 256, 56)
    BF16 = (30, 1, 2)
    TQ2_0 = (35, 256, 66)
    MXFP4 = (39, 32, 17)
    Q2_0 = (42, 64, 18)

    @property
    def alignment(self) -> int:
        """Bytes, a power of two, of which the addresses that kernels read are a multiple: 1 to 16.

        It divides the block's size, so that every block of a matrix is as aligned as the first.
        """
        return self.block_bytes & -self.block_bytes

    def row_bytes(self, num_elements: int) -> int:
        """Bytes of a row of `num_elements` values. ValueError if they are not a whole number of blocks."""
        blocks, rest = divmod(num_elements, self.block_elements)
        if rest:
            raise ValueError(
                f"{self.name} rows hold multiples of {self.block_elements} values, not {num_elements}"
            )
        return blocks * self.block_bytes
