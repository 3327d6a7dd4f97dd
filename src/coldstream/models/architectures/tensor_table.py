"""Which tensors a model needs, with their shapes, and the comparison of a file with that list.

`architectures/` lists the tensors of a block. Any tensor may have any type that the reader knows.

A tensor that the table does not list is refused inside a block, or beside the embedding and the output,
where it would change the result. Otherwise (vision towers `v.*`, projectors `mm.*`, `mtp.*`) it belongs to
something else and is only reported.
"""

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final

from coldstream.errors import InconsistentError, UnsupportedError
from coldstream.gguf.messages import INCOMPLETE, RECONVERT, shorten
from coldstream.gguf.reader import TensorInfo
from coldstream.models.architectures import ARCHITECTURES
from coldstream.models.spec.layer_tensors import (
    NGRAM_TABLE,
    ROPE_FACTORS,
    Group,
    Requirement,
    Shape,
    each,
    mixer_tensors,
    nextn_tensors,
    norm_tensors,
    post_norm_tensors,
    stream_tensors,
)
from coldstream.models.spec.model_spec import ModelSpec

# Beginnings of names of tensors that change what a model of text computes, such as factors of frequencies.
_OF_TEXT: Final = ("token_", "position_", "output", "rope_", "cls", "per_layer_")
_BLOCK_NAME: Final = re.compile(r"blk\.([0-9]{1,9})\.")


def global_tensors(spec: ModelSpec) -> tuple[Requirement, ...]:
    """The tensors outside the blocks."""
    table: Shape = (spec.vocab_size, spec.hidden_size)
    output: Requirement = ({"output.weight": (table,)},)
    streams = spec.hyper_connections
    return (
        ({"token_embd.weight": (table,)},),
        *(
            each({"output_norm.weight": (spec.hidden_size,)})
            if streams is None
            else mixer_tensors(streams, spec.hidden_size, "output_hc")
        ),
        *(() if spec.tied_output else (output,)),
        *_rope_factors(spec),
    )


def _rope_factors(spec: ModelSpec) -> tuple[Requirement, ...]:
    """What divides frequencies, for as many pairs as rotate in the layers that have it."""
    sizes = {each.rope.num_dims // 2 for each in spec.attentions if each.rope_factors}
    return tuple(({ROPE_FACTORS: ((size,),)},) for size in sizes)


def block_tensors(spec: ModelSpec, block: int) -> tuple[Requirement, ...]:
    """The tensors of one block: of the trunk, or from `spec.num_layers` on an MTP block."""
    prefix = f"blk.{block}."
    architecture = ARCHITECTURES[spec.architecture]
    layer, hidden = spec.blocks[block], spec.hidden_size
    streams = layer.hyper_connections
    norms = (
        norm_tensors(architecture.ffn_norm, hidden)
        if streams is None
        else stream_tensors(streams, hidden, "hc_attn", "hc_ffn")
    )
    parts = architecture.block_tensors(layer, hidden)
    nextn = nextn_tensors(hidden, spec.vocab_size, streams) if block >= spec.num_layers else ()
    return tuple(
        tuple({prefix + name: shapes for name, shapes in group.items()} for group in requirement)
        for requirement in (*norms, *post_norm_tensors(layer, hidden), *parts, *nextn)
    )


def validate_tensors(
    spec: ModelSpec, tensors: Mapping[str, TensorInfo], path: Path = Path("model")
) -> tuple[str, ...]:
    """Checks that `tensors` has what `spec` needs, and returns the names of tensors that were ignored.

    Raises InconsistentError for a tensor that is missing or has another shape than expected, and
    UnsupportedError for one within a block whose meaning is unknown. They name `path`, the tensor, where it
    lies and both shapes. Reads nothing.
    """
    _refuse_scaled_weights(spec, tensors, path)
    known = set(_ngram_table(spec, tensors, path))
    for requirement in _requirements(spec):
        known.update(_check(requirement, tensors, path))
    others = tuple(name for name in tensors if name not in known)
    for name in others:
        match = _BLOCK_NAME.match(name)
        if not match:
            if name.startswith(_OF_TEXT):
                problem = f"has no known meaning in a {spec.architecture} model"
                raise UnsupportedError(f"{_place(tensors[name], path)} {problem}")
            continue
        if int(match[1]) >= spec.num_blocks:
            problem = f"lies outside the {spec.num_blocks} blocks that the metadata declare: {RECONVERT}"
            raise InconsistentError(f"{_place(tensors[name], path)} {problem}")
        raise UnsupportedError(
            f"{_place(tensors[name], path)} has no known meaning in a {spec.architecture} block"
        )
    return others


def _requirements(spec: ModelSpec) -> Iterator[Requirement]:
    yield from global_tensors(spec)
    for block in range(spec.num_blocks):
        yield from block_tensors(spec, block)


def _ngram_table(spec: ModelSpec, tensors: Mapping[str, TensorInfo], path: Path) -> tuple[str, ...]:
    """The table of n-grams that a model may need; converters pad its rows."""
    if spec.ngram is None:
        return ()
    columns, least = spec.ngram.columns, spec.ngram.least_rows
    info = tensors.get(NGRAM_TABLE)
    if info is None:
        raise InconsistentError(
            f"{shorten(path)}: the tensor {NGRAM_TABLE} [{least}, {columns}] is missing: {INCOMPLETE}"
        )
    if len(info.shape) != 2 or info.shape[0] < least or info.shape[1] != columns:
        problem = f"has shape {list(info.shape)}, expected [{least} or more, {columns}]: {RECONVERT}"
        raise InconsistentError(f"{_place(info, path)} {problem}")
    return (NGRAM_TABLE,)


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


def _refuse_scaled_weights(spec: ModelSpec, tensors: Mapping[str, TensorInfo], path: Path) -> None:
    """NVFP4 files keep a factor of each weight in a tensor beside it; products without it would be wrong.

    Tensors of these names that belong to the model are read.
    """
    own = {name for requirement in _requirements(spec) for group in requirement for name in group}
    for name, info in tensors.items():
        stem = name.removesuffix(".scale").removesuffix(".input_scale")
        if stem != name and name not in own and f"{stem}.weight" in tensors:
            problem = (
                f"scales {stem}.weight (an NVFP4 file), which is not supported: choose another quantisation"
            )
            raise UnsupportedError(f"{_place(info, path)} {problem}")


def _place(info: TensorInfo, path: Path) -> str:
    part = f" of part {info.shard + 1}" if info.shard else ""
    return f"{shorten(path)}: the tensor {info.name} (data at byte {info.offset}{part})"
