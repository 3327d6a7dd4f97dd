"""ModelSpec: the numbers of a model, taken from its metadata and tensor table and checked against each other.

Knows the architectures `qwen35` (dense) and `qwen35moe` with the variants that their converters write, and
nothing of weights, devices or layers. A spec that exists is consistent: every number lies in a sane range,
and every tensor that the model needs is present with the shape that the numbers imply.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, Self

from coldstream.errors import InconsistentError
from coldstream.gguf.messages import INCOMPLETE, RECONVERT, shorten
from coldstream.gguf.metadata import Metadata, Value
from coldstream.gguf.reader import TensorInfo
from coldstream.models.hyperparameters import MAX_HEADS, Hyperparameters
from coldstream.models.tensor_table import validate_tensors

LayerKind = Literal["attention", "delta_net"]


@dataclass(frozen=True)
class ModelSpec:
    """Names follow the Hugging Face configuration; sizes are in elements. Dense models have num_experts = 0.

    The blocks of the file are the layers of the trunk, 0 … num_layers − 1, then num_nextn_layers blocks that
    predict further tokens (MTP) and take no part in the forward pass.
    """

    architecture: str
    num_layers: int
    num_nextn_layers: int
    hidden_size: int
    vocab_size: int
    context_length: int
    rms_norm_eps: float
    tied_output: bool  # the output matrix is the embedding table
    layer_kinds: tuple[LayerKind, ...]  # [num_layers]

    num_heads: int
    num_kv_heads: int
    head_dim: int
    rope_dims: int  # of each head's head_dim
    rope_theta: float

    conv_kernel: int
    ssm_state_size: int  # head size of keys and of values in the gated DeltaNet
    num_key_heads: int
    num_value_heads: int
    value_heads_grouped: bool

    intermediate_size: int | None  # None in MoE models
    num_experts: int
    num_experts_per_tok: int
    expert_ffn_size: int
    shared_expert_ffn_size: int

    @property
    def is_moe(self) -> bool:
        return self.num_experts > 0

    @property
    def num_blocks(self) -> int:
        """Layers of the trunk and MTP blocks together."""
        return self.num_layers + self.num_nextn_layers

    @property
    def query_dim(self) -> int:
        """Width of all query heads together; the query projection has twice as many rows (query and gate)."""
        return self.num_heads * self.head_dim

    @property
    def kv_dim(self) -> int:
        """Width of all keys (or values) of attention together."""
        return self.num_kv_heads * self.head_dim

    @property
    def key_dim(self) -> int:
        """Width of all DeltaNet keys (or queries) together."""
        return self.num_key_heads * self.ssm_state_size

    @property
    def value_dim(self) -> int:
        """Width of all DeltaNet values together."""
        return self.num_value_heads * self.ssm_state_size

    @property
    def conv_dim(self) -> int:
        """Channels of the causal convolution: queries, keys and values."""
        return 2 * self.key_dim + self.value_dim

    @property
    def key_head_ids(self) -> tuple[int, ...]:
        """Which key head each value head reads, [num_value_heads].

        GGUF writers tile the value heads (head h reads key head h mod num_key_heads). Ollama's first
        converter left them grouped (h div the number of value heads per key head), as in the original
        checkpoints.
        """
        if self.value_heads_grouped:
            per_key_head = self.num_value_heads // self.num_key_heads
            return tuple(head // per_key_head for head in range(self.num_value_heads))
        return tuple(head % self.num_key_heads for head in range(self.num_value_heads))

    def block_kind(self, block: int) -> LayerKind:
        """The mixer of a block; MTP blocks always use attention."""
        return self.layer_kinds[block] if block < self.num_layers else "attention"

    @classmethod
    def from_gguf(cls, metadata: Mapping[str, Value], tensors: Mapping[str, TensorInfo]) -> Self:
        """The spec of the model that `metadata` and `tensors` (name → TensorInfo) describe.

        Raises UnsupportedError for files that are something else than a whole model of a known architecture,
        and InconsistentError or LimitError naming the key or tensor that is wrong. Give a `Metadata` for
        messages that name the file and the byte.
        """
        keys = metadata if isinstance(metadata, Metadata) else Metadata(metadata, {})
        numbers = Hyperparameters(keys, tensors)
        is_moe = numbers.architecture == "qwen35moe"
        num_heads = numbers.uniform("attention.head_count", MAX_HEADS)
        head_dim = numbers.integer("attention.key_length", 1, 1024)
        num_value_heads = numbers.integer("ssm.time_step_rank", 1, MAX_HEADS)
        num_experts = numbers.integer("expert_count", 1, 4096) if is_moe else 0
        spec = cls(
            architecture=numbers.architecture,
            num_layers=numbers.num_layers,
            num_nextn_layers=numbers.num_blocks - numbers.num_layers,
            hidden_size=numbers.integer("embedding_length", 1, 1 << 16),
            vocab_size=_vocab_size(keys, tensors),
            context_length=numbers.integer("context_length", 1, 1 << 24),
            rms_norm_eps=numbers.number("attention.layer_norm_rms_epsilon", 1e-12, 0.1),
            tied_output="output.weight" not in tensors,
            layer_kinds=_layer_kinds(numbers, tensors),
            num_heads=num_heads,
            num_kv_heads=numbers.uniform("attention.head_count_kv", num_heads),
            head_dim=head_dim,
            rope_dims=numbers.integer("rope.dimension_count", 2, head_dim),
            rope_theta=numbers.number("rope.freq_base", 1.0, 1e12),
            conv_kernel=numbers.integer("ssm.conv_kernel", 2, 16),
            ssm_state_size=numbers.integer("ssm.state_size", 1, 1024),
            num_key_heads=numbers.integer("ssm.group_count", 1, num_value_heads),
            num_value_heads=num_value_heads,
            value_heads_grouped=numbers.value_heads_grouped(),
            intermediate_size=None if is_moe else numbers.uniform("feed_forward_length", 1 << 18),
            num_experts=num_experts,
            num_experts_per_tok=numbers.integer("expert_used_count", 1, num_experts) if is_moe else 0,
            expert_ffn_size=numbers.uniform("expert_feed_forward_length", 1 << 16) if is_moe else 0,
            shared_expert_ffn_size=numbers.uniform("expert_shared_feed_forward_length", 1 << 16)
            if is_moe
            else 0,
        )
        _check_numbers(spec, numbers)
        validate_tensors(spec, tensors, keys.path)
        return spec


def _vocab_size(keys: Metadata, tensors: Mapping[str, TensorInfo]) -> int:
    if "token_embd.weight" not in tensors:
        raise InconsistentError(
            f"{shorten(keys.path)}: the tensor token_embd.weight is missing: {INCOMPLETE}"
        )
    vocab_size = tensors["token_embd.weight"].shape[0]
    tokens = keys.get("tokenizer.ggml.tokens")
    if isinstance(tokens, list) and len(tokens) != vocab_size:
        problem = f"{len(tokens)} tokens, but token_embd.weight has {vocab_size} rows: {RECONVERT}"
        raise keys.error(InconsistentError, "tokenizer.ggml.tokens", problem)
    return vocab_size


def _layer_kinds(numbers: Hyperparameters, tensors: Mapping[str, TensorInfo]) -> tuple[LayerKind, ...]:
    """By the tensors present, which the metadata must not contradict."""
    recurrent = tuple(f"blk.{layer}.ssm_a" in tensors for layer in range(numbers.num_layers))
    declared = numbers.declared_recurrent()
    if declared is not None and declared[1] != recurrent:
        name, flags = declared
        layer = next(layer for layer, flag in enumerate(flags) if flag != recurrent[layer])
        kind, tensor = ("a gated DeltaNet", "missing") if flags[layer] else ("attention", "present")
        raise numbers.inconsistent(
            name, f"makes layer {layer} {kind}, but the tensor blk.{layer}.ssm_a is {tensor}"
        )
    return tuple("delta_net" if flag else "attention" for flag in recurrent)


def _check_numbers(spec: ModelSpec, numbers: Hyperparameters) -> None:
    """The statements that hold between several keys."""
    if spec.num_heads % spec.num_kv_heads:
        raise numbers.inconsistent(
            "attention.head_count_kv", f"{spec.num_kv_heads} for {spec.num_heads} heads"
        )
    value_length = numbers.integer("attention.value_length", 1, 1024, spec.head_dim)
    if value_length != spec.head_dim:
        raise numbers.inconsistent("attention.value_length", f"{value_length}, the keys have {spec.head_dim}")
    if spec.rope_dims % 2:
        raise numbers.inconsistent("rope.dimension_count", f"{spec.rope_dims}, expected an even number")
    if spec.num_value_heads % spec.num_key_heads:
        problem = f"{spec.num_value_heads} value heads for {spec.num_key_heads} key heads: not a multiple"
        raise numbers.inconsistent("ssm.time_step_rank", problem)
    inner_size = numbers.integer("ssm.inner_size", 1, 1 << 20, spec.value_dim)
    if inner_size != spec.value_dim:
        problem = (
            f"{inner_size}, but {spec.num_value_heads} heads of {spec.ssm_state_size} make {spec.value_dim}"
        )
        raise numbers.inconsistent("ssm.inner_size", problem)
    vocab_size = numbers.integer("vocab_size", 1, 1 << 24, spec.vocab_size)
    if vocab_size != spec.vocab_size:
        raise numbers.inconsistent(
            "vocab_size", f"{vocab_size}, but token_embd.weight has {spec.vocab_size} rows"
        )
