"""Tables of the full-size file: what is read back is what was chosen, as near as each type comes."""

import numpy as np
import pytest
import torch

from bench.level_blocks import ROW, level_blocks
from coldstream.gguf.quant_types import QuantType
from coldstream.kernels.dequantize.reference import dequantize
from coldstream.kernels.quant_tensor import QuantTensor

# How far a value may be from its level's, in steps.
NEAR = {QuantType.Q4_K: 0, QuantType.Q6_K: 0, QuantType.Q8_0: 0, QuantType.IQ4_XS: 0.6, QuantType.Q2_K: 1.5}
LEVELS = np.random.default_rng(1).integers(0, 16, (40, ROW), dtype=np.uint8)


def read_back(qtype: QuantType, step: float, num_zero: int = 0) -> np.ndarray:
    blocks = level_blocks(qtype, LEVELS, step, num_zero)
    assert blocks.shape == (len(LEVELS), qtype.row_bytes(ROW))
    return dequantize(QuantTensor(torch.from_numpy(blocks), qtype, LEVELS.shape)).numpy()


@pytest.mark.parametrize("step", [1.0, 0.25])
@pytest.mark.parametrize("qtype", NEAR, ids=lambda qtype: qtype.name)
def test_values_are_those_of_the_levels(qtype: QuantType, step: float) -> None:
    error = read_back(qtype, step) / step - (LEVELS - 7.5)
    assert abs(error).max() <= NEAR[qtype]


@pytest.mark.parametrize("qtype", [QuantType.Q6_K, QuantType.Q8_0], ids=lambda qtype: qtype.name)
def test_rows_may_begin_with_zeros(qtype: QuantType) -> None:
    found = read_back(qtype, 0.25, num_zero=32)
    assert not found[:, :32].any()
    np.testing.assert_array_equal(found[:, 32:], read_back(qtype, 0.25)[:, 32:])


def test_types_that_no_mix_has_for_a_table_are_refused() -> None:
    with pytest.raises(ValueError, match="no table with 0 zeros a row in IQ1_S"):
        level_blocks(QuantType.IQ1_S, LEVELS, 1.0)
    with pytest.raises(ValueError, match="no table with 32 zeros a row in Q4_K"):
        level_blocks(QuantType.Q4_K, LEVELS, 1.0, 32)
