"""The record of a family of models: how its keys define layers, and the names of its tensors."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from coldstream.models.spec.hyperparameters import Hyperparameters
from coldstream.models.spec.layer_specs import LayerSpec
from coldstream.models.spec.layer_tensors import Requirement


@dataclass(frozen=True)
class GatheredRows:
    """A matrix that is stored as rows of another tensor of the block."""

    source: str  # without `.weight`
    row_ids: tuple[int, ...]


def nothing_gathered(_: LayerSpec) -> Mapping[str, GatheredRows]:
    """For families whose matrices are tensors of their own, or lie in others as consecutive rows."""
    return MappingProxyType({})


@dataclass(frozen=True)
class Architecture:
    """One value of `general.architecture`. Tensors are named without `blk.N.`.

    - read_layers: the layers of all blocks; blocks for multi-token prediction come last.
    - block_tensors: (layer, hidden size) → the tensors of its block, without its norms and without tensors of
      multi-token prediction.
    - gathered: layer → the matrices (named without `.weight`) that may be rows of other tensors. A tensor of
      the name itself is preferred.
    - ffn_norm: the norm before the feed-forward network, without `.weight`.
    - scales_embeddings: whether they are multiplied by the root of the hidden size.
    - caps_logits: whether a key may state a soft cap.
    """

    name: str
    read_layers: Callable[[Hyperparameters], tuple[LayerSpec, ...]]
    block_tensors: Callable[[LayerSpec, int], tuple[Requirement, ...]]
    gathered: Callable[[LayerSpec], Mapping[str, GatheredRows]] = nothing_gathered
    ffn_norm: str = "post_attention_norm"
    scales_embeddings: bool = False
    caps_logits: bool = False
