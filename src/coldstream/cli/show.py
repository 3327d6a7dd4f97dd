"""`coldstream show`: the metadata and tensors of a model file. Reads the header only."""

import json
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

import click
import numpy as np

from coldstream.cli.model_argument import complete_model, model_or_bundled
from coldstream.cli.options import common_options, engine_config
from coldstream.cli.tables import print_pairs, print_table
from coldstream.cli.terminal import ProgressLine, format_bytes, format_count, note, visible
from coldstream.errors import ModelFormatError, UnsupportedError
from coldstream.gguf.hub import resolve_model
from coldstream.gguf.reader import GGUFFile, TensorInfo
from coldstream.models.dflash.file import DflashFile
from coldstream.models.dflash.metadata import ARCHITECTURES as DFLASH_ARCHITECTURES
from coldstream.models.footprint import active_parameters, bytes_per_token, num_parameters
from coldstream.models.mtp.sidecar import sidecar_blocks
from coldstream.models.read_spec import read_spec
from coldstream.models.spec.layer_specs import DenseFfnSpec
from coldstream.models.spec.model_spec import ModelSpec

_MAX_SHOWN_CHARS = 100
_MAX_SHOWN_ITEMS = 8


@click.command("show", short_help="Describe a model file.")
@click.argument("model", required=False, shell_complete=complete_model)
@click.option("--tensors", is_flag=True, help="List every tensor.")
@click.option("--json", "as_json", is_flag=True, help="One line of JSON instead of tables.")
@click.option("--offline", is_flag=True, help="Never ask the hub; use what is on this machine.")
@common_options
def command(model: str | None, tensors: bool, as_json: bool, offline: bool) -> None:
    """Describe MODEL, a file or org/repo[:QUANT]: numbers, quantisation, metadata. Weights are not read.

    Without MODEL: the bundled demo model.
    """
    with ProgressLine() as line:
        config = engine_config(model_or_bundled(model), {"offline": offline})
        path = resolve_model(config.model, offline=offline, progress=line.update)
    with GGUFFile.open(path) as file:
        try:
            spec, problem = read_spec(file.metadata, file.tensors), ""
        except UnsupportedError as error:
            # A sound file that this version has no code for can still be shown.
            spec, problem = None, str(error)
    if as_json:
        click.echo(json.dumps(_to_json(file, spec, problem, tensors)))
        return
    print_pairs(_summary(file, spec, problem))
    _print_types(file.tensors)
    metadata = {visible(key): _shorten(value) for key, value in file.metadata.readable.items()}
    print_pairs(metadata, title="metadata:")
    for warning in _warnings(file, spec):
        note(f"warning: {warning}")
    if tensors:
        _print_tensors(file.tensors)


def _warnings(file: GGUFFile, spec: ModelSpec | None) -> tuple[str, ...]:
    return file.metadata.warnings + (spec.warnings if spec else ())


def _summary(file: GGUFFile, spec: ModelSpec | None, problem: str) -> dict[str, str]:
    facts = {
        "file": visible(str(file.paths[0]))
        + (f" and {len(file.paths) - 1} more parts" if len(file.paths) > 1 else ""),
        "size": format_bytes(file.num_bytes),
        "parameters": format_count(num_parameters(file.tensors.values())),
    }
    if spec is None:
        return facts | _part_of_a_model(file) | _drafter(file) | {"cannot run": problem}
    counts = _by_window(each.window for each in spec.attentions)
    counts |= {"gated DeltaNet": spec.layer_kinds.count("delta_net")}
    facts |= {
        "active": f"{format_count(active_parameters(spec, file.tensors))} parameters and "
        f"{format_bytes(bytes_per_token(spec, file.tensors))} of weights a token",
        "architecture": spec.architecture,
        "layers": _joined(counts)
        + (f"; {spec.num_nextn_layers} for multi-token prediction" if spec.num_nextn_layers else ""),
        "hidden size": str(spec.hidden_size),
        "vocabulary": str(spec.vocab_size),
        "context": str(spec.context_length),
    }
    if spec.num_experts:
        beside = {"none": "", "parallel": ", and a dense network"}
        shared = beside.get(spec.moe.shared, ", and a shared one")
        where = "" if len(spec.placed_layers) == spec.num_layers else f" in {len(spec.placed_layers)} layers"
        facts["experts"] = f"{spec.num_experts} a layer, {spec.num_experts_per_tok} a token{shared}{where}"
    return facts


def _by_window(windows: Iterable[int | None]) -> dict[str, int]:
    """Layers of attention by what they see."""
    counts = Counter(windows)
    of_all = {"attention": counts.pop(None, 0)}
    return of_all | {f"attention in a window of {window}": count for window, count in counts.items()}


def _joined(counts: Mapping[str, int]) -> str:
    return " and ".join(f"{count} {mixer}" for mixer, count in counts.items() if count)


def _part_of_a_model(file: GGUFFile) -> dict[str, str]:
    """What a sidecar is and what it is for; nothing of any other file."""
    blocks = sidecar_blocks(file)
    if not blocks:
        return {}
    shares = "token_embd.weight" not in file.tensors
    return {
        "architecture": str(file.metadata["general.architecture"]),
        "layers": f"none but block {', '.join(map(str, blocks))}, for multi-token prediction (MTP)",
        "holds": f"a sidecar, which drafts for a model of {blocks[0]} layers as its --model-draft"
        + (", and shares that model's embedding and head" if shares else ""),
    }


def _drafter(file: GGUFFile) -> dict[str, str]:
    """What a DFlash drafter is and what it is for, or why it cannot draft; nothing of any other file."""
    if file.metadata.get("general.architecture") not in DFLASH_ARCHITECTURES:
        return {}
    try:
        with DflashFile.open(file.paths[0]) as drafter:
            spec = drafter.spec
    except ModelFormatError as error:
        return {"cannot draft": str(error)}
    layers = _joined(_by_window(layer.window for layer in spec.layers))
    target = "a model" if spec.num_target_layers is None else f"a model of {spec.num_target_layers} layers"
    aux_layers = ", ".join(map(str, spec.aux_layers))
    return {
        "architecture": "DFlash" if spec.second is None else "DFlash 2",
        "layers": layers + (", with biases" if spec.has_attention_bias else ""),
        "reads": f"residual streams after layers {aux_layers} of {target}",
        "hidden size": str(spec.hidden_size),
        "vocabulary": str(spec.vocab_size),
        "holds": f"a drafter of {spec.block_size - 1} tokens at once, for that model's --model-draft",
    }


def _type_rows(tensors: Mapping[str, TensorInfo]) -> list[dict[str, Any]]:
    """One row per tensor type, the one with the most bytes first."""
    rows: dict[str, dict[str, Any]] = {}
    for info in tensors.values():
        name = info.quant_type.name
        row = rows.setdefault(name, {"type": name, "tensors": 0, "parameters": 0, "bytes": 0})
        row["tensors"] += 1
        row["parameters"] += num_parameters([info])
        row["bytes"] += info.num_bytes
    return sorted(rows.values(), key=lambda row: (-row["bytes"], row["type"]))


def _print_types(tensors: Mapping[str, TensorInfo]) -> None:
    rows = [
        (
            row["type"],
            str(row["tensors"]),
            format_count(row["parameters"]),
            format_bytes(row["bytes"]),
            f"{8 * row['bytes'] / max(1, row['parameters']):.2f}",
        )
        for row in _type_rows(tensors)
    ]
    print_table(("type", "tensors", "parameters", "size", "bits per weight"), rows, left=("type",))


def _print_tensors(tensors: Mapping[str, TensorInfo]) -> None:
    rows = [
        (
            visible(info.name),
            " × ".join(map(str, info.shape)),
            info.quant_type.name,
            str(info.num_bytes),
            str(info.shard),
            str(info.offset),
        )
        for info in tensors.values()
    ]
    columns = ("tensor", "shape", "type", "bytes", "part", "offset")
    print_table(columns, rows, left=("tensor", "shape", "type"))


def _shorten(value: Any) -> str:
    """A metadata value in one short line."""
    if isinstance(value, (list, np.ndarray)):
        items = ", ".join(_shorten(item)[:20] for item in value[:_MAX_SHOWN_ITEMS])
        more = f", … {len(value)} in all" if len(value) > _MAX_SHOWN_ITEMS else ""
        return f"[{items}{more}]"
    text = visible(str(value)).replace("\n", "\\n").replace("\t", "\\t")
    return text if len(text) <= _MAX_SHOWN_CHARS else f"{text[:_MAX_SHOWN_CHARS]}… {len(text)} characters"


def _to_json(file: GGUFFile, spec: ModelSpec | None, problem: str, tensors: bool) -> dict[str, Any]:
    document: dict[str, Any] = {
        "paths": [str(path) for path in file.paths],
        "size_bytes": file.num_bytes,
        "parameters": num_parameters(file.tensors.values()),
        "spec": _spec_to_json(spec) if spec else None,
        "problem": problem or None,
        "sidecar_blocks": [] if spec else sidecar_blocks(file),
        "warnings": _warnings(file, spec),
        "types": _type_rows(file.tensors),
        "metadata": {key: _plain(value) for key, value in file.metadata.readable.items()},
    }
    if spec:
        document["active_parameters"] = active_parameters(spec, file.tensors)
        document["bytes_per_token"] = bytes_per_token(spec, file.tensors)
    if tensors:
        document["tensors"] = [
            asdict(info) | {"quant_type": info.quant_type.name} for info in file.tensors.values()
        ]
    return document


def _spec_to_json(spec: ModelSpec) -> dict[str, Any]:
    """The numbers of the model and of its layers, once where the layers of a kind are alike."""
    attentions, delta_net, moe = spec.attentions, spec.delta_net, spec.moe
    dense = [layer.ffn.size for layer in spec.layers if isinstance(layer.ffn, DenseFfnSpec)]
    return {
        "architecture": spec.architecture,
        "num_layers": spec.num_layers,
        "num_nextn_layers": spec.num_nextn_layers,
        "hidden_size": spec.hidden_size,
        "vocab_size": spec.vocab_size,
        "context_length": spec.context_length,
        "rms_norm_eps": spec.rms_norm_eps,
        "tied_output": spec.tied_output,
        "layer_kinds": spec.layer_kinds,
        "num_heads": _once([each.num_heads for each in attentions]),
        "num_kv_heads": _once([each.num_kv_heads for each in attentions]),
        "head_dim": _once([each.head_dim for each in attentions]),
        "window": _once([each.window for each in attentions]),
        "rope_dims": _once([each.rope.num_dims for each in attentions]),
        "rope_theta": _once([each.rope.theta for each in attentions]),
        "conv_kernel": delta_net.conv_kernel,
        "ssm_state_size": delta_net.state_size,
        "num_key_heads": delta_net.num_key_heads,
        "num_value_heads": delta_net.num_value_heads,
        "value_heads_grouped": delta_net.value_heads_grouped,
        "intermediate_size": dense[0] if dense else None,
        "expert_layers": spec.placed_layers if spec.is_moe else (),
        "num_experts": moe.num_experts,
        "num_experts_per_tok": moe.num_experts_per_tok,
        "expert_ffn_size": moe.ffn_size,
        "shared_expert_ffn_size": moe.shared_ffn_size,
    }


def _once(values: Sequence[Any]) -> Any:
    """The value of all layers that attend, one of each where they differ, or 0 where there are none."""
    distinct = set(values)
    return list(values) if len(distinct) > 1 else distinct.pop() if distinct else 0


def _plain(value: Any) -> Any:
    """A value that JSON can hold; of a long array its length and its first items."""
    if isinstance(value, np.ndarray):
        value = value.tolist()
    if isinstance(value, list) and len(value) > 4 * _MAX_SHOWN_ITEMS:
        return {"length": len(value), "first": value[:_MAX_SHOWN_ITEMS]}
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value
