"""Laguna's published drafters: what their configurations and files say, and what they compute.

The definition here is of the published forward pass, over tensors by the names of the checkpoints. It shares
nothing with the package or with `dflash_reference.py`.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from test_dflash import LOADERS
from torch.nn import functional

from coldstream.errors import InconsistentError, UnsupportedError
from coldstream.gguf.metadata import Metadata
from coldstream.models.dflash.convert import convert
from coldstream.models.dflash.file import DflashFile
from coldstream.models.dflash.metadata import metadata_of, spec_of_metadata
from coldstream.models.dflash.spec import DflashLayer, DflashRope, DflashSpec, tensor_shapes
from dflash_cases import (
    ANCHOR,
    CHUNKS,
    LAGUNA,
    NUM_ROWS,
    SECOND,
    WIDTH,
    config,
    features,
    hf_tensors,
    random_tensors,
    spec_of,
    target_tables,
    write_folder,
    write_gguf_drafter,
)
from dflash_reference import read_tensors

SLIDING, FULL = "sliding_attention", "full_attention"
FOR_XS: dict[str, Any] = {  # poolside/Laguna-XS-2.1-DFlash
    "architectures": ["DFlashLagunaForCausalLM"],
    "model_type": "laguna",
    "attention_bias": False,
    "attention_dropout": 0.0,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "max_position_embeddings": 262144,
    "num_attention_heads": 64,
    "num_hidden_layers": 5,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-6,
    "sliding_window": 512,
    "vocab_size": 100352,
    "layer_types": [SLIDING] * 5,
    "rope_theta": 500000.0,
    "gating": "per-head",
    "draft_vocab_size": 100352,
    "num_experts": 0,
    "torch_dtype": "bfloat16",
    "eagle_aux_hidden_state_layer_ids": [2, 14, 26, 34, 40],
    "dflash_config": {
        "block_size": 16,
        "mask_token_id": 12,
        "num_target_layers": 40,
        "target_layer_ids": [1, 13, 25, 33, 39],
        "causal": True,
    },
}
FOR_S = FOR_XS | {  # poolside/Laguna-S-2.1-DFlash
    "hidden_size": 3072,
    "intermediate_size": 12288,
    "max_position_embeddings": 1048576,
    "num_attention_heads": 72,
    "num_hidden_layers": 6,
    "layer_types": [SLIDING] * 6,
    "eagle_aux_hidden_state_layer_ids": [2, 11, 20, 30, 39, 48],
    "dflash_config": FOR_XS["dflash_config"]
    | {"num_target_layers": 48, "target_layer_ids": [1, 10, 19, 29, 38, 47]},
}


def published_hidden(
    values: dict[str, Any], tensors: dict[str, torch.Tensor], states: torch.Tensor, embedded: torch.Tensor
) -> torch.Tensor:
    """The last norm of a block's rows, behind as many positions as there are states.

    embedded: their embeddings. tensors: by the checkpoint's names. states: the target's states after its
    auxiliary layers, side by side.
    """
    eps, dim = values["rms_norm_eps"], values["head_dim"]
    num_heads, num_kv_heads = values["num_attention_heads"], values["num_key_value_heads"]
    window, num_aux = values["sliding_window"], len(values["dflash_config"]["target_layer_ids"])

    def norm(x: torch.Tensor, name: str) -> torch.Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * tensors[f"{name}.weight"]

    def rotated(x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        angles = positions[:, None] * values["rope_theta"] ** (-torch.arange(0, dim, 2).double() / dim)
        turn = torch.polar(torch.ones_like(angles), angles).to(torch.complex64)[:, None]
        low, high = x.chunk(2, dim=-1)
        turned = torch.complex(low, high) * turn
        return torch.cat((turned.real, turned.imag), dim=-1)

    parts = [norm(state, f"aux_hidden_norms.{i}") for i, state in enumerate(states.chunk(num_aux, dim=-1))]
    context = norm(torch.cat(parts, dim=-1) @ tensors["fc.weight"].T, "hidden_norm")
    positions = torch.arange(len(states) + len(embedded)).double()
    ahead = positions[None] - positions[len(states) :, None]
    is_seen = (ahead <= 0) & (ahead > -window)
    x = embedded
    for layer in range(values["num_hidden_layers"]):
        prefix = f"layers.{layer}"
        rows = norm(torch.cat((context, x)), f"{prefix}.input_layernorm")
        sizes = (num_heads * dim, num_kv_heads * dim, num_kv_heads * dim)
        q, k, v = (rows @ tensors[f"{prefix}.self_attn.qkv_proj.weight"].T).split(sizes, dim=-1)
        q = rotated(norm(q.view(len(rows), -1, dim), f"{prefix}.self_attn.q_norm"), positions)[len(states) :]
        k = rotated(norm(k.view(len(rows), -1, dim), f"{prefix}.self_attn.k_norm"), positions)
        k, v = (
            each.repeat_interleave(num_heads // num_kv_heads, dim=1)
            for each in (k, v.view(len(rows), -1, dim))
        )
        scores = torch.einsum("qhd,khd->hqk", q, k) / dim**0.5
        weights = scores.masked_fill(~is_seen, -torch.inf).softmax(dim=-1)
        gate = rows[len(states) :] @ tensors[f"{prefix}.self_attn.g_proj.weight"].T
        mixed = torch.einsum("hqk,khd->qhd", weights, v) * functional.softplus(gate)[:, :, None]
        x = x + mixed.flatten(1) @ tensors[f"{prefix}.self_attn.o_proj.weight"].T
        normed = norm(x, f"{prefix}.post_attention_layernorm")
        gated = functional.silu(normed @ tensors[f"{prefix}.mlp.gate_proj.weight"].T)
        up = normed @ tensors[f"{prefix}.mlp.up_proj.weight"].T
        x = x + (gated * up) @ tensors[f"{prefix}.mlp.down_proj.weight"].T
    return norm(x, "norm")


@pytest.mark.parametrize("load", LOADERS.values(), ids=LOADERS)
def test_hidden_states_are_those_of_the_published_forward_pass(
    tmp_path: Path, load: Callable[[DflashFile], Any]
) -> None:
    spec = spec_of(LAGUNA)
    weights = random_tensors(spec)
    convert(write_folder(tmp_path / "drafter", LAGUNA, weights), tmp_path / "drafter.gguf")
    with DflashFile.open(tmp_path / "drafter.gguf") as file:
        sequence = load(file).new_sequence()
    rows, embedding = features(spec, sum(CHUNKS)), target_tables()[0]
    block = torch.from_numpy(embedding[[ANCHOR, *[spec.mask_id] * (NUM_ROWS - 1)]])
    named = {name: torch.from_numpy(value) for name, value in hf_tensors(weights).items()}
    for count in CHUNKS:
        sequence.append(rows[sequence.length : sequence.length + count])
        expected = published_hidden(LAGUNA, named, torch.from_numpy(rows[: sequence.length]), block)
        found = np.asarray(sequence.hidden(ANCHOR, NUM_ROWS))
        assert np.abs(found - expected.numpy()).max() < 1e-4
    assert sequence.length > spec.layers[0].window


def test_the_published_configurations() -> None:
    spec = spec_of(FOR_XS)
    assert spec.is_laguna
    assert spec.second is None
    assert spec.layers == (DflashLayer(512, is_causal=True),) * 5
    assert spec.rope == DflashRope(500000.0)
    assert (spec.aux_layers, spec.num_target_layers) == ((1, 13, 25, 33, 39), 40)
    assert (spec.mask_id, spec.block_size) == (12, 16)
    # What the checkpoints hold: 58 and 69 tensors, of which norms are apart and projections together.
    for values, num_tensors in ((FOR_XS, 58), (FOR_S, 69)):
        found = spec_of(values)
        joined = len(found.aux_layers) - 1 - 2 * found.num_layers
        assert len(tensor_shapes(found)) + joined == num_tensors
    assert spec_of(FOR_XS | {"gating": True}) == spec


@pytest.mark.parametrize(
    "changes", [{}, {"layer_types": [FULL] * 3}, {"dflash_config": {"causal": False}}], ids=str
)
def test_the_metadata_of_a_converted_drafter_say_the_same(changes: dict[str, Any]) -> None:
    section = LAGUNA["dflash_config"] | changes.get("dflash_config", {})
    spec = spec_of(LAGUNA | changes | {"dflash_config": section})
    assert {layer.is_causal for layer in spec.layers} == {section["causal"]}
    values = {
        key: np.array(value) if isinstance(value, list) else value for key, value in metadata_of(spec).items()
    }
    found = spec_of_metadata(Metadata(values, {}))
    assert found.layers == spec.layers
    assert found.is_laguna


def test_the_published_gguf_file_has_no_windows_and_its_layers_are_causal(tmp_path: Path) -> None:
    """It says whose layers they are, and nothing of causality."""
    spec = spec_of(LAGUNA)
    names = ("attention.causal", "attention.sliding_window", "attention.sliding_window_pattern")
    changes = {f"dflash.{name}": None for name in names} | {"dflash.rope.scaling.type": "none"}
    tensors = random_tensors(spec)
    path = write_gguf_drafter(tmp_path / "d.gguf", spec, tensors, changes=changes)
    with DflashFile.open(path) as file:
        assert file.spec.is_laguna
        assert file.spec.layers == (DflashLayer(None, is_causal=True),) * 3
        found = read_tensors(file)
    assert all(np.array_equal(found[name], value) for name, value in tensors.items())


def changed(**changes: Any) -> DflashSpec:
    section = LAGUNA["dflash_config"] | changes.pop("section", {})
    return spec_of(LAGUNA | changes | {"dflash_config": section})


def test_other_gates_vocabularies_and_kinds_are_refused() -> None:
    for changes, key in (
        ({"gating": "per-element"}, "gating"),
        ({"gating": False}, "gating"),
        ({"draft_vocab_size": 49}, "draft_vocab_size"),
        ({"num_experts": 8}, "num_experts"),
    ):
        with pytest.raises(UnsupportedError, match=key):
            changed(**changes)
    with pytest.raises(InconsistentError, match="architectures"):
        changed(section=SECOND)
    with pytest.raises(InconsistentError, match="is_causal"):
        changed(is_causal=False)
    assert not spec_of(config(gating="per-element")).is_laguna


def test_gguf_files_of_other_layers_are_refused(tmp_path: Path) -> None:
    spec = spec_of(LAGUNA)
    for number, (changes, part) in enumerate(
        (
            ({"dflash.decoder_arch": "mamba"}, "mamba"),
            ({"dflash.decoder_arch": None}, "norms of every auxiliary layer"),
            ({f"dflash.{name}": value for name, value in SECOND.items()}, "first kind"),
        )
    ):
        path = write_gguf_drafter(tmp_path / f"{number}.gguf", spec, random_tensors(spec), changes=changes)
        with pytest.raises(UnsupportedError, match=part):
            DflashFile.open(path)


Change = Callable[[dict[str, np.ndarray]], None]


def without_a_norm(tensors: dict[str, np.ndarray]) -> None:
    del tensors["aux_hidden_norms.1.weight"]


def with_a_further_norm(tensors: dict[str, np.ndarray]) -> None:
    tensors["aux_hidden_norms.3.weight"] = np.ones(WIDTH, np.float32)


def with_a_short_norm(tensors: dict[str, np.ndarray]) -> None:
    tensors["aux_hidden_norms.2.weight"] = np.ones(WIDTH // 2, np.float32)


def with_a_short_projection(tensors: dict[str, np.ndarray]) -> None:
    tensors["layers.1.self_attn.qkv_proj.weight"] = tensors["layers.1.self_attn.qkv_proj.weight"][:-1]


def with_a_projection_of_five_rows(tensors: dict[str, np.ndarray]) -> None:
    tensors["layers.1.self_attn.qkv_proj.weight"] = tensors["layers.1.self_attn.qkv_proj.weight"][:5]


def with_a_projection_twice(tensors: dict[str, np.ndarray]) -> None:
    tensors["layers.1.self_attn.k_proj.weight"] = np.ones((64, WIDTH), np.float32)


def without_a_gate(tensors: dict[str, np.ndarray]) -> None:
    del tensors["layers.2.self_attn.g_proj.weight"]


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (without_a_norm, "shape"),
        (with_a_further_norm, "norms of every auxiliary layer"),
        (with_a_short_norm, "differ"),
        (with_a_short_projection, "values has the shape"),
        (with_a_projection_of_five_rows, "values has the shape"),
        (with_a_projection_twice, "same tensor"),
        (without_a_gate, "attn_gate"),
    ],
)
def test_checkpoints_that_lack_or_repeat_something_are_refused(
    tmp_path: Path, change: Change, problem: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    tensors = hf_tensors(random_tensors(spec_of(LAGUNA)))
    change(tensors)
    monkeypatch.setattr("dflash_cases.hf_tensors", lambda given: tensors)
    folder = write_folder(tmp_path / "drafter", LAGUNA, {})
    with pytest.raises((InconsistentError, UnsupportedError), match=problem):
        convert(folder, tmp_path / "drafter.gguf")
    assert not (tmp_path / "drafter.gguf").exists()


def test_projections_that_are_apart_are_taken_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    weights = random_tensors(spec_of(LAGUNA))
    convert(write_folder(tmp_path / "joined", LAGUNA, weights), tmp_path / "joined.gguf")
    tensors = hf_tensors(weights)
    for layer in range(3):
        del tensors[f"layers.{layer}.self_attn.qkv_proj.weight"]
        for part in "qkv":
            values = weights[f"blk.{layer}.attn_{part}.weight"]
            tensors[f"layers.{layer}.self_attn.{part}_proj.weight"] = values
    monkeypatch.setattr("dflash_cases.hf_tensors", lambda given: tensors)
    convert(write_folder(tmp_path / "apart", LAGUNA, weights), tmp_path / "apart.gguf")
    assert (tmp_path / "apart.gguf").read_bytes() == (tmp_path / "joined.gguf").read_bytes()
