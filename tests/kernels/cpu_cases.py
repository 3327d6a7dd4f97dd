"""Shared by tests of the C++ float ops: runtimes of every kind, outputs that detect writes out of bounds."""

from collections.abc import Callable, Sequence

import torch

from coldstream.kernels import _csrc

AWKWARD_SIZES = (1, 2, 3, 4, 5, 7, 8, 9, 15, 16, 17, 31, 33, 64, 100)
GUARD = 17  # elements before, after and between the rows of an output
SENTINEL = -1234.5

Results = tuple[torch.Tensor, ...]


class Output:
    """Rows of NaN inside a larger buffer of sentinels; `rows` is the view to hand to an op."""

    def __init__(self, *shape: int) -> None:
        *leading, size = shape
        count = torch.Size(leading).numel()
        self.buffer = torch.full((count * (size + GUARD) + 2 * GUARD,), SENTINEL)
        strides = [size + GUARD]
        for length in reversed(leading[1:]):
            strides.insert(0, strides[0] * length)
        self.rows = self.buffer.as_strided(shape, (*strides, 1), GUARD)
        self.rows.fill_(torch.nan)

    def checked(self) -> torch.Tensor:
        """A copy of the rows, which must be fully written, with nothing written around them."""
        result = self.rows.clone()
        assert not result.isnan().any(), "an output element was not written"
        self.rows.fill_(SENTINEL)
        assert self.buffer.eq(SENTINEL).all(), "something was written outside the output"
        return result


def all_runtimes() -> list[_csrc.Runtime]:
    """Every tier on one thread, generic first, then the first and the best tier on two and three threads."""
    tiers = _csrc.supported_tiers()
    several = [_csrc.Runtime(threads, tier) for tier in (tiers[0], tiers[-1]) for threads in (2, 3)]
    return [_csrc.Runtime(1, tier) for tier in tiers] + several


def same_bits(x: torch.Tensor, y: torch.Tensor) -> bool:
    return x.shape == y.shape and x.dtype == y.dtype and x.numpy().tobytes() == y.numpy().tobytes()


def run_everywhere(call: Callable[[_csrc.Runtime], Results], runtimes: Sequence[_csrc.Runtime]) -> Results:
    """The results of `call`, which must be the same bits on all runtimes."""
    expected = call(runtimes[0])
    for runtime in runtimes[1:]:
        for want, got in zip(expected, call(runtime), strict=True):
            assert same_bits(want, got), f"{runtime.tier} on {runtime.threads} threads differs from generic"
    return expected


def random(seed: int, *shape: int, scale: float = 1.0) -> torch.Tensor:
    return scale * torch.randn(*shape, generator=torch.Generator().manual_seed(seed))
