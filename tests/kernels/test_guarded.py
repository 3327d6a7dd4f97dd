"""The outputs that notice careless writes do notice them."""

import pytest
import torch
from guarded import GUARD_BYTES, Guarded


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.int16, torch.int8])
def test_what_is_inside_may_be_written(dtype: torch.dtype) -> None:
    out = Guarded(3, 5, dtype=dtype, gap=2, device=torch.device("cpu"))
    assert out.tensor.shape == (3, 5)
    assert out.tensor.stride() == (7, 1)
    unwritten = out.checked()
    assert unwritten.isnan().all() if dtype.is_floating_point else unwritten.eq(-1).all()
    out.tensor.fill_(7)
    assert out.checked().eq(7).all()
    assert out.checked().is_contiguous()


@pytest.mark.parametrize("offset", [-GUARD_BYTES, -1, 20, 27, 3 * 28, 3 * 28 + GUARD_BYTES - 1])
def test_a_byte_outside_is_noticed(offset: int) -> None:
    out = Guarded(3, 5, gap=2, device=torch.device("cpu"))
    out._buffer[GUARD_BYTES + offset] = 0
    with pytest.raises(AssertionError, match="outside the output"):
        out.checked()
