"""The C++ row ops: the same bits in every tier and on any number of threads, and the right values."""

import numpy as np
import pytest
import torch
from cpu_cases import AWKWARD_SIZES, Output, Results, random, run_everywhere, same_bits

from all_pairs import all_pairs
from coldstream.kernels import _csrc
from coldstream.kernels.arithmetic import reference as exact
from coldstream.kernels.experts.reference import combine_experts
from coldstream.kernels.ops import RopeScaling, RopeSpec
from coldstream.kernels.rms_norm.reference import rms_norm
from coldstream.kernels.rope.reference import rope_angles

Runtimes = list[_csrc.Runtime]
EPS = 1e-6


@pytest.mark.parametrize("size", [*AWKWARD_SIZES, 5000])
def test_add_is_exact(runtimes: Runtimes, size: int) -> None:
    x, y = random(1, 3, size), random(2, 3, size)

    def call(runtime: _csrc.Runtime) -> Results:
        out = Output(3, size)
        _csrc.add(runtime, x, y, out.rows)
        return (out.checked(),)

    assert same_bits(run_everywhere(call, runtimes)[0], x + y)


@pytest.mark.parametrize("size", [*AWKWARD_SIZES, 5000])
def test_swiglu_has_the_bits_of_the_written_arithmetic(runtimes: Runtimes, size: int) -> None:
    gate, up = random(3, 2, size, scale=20), random(4, 2, size)
    gate[0, 0], gate[-1, -1] = 200.0, -200.0  # beyond the clamps of exp

    def call(runtime: _csrc.Runtime) -> Results:
        out = Output(2, size)
        _csrc.glu(runtime, gate, up, out.rows)
        return (out.checked(),)

    assert same_bits(run_everywhere(call, runtimes)[0], exact.silu(gate) * up)


@pytest.mark.parametrize("size", [*AWKWARD_SIZES, 2048])
def test_rms_norm_has_the_bits_of_the_written_arithmetic(runtimes: Runtimes, size: int) -> None:
    x, weight = random(5, 4, size, scale=3), random(6, size)

    def call(runtime: _csrc.Runtime) -> Results:
        out = Output(4, size)
        _csrc.rms_norm(runtime, x, weight, EPS, out.rows)
        return (out.checked(),)

    (result,) = run_everywhere(call, runtimes)
    squares = torch.stack([exact.dot_lanes(row[None], row[None])[0] for row in x])
    scale = exact.inverse_sqrt(squares / size + torch.tensor(EPS))
    assert same_bits(result, x * scale * weight)
    torch.testing.assert_close(
        result.double(), rms_norm(x.double(), weight.double(), EPS), rtol=1e-6, atol=1e-6
    )


@pytest.mark.parametrize("num_dims", [2, 6, 16, 64])
def test_rope_angles_are_float64_angles_rounded(runtimes: Runtimes, num_dims: int) -> None:
    positions = torch.tensor([0, 1, 2, 1000, 262143], dtype=torch.int32)

    def call(runtime: _csrc.Runtime) -> Results:
        out = torch.full((5, num_dims // 2, 2), torch.nan)
        _csrc.rope_angles(runtime, positions, 1e7, out)
        return (out,)

    (result,) = run_everywhere(call, runtimes)
    torch.testing.assert_close(result, rope_angles(positions, RopeSpec(num_dims, 1e7)), rtol=0, atol=1e-7)


def test_rope_angles_with_factors_of_frequencies_and_a_magnitude(runtimes: Runtimes) -> None:
    positions = torch.tensor([0, 1, 77, 1048575], dtype=torch.int32)
    factors = (1.0, 0.75, 0.25)

    def call(runtime: _csrc.Runtime) -> Results:
        out = torch.full((4, 3, 2), torch.nan)
        _csrc.rope_angles(runtime, positions, 1e4, out, np.array(factors), 1.5)
        return (out,)

    (result,) = run_everywhere(call, runtimes)
    expected = rope_angles(positions, RopeSpec(6, 1e4, RopeScaling(factors, 1.5)))
    torch.testing.assert_close(result, expected, rtol=0, atol=1e-7)
    with pytest.raises(ValueError, match=r"factors must be \[3\], not \[2\]"):
        _csrc.rope_angles(runtimes[0], positions, 1e4, torch.zeros(4, 3, 2), np.ones(2), 1.0)


@all_pairs(size=[*AWKWARD_SIZES, 5000], num_experts_per_tok=[1, 4, 8], shared=["none", "plain", "gated"])
def test_combine_experts_has_the_bits_of_the_written_arithmetic(
    runtimes: Runtimes, size: int, num_experts_per_tok: int, shared: str
) -> None:
    routed, weights = random(7, 3, num_experts_per_tok, size), random(8, 3, num_experts_per_tok).softmax(-1)
    output = None if shared == "none" else random(9, 3, size)
    gate = random(10, 3, 1) if shared == "gated" else None

    def call(runtime: _csrc.Runtime) -> Results:
        out = Output(3, size)
        _csrc.combine_experts(runtime, routed, weights, output, gate, out.rows)
        return (out.checked(),)

    expected = combine_experts(routed, weights, output, gate, exact.fma, exact.sigmoid)
    assert same_bits(run_everywhere(call, runtimes)[0], expected)


@pytest.mark.parametrize("num_rows", [2, 5, 16, 64])
def test_sp02_rows_do_not_depend_on_their_neighbours(fastest: _csrc.Runtime, num_rows: int) -> None:
    x, y, weight = random(11, num_rows, 100), random(12, num_rows, 100), random(13, 100)
    together = [torch.empty(num_rows, 100) for _ in range(3)]
    alone = [torch.empty(num_rows, 100) for _ in range(3)]
    for outs, slices in (
        (together, [slice(0, num_rows)]),
        (alone, [slice(r, r + 1) for r in range(num_rows)]),
    ):
        for part in slices:
            _csrc.add(fastest, x[part], y[part], outs[0][part])
            _csrc.glu(fastest, x[part], y[part], outs[1][part])
            _csrc.rms_norm(fastest, x[part], weight, EPS, outs[2][part])
    assert all(same_bits(a, b) for a, b in zip(together, alone, strict=True))


def test_outputs_may_be_inputs(fastest: _csrc.Runtime) -> None:
    x, y = random(14, 3, 33), random(15, 3, 33)
    expected = exact.silu(x) * (x + y)
    _csrc.add(fastest, x, y, y)
    _csrc.glu(fastest, x, y, x)
    assert same_bits(x, expected)


def test_nan_is_kept(runtimes: Runtimes) -> None:
    x = torch.full((1, 20), 1.0)
    x[0, 17] = torch.nan
    for runtime in runtimes:
        out = torch.zeros(1, 20)
        _csrc.glu(runtime, x, torch.ones(1, 20), out)
        assert out.isnan().nonzero().tolist() == [[0, 17]]
        _csrc.rms_norm(runtime, x, torch.ones(20), EPS, out)
        assert out.isnan().all()


def test_a_gate_of_nan_gives_nan(runtimes: Runtimes) -> None:
    """exp keeps it between its clamps. Nothing else here would: SwiGLU multiplies by its input as well."""
    experts, shared, gate = torch.zeros(1, 1, 20), torch.ones(1, 20), torch.full((1, 1), torch.nan)
    for runtime in runtimes:
        out = torch.zeros(1, 20)
        _csrc.combine_experts(runtime, experts, torch.ones(1, 1), shared, gate, out)
        assert out.isnan().all()


def test_no_rows_is_no_work(fastest: _csrc.Runtime) -> None:
    empty = torch.empty(0, 8)
    _csrc.add(fastest, empty, empty, empty)


def test_wrong_arrays_are_refused(fastest: _csrc.Runtime) -> None:
    x = torch.zeros(2, 8)
    with pytest.raises(ValueError, match=r"y must be \[2, 8\], not \[3, 8\]"):
        _csrc.add(fastest, x, torch.zeros(3, 8), x)
    with pytest.raises(ValueError, match="out must have unit stride"):
        _csrc.add(fastest, x, x, torch.zeros(8, 2).T)
    with pytest.raises(ValueError, match="rows that do not overlap"):
        _csrc.add(fastest, x, x, torch.zeros(1, 8).expand(2, 8))
    with pytest.raises(TypeError):
        _csrc.add(fastest, x, x.double(), x)
    with pytest.raises(TypeError):
        _csrc.rms_norm(fastest, x, torch.zeros(1, 8), EPS, x)
    with pytest.raises(ValueError, match=r"weight must be \[8\], not \[9\]"):
        _csrc.rms_norm(fastest, x, torch.zeros(9), EPS, x)
    with pytest.raises(ValueError, match=r"shared_gate must be \[2, 1\]"):
        _csrc.combine_experts(fastest, torch.zeros(2, 3, 8), torch.zeros(2, 3), x, torch.zeros(2, 2), x)
    with pytest.raises(ValueError, match="a gate comes with its shared expert"):
        _csrc.combine_experts(fastest, torch.zeros(2, 3, 8), torch.zeros(2, 3), None, torch.zeros(2, 1), x)


def _top_log_probs(runtime: _csrc.Runtime, logits: torch.Tensor, k: int) -> Results:
    ids, log_probs = torch.empty(len(logits), k, dtype=torch.int32), torch.empty(len(logits), k)
    _csrc.top_log_probs(runtime, logits, ids, log_probs)
    return ids, log_probs


@pytest.mark.parametrize("size", [*AWKWARD_SIZES, 6144])
@pytest.mark.parametrize("num_rows", [1, 3])
def test_the_likeliest_tokens_and_their_log_probabilities(
    runtimes: Runtimes, size: int, num_rows: int
) -> None:
    logits, k = random(9, num_rows, size, scale=4), min(4, size)
    logits[-1, size // 2 :] = logits[-1, : size - size // 2].clone()  # ties
    exact_log_probs = torch.log_softmax(logits.double(), dim=1)
    order = torch.sort(logits, dim=1, descending=True, stable=True).indices[:, :k]
    for runtime in runtimes:
        ids, log_probs = _top_log_probs(runtime, logits, k)
        assert torch.equal(ids.long(), order)
        torch.testing.assert_close(log_probs.double(), exact_log_probs.gather(1, order), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("at", [0, 7, 6143])
def test_log_probabilities_of_damaged_logits_are_no_numbers(runtimes: Runtimes, bad: float, at: int) -> None:
    logits = random(9, 1, 6144)
    logits[0, at] = bad
    for runtime in runtimes:
        assert not _top_log_probs(runtime, logits, 4)[1].isfinite().any()
