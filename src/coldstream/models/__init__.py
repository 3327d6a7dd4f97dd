"""Models: their numbers, their tensors, and the forward pass over them."""

from coldstream.models.layer_specs import LayerKind
from coldstream.models.sanity import check_small_tensors
from coldstream.models.spec import ModelSpec
from coldstream.models.tensor_table import block_tensors, global_tensors, validate_tensors

__all__ = [
    "LayerKind",
    "ModelSpec",
    "block_tensors",
    "check_small_tensors",
    "global_tensors",
    "validate_tensors",
]
