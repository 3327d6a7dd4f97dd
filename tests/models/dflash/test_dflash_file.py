"""Drafters' files of all kinds give the same weights, and damaged or foreign ones are refused by name."""

import json
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from coldstream.errors import (
    ColdstreamError,
    DuplicateError,
    InconsistentError,
    LimitError,
    ModelChangedError,
    ModelFormatError,
    ModelNotFoundError,
    UnsupportedError,
)
from coldstream.gguf.quant_types import QuantType
from coldstream.models.dflash.convert import convert, folder_of
from coldstream.models.dflash.file import DflashFile
from coldstream.models.dflash.safetensors import SafetensorsFile
from coldstream.models.dflash.spec import tensor_shapes
from dflash_cases import CASES, config, hf_name, random_tensors, spec_of, write_folder, write_gguf_drafter
from dflash_reference import read_tensors

KINDS = ["full", "second", "gpt-oss"]
WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"


def opened(path: Path) -> DflashFile:
    """A GGUF file, or a folder that is converted into another one."""
    folder = folder_of(path)
    if folder is None:
        return DflashFile.open(path)
    with tempfile.TemporaryDirectory() as directory:
        convert(folder, Path(directory) / "drafter.gguf")
        return DflashFile.open(Path(directory) / "drafter.gguf")


def read_all(path: Path) -> dict[str, np.ndarray]:
    with opened(path) as file:
        return read_tensors(file)


def check_equal(found: dict[str, np.ndarray], expected: dict[str, np.ndarray]) -> None:
    assert found.keys() == expected.keys()
    for name, values in found.items():
        assert values.shape == expected[name].shape
        assert np.array_equal(values, expected[name]), name


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_folder(tmp_path / "drafter", config(), random_tensors(spec_of(config())))


@pytest.mark.parametrize("num_files", [1, 3])
@pytest.mark.parametrize("name", KINDS)
def test_a_folder_gives_its_tensors_by_canonical_names(tmp_path: Path, name: str, num_files: int) -> None:
    expected = random_tensors(spec_of(CASES[name]))
    found = read_all(write_folder(tmp_path / "drafter", CASES[name], expected, num_files))
    check_equal(found, expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_the_bytes_of_weights_stay_what_they_are(folder: Path, dtype: torch.dtype) -> None:
    stored = {name: values.to(dtype) for name, values in load_file(folder / WEIGHTS).items()}
    save_file(stored, folder / WEIGHTS)
    types = {torch.bfloat16: QuantType.BF16, torch.float16: QuantType.F16, torch.float32: QuantType.F32}
    with opened(folder) as file:
        for name in tensor_shapes(file.spec):
            info = file.tensor(name)
            assert info.quant_type is types[dtype]
            expected = stored[hf_name(name)].flatten().view(torch.uint8).numpy()
            assert np.array_equal(file.gguf.read(info), expected)


@pytest.mark.parametrize("name", KINDS)
def test_a_gguf_file_gives_the_same(tmp_path: Path, name: str) -> None:
    expected = random_tensors(spec_of(CASES[name]))
    found = read_all(write_gguf_drafter(tmp_path / "d.gguf", spec_of(CASES[name]), expected))
    check_equal(found, expected)


@pytest.mark.parametrize("prefix", ["dflash.", "dflash_"])
def test_older_gguf_files_have_names_of_their_own(tmp_path: Path, prefix: str) -> None:
    spec = spec_of(config())
    expected = random_tensors(spec)
    older = dict(expected)
    older[f"{prefix}fc.weight"] = older.pop("fc.weight")
    older[f"{prefix}hidden_norm.weight"] = older.pop("enc.output_norm.weight")
    check_equal(read_all(write_gguf_drafter(tmp_path / "d.gguf", spec, older, "dflash-draft")), expected)


def test_quantised_tensors_are_dequantised(tmp_path: Path) -> None:
    spec = spec_of(config())
    expected = random_tensors(spec)
    types = {"fc.weight": "Q8_0", "blk.0.attn_q.weight": "BF16", "blk.1.ffn_down.weight": "F16"}
    found = read_all(write_gguf_drafter(tmp_path / "d.gguf", spec, expected, types=types))
    for name, kind in types.items():
        error = np.abs(found[name] - expected[name]).max()
        assert 0 < error < 0.02, kind


def test_the_order_of_tensors_is_of_no_matter(tmp_path: Path) -> None:
    expected = random_tensors(spec_of(config()))
    turned = dict(reversed(expected.items()))
    assert read_all(write_gguf_drafter(tmp_path / "d.gguf", spec_of(config()), turned)).keys() == (
        expected.keys()
    )


FOREIGN = {
    "markov_w1.weight": "a DSpark head",
    "conf_proj.weight": "a DSpark head",
    "domino.gru.weight": "a Domino head",
    "mask_embedding.weight": "an embedding of the mask",
    "embed_tokens.weight": "an embedding of its own",
    "lm_head.weight": "a head of its own",
    "d2t": "a vocabulary of its own",
    "layers.0.self_attn.sinks": "attention sinks",
    "layers.0.self_attn.q_proj.bias": "biases",
    "layers.0.mlp.down_proj.bias": "biases",
    "aux_hidden_norms.0.weight": "norms of every auxiliary layer",
    "layers.3.input_layernorm.weight": "a part that is not known",
    "candidate_selector.predecessor_codebook": "a part that is not known",
    "x" * 200: "a part that is not known",
}


@pytest.mark.parametrize("name", FOREIGN)
def test_further_tensors_are_refused_by_the_part_they_belong_to(folder: Path, name: str) -> None:
    save_file(load_file(folder / WEIGHTS) | {name: torch.zeros(3)}, folder / WEIGHTS)
    with pytest.raises(UnsupportedError, match=FOREIGN[name]) as caught:
        opened(folder)
    assert name[:40] in str(caught.value)


@pytest.mark.parametrize(
    ("name", "part"),
    [
        ("token_embd.weight", "an embedding of its own"),
        ("output.weight", "a head of its own"),
        ("blk.0.attn_sinks.weight", "attention sinks"),
        ("blk.0.post_attention_norm.weight", "norms behind its sublayers"),
        ("blk.0.ffn_post_norm.weight", "norms behind its sublayers"),
        ("markov_w2.weight", "a DSpark head"),
        ("dflash_fc.weight", "are the same tensor"),
    ],
)
def test_further_tensors_of_gguf_files_are_refused_too(tmp_path: Path, name: str, part: str) -> None:
    spec = spec_of(config())
    tensors = random_tensors(spec)
    further = {name: tensors["fc.weight"] if "fc" in name else np.zeros(4, np.float32)}
    path = write_gguf_drafter(tmp_path / "d.gguf", spec, tensors | further)
    with pytest.raises(ModelFormatError, match=part):
        DflashFile.open(path)


@pytest.mark.parametrize("name", ["norm.weight", "layers.2.mlp.down_proj.weight", "fc.weight"])
def test_a_missing_tensor_is_named(folder: Path, name: str) -> None:
    tensors = load_file(folder / WEIGHTS)
    del tensors[name]
    save_file(tensors, folder / WEIGHTS)
    with pytest.raises(InconsistentError, match="1 tensors are missing") as caught:
        opened(folder)
    assert "first" in str(caught.value)


@pytest.mark.parametrize("shape", [(1,), (64, 191), (192, 64), (64, 192, 1), ()])
def test_a_wrong_shape_is_named(folder: Path, shape: tuple[int, ...]) -> None:
    save_file(load_file(folder / WEIGHTS) | {"fc.weight": torch.zeros(shape)}, folder / WEIGHTS)
    with pytest.raises(InconsistentError, match=r"fc.weight has the shape .*, expected \[64, 192\]"):
        opened(folder)


@pytest.mark.parametrize("dtype", [torch.float64, torch.int8, torch.float8_e4m3fn, torch.bool])
def test_types_that_are_no_weights_are_refused(folder: Path, dtype: torch.dtype) -> None:
    stored = load_file(folder / WEIGHTS)
    save_file(stored | {"fc.weight": stored["fc.weight"].to(dtype)}, folder / WEIGHTS)
    with pytest.raises(UnsupportedError, match=r"fc.weight has the type .*, supported are F32, F16, BF16"):
        opened(folder)


def with_header(change: Callable[[dict[str, Any]], Any]) -> Callable[[bytes], bytes]:
    """Changes the table of a safetensors file, keeping its data."""

    def changed(data: bytes) -> bytes:
        size = int.from_bytes(data[:8], "little")
        header = json.loads(data[8 : 8 + size])
        text = change(header)
        raw = (text if isinstance(text, str) else json.dumps(header)).encode()
        return len(raw).to_bytes(8, "little") + raw + data[8 + size :]

    return changed


def _moved(header: dict[str, Any]) -> None:
    header["fc.weight"]["data_offsets"][0] += 4


def _huge(header: dict[str, Any]) -> None:
    header["fc.weight"]["shape"] = [1 << 62, 1 << 62]


def _twice(header: dict[str, Any]) -> str:
    return json.dumps(header)[:-1] + ', "fc.weight": ' + json.dumps(header["fc.weight"]) + "}"


def _unknown(header: dict[str, Any]) -> None:
    header["fc.weight"]["dtype"] = "F3"


DAMAGES: dict[str, tuple[type[ColdstreamError], Callable[[bytes], bytes]]] = {
    "empty": (InconsistentError, lambda data: b""),
    "short": (InconsistentError, lambda data: data[:5]),
    "no header": (InconsistentError, lambda data: data[:8]),
    "half": (InconsistentError, lambda data: data[: len(data) // 2]),
    "a byte less": (InconsistentError, lambda data: data[:-1]),
    "a byte more": (InconsistentError, lambda data: data + b"\0"),
    "zeros": (InconsistentError, lambda data: bytes(len(data))),
    "long header": (LimitError, lambda data: b"\xff" * 8 + data[8:]),
    "header of 1 TiB": (LimitError, lambda data: (1 << 40).to_bytes(8, "little") + data[8:]),
    "gguf": (LimitError, lambda data: b"GGUF" * 100),
    "moved": (InconsistentError, with_header(_moved)),
    "huge": (InconsistentError, with_header(_huge)),
    "type": (InconsistentError, with_header(_unknown)),
    "twice": (DuplicateError, with_header(_twice)),
    "list": (InconsistentError, with_header(lambda header: "[]")),
    "deep": (InconsistentError, with_header(lambda header: "[" * 100_000)),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_file_is_refused(folder: Path, damage: str) -> None:
    kind, change = DAMAGES[damage]
    path = folder / WEIGHTS
    path.write_bytes(change(path.read_bytes()))
    with pytest.raises(kind, match=r"model\.safetensors"):
        opened(folder)


def test_no_truncation_of_a_file_is_accepted(folder: Path) -> None:
    path = folder / WEIGHTS
    data = path.read_bytes()
    for size in np.linspace(0, len(data) - 1, 60).astype(int):
        path.write_bytes(data[:size])
        with pytest.raises(ModelFormatError):
            opened(folder)


def test_no_changed_byte_of_a_header_does_harm(folder: Path) -> None:
    """The file is refused, or it is another valid one of the same shapes."""
    path = folder / WEIGHTS
    data = path.read_bytes()
    random = np.random.default_rng(3)
    for position in random.integers(0, int.from_bytes(data[:8], "little") + 8, 150):
        changed = bytearray(data)
        changed[position] ^= 1 << random.integers(8)
        path.write_bytes(bytes(changed))
        try:
            read_all(folder)
        except ModelFormatError:
            continue


def listed(folder: Path, change: Callable[[dict[str, str]], Any]) -> None:
    path = folder / INDEX
    index = json.loads(path.read_text())
    result = change(index["weight_map"])
    path.write_text(result if isinstance(result, str) else json.dumps(index))


@pytest.mark.parametrize(
    ("kind", "change"),
    [
        (InconsistentError, lambda names: names.pop("fc.weight") and None),
        (InconsistentError, lambda names: names.update({"further": names["fc.weight"]})),
        (InconsistentError, lambda names: names.update({"fc.weight": names["hidden_norm.weight"]})),
        (InconsistentError, lambda names: names.update({"fc.weight": "../model.safetensors"})),
        (InconsistentError, lambda names: names.update({"fc.weight": "/etc/passwd"})),
        (InconsistentError, lambda names: names.update({"fc.weight": "a\0.safetensors"})),
        (InconsistentError, lambda names: names.update({"fc.weight": 7})),
        (InconsistentError, lambda names: names.clear()),
        (InconsistentError, lambda names: "{"),
        (InconsistentError, lambda names: "{}"),
        (DuplicateError, lambda names: '{"weight_map": {"a": "b.safetensors", "a": "b.safetensors"}}'),
        (ModelNotFoundError, lambda names: names.update({"fc.weight": "absent.safetensors"})),
        (LimitError, lambda names: names.update({f"t{i}": f"{i}.safetensors" for i in range(300)})),
    ],
)
def test_an_index_that_says_something_else_is_refused(
    tmp_path: Path, kind: type[ColdstreamError], change: Callable[[dict[str, str]], Any]
) -> None:
    folder = write_folder(tmp_path / "drafter", config(), random_tensors(spec_of(config())), num_files=2)
    listed(folder, change)
    with pytest.raises(kind):
        opened(folder)


def test_a_tensor_in_two_files_is_refused(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "drafter", config(), random_tensors(spec_of(config())), num_files=2)
    parts = sorted(folder.glob("*.safetensors"))
    save_file(load_file(parts[1]) | {"fc.weight": load_file(parts[0])["fc.weight"]}, parts[1])
    with pytest.raises(DuplicateError, match=r"fc.weight is in model-00001-of-00002.safetensors too"):
        opened(folder)


def test_what_is_no_file_is_not_waited_for(folder: Path) -> None:
    (folder / WEIGHTS).unlink()
    with pytest.raises(ModelNotFoundError, match="Give a folder with the drafter's weights"):
        opened(folder)
    os.mkfifo(folder / WEIGHTS)
    with pytest.raises(UnsupportedError, match="not a regular file"):
        opened(folder)
    (folder / WEIGHTS).unlink()
    (folder / WEIGHTS).mkdir()
    with pytest.raises(UnsupportedError, match="not a regular file"):
        opened(folder)
    with pytest.raises(ModelNotFoundError):
        opened(folder / "absent")
    for name in (INDEX, "config.json"):
        (folder / name).unlink(missing_ok=True)
        os.mkfifo(folder / name)
        with pytest.raises(UnsupportedError, match=rf"{name} is not a regular file"):
            opened(folder)


@pytest.mark.parametrize("name", ["config.json", WEIGHTS])
def test_a_file_of_a_folder_stands_for_it(folder: Path, name: str) -> None:
    assert read_all(folder / name).keys() == read_all(folder).keys()


def test_a_file_that_shrinks_while_it_is_read_is_an_error(folder: Path) -> None:
    with SafetensorsFile.open(folder) as file:
        os.truncate(folder / WEIGHTS, (folder / WEIGHTS).stat().st_size // 2)
        with pytest.raises(ModelChangedError, match="it shrank"):
            [list(file.pieces(name)) for name in file.shapes]


def test_files_are_closed(folder: Path, tmp_path: Path) -> None:
    gguf = write_gguf_drafter(tmp_path / "d.gguf", spec_of(config()), random_tensors(spec_of(config())))
    save_file({"further": torch.zeros(1)}, folder / WEIGHTS)
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(UnsupportedError):
        opened(folder)
    file = DflashFile.open(gguf)
    file.close()
    file.close()
    assert len(os.listdir("/proc/self/fd")) == before
