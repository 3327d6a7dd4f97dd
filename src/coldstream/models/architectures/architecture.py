"""What a family of models has of its own: how its keys become layers, and where its tensors are."""

from collections.abc import Callable
from dataclasses import dataclass

from coldstream.models.hyperparameters import Hyperparameters
from coldstream.models.layer_specs import LayerSpec
from coldstream.models.layer_tensors import Requirement


@dataclass(frozen=True)
class Architecture:
    """One value of `general.architecture`. Tensors are named without `blk.N.`.

    read_layers    the layers of all blocks, those for multi-token prediction last
    block_tensors  (layer, hidden size) → the tensors of its block, without those of multi-token prediction
    """

    name: str
    read_layers: Callable[[Hyperparameters], tuple[LayerSpec, ...]]
    block_tensors: Callable[[LayerSpec, int], tuple[Requirement, ...]]
