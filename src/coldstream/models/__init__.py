"""Models: their numbers, their tensors, and the forward pass over them."""

from coldstream.models.architectures.tensor_table import block_tensors, global_tensors, validate_tensors
from coldstream.models.read_spec import read_spec
from coldstream.models.spec.layer_specs import LayerKind
from coldstream.models.spec.model_spec import ModelSpec
from coldstream.models.spec.sanity import check_small_tensors

__all__ = [
    "LayerKind",
    "ModelSpec",
    "block_tensors",
    "check_small_tensors",
    "global_tensors",
    "read_spec",
    "validate_tensors",
]
