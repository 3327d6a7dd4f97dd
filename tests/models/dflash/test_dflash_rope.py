"""The rotary embedding of DFlash drafters beside transformers' own."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from transformers import Qwen3Config
from transformers.models.qwen3.modeling_qwen3 import Qwen3RotaryEmbedding

from coldstream.kernels.ops import RopeScaling, RopeSpec
from coldstream.kernels.rope.reference import rope_angles
from coldstream.kernels.rope.scaling import Yarn, yarn_magnitude
from coldstream.models.dflash.spec import DflashRope

PREVIEW = Yarn(64.0, 4096)  # the preview of April


def stretched(theta: float, yarn: Yarn | None) -> DflashRope:
    if yarn is None:
        return DflashRope(theta)
    return DflashRope(theta, yarn, yarn_magnitude(yarn.factor))


def transformers_rope(theta: float, head_dim: int, yarn: Yarn | None) -> Qwen3RotaryEmbedding:
    parameters = {"rope_type": "default", "rope_theta": theta}
    if yarn is not None:
        parameters |= {
            "rope_type": "yarn",
            "factor": yarn.factor,
            "original_max_position_embeddings": yarn.original_context,
            "beta_fast": yarn.beta_fast,
            "beta_slow": yarn.beta_slow,
        }
    config = Qwen3Config(
        hidden_size=head_dim,
        num_attention_heads=1,
        head_dim=head_dim,
        max_position_embeddings=262144,
        rope_parameters=parameters,
    )
    return Qwen3RotaryEmbedding(config)


@pytest.mark.parametrize(
    ("theta", "head_dim", "yarn"),
    [
        (1e7, 128, None),
        (1e7, 128, PREVIEW),
        (1e6, 128, PREVIEW),
        (1e4, 64, Yarn(4.0, 32768, 16.0, 2.0)),
        (1e7, 32, Yarn(1.0, 4096)),
        (1e4, 16, Yarn(8.0, 8)),  # all dimensions beyond the ramp
        (1e4, 16, Yarn(8.0, 262144)),  # a ramp that goes on behind the last
    ],
)
def test_trap_27_frequencies_and_magnitude_are_transformers_own(
    theta: float, head_dim: int, yarn: Yarn | None
) -> None:
    rope, expected = stretched(theta, yarn), transformers_rope(theta, head_dim, yarn)
    assert np.allclose(rope.inverse_frequencies(head_dim), expected.inv_freq.numpy(), rtol=2e-6)
    positions = np.array([0, 1, 5, 63, 1000])
    cos, sin = rope.cos_sin(positions, head_dim)
    theirs = expected(torch.zeros(1, dtype=torch.float32), torch.from_numpy(positions)[None])
    for ours, other in zip((cos, sin), theirs, strict=True):
        assert ours.dtype == np.float32
        assert np.allclose(ours, other[0, :, : head_dim // 2].numpy(), atol=2e-4)
    plain = RopeSpec(head_dim, theta)
    scaling = yarn and RopeScaling(yarn.frequency_factors(plain), rope.magnitude)
    of_models = rope_angles(torch.from_numpy(positions), replace(plain, scaling=scaling))
    assert np.allclose(of_models, np.stack((cos, sin), axis=-1), atol=1e-7)


def test_trap_27_the_preview_stretches_four_fifths_of_the_dimensions() -> None:
    plain, preview = (stretched(1e7, yarn) for yarn in (None, PREVIEW))
    changed = ~np.isclose(plain.inverse_frequencies(128), preview.inverse_frequencies(128), rtol=1e-12)
    assert changed.nonzero()[0].tolist() == list(range(12, 64))
    assert pytest.approx(1.41589, abs=1e-5) == preview.magnitude
    cos, _ = preview.cos_sin(np.zeros(1, np.int64), 128)
    assert np.allclose(cos, preview.magnitude)


def test_positions_beyond_float32_angles_are_exact() -> None:
    """One position further turns the fastest dimension by one radian, however far it is."""
    rope = DflashRope(1e7)
    cos, sin = rope.cos_sin(np.array([1_000_000, 1_000_001]), 128)
    turned = np.arctan2(sin[1, 0], cos[1, 0]) - np.arctan2(sin[0, 0], cos[0, 0])
    assert np.cos(turned) == pytest.approx(np.cos(1), abs=1e-6)
