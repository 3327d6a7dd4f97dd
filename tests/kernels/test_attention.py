"""Gated attention against one written as loops over heads and positions."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from coldstream.kernels.attention.reference import attention
from coldstream.kernels.ops import AttentionHeads, AttentionInputs, Caches, RopeSpec, Rows
from coldstream.kernels.rope.reference import rope_angles, rotate

H, G, D, EPS = 4, 2, 8, 1e-6
ROPE = RopeSpec(num_dims=4, theta=100.0)


def make_rows(*sequences: tuple[int, int, int]) -> Rows:
    """Rows of (state_id, first position, count) sequences."""
    positions = [p for _, start, count in sequences for p in range(start, start + count)]
    state_ids = [state_id for state_id, _, count in sequences for _ in range(count)]
    return Rows(torch.tensor(positions, dtype=torch.int32), torch.tensor(state_ids, dtype=torch.int32))


def random_inputs(num_rows: int, seed: int, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    """query_gate, key, value, q_norm, k_norm."""
    generator = torch.Generator().manual_seed(seed)
    shapes = [(num_rows, H * 2 * D), (num_rows, G * D), (num_rows, G * D), (D,), (D,)]
    return [torch.randn(shape, generator=generator, dtype=dtype) for shape in shapes]


def empty_caches(state_ids: int, dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor]:
    """Poisoned: whatever is read before it is written shows."""
    return tuple(torch.full((state_ids, 20, G, D), torch.nan, dtype=dtype) for _ in range(2))


def run(inputs: list[torch.Tensor], rows: Rows, caches: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    query_gate, key, value, q_norm, k_norm = inputs
    angles = rope_angles(rows.positions, ROPE)
    heads = AttentionHeads(q_norm, k_norm, EPS)
    return attention(AttentionInputs(query_gate, key, value, angles), heads, Caches(*caches), rows)


def attention_by_hand(inputs: list[torch.Tensor]) -> torch.Tensor:
    """A sequence from position 0, one head and one position at a time."""
    query_gate, key, value, q_norm, k_norm = inputs
    num_rows = key.shape[0]

    def prepare(x: torch.Tensor, norm: torch.Tensor, position: int) -> torch.Tensor:
        x = x / math.sqrt((x * x).mean() + EPS) * norm
        result = x.clone()
        for i in range(2):
            angle = position * 100.0 ** (-2 * i / 4)
            cos, sin = math.cos(angle), math.sin(angle)
            result[i] = x[i] * cos - x[i + 2] * sin
            result[i + 2] = x[i + 2] * cos + x[i] * sin
        return result

    output = torch.zeros(num_rows, H * D)
    for t in range(num_rows):
        for h in range(H):
            g = h // (H // G)
            start = h * 2 * D
            query = prepare(query_gate[t, start : start + D], q_norm, t)
            gate = query_gate[t, start + D : start + 2 * D]
            keys = [prepare(key[p, g * D : (g + 1) * D], k_norm, p) for p in range(t + 1)]
            scores = torch.stack([query @ k for k in keys]) / math.sqrt(D)
            mixed = torch.softmax(scores, 0) @ value[: t + 1, g * D : (g + 1) * D]
            output[t, h * D : (h + 1) * D] = mixed * torch.sigmoid(gate)
    return output


def test_attention_equals_loops() -> None:
    inputs = random_inputs(7, seed=1)
    output = run(inputs, make_rows((0, 0, 7)), empty_caches(1))
    torch.testing.assert_close(output, attention_by_hand(inputs), atol=1e-6, rtol=1e-5)


@settings(max_examples=20)
@given(first=st.integers(0, 9), second=st.integers(0, 9), state_id=st.integers(0, 2))
def test_chunks_and_neighbours_change_nothing(first: int, second: int, state_id: int) -> None:
    """A sequence in two chunks, beside another one, gives what it gives at once and alone."""
    length = first + second
    inputs, others = random_inputs(length, seed=2), random_inputs(3, seed=3)
    others[3:] = inputs[3:]
    whole = run(inputs, make_rows((0, 0, length)), empty_caches(1))
    caches = empty_caches(4)
    start = run([x[:first] for x in inputs[:3]] + inputs[3:], make_rows((state_id, 0, first)), caches)
    mixed = [torch.cat((other, x[first:])) for other, x in zip(others[:3], inputs[:3], strict=True)]
    rest = run(mixed + inputs[3:], make_rows((3, 0, 3), (state_id, first, second)), caches)
    torch.testing.assert_close(torch.cat((start, rest[3:])), whole, atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(rest[:3], run(others, make_rows((0, 0, 3)), empty_caches(1)))


def test_half_caches_hold_keys_and_values_in_half_precision() -> None:
    inputs = random_inputs(5, seed=4)
    rows = make_rows((1, 0, 5))
    caches = empty_caches(2, torch.float16)
    output = run(inputs, rows, caches)
    torch.testing.assert_close(output, attention_by_hand(inputs), atol=5e-3, rtol=0)
    assert torch.equal(caches[1][1, :5].flatten(1), inputs[2].half())
    assert caches[0][0].isnan().all()


def test_trap_48_no_rows_give_an_empty_result() -> None:
    caches = empty_caches(1)
    assert run(random_inputs(0, seed=5), make_rows(), caches).shape == (0, H * D)
    assert caches[0].isnan().all()


def test_gradients() -> None:
    inputs = [x.requires_grad_() for x in random_inputs(3, seed=6, dtype=torch.float64)]

    def call(*args: torch.Tensor) -> torch.Tensor:
        return run(list(args), make_rows((0, 0, 3)), empty_caches(1, torch.float64))

    assert torch.autograd.gradcheck(call, inputs, fast_mode=True)


@pytest.mark.parametrize("position", [0, 1, 1000, 262143])
def test_rope_angles_are_those_of_float64(position: int) -> None:
    angles = rope_angles(torch.tensor([position], dtype=torch.int32), RopeSpec(64, 1e7))
    assert angles.shape == (1, 32, 2)
    for i in range(32):
        angle = position * 1e7 ** (-2 * i / 64)
        assert angles[0, i, 0].item() == pytest.approx(math.cos(angle), abs=1e-7)
        assert angles[0, i, 1].item() == pytest.approx(math.sin(angle), abs=1e-7)


def test_rotation_keeps_lengths_and_the_unrotated_rest() -> None:
    x = torch.randn(3, 2, 8, generator=torch.Generator().manual_seed(7))
    rotated = rotate(x, rope_angles(torch.tensor([0, 5, 9]), ROPE))
    assert torch.equal(rotated[0], x[0])
    assert torch.equal(rotated[..., 4:], x[..., 4:])
    torch.testing.assert_close(rotated.norm(dim=-1), x.norm(dim=-1))
