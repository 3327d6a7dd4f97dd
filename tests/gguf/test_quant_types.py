import pytest

import gguf
from coldstream.gguf.quant_types import QuantType

# Types of the `gguf` package that are left out here: intermediate formats, integers, rare and new ones.
LEFT_OUT = {"Q8_1", "Q8_K", "I8", "I16", "I32", "I64", "F64", "TQ1_0", "NVFP4", "Q1_0"}

Q2_0 = ("Q2_0", 42, 64, 18)  # newer than the package


def test_ids_and_block_geometry_equal_the_gguf_package() -> None:
    theirs = {
        (kind.name, int(kind), *gguf.GGML_QUANT_SIZES[kind])
        for kind in gguf.GGMLQuantizationType
        if kind.name not in LEFT_OUT
    }
    ours = {(kind.name, int(kind), kind.block_elements, kind.block_bytes) for kind in QuantType}
    assert ours == theirs | {Q2_0}


def test_row_bytes() -> None:
    assert QuantType.Q4_K.row_bytes(512) == 288
    assert QuantType.F32.row_bytes(3) == 12
    with pytest.raises(ValueError, match="Q4_K rows hold multiples of 256 values, not 300"):
        QuantType.Q4_K.row_bytes(300)


def test_blocks_are_as_aligned_as_their_matrix() -> None:
    for kind in QuantType:
        assert kind.alignment in (1, 2, 4, 8, 16)
        assert kind.block_bytes % kind.alignment == 0
        assert kind.block_bytes % (2 * kind.alignment)
