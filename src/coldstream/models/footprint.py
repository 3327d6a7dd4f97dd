"""How much of a model one token needs: what bounds decoding, and what "active parameters" means. Pure."""

import math
import re
from collections.abc import Iterable, Mapping
from fractions import Fraction

from coldstream.gguf.reader import TensorInfo
from coldstream.models.spec import ModelSpec

_BLOCK = re.compile(r"blk\.(\d+)\.")
_EMBEDDING = "token_embd.weight"


def num_parameters(tensors: Iterable[TensorInfo]) -> int:
    """Values in all tensors, blocks for multi-token prediction included."""
    return sum(math.prod(info.shape) for info in tensors)


def active_parameters(spec: ModelSpec, tensors: Mapping[str, TensorInfo]) -> int:
    """Values that one token is computed with: of routed experts the chosen ones, of the embedding one row."""
    return int(sum(_active_share(spec, info) * math.prod(info.shape) for info in tensors.values()))


def bytes_per_token(spec: ModelSpec, tensors: Mapping[str, TensorInfo]) -> int:
    """Bytes of weights that decoding one token reads, the caches not included."""
    return int(sum(_active_share(spec, info) * info.num_bytes for info in tensors.values()))


def dense_bytes(spec: ModelSpec, tensors: Mapping[str, TensorInfo]) -> int:
    """Bytes of the weights that every token reads whole."""
    return sum(info.num_bytes for info in tensors.values() if _active_share(spec, info) == 1)


def trunk_bytes(spec: ModelSpec, tensors: Mapping[str, TensorInfo]) -> int:
    """Bytes of all weights but those of blocks for multi-token prediction."""
    return sum(info.num_bytes for info in tensors.values() if _active_share(spec, info) > 0)


def _active_share(spec: ModelSpec, info: TensorInfo) -> Fraction:
    block = _BLOCK.match(info.name)
    if block and int(block[1]) >= spec.num_layers:
        return Fraction(0)  # a block for multi-token prediction, which plain decoding leaves out
    if "_exps." in info.name:
        return Fraction(spec.num_experts_per_tok, spec.num_experts)
    if info.name == _EMBEDDING and not spec.tied_output:
        return Fraction(1, spec.vocab_size)
    return Fraction(1)
