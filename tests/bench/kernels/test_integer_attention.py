"""Attention over integers as the study computes it: close to float64, causal, in planes that are int8."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from bench.kernels.attention_heads import float_attend
from bench.kernels.integer_attention import (
    DEFINITIONS,
    TWO_PLANES,
    Definition,
    TriedOps,
    hadamard,
    logits_of,
    low_plane,
    rounded,
)
from coldstream.assets import demo_model_path
from coldstream.gguf.reader import GGUFFile
from coldstream.kernels.reference_ops import ReferenceOps
from coldstream.models.causal_lm import CausalLM
from coldstream.models.read_spec import read_spec

POSITIONS, HEAD_DIM = 150, 64


def heads(seed: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Queries of four heads, keys and values of two, and the positions of three rows."""
    generator = torch.Generator().manual_seed(seed)
    query = torch.randn(3, 4, HEAD_DIM, generator=generator)
    key, value = torch.randn(2, POSITIONS, 2, HEAD_DIM, generator=generator)
    return query, key, value, torch.tensor([0, 64, POSITIONS - 1])


@pytest.mark.parametrize("name", DEFINITIONS)
def test_every_definition_is_near_float64(name: str) -> None:
    query, key, value, positions = heads(0)
    exact = float_attend(query, key, value, positions)
    error = (DEFINITIONS[name].attend(query, key, value, positions) - exact).square().mean().sqrt()
    limit = 0.02 if "one plane" in name else 0.0005
    assert 0 < error < limit * exact.square().mean().sqrt()


@pytest.mark.parametrize("name", DEFINITIONS)
def test_no_row_sees_a_later_position(name: str) -> None:
    query, key, value, positions = heads(1)
    first = DEFINITIONS[name].attend(query, key, value, positions)
    key[65:], value[65:] = 100, -100
    second = DEFINITIONS[name].attend(query, key, value, positions)
    assert torch.equal(first[:2], second[:2])
    assert not torch.equal(first[2], second[2])


@torch.no_grad()
def test_the_model_with_floats_in_place_of_integers_is_the_plain_one() -> None:
    ids, tried = torch.arange(100, 130), TriedOps()
    with GGUFFile.open(demo_model_path()) as file:
        spec = read_spec(file.metadata, file.tensors)
        plain, floats = (logits_of(CausalLM.load(file, spec, ops), ids) for ops in (ReferenceOps(), tried))
        tried.attend = DEFINITIONS["one plane"].attend
        planes = logits_of(CausalLM.load(file, spec, tried), ids)
    assert 0 < (floats - plain).abs().max() < 1e-3 < (planes - plain).abs().max()


def test_low_products_are_all_that_is_left_out() -> None:
    x, y = torch.randint(-TWO_PLANES, TWO_PLANES + 1, (2, 3, HEAD_DIM)).double()
    product = Definition(planes=2, low_products=False).product("ij,kj->ik", x, y)
    assert torch.equal(product, x @ y.T - low_plane(x) @ low_plane(y).T)
    assert torch.equal(Definition(planes=2).product("ij,kj->ik", x, y), x @ y.T)


@given(st.lists(st.integers(-TWO_PLANES, TWO_PLANES), min_size=1))
def test_two_planes_of_int8_hold_every_code(values: list[int]) -> None:
    codes = torch.tensor(values, dtype=torch.float64)
    low = low_plane(codes)
    high = (codes - low) / 256
    assert torch.equal(high, high.round())
    for plane in (low, high):
        assert plane.min() >= -128
        assert plane.max() <= 127


@given(st.integers(0, 2**31), st.sampled_from([1, 2, 64, 256]))
def test_hadamard_is_its_own_inverse_and_keeps_products(seed: int, size: int) -> None:
    x, y = torch.randn(2, size, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    assert torch.allclose(hadamard(hadamard(x)), x)
    assert torch.allclose(hadamard(x) @ hadamard(y), x @ y)


def test_a_row_of_zeros_has_codes_of_zero() -> None:
    codes, scale = rounded(torch.zeros(2, 4), 127)
    assert torch.equal(codes, torch.zeros(2, 4))
    assert torch.equal(scale, torch.zeros(2))
