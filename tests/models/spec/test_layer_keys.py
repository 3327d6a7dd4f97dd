"""Feed-forward networks as keys state them."""

from typing import Any

import pytest

from coldstream.errors import InconsistentError, LimitError
from coldstream.gguf.metadata import Metadata
from coldstream.kernels.ops import Activation
from coldstream.models.spec.hyperparameters import Hyperparameters
from coldstream.models.spec.layer_keys import read_clamped_swiglu, read_ffns, read_moe
from coldstream.models.spec.layer_specs import DenseFfnSpec

EXPERTS = {"block_count": 3, "expert_count": 8, "expert_used_count": 2, "expert_feed_forward_length": 96}


def keys_of(**changes: Any) -> Hyperparameters:
    values = {name: value for name, value in {**EXPERTS, **changes}.items() if value is not None}
    return Hyperparameters(Metadata({f"any.{name}": value for name, value in values.items()}, {}), {}, "any")


@pytest.mark.parametrize(
    ("changes", "size"),
    [
        ({"expert_shared_feed_forward_length": 64}, 64),
        ({"expert_shared_count": 1}, 96),
        ({"expert_shared_count": 2}, 192),
        ({"expert_shared_count": 2, "expert_shared_feed_forward_length": 100}, 100),
    ],
)
def test_the_size_of_a_shared_expert(changes: dict[str, int], size: int) -> None:
    assert read_moe(keys_of(**changes), shared="plain").shared_ffn_size == size
    assert read_moe(keys_of(**changes), shared="none").shared_ffn_size == 0


@pytest.mark.parametrize("num_dense", [None, 0, 1, 2])
def test_leading_layers_may_be_dense(num_dense: int | None) -> None:
    keys = keys_of(leading_dense_block_count=num_dense, feed_forward_length=256)
    moe = read_moe(keys, shared="none")
    dense = num_dense or 0
    assert read_ffns(keys, moe) == (DenseFfnSpec(256),) * dense + (moe,) * (3 - dense)


def test_a_mixture_of_experts_without_experts() -> None:
    keys = keys_of(leading_dense_block_count=3, feed_forward_length=256)
    with pytest.raises(LimitError, match="leading_dense_block_count"):
        read_ffns(keys, read_moe(keys, shared="none"))


@pytest.mark.parametrize(("limit", "expected"), [(None, 7.0), (10.0, 10.0)])
def test_the_limit_of_a_clamped_swiglu(limit: float | None, expected: float) -> None:
    assert read_clamped_swiglu(keys_of(swiglu_clamp_exp=limit)) == Activation("clamped swiglu", expected)


def test_a_shared_expert_without_a_size() -> None:
    with pytest.raises(InconsistentError, match="expert_shared_feed_forward_length"):
        read_moe(keys_of(), shared="plain")
