"""Feed-forward networks as keys state them."""

from typing import Any

import pytest

from coldstream.errors import InconsistentError
from coldstream.gguf.metadata import Metadata
from coldstream.models.spec.hyperparameters import Hyperparameters
from coldstream.models.spec.layer_keys import read_moe

EXPERTS = {"block_count": 3, "expert_count": 8, "expert_used_count": 2, "expert_feed_forward_length": 96}


def keys_of(**changes: Any) -> Hyperparameters:
    values = {name: value for name, value in {**EXPERTS, **changes}.items() if value is not None}
    return Hyperparameters(Metadata({f"any.{name}": value for name, value in values.items()}, {}), (), "any")


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


def test_a_shared_expert_without_a_size() -> None:
    with pytest.raises(InconsistentError, match="expert_shared_feed_forward_length"):
        read_moe(keys_of(), shared="plain")
