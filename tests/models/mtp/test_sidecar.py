"""A block that lies in a file of its own joins the trunk's, and what is no such file is refused."""

import os
import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from bench.runners import open_model_file
from builders import SMALL, Dims, TinyModel, write_model
from coldstream.engine import LLM
from coldstream.errors import ColdstreamError, ConfigError, InconsistentError, UnsupportedError
from coldstream.gguf.reader import GGUFFile
from coldstream.models.mtp.sidecar import join_sidecar, sidecar_blocks
from coldstream.models.read_spec import read_spec
from sidecar_files import FAMILIES, make_whole, split, write_split

TINY = {"quant": "F32", "dims": SMALL, "tokenizer": False}


def refusal(trunk: str, sidecar: str, kind: type[ColdstreamError]) -> str:
    """Of joining two files, which leaves both as they were, and the trunk usable."""
    file, spec = open_model_file(Path(trunk))
    with file, GGUFFile.open(sidecar) as other:
        before = dict(file.tensors), file.paths, dict(file.metadata)["general.architecture"]
        with pytest.raises(kind) as caught:
            join_sidecar(file, spec, other)
        assert before == (dict(file.tensors), file.paths, file.metadata["general.architecture"])
        assert read_spec(file.metadata, file.tensors) == spec
        assert len(other.read(next(iter(other.tensors.values())))) > 0
    message = str(caught.value)
    assert "\n" not in message
    return message


@pytest.mark.parametrize("shares", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_joined_block_is_that_of_a_whole_file(tmp_path: Path, family: str, shares: bool) -> None:
    """Its spec, its tensors and their bytes; embedding and head stay the trunk's."""
    whole, trunk, sidecar = write_split(tmp_path, make_whole(family, **TINY), shares=shares)
    expected, expected_spec = open_model_file(Path(whole))
    file, spec = open_model_file(Path(trunk))
    alone = file.fingerprint, file.num_bytes
    other = GGUFFile.open(sidecar)
    assert sidecar_blocks(other) == (4,)
    assert sidecar_blocks(file) == sidecar_blocks(expected) == ()
    with expected, file:
        assert join_sidecar(file, spec, other) == expected_spec
        assert read_spec(file.metadata, file.tensors) == expected_spec
        assert file.tensors.keys() == expected.tensors.keys()
        for name, info in expected.tensors.items():
            assert np.array_equal(file.read(file.tensors[name]), expected.read(info))
            assert file.tensors[name].shard == name.startswith("blk.4.")
        assert file.fingerprint == alone[0]
        assert file.num_bytes == alone[1] + os.path.getsize(sidecar)
        assert [path.name for path in file.paths] == ["trunk.gguf", "sidecar.gguf"]
    with pytest.raises(ValueError, match="is closed"):
        other.read(next(iter(other.tensors.values())))


def test_both_files_are_closed_together(tmp_path: Path) -> None:
    _, trunk, sidecar = write_split(tmp_path, make_whole(**TINY))
    before = os.listdir("/proc/self/fd")
    file, spec = open_model_file(Path(trunk))
    other = GGUFFile.open(sidecar)
    join_sidecar(file, spec, other)
    other.close()  # which has nothing left to close
    file.check_unchanged()
    assert file.read(file.tensors["blk.4.nextn.enorm.weight"]).size
    with open(sidecar, "r+b") as writing:
        writing.seek(-8, os.SEEK_END)
        writing.write(b"\xff" * 8)
    assert [path.name for path in file.rewritten()] == ["sidecar.gguf"]
    file.close()
    assert os.listdir("/proc/self/fd") == before


@pytest.mark.parametrize("family", FAMILIES)
def test_each_tensor_of_the_block_is_required_by_name(tmp_path: Path, family: str) -> None:
    """But for what the trunk has too."""
    trunk, whole_sidecar = split(make_whole(family, **TINY))
    (path,) = write_model(tmp_path / "trunk.gguf", trunk)
    names = [name for name in whole_sidecar.tensors if name.startswith("blk.4.")]
    assert len(names) > 14
    for name in names:
        tensors = {each: values for each, values in whole_sidecar.tensors.items() if each != name}
        broken = TinyModel(family, whole_sidecar.metadata, tensors)
        (sidecar,) = write_model(tmp_path / "sidecar.gguf", broken)
        if name.endswith("shared_head_norm.weight"):
            file, spec = open_model_file(path)
            with file:
                join_sidecar(file, spec, GGUFFile.open(sidecar))
            continue
        message = refusal(str(path), str(sidecar), InconsistentError)
        assert message.startswith(f"{sidecar}: the tensor {name} "), message
        assert message.endswith(" is missing: the file is incomplete, download it again")


def _of_other_family(sidecar: TinyModel) -> TinyModel:
    return split(make_whole("qwen35", **TINY))[1]


def _two_blocks(sidecar: TinyModel) -> TinyModel:
    again = {name.replace("blk.4.", "blk.5."): values for name, values in sidecar.tensors.items()}
    keys = {"qwen35moe.block_count": 6, "qwen35moe.nextn_predict_layers": 2}
    return TinyModel("qwen35moe", sidecar.metadata | keys, sidecar.tensors | again)


def _deeper(sidecar: TinyModel) -> TinyModel:
    renamed = {name.replace("blk.4.", "blk.8."): values for name, values in sidecar.tensors.items()}
    return TinyModel("qwen35moe", sidecar.metadata | {"qwen35moe.block_count": 9}, renamed)


def _wider(sidecar: TinyModel) -> TinyModel:
    return split(make_whole(**TINY | {"dims": Dims(hidden=64, vocab=16)}))[1]


def _more_tokens(sidecar: TinyModel) -> TinyModel:
    table = np.zeros((24, 32), np.float32)
    return TinyModel("qwen35moe", sidecar.metadata, sidecar.tensors | {"token_embd.weight": table})


def _more_experts(sidecar: TinyModel) -> TinyModel:
    values = sidecar.tensors["blk.4.ffn_down_exps.weight"]
    tensors = sidecar.tensors | {"blk.4.ffn_down_exps.weight": np.concatenate([values, values])}
    return TinyModel("qwen35moe", sidecar.metadata, tensors)


def _foreign_tensor(sidecar: TinyModel) -> TinyModel:
    tensors = sidecar.tensors | {"blk.4.nextn.gate.weight": np.zeros(32, np.float32)}
    return TinyModel("qwen35moe", sidecar.metadata, tensors)


@pytest.mark.parametrize(
    ("change", "kind", "message"),
    [
        (
            _of_other_family,
            ConfigError,
            r"holds the MTP block of a qwen35 model, and \S+ is qwen35moe: give the sidecar of this model",
        ),
        (
            _two_blocks,
            UnsupportedError,
            r"holds 2 blocks for multi-token prediction, and drafting takes one: give a sidecar with one",
        ),
        (
            _deeper,
            ConfigError,
            r"holds the MTP block of a model of 8 layers, and \S+ has 4: give the sidecar",
        ),
        (_wider, ConfigError, r"has a hidden size of 64, and \S+ has 32: give the sidecar of this model"),
        (_more_tokens, ConfigError, r"has a vocabulary of 24 tokens, and \S+ has 16: give the sidecar"),
        (
            _more_experts,
            InconsistentError,
            r"ffn_down_exps\.weight \(data at byte \d+\) has shape \[8, 32, 32\], expected \[4, 32, 32\]",
        ),
        (
            _foreign_tensor,
            UnsupportedError,
            r"blk\.4\.nextn\.gate\.weight .* no known meaning in a qwen35moe",
        ),
    ],
)
def test_one_that_does_not_fit_is_refused_in_a_sentence(
    tmp_path: Path, change: Callable[[TinyModel], TinyModel], kind: type[ColdstreamError], message: str
) -> None:
    trunk, sidecar = split(make_whole(**TINY))
    (path,), (other,) = (
        write_model(tmp_path / name, model)
        for name, model in (("trunk.gguf", trunk), ("sidecar.gguf", change(sidecar)))
    )
    found = refusal(str(path), str(other), kind)
    assert found.startswith(str(other))
    assert re.search(message, found), found


def test_one_with_other_tokens_is_refused(tmp_path: Path) -> None:
    options = {"quant": "F32", "dims": Dims(**(vars(SMALL) | {"vocab": 320}))}
    trunk, sidecar = split(make_whole(**options))
    tokens = list(sidecar.metadata["tokenizer.ggml.tokens"])
    sidecar.metadata["tokenizer.ggml.tokens"] = [*tokens[:-1], "another"]
    (path,), (other,) = (
        write_model(tmp_path / name, model)
        for name, model in (("trunk.gguf", trunk), ("sidecar.gguf", sidecar))
    )
    found = refusal(str(path), str(other), ConfigError)
    assert "another tokenizer than" in found
    assert "as tokenizer.ggml.tokens differs: give the sidecar of this model" in found


def test_a_trunk_with_a_block_of_its_own_takes_no_other(tmp_path: Path) -> None:
    whole, _, sidecar = write_split(tmp_path, make_whole(**TINY))
    message = refusal(whole, sidecar, ConfigError)
    assert message == (
        f"{sidecar} holds an MTP block, and {whole} has one of its own: leave --model-draft out, and give "
        "--spec-type mtp"
    )


def test_a_trunk_that_declares_a_block_and_lacks_it_takes_one(tmp_path: Path) -> None:
    """As converters of older files left the key."""
    trunk, sidecar = split(make_whole(**TINY))
    trunk.metadata |= {"qwen35moe.block_count": 5, "qwen35moe.nextn_predict_layers": 1}
    (path,), (other,) = (
        write_model(tmp_path / name, model)
        for name, model in (("trunk.gguf", trunk), ("sidecar.gguf", sidecar))
    )
    file, spec = open_model_file(path)
    with file:
        assert spec.num_absent_nextn_layers == 1
        joined = join_sidecar(file, spec, GGUFFile.open(other))
        assert (joined.num_nextn_layers, joined.num_absent_nextn_layers) == (1, 0)


@pytest.mark.parametrize("tensor", ["blk.4.nextn.hnorm.weight", "blk.0.attn_norm.weight"])
def test_damage_is_named_with_the_file_that_has_it(tmp_path: Path, tensor: str) -> None:
    whole = make_whole(quant="F32")
    whole.tensors[tensor][3] = np.nan
    _, trunk, sidecar = write_split(tmp_path, whole)
    damaged = sidecar if tensor.startswith("blk.4.") else trunk
    with pytest.raises(InconsistentError, match=f"^{re.escape(damaged)}: {re.escape(tensor)} holds a NaN"):
        LLM(trunk, device="cpu", threads=1, ctx_size=64, model_draft=sidecar, spec_type="mtp")
