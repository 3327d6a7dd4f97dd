"""The norm in a router's launch, on the host: the bits of the norm's own launch."""

import pytest
import torch
from guarded import Guarded
from same_bits import assert_same_bits
from test_host_router import CPU, Outputs

from coldstream.kernels.arithmetic.reference import empty_activations
from coldstream.kernels.linear.records import BiasedOutput
from coldstream.kernels.rms_norm.cuda import add_rms_norm_cuda
from coldstream.kernels.router.cuda import Ahead, NormBefore, RouterBuffers, router_gemv_cuda


@pytest.mark.usefixtures("host")
@pytest.mark.parametrize("tokens", [1, 2, 3, 8])
@pytest.mark.parametrize(
    ("experts", "cols", "has_bias"),
    [(7, 256, False), (40, 768, True), (20, 2048, False), (9, 1220, False), (9, 1220, True)],
)
def test_a_norm_in_the_routers_launch_has_the_bits_of_its_own(
    experts: int, cols: int, tokens: int, *, has_bias: bool
) -> None:
    """In all that both launches write, beside a later layer's router, and with fewer blocks than tokens."""
    generator = torch.Generator().manual_seed(cols + tokens)
    x, update = (torch.randn(tokens, cols, generator=generator) for _ in range(2))
    norm_weight, bias = (torch.randn(cols, generator=generator) for _ in range(2))
    biased = BiasedOutput(update, bias) if has_bias else update
    weight, later = (torch.randn(experts, cols, generator=generator) * cols**-0.5 for _ in range(2))
    shared, arrivals = torch.randn(1, cols, generator=generator), torch.zeros(1, dtype=torch.int32)
    assert NormBefore.is_supported(tokens, cols)
    found = []
    for at_once in (False, True):
        total, normed = Guarded(tokens, cols, device=CPU), Guarded(tokens, cols, device=CPU)
        codes = empty_activations(tokens, cols, CPU)
        norm = NormBefore(x, update, total.tensor, norm_weight, 1e-6, codes, bias if has_bias else None)
        if not at_once:
            add_rms_norm_cuda(x, biased, total.tensor, norm_weight, 1e-6, normed.tensor, codes)
        outs, guesses = Outputs(tokens, 4, experts), Outputs(tokens, 4, experts)
        ahead = Ahead(later, guesses.ids.tensor, guesses.logits.tensor, guesses.weights.tensor)
        router_gemv_cuda(
            normed.tensor,
            weight,
            shared,
            RouterBuffers(*outs.tensors, arrivals),
            None,
            ahead,
            norm if at_once else None,
        )
        outs.check(normed.checked(), weight, shared)
        assert_same_bits(total.tensor, x + (update + bias) if has_bias else x + update)
        found.append(
            (total.checked(), normed.checked(), codes.q, codes.scales, codes.sums, guesses.ids.checked())
        )
    for apart, together in zip(*found, strict=True):
        assert_same_bits(together, apart)


@pytest.mark.usefixtures("host")
@pytest.mark.parametrize(("tokens", "cols"), [(9, 256), (1, 102), (8, 8192), (0, 256)])
def test_rows_that_no_router_norms(tokens: int, cols: int) -> None:
    assert not NormBefore.is_supported(tokens, cols)


@pytest.mark.usefixtures("host")
@pytest.mark.parametrize("cols", [2048, 2880, 4096])
def test_two_rows_of_published_models_stay_whole(cols: int) -> None:
    """A block takes fewer rows of the weight where eight do not fit, and loads all of them early."""
    assert NormBefore.is_supported(2, cols)


def test_a_norm_of_other_rows_is_refused() -> None:
    x = torch.zeros(2, 256)
    codes = empty_activations(2, 256, CPU)
    for wrong in (
        {"update": torch.zeros(3, 256)},
        {"weight": torch.zeros(128)},
        {"x": torch.zeros(2, 257)[:, 1:]},
    ):
        given = {
            "x": x,
            "update": x,
            "total": x.clone(),
            "weight": x[0],
            "eps": 1e-6,
            "quantised": codes,
            **wrong,
        }
        with pytest.raises(ValueError, match=r"rows \(2, 256\)"):
            NormBefore(**given).argument(torch.zeros(2, 256))
