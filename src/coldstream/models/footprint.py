"""Bytes and parameters of a model that one token uses: the bound of decoding, "active parameters". Pure."""

import math
import re
from collections.abc import Callable, Iterable, Mapping
from fractions import Fraction

from coldstream.errors import UnsupportedError
from coldstream.gguf.messages import shorten
from coldstream.gguf.quant_types import QuantType
from coldstream.gguf.reader import GGUFFile, TensorInfo
from coldstream.kernels.ngram import NGRAM_CACHE_BYTES
from coldstream.kvcache import state_bytes
from coldstream.models.spec.layer_specs import AttentionSpec
from coldstream.models.spec.layer_tensors import NGRAM_TABLE
from coldstream.models.spec.model_spec import ModelSpec
from coldstream.placement.routing_trace import RoutedModel
from coldstream.placement.sizes import ModelSizes, Products, WindowedLayers, slot_bytes

_BLOCK = re.compile(r"blk\.(\d+)\.")
FFN_MATRICES = ("ffn_gate", "ffn_up", "ffn_down")  # of a dense layer
_FFN_ENDS = tuple(f".{name}.weight" for name in FFN_MATRICES)
_STACK_END = "_exps.weight"  # of a matrix of all experts of a layer
_BIAS_END = "_exps.bias"
_GATE_UP = "ffn_gate_up_exps."  # two matrices in one tensor, separate in slots
_EMBEDDING, _HEAD = "token_embd.weight", "output.weight"
_NEXTN_EMBEDDING, _NEXTN_HEAD = ".nextn.embed_tokens.weight", ".nextn.shared_head_head.weight"


def num_parameters(tensors: Iterable[TensorInfo]) -> int:
    """Values in all tensors, blocks for multi-token prediction included."""
    return sum(math.prod(info.shape) for info in tensors)


def active_parameters(spec: ModelSpec, tensors: Mapping[str, TensorInfo]) -> int:
    """Values used for one token: its chosen experts, one row of the embedding, and all other weights."""
    return int(sum(_active_share(spec, info) * math.prod(info.shape) for info in tensors.values()))


def bytes_per_token(spec: ModelSpec, tensors: Mapping[str, TensorInfo]) -> int:
    """Bytes of weights that decoding one token reads, the caches not included."""
    return int(sum(_active_share(spec, info) * info.num_bytes for info in tensors.values()))


def dense_bytes(spec: ModelSpec, tensors: Mapping[str, TensorInfo]) -> int:
    """Bytes of the weights that every token reads whole."""
    return sum(info.num_bytes for info in tensors.values() if _active_share(spec, info) == 1)


def ngram_cache_bytes(spec: ModelSpec, tensors: Mapping[str, TensorInfo]) -> int:
    """Bytes of rows of n-grams that a CPU keeps in memory at most."""
    return 0 if spec.ngram is None else min(NGRAM_CACHE_BYTES, tensors[NGRAM_TABLE].num_bytes)


def trunk_bytes(spec: ModelSpec, tensors: Mapping[str, TensorInfo]) -> int:
    """Bytes of all weights outside blocks for multi-token prediction."""
    return sum(info.num_bytes for info in tensors.values() if _active_share(spec, info) > 0)


def nextn_bytes(spec: ModelSpec, tensors: Mapping[str, TensorInfo]) -> int:
    """Bytes of all weights of blocks for multi-token prediction, without shared ones."""
    blocks = ((_BLOCK.match(info.name), info.num_bytes) for info in tensors.values())
    return sum(size for block, size in blocks if block and int(block[1]) >= spec.num_layers)


def drafted_share(spec: ModelSpec, tensors: Mapping[str, TensorInfo], most_ids: int) -> float:
    """Of `bytes_per_token`, the share that a token drafted by the block for multi-token prediction reads.

    most_ids: how many of the first tokens are candidates, whose rows of the head are read.
    """
    blocks = ((info, _BLOCK.match(info.name)) for info in tensors.values())
    own = [info for info, block in blocks if block and int(block[1]) >= spec.num_layers]
    heads = [info for info in own if info.name.endswith(_NEXTN_HEAD)]
    head = heads[0] if heads else tensors[_EMBEDDING if spec.tied_output else _HEAD]
    chosen = Fraction(spec.num_experts_per_tok, spec.num_experts) if spec.is_moe else Fraction(1)
    num_bytes = Fraction(min(most_ids, spec.vocab_size), spec.vocab_size) * head.num_bytes
    for info in own:
        if not info.name.endswith((_NEXTN_EMBEDDING, _NEXTN_HEAD)):  # one row of a table is next to nothing
            num_bytes += (chosen if info.name.endswith(_STACK_END) else 1) * info.num_bytes
    return float(num_bytes / bytes_per_token(spec, tensors))


def file_bytes(matrix_bytes: int) -> int:
    """Bytes of an expert's matrix where it is mapped, the same as in the file."""
    return matrix_bytes


def model_sizes(
    spec: ModelSpec,
    tensors: Mapping[str, TensorInfo],
    fingerprint: str,
    kv_token_bytes: int,
    matrix_room: Callable[[int], int] = slot_bytes,
    *,
    places_layers: bool = False,
) -> ModelSizes:
    """The model's sizes for placement. kv_token_bytes: of all attention layers, in the cache's type.

    matrix_room: bytes of a matrix in fast memory, from its bytes in the file; by default in a GPU's slot.
    places_layers: whether the FFNs of a dense model count as experts, one of each layer.
    """
    is_dense = places_layers and not spec.is_moe
    num_experts, chosen = (1, 1) if is_dense else (spec.num_experts, spec.num_experts_per_tok)
    infos: dict[int, list[TensorInfo]] = {layer: [] for layer in spec.placed_layers}
    for info in tensors.values():
        block = _BLOCK.match(info.name)
        if block and int(block[1]) in infos and info.name.endswith(_FFN_ENDS if is_dense else _STACK_END):
            infos[int(block[1])].append(info)
    by_layer = tuple(infos.values())
    placed = {info.name: info for layer in by_layer for info in layer}
    routed_bytes = sum(info.num_bytes for info in placed.values())
    matrices = [info for name, info in tensors.items() if name not in placed and len(info.shape) > 1]
    head_name = _EMBEDDING if spec.tied_output else _HEAD
    chosen_bytes = routed_bytes * chosen // max(1, num_experts)
    return ModelSizes(
        fingerprint=fingerprint,
        num_experts=num_experts,
        num_experts_per_tok=chosen,
        expert_bytes=tuple(
            sum(_expert_room(info, num_experts, matrix_room) for info in layer) for layer in by_layer
        ),
        dense_bytes=trunk_bytes(spec, tensors) - routed_bytes,
        dense_token_bytes=bytes_per_token(spec, tensors) - chosen_bytes,
        kv_token_bytes=kv_token_bytes,
        state_bytes=state_bytes(spec),
        token_parameters=active_parameters(spec, tensors),
        expert_parameters=num_parameters(placed.values()) // max(1, len(by_layer) * num_experts),
        attention_width=sum(each.query_dim for each in spec.attentions),
        windows=_windowed_layers(spec),
        is_dense=is_dense,
        dense_products=_products(info for info in matrices if _active_share(spec, info) == 1),
        expert_products=tuple(_products(layer, num_experts) for layer in by_layer),
        head=next(iter(_products([tensors[head_name]])), None) if head_name in tensors else None,
        table_bytes=0 if spec.tied_output else tensors[_EMBEDDING].num_bytes,
        placed_layers=spec.placed_layers,
        hidden_size=spec.hidden_size,
    )


def _windowed_layers(spec: ModelSpec) -> tuple[WindowedLayers, ...]:
    kv_dims = sum(each.kv_dim for each in spec.attentions)
    by_window: dict[int, list[AttentionSpec]] = {}
    for each in spec.attentions:
        if each.window is not None:
            by_window.setdefault(each.window, []).append(each)
    return tuple(
        WindowedLayers(
            window, sum(each.query_dim for each in layers), sum(each.kv_dim for each in layers) / kv_dims
        )
        for window, layers in by_window.items()
    )


def _expert_room(info: TensorInfo, num_experts: int, matrix_room: Callable[[int], int]) -> int:
    """Bytes in fast memory of an expert's part of a tensor."""
    num_matrices = 2 if _GATE_UP in info.name else 1
    return num_matrices * matrix_room(info.num_bytes // num_experts // num_matrices)


def _products(matrices: Iterable[TensorInfo], num_parts: int = 1) -> tuple[Products, ...]:
    """One of so many equal parts of these tensors, by type."""
    by_type: dict[QuantType, list[TensorInfo]] = {}
    for info in matrices:
        by_type.setdefault(info.quant_type, []).append(info)
    return tuple(
        Products(
            quant_type,
            num_parameters(infos) // num_parts,
            sum(info.num_bytes for info in infos) // num_parts,
        )
        for quant_type, infos in sorted(by_type.items())
    )


def routed_model(file: GGUFFile, spec: ModelSpec) -> RoutedModel:
    """The record that a trace of the model in `file` must match. UnsupportedError for a dense model."""
    if not spec.is_moe:
        raise UnsupportedError(
            f"{shorten(file.paths[0])} is a dense model, no expert is ever chosen: give a mixture of experts"
        )
    return RoutedModel(file.fingerprint, len(spec.placed_layers), spec.num_experts, spec.num_experts_per_tok)


def _active_share(spec: ModelSpec, info: TensorInfo) -> Fraction:
    block = _BLOCK.match(info.name)
    if block and int(block[1]) >= spec.num_layers:
        return Fraction(0)  # a block for multi-token prediction, which plain decoding leaves out
    if info.name == NGRAM_TABLE:
        return Fraction(0)  # a few rows of tens of bytes, of which a bounded number stays in memory
    if info.name.endswith((_STACK_END, _BIAS_END)):
        return Fraction(spec.num_experts_per_tok, spec.num_experts)
    if info.name == _EMBEDDING and not spec.tied_output:
        return Fraction(1, spec.vocab_size)
    return Fraction(1)
