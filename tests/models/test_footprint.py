"""How much of a model one token touches, against sums written out by hand."""

from pathlib import Path

import pytest

from builders import Dims, make_model, write_gguf, write_model
from coldstream.gguf.reader import GGUFFile
from coldstream.models.footprint import active_parameters, bytes_per_token, model_sizes, num_parameters
from coldstream.models.read_spec import read_spec
from mixed_ffns import UNIT_KEY, mixed_families

DIMS = Dims(layers=4, hidden=32, experts=8, experts_used=2, expert_ffn=32, shared_ffn=32, state=32, ffn=64)


@pytest.mark.parametrize("arch", ["qwen35", "qwen35moe"])
@pytest.mark.parametrize("tied", [False, True], ids=["head", "tied"])
@pytest.mark.parametrize("nextn", [False, True], ids=["trunk", "nextn"])
def test_a_token_needs_the_trunk_its_experts_and_the_head(
    tmp_path: Path, arch: str, tied: bool, nextn: bool
) -> None:
    (path,) = write_gguf(tmp_path / "tiny.gguf", arch, dims=DIMS, quant="F32", tied=tied, nextn=nextn)
    with GGUFFile.open(path) as file:
        spec = read_spec(file.metadata, file.tensors)
        expected = 0
        for name, info in file.tensors.items():
            values = info.num_bytes // info.quant_type.block_bytes * info.quant_type.block_elements
            if name.startswith("blk.4."):
                continue
            if name == "token_embd.weight" and not tied:
                values = DIMS.hidden
            elif "_exps." in name:
                values = values * 2 // 8
            expected += values
        assert active_parameters(spec, file.tensors) == expected
        if not tied or nextn or arch == "qwen35moe":
            assert num_parameters(file.tensors.values()) > expected
        if all(info.quant_type.name == "F32" for info in file.tensors.values()):
            assert bytes_per_token(spec, file.tensors) == 4 * expected


def test_biases_of_experts_are_always_resident(tmp_path: Path) -> None:
    """They are no part of what is placed, and a token reads those of its experts."""
    sizes, token_values = [], []
    for has_biases in (False, True):
        model = make_model("qwen3moe", dims=DIMS, quant="F32", expert_biases=has_biases, tokenizer=False)
        model.metadata[f"qwen3moe.{UNIT_KEY}"] = "clamped swiglu"
        (path,) = write_model(tmp_path / f"{has_biases}.gguf", model)
        with mixed_families(), GGUFFile.open(path) as file:
            spec = read_spec(file.metadata, file.tensors)
            sizes.append(model_sizes(spec, file.tensors, "", 0))
            token_values.append(active_parameters(spec, file.tensors))
    num_values = DIMS.layers * (2 * DIMS.expert_ffn + DIMS.hidden)  # of one expert of each layer
    assert sizes[0].expert_bytes == sizes[1].expert_bytes
    assert sizes[1].dense_bytes - sizes[0].dense_bytes == 4 * DIMS.experts * num_values
    assert token_values[1] - token_values[0] == DIMS.experts_used * num_values
