"""Which tensors a model needs, with their shapes: the one list of the names of the `qwen35` architectures.

Shapes are in numpy order: a weight is [out, in], a stack of experts [experts, out, in]. Any tensor may have
any type that the reader knows; whoever loads it goes by the type it has.

What converters do differently is written as alternatives: fused or split matrices, a shape with or without a
leading 1, a name with or without `.bias`. Tensors that the table does not list are judged by where they are:
inside a block they would change the result, so they are refused; outside (vision towers `v.*`, projectors
`mm.*`, `mtp.*`) they belong to something else and are only reported.
"""

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Final

from coldstream.errors import InconsistentError, UnsupportedError
from coldstream.gguf.messages import INCOMPLETE, RECONVERT, shorten
from coldstream.gguf.reader import TensorInfo

if TYPE_CHECKING:
    from coldstream.models.spec import ModelSpec

Shape = tuple[int, ...]
Group = dict[str, tuple[Shape, ...]]  # tensors that come together: name → the shapes it may have
Requirement = tuple[
    Group, ...
]  # alternatives, of which the file must hold one; an empty group makes it optional

_BLOCK_NAME: Final = re.compile(r"blk\.([0-9]{1,9})\.")


def global_tensors(spec: "ModelSpec") -> tuple[Requirement, ...]:
    """The tensors outside the blocks."""
    table: Shape = (spec.vocab_size, spec.hidden_size)
    output: Requirement = ({"output.weight": (table,)},)
    return (
        ({"token_embd.weight": (table,)},),
        ({"output_norm.weight": ((spec.hidden_size,),)},),
        *(() if spec.tied_output else (output,)),
    )


def block_tensors(spec: "ModelSpec", block: int) -> tuple[Requirement, ...]:
    """The tensors of one block: of the trunk, or from `spec.num_layers` on an MTP block."""
    prefix = f"blk.{block}."
    mixer = _delta_net(spec) if spec.block_kind(block) == "delta_net" else _attention(spec)
    norms = _each(
        {"attn_norm.weight": (spec.hidden_size,), "post_attention_norm.weight": (spec.hidden_size,)}
    )
    feed_forward = _experts(spec) if spec.is_moe else _dense(spec)
    nextn = _nextn(spec) if block >= spec.num_layers else ()
    return tuple(
        tuple({prefix + name: shapes for name, shapes in group.items()} for group in requirement)
        for requirement in (*norms, *mixer, *feed_forward, *nextn)
    )


def validate_tensors(
    spec: "ModelSpec", tensors: Mapping[str, TensorInfo], path: Path = Path("model")
) -> tuple[str, ...]:
    """Checks that `tensors` are those that `spec` needs, and returns the names of others that were ignored.

    Raises InconsistentError (missing, or another shape than expected) or UnsupportedError (a tensor within a
    block whose meaning is unknown), naming `path`, the tensor, where it lies and both shapes. Reads nothing.
    """
    _refuse_scaled_weights(tensors, path)
    known: set[str] = set()
    for requirement in _requirements(spec):
        known.update(_check(requirement, tensors, path))
    others = tuple(name for name in tensors if name not in known)
    for name in others:
        match = _BLOCK_NAME.match(name)
        if not match:
            continue
        if int(match[1]) >= spec.num_blocks:
            problem = f"lies outside the {spec.num_blocks} blocks that the metadata declare: {RECONVERT}"
            raise InconsistentError(f"{_place(tensors[name], path)} {problem}")
        raise UnsupportedError(
            f"{_place(tensors[name], path)} has no known meaning in a {spec.architecture} block"
        )
    return others


def _requirements(spec: "ModelSpec") -> Iterator[Requirement]:
    yield from global_tensors(spec)
    for block in range(spec.num_blocks):
        yield from block_tensors(spec, block)


def _each(shapes: Mapping[str, Shape]) -> tuple[Requirement, ...]:
    """Every one of these tensors, on its own, with one shape."""
    return tuple(({name: (shape,)},) for name, shape in shapes.items())


def _group(shapes: Mapping[str, Shape]) -> Group:
    return {name: (shape,) for name, shape in shapes.items()}


def _attention(spec: "ModelSpec") -> tuple[Requirement, ...]:
    hidden, kv_rows = spec.hidden_size, spec.kv_dim
    query_rows = 2 * spec.query_dim  # each head's query, then its gate
    split = _group(
        {
            "attn_q.weight": (query_rows, hidden),
            "attn_k.weight": (kv_rows, hidden),
            "attn_v.weight": (kv_rows, hidden),
        }
    )
    fused = _group({"attn_qkv.weight": (query_rows + 2 * kv_rows, hidden)})
    others = {
        "attn_output.weight": (hidden, spec.query_dim),
        "attn_q_norm.weight": (spec.head_dim,),
        "attn_k_norm.weight": (spec.head_dim,),
    }
    return ((split, fused), *_each(others))


def _delta_net(spec: "ModelSpec") -> tuple[Requirement, ...]:
    hidden, heads = spec.hidden_size, spec.num_value_heads
    bias: Requirement = ({"ssm_dt.bias": ((heads,),)}, {"ssm_dt": ((heads,),)})
    others = {
        "attn_qkv.weight": (spec.conv_dim, hidden),
        "attn_gate.weight": (spec.value_dim, hidden),
        "ssm_alpha.weight": (heads, hidden),
        "ssm_beta.weight": (heads, hidden),
        "ssm_a": (heads,),
        "ssm_conv1d.weight": (spec.conv_dim, spec.conv_kernel),
        "ssm_norm.weight": (spec.ssm_state_size,),
        "ssm_out.weight": (hidden, spec.value_dim),
    }
    return (bias, *_each(others))


def _dense(spec: "ModelSpec") -> tuple[Requirement, ...]:
    assert spec.intermediate_size is not None
    hidden, size = spec.hidden_size, spec.intermediate_size
    return _each(
        {
            "ffn_gate.weight": (size, hidden),
            "ffn_up.weight": (size, hidden),
            "ffn_down.weight": (hidden, size),
        }
    )


def _experts(spec: "ModelSpec") -> tuple[Requirement, ...]:
    hidden, experts = spec.hidden_size, spec.num_experts
    size, shared = spec.expert_ffn_size, spec.shared_expert_ffn_size
    split = _group(
        {"ffn_gate_exps.weight": (experts, size, hidden), "ffn_up_exps.weight": (experts, size, hidden)}
    )
    fused = _group(
        {"ffn_gate_up_exps.weight": (experts, 2 * size, hidden)}
    )  # of each expert gate rows, then up
    shared_gate: Group = {"ffn_gate_inp_shexp.weight": ((hidden,), (1, hidden))}
    others = {
        "ffn_gate_inp.weight": (experts, hidden),
        "ffn_down_exps.weight": (experts, hidden, size),
        "ffn_gate_shexp.weight": (shared, hidden),
        "ffn_up_shexp.weight": (shared, hidden),
        "ffn_down_shexp.weight": (hidden, shared),
    }
    return ((split, fused), (shared_gate,), *_each(others))


def _nextn(spec: "ModelSpec") -> tuple[Requirement, ...]:
    hidden = spec.hidden_size
    table = (spec.vocab_size, hidden)
    required = {
        "nextn.eh_proj.weight": (hidden, 2 * hidden),
        "nextn.enorm.weight": (hidden,),
        "nextn.hnorm.weight": (hidden,),
        "nextn.shared_head_norm.weight": (hidden,),
    }
    own_tables = {"nextn.embed_tokens.weight": table, "nextn.shared_head_head.weight": table}
    return (*_each(required), *((*requirement, {}) for requirement in _each(own_tables)))


def _check(requirement: Requirement, tensors: Mapping[str, TensorInfo], path: Path) -> Group:
    """The group of `requirement` that the file holds, after comparing shapes."""
    whole = [group for group in requirement if group and all(name in tensors for name in group)]
    if len(whole) > 1:
        one, other = (next(iter(group)) for group in whole[:2])
        raise InconsistentError(f"{shorten(path)}: both {one} and {other} are present: {RECONVERT}")
    if not whole:
        if {} in requirement:
            return {}
        closest = max(requirement, key=lambda group: sum(name in tensors for name in group))
        missing = next(name for name in closest if name not in tensors)
        shape = list(closest[missing][0])
        raise InconsistentError(f"{shorten(path)}: the tensor {missing} {shape} is missing: {INCOMPLETE}")
    for name, shapes in whole[0].items():
        if tensors[name].shape not in shapes:
            expected = " or ".join(str(list(shape)) for shape in shapes)
            problem = f"has shape {list(tensors[name].shape)}, expected {expected}: {RECONVERT}"
            raise InconsistentError(f"{_place(tensors[name], path)} {problem}")
    return whole[0]


def _refuse_scaled_weights(tensors: Mapping[str, TensorInfo], path: Path) -> None:
    """NVFP4 files keep a factor of each weight in a tensor beside it; products without it would be wrong."""
    for name, info in tensors.items():
        stem = name.removesuffix(".scale").removesuffix(".input_scale")
        if stem != name and f"{stem}.weight" in tensors:
            problem = (
                f"scales {stem}.weight (an NVFP4 file), which is not supported: choose another quantisation"
            )
            raise UnsupportedError(f"{_place(info, path)} {problem}")


def _place(info: TensorInfo, path: Path) -> str:
    part = f" of part {info.shard + 1}" if info.shard else ""
    return f"{shorten(path)}: the tensor {info.name} (data at byte {info.offset}{part})"
