"""The C++ router: the bits of the written arithmetic, ties, and float weights of every type."""

import pytest
import torch
from cpu_cases import Output, Results, random, run_everywhere, same_bits

from coldstream.gguf.quant_types import QuantType
from coldstream.kernels import _csrc
from coldstream.kernels.arithmetic import reference as exact
from coldstream.kernels.router.reference import choose_experts

Runtimes = list[_csrc.Runtime]
TYPES = {QuantType.F32: torch.float32, QuantType.F16: torch.float16, QuantType.BF16: torch.bfloat16}


def load(matrix: torch.Tensor, quant_type: QuantType = QuantType.F32) -> _csrc.Weight:
    data = matrix.to(TYPES[quant_type]).contiguous()
    return _csrc.Weight.from_array(data.view(torch.uint8).flatten(), int(quant_type), *matrix.shape)


def route(runtime: _csrc.Runtime, x: torch.Tensor, weight: _csrc.Weight, num_experts_per_tok: int) -> Results:
    ids = torch.full((len(x), num_experts_per_tok), -1, dtype=torch.int32)
    weights = torch.full((len(x), num_experts_per_tok), torch.nan)
    _csrc.router(runtime, x, weight, ids, weights)
    return ids, weights


def expected_route(x: torch.Tensor, matrix: torch.Tensor, num_experts_per_tok: int) -> Results:
    """docs/arithmetic.md in PyTorch."""
    logits = exact.dot_lanes(x, matrix)
    powers = exact.exp(logits - logits.amax(dim=-1, keepdim=True))
    probabilities = powers / exact.sum_lanes(powers).unsqueeze(-1)
    values, ids = torch.sort(probabilities, dim=-1, descending=True, stable=True)
    values = values[:, :num_experts_per_tok].contiguous()
    divisor = exact.sum_lanes(values).clamp(min=6.103515625e-5).unsqueeze(-1)
    return ids[:, :num_experts_per_tok].int().contiguous(), values / divisor


@pytest.mark.parametrize("quant_type", list(TYPES))
@pytest.mark.parametrize("size", [1, 2, 3, 7, 8, 9, 15, 16, 17, 31, 33, 64, 100])
def test_router_has_the_bits_of_the_written_arithmetic(
    runtimes: Runtimes, size: int, quant_type: QuantType
) -> None:
    x, matrix = random(1, 5, size), random(2, 33, size)
    results = run_everywhere(lambda runtime: route(runtime, x, load(matrix, quant_type), 8), runtimes)
    expected = expected_route(x, matrix.to(TYPES[quant_type]).float(), 8)
    assert all(same_bits(got, want) for got, want in zip(results, expected, strict=True))


@pytest.mark.parametrize(
    ("num_experts", "num_experts_per_tok"), [(1, 1), (2, 2), (17, 3), (40, 17), (256, 8)]
)
def test_router_agrees_with_the_reference(
    runtimes: Runtimes, num_experts: int, num_experts_per_tok: int
) -> None:
    x, matrix = random(3, 70, 64), random(4, num_experts, 64, scale=0.3)
    ids, weights = run_everywhere(
        lambda runtime: route(runtime, x, load(matrix), num_experts_per_tok), runtimes
    )
    expected_ids, expected_weights = choose_experts(x.double() @ matrix.double().T, num_experts_per_tok)
    assert torch.equal(ids, expected_ids)
    torch.testing.assert_close(weights.double(), expected_weights, rtol=1e-5, atol=1e-6)


def test_ties_go_to_the_lowest_id(runtimes: Runtimes) -> None:
    x, matrix = torch.ones(1, 4), torch.zeros(40, 4)
    matrix[[7, 20, 33]] = 1
    results = run_everywhere(lambda runtime: route(runtime, x, load(matrix), 6), runtimes)
    assert results[0].tolist() == [[7, 20, 33, 0, 1, 2]]


def test_sp02_routes_do_not_depend_on_their_neighbours(fastest: _csrc.Runtime) -> None:
    x, weight = random(5, 64, 100), load(random(6, 40, 100))
    together = route(fastest, x, weight, 4)
    alone = [route(fastest, row[None], weight, 4) for row in x]
    for i, result in enumerate(together):
        assert same_bits(result, torch.cat([one[i] for one in alone]))


@pytest.mark.parametrize("poison", [torch.nan, torch.inf, -torch.inf])
def test_ids_are_valid_and_distinct_whatever_the_input(runtimes: Runtimes, poison: float) -> None:
    """Weights say that an input was not finite."""
    x = random(7, 3, 16)
    x[1, 3] = poison
    for runtime in runtimes:
        ids, weights = route(runtime, x, load(random(8, 20, 16)), 8)
        assert all(len(set(row)) == 8 and min(row) >= 0 and max(row) < 20 for row in ids.tolist())
        assert weights[[0, 2]].isfinite().all()
        assert weights[1].isnan().all()


def test_outputs_stay_inside(fastest: _csrc.Runtime) -> None:
    out, ids = Output(1, 8), torch.full((1, 24), -1, dtype=torch.int32)
    _csrc.router(fastest, random(9, 1, 16), load(random(10, 20, 16)), ids[:, 8:16], out.rows)
    out.checked()
    assert ids[:, 8:16].min() >= 0
    assert ids[:, :8].eq(-1).all()
    assert ids[:, 16:].eq(-1).all()


def test_wrong_arrays_are_refused(fastest: _csrc.Runtime) -> None:
    x, weight = torch.zeros(2, 16), load(torch.zeros(4, 16))
    ids, weights = torch.zeros(2, 3, dtype=torch.int32), torch.zeros(2, 3)
    with pytest.raises(ValueError, match="cannot choose 5 of 4 experts"):
        _csrc.router(fastest, x, weight, torch.zeros(2, 5, dtype=torch.int32), torch.zeros(2, 5))
    with pytest.raises(ValueError, match=r"x must be \[2, 16\], not \[2, 8\]"):
        _csrc.router(fastest, x[:, :8], weight, ids, weights)
    with pytest.raises(ValueError, match="topk_ids must be contiguous"):
        _csrc.router(fastest, x, weight, torch.zeros(2, 8, dtype=torch.int32)[:, :3], weights)
    with pytest.raises(TypeError):
        _csrc.router(fastest, x, weight, ids.long(), weights)
    quantised = _csrc.Weight.from_array(torch.zeros(4 * 34, dtype=torch.uint8), int(QuantType.Q8_0), 4, 32)
    with pytest.raises(ValueError, match="must be F32, F16 or BF16"):
        _csrc.router(fastest, x, quantised, ids, weights)
    misaligned = torch.zeros(4 * 16 * 4 + 4, dtype=torch.uint8)[2:258]
    with pytest.raises(ValueError, match=r"aligned|multiple of 4"):
        _csrc.router(fastest, x, _csrc.Weight.from_array(misaligned, int(QuantType.F32), 4, 16), ids, weights)
