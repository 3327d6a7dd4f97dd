"""Reads the layers of a model from the keys that families share.

A family passes as arguments what no key states (gates, norms, the order of heads).

Every function takes the `Hyperparameters` of a file and raises InconsistentError, LimitError or
UnsupportedError naming the key that is wrong.
"""

import math
from collections.abc import Container
from dataclasses import dataclass, replace
from typing import Final

from coldstream.errors import UnsupportedError
from coldstream.kernels.ops import (
    GATINGS,
    PLAIN_RULE,
    SWIGLU,
    Activation,
    OutputGate,
    RopeSpec,
    RouterSpec,
)
from coldstream.models.spec.hyperparameters import MAX_BLOCKS, MAX_HEADS, Hyperparameters
from coldstream.models.spec.layer_specs import (
    AttentionSpec,
    DeltaNetSpec,
    DenseFfnSpec,
    LayerKind,
    LayerSpec,
    MoeSpec,
    QkNorm,
    SharedExpert,
)
from coldstream.models.spec.rope_keys import USUAL_YARN, YarnRules, read_scaling

CLAMPED_LIMIT: Final = 7.0
# Ollama's converter has a name of its own for the same key.
NORM_KEYS: Final = ("expert_weights_norm", "norm_top_k_prob")


@dataclass(frozen=True)
class WindowPattern:
    """Which layers of a family have a window where no key says it, and how they rotate."""

    period: int  # of each so many layers, one sees all positions
    is_full_first: bool  # whether that is the first of them, or the last
    is_scaled: (
        bool  # whether these layers rotate like the others, scaling included; else by a base of their own
    )
    is_required: bool = False  # whether a file has to state the window
    has_heads: bool = False  # whether these layers have a key for the size of their heads

    def is_windowed(self, layer: int, period: int) -> bool:
        """Whether a layer has a window, with a period that the file may state."""
        return layer % period != (0 if self.is_full_first else period - 1)


# Of families whose files state the pattern, if they state a window at all.
_STATED: Final = WindowPattern(period=0, is_full_first=False, is_scaled=True)


def read_attention(
    keys: Hyperparameters,
    *,
    output_gate: OutputGate,
    qk_norm: QkNorm,
    rotates_whole_heads: bool = False,
    windows: WindowPattern = _STATED,
    yarn: YarnRules = USUAL_YARN,
) -> tuple[AttentionSpec, ...]:
    """The attention of each block [num_blocks]; one that does not attend has that of another block.

    rotates_whole_heads: the default without a key for it.
    """
    head_counts = keys.per_block("attention.head_count", MAX_HEADS)
    kv_head_counts = keys.per_block("attention.head_count_kv", max(head_counts))
    for count, kv_count in zip(head_counts, kv_head_counts, strict=True):
        if count % kv_count:
            raise keys.inconsistent("attention.head_count_kv", f"{kv_count} for {count} heads")
    full = AttentionSpec(
        num_heads=head_counts[0],
        num_kv_heads=kv_head_counts[0],
        head_dim=_read_head_dim(keys),
        rope=RopeSpec(0, 1.0),
        output_gate=output_gate,
        qk_norm=qk_norm,
        causal=keys.flag("attention.causal", True),
    )
    full = replace(full, rope=_read_rope(keys, full.head_dim, rotates_whole_heads, yarn))
    _check_scale(keys, full.head_dim)
    windowed = _windowed_blocks(keys, windows)
    of_windows = _with_window(keys, full, windows) if any(windowed) else full
    kinds = [of_windows if flag else full for flag in windowed]
    return tuple(
        replace(kind, num_heads=count, num_kv_heads=kv_count)
        for kind, count, kv_count in zip(kinds, head_counts, kv_head_counts, strict=True)
    )


def _read_head_dim(keys: Hyperparameters, end: str = "") -> int:
    head_dim = keys.integer(f"attention.key_length{end}", 1, 1024)
    value_length = keys.integer(f"attention.value_length{end}", 1, 1024, head_dim)
    if value_length != head_dim:
        raise keys.inconsistent(f"attention.value_length{end}", f"{value_length}, the keys have {head_dim}")
    return head_dim


def _check_scale(keys: Hyperparameters, head_dim: int) -> None:
    """Refuses a scale of scores that other programs would not follow in files of these families."""
    scale = keys.number("attention.scale", 0.0, 1e6, 0.0)
    if scale != 0 and not math.isclose(scale, 1 / math.sqrt(head_dim), rel_tol=1e-6):
        raise keys.error(UnsupportedError, "attention.scale", f"{scale}, supported: 1 / sqrt(head size)")


def _read_rope(keys: Hyperparameters, head_dim: int, rotates_whole_heads: bool, yarn: YarnRules) -> RopeSpec:
    """The rotary embedding of layers that see all positions."""
    rope = RopeSpec(
        _read_rope_dims(keys, "rope.dimension_count", head_dim, head_dim if rotates_whole_heads else None),
        keys.number("rope.freq_base", 1.0, 1e12),
    )
    context_length = keys.integer("context_length", 1, 1 << 24)
    scaling = read_scaling(keys.keys, keys.architecture, rope, context_length, yarn)
    return replace(rope, scaling=scaling)


def _read_rope_dims(keys: Hyperparameters, name: str, head_dim: int, default: int | None) -> int:
    rope_dims = keys.integer(name, 2, head_dim, default)
    if rope_dims % 2:
        raise keys.inconsistent(name, f"{rope_dims}, expected an even number")
    return rope_dims


def _with_window(keys: Hyperparameters, full: AttentionSpec, windows: WindowPattern) -> AttentionSpec:
    """The attention of layers with a window, which may rotate in another way than `full`."""
    head_dim = _read_head_dim(keys, "_swa") if windows.has_heads else full.head_dim
    rope = RopeSpec(
        _read_rope_dims(keys, "rope.dimension_count_swa", head_dim, min(head_dim, full.rope.num_dims)),
        keys.number("rope.freq_base_swa", 1.0, 1e12, full.rope.theta if windows.is_scaled else None),
    )
    if windows.is_scaled and full.rope.scaling is not None:
        if rope != replace(full.rope, scaling=None):
            problem = f"{rope.theta:g}, supported: one rotary embedding where windows are scaled"
            raise keys.error(UnsupportedError, "rope.freq_base_swa", problem)
        rope = full.rope
    window = keys.integer("attention.sliding_window", 1, 1 << 32)
    return replace(full, head_dim=head_dim, rope=rope, window=window)


def _windowed_blocks(keys: Hyperparameters, windows: WindowPattern) -> tuple[bool, ...]:
    """Whether each block has a window; a block for multi-token prediction has none."""
    name = "attention.sliding_window"
    is_required = windows.is_required
    window = keys.integer(name, int(is_required), 1 << 32, None if is_required else 0)  # 0 means none
    flags: tuple[bool, ...] = (False,) * keys.num_layers
    pattern = f"{name}_pattern"
    if window and pattern in keys and keys.is_array(pattern):
        flags = keys.flags_per_layer(pattern)
    elif window and (windows.period or pattern in keys):
        period = keys.integer(pattern, 1, MAX_BLOCKS, windows.period or None)
        flags = tuple(windows.is_windowed(layer, period) for layer in range(keys.num_layers))
    elif 0 < window < keys.integer("context_length", 1, 1 << 24):
        problem = f"{window}, supported: all positions, or windows of the layers that {pattern} names"
        raise keys.error(UnsupportedError, name, problem)
    return flags + (False,) * keys.num_nextn_layers


def read_delta_net(keys: Hyperparameters, *, value_heads_grouped: bool) -> DeltaNetSpec:
    """The gated DeltaNet of all layers that have one."""
    num_value_heads = keys.integer("ssm.time_step_rank", 1, MAX_HEADS)
    spec = DeltaNetSpec(
        conv_kernel=keys.integer("ssm.conv_kernel", 2, 16),
        state_size=keys.integer("ssm.state_size", 1, 1024),
        num_key_heads=keys.integer("ssm.group_count", 1, num_value_heads),
        num_value_heads=num_value_heads,
        value_heads_grouped=value_heads_grouped,
    )
    if num_value_heads % spec.num_key_heads:
        problem = f"{num_value_heads} value heads for {spec.num_key_heads} key heads: not a multiple"
        raise keys.inconsistent("ssm.time_step_rank", problem)
    inner_size = keys.integer("ssm.inner_size", 1, 1 << 20, spec.value_dim)
    if inner_size != spec.value_dim:
        problem = f"{inner_size}, but {num_value_heads} heads of {spec.state_size} make {spec.value_dim}"
        raise keys.inconsistent("ssm.inner_size", problem)
    return spec


def read_moe(
    keys: Hyperparameters,
    *,
    shared: SharedExpert,
    router: RouterSpec | None = None,
    activation: Activation = SWIGLU,
    bias: bool = False,
) -> MoeSpec:
    """The mixture of experts of all layers that have one. router: by default that of `read_router`."""
    router = router or read_router(keys)
    num_experts = keys.integer("expert_count", 1, 4096)
    num_candidates = _candidates(keys, router, num_experts)
    return MoeSpec(
        num_experts=num_experts,
        num_experts_per_tok=keys.integer("expert_used_count", 1, num_candidates),
        ffn_size=keys.uniform("expert_feed_forward_length", 1 << 16),
        router=router,
        shared=shared,
        shared_ffn_size=_shared_ffn_size(keys, shared),
        activation=activation,
        bias=bias,
    )


def _shared_ffn_size(keys: Hyperparameters, shared: SharedExpert) -> int:
    """The shared expert's: a key of its own, or as large as so many routed experts."""
    if shared == "none":
        return 0
    if shared == "parallel":
        return keys.uniform("feed_forward_length", 1 << 18)
    count_key, size_key = "expert_shared_count", "expert_shared_feed_forward_length"
    if count_key not in keys or size_key in keys:
        return keys.uniform(size_key, 1 << 16)
    count = keys.integer(count_key, 1, 64)
    return count * keys.uniform("expert_feed_forward_length", (1 << 16) // count)


def read_clamped_swiglu(keys: Hyperparameters) -> Activation:
    """The clamped SwiGLU of gpt-oss, whose limit no key states in most files."""
    return Activation("clamped swiglu", keys.number("swiglu_clamp_exp", 1e-6, 1e6, CLAMPED_LIMIT))


def read_router(
    keys: Hyperparameters, usual: RouterSpec = PLAIN_RULE.spec, *, is_fixed: bool = True
) -> RouterSpec:
    """The router of all layers with experts: `usual`, unless keys state otherwise.

    is_fixed: the family's own code reads no such keys. UnsupportedError then for one that states otherwise.
    """
    number = keys.integer("expert_gating_func", 0, 1 << 32, 0)  # 0: not stated
    if number and number not in GATINGS:
        raise keys.error(UnsupportedError, "expert_gating_func", f"{number}, known: 1 to {max(GATINGS)}")
    norms = {name: keys.flag(name) for name in NORM_KEYS if name in keys}
    if len(set(norms.values())) > 1:
        raise keys.inconsistent(NORM_KEYS[1], f"{norms[NORM_KEYS[1]]}, but {NORM_KEYS[0]} says otherwise")
    stated = replace(
        usual,
        gating=GATINGS.get(number, usual.gating),
        normalised=all(norms.values()) if norms else usual.normalised,
        scale=keys.number("expert_weights_scale", 0.0, 1e6, usual.scale) or 1.0,  # 0 means none
        num_groups=keys.integer("expert_group_count", 0, 4096, usual.num_groups) or 1,
    )
    if is_fixed:
        _refuse_other_router(keys, stated, usual)
    if stated.num_groups == 1:
        return stated
    num_used = keys.integer("expert_group_used_count", 1, stated.num_groups)
    if num_used == stated.num_groups:  # all experts may be chosen
        return replace(stated, num_groups=1)
    return replace(stated, num_used_groups=num_used)


def _refuse_other_router(keys: Hyperparameters, stated: RouterSpec, usual: RouterSpec) -> None:
    number = next(number for number, gating in GATINGS.items() if gating == usual.gating)
    weights = "normalised expert weights" if usual.normalised else "expert weights as they are"
    for key, is_usual, supported in (
        ("expert_gating_func", stated.gating == usual.gating, f"{usual.gating} ({number})"),
        *((name, stated.normalised == usual.normalised, weights) for name in NORM_KEYS),
        ("expert_weights_scale", stated.scale == usual.scale, f"{usual.scale:g}"),
        ("expert_group_count", stated.num_groups == usual.num_groups, f"{usual.num_groups}"),
    ):
        if key in keys and not is_usual:
            problem = f"{keys.value(key)}, supported: {supported}"
            raise keys.error(UnsupportedError, key, problem)


def _candidates(keys: Hyperparameters, router: RouterSpec, num_experts: int) -> int:
    """Experts that a token chooses from: all, or those of the groups that it uses."""
    size, left = divmod(num_experts, router.num_groups)
    if left or (router.num_groups > 1 and size < 2):
        problem = f"{router.num_groups} groups of {num_experts} experts, expected equal ones of at least 2"
        raise keys.inconsistent("expert_group_count", problem)
    return size * router.num_used_groups


def read_dense_ffn(keys: Hyperparameters, activation: Activation = SWIGLU) -> DenseFfnSpec:
    """The feed-forward network of all layers without experts."""
    return DenseFfnSpec(keys.uniform("feed_forward_length", 1 << 18), activation)


def read_ffns(keys: Hyperparameters, moe: MoeSpec) -> tuple[MoeSpec | DenseFfnSpec, ...]:
    """Those of all blocks [num_blocks]: `moe`, but dense in as many layers at first as a key says."""
    num_dense = keys.integer("leading_dense_block_count", 0, keys.num_layers - 1, 0)
    dense = (read_dense_ffn(keys),) * num_dense if num_dense else ()
    return (*dense, *(moe,) * (keys.num_blocks - num_dense))


def hybrid_layers(
    keys: Hyperparameters,
    attentions: tuple[AttentionSpec, ...],
    delta_net: DeltaNetSpec,
    ffn: MoeSpec | DenseFfnSpec,
) -> tuple[LayerSpec, ...]:
    """Layers of two kinds of mixer [num_blocks]; blocks for multi-token prediction always attend.

    attentions: of all blocks, as `read_attention` gives it.
    """
    recurrent = [kind == "delta_net" for kind in layer_kinds(keys, keys.tensors)]
    recurrent += [False] * keys.num_nextn_layers
    return tuple(
        LayerSpec(delta_net if flag else attention, ffn)
        for flag, attention in zip(recurrent, attentions, strict=True)
    )


def layer_kinds(keys: Hyperparameters, tensor_names: Container[str]) -> tuple[LayerKind, ...]:
    """The mixer of each layer of the trunk, by the tensors present, which the keys must not contradict."""
    recurrent = tuple(f"blk.{layer}.ssm_a" in tensor_names for layer in range(keys.num_layers))
    declared = _declared_recurrent(keys)
    if declared is not None and declared[1] != recurrent:
        name, flags = declared
        layer = next(layer for layer, flag in enumerate(flags) if flag != recurrent[layer])
        kind, tensor = ("a gated DeltaNet", "missing") if flags[layer] else ("attention", "present")
        raise keys.inconsistent(
            name, f"makes layer {layer} {kind}, but the tensor blk.{layer}.ssm_a is {tensor}"
        )
    return tuple("delta_net" if flag else "attention" for flag in recurrent)


def _declared_recurrent(keys: Hyperparameters) -> tuple[str, tuple[bool, ...]] | None:
    """The key that states each layer's mixer, and its flags: True for a DeltaNet, False for attention.

    None without such a key, as in some of Ollama's files and early ones of `qwen3next`.
    """
    name = "attention.recurrent_layers"
    if name in keys:
        return name, keys.flags_per_layer(name)
    name = "full_attention_interval"
    if name in keys:
        interval = keys.integer(name, 1, MAX_BLOCKS)
        return name, tuple((layer + 1) % interval != 0 for layer in range(keys.num_layers))
    name = "attention.head_count_kv"
    counts = keys.per_layer(name, MAX_HEADS)
    return (name, tuple(count == 0 for count in counts)) if 0 in counts else None
