"""`coldstream show` on complete, foreign and hostile files."""

import json
import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from builders import SMALL, make_model, write_gguf, write_model
from coldstream.assets import demo_model_path
from dflash_cases import CASES, random_tensors, spec_of, write_converted, write_gguf_drafter
from sidecar_files import make_whole, write_split

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_gguf(tmp_path_factory.mktemp("show") / "tiny.gguf", quant="Q4_K", nextn=True)[0])


def test_numbers_types_and_metadata(run: Run, path: str) -> None:
    code, out, err = run("show", path)
    assert (code, err) == (0, "")
    for expected in ("qwen35moe", "1 attention and 3 gated DeltaNet; 1 for multi-token prediction", "4096"):
        assert expected in out
    assert "8 a layer, 2 a token" in out
    assert "Q4_K" in out
    assert "4.50" in out
    assert "tokenizer.ggml.eos_token_id" in out
    assert "blk.0.attn_norm.weight" not in out
    assert "blk.0.attn_norm.weight" in run("show", path, "--tensors")[1]


def test_without_a_model_it_is_the_bundled_one(run: Run) -> None:
    code, out, _ = run("show")
    assert (code, out) == run("show", str(demo_model_path()))[:2]
    assert "coldstream demo" in out


def test_json_is_one_line_with_everything(run: Run, path: str) -> None:
    code, out, _ = run("show", path, "--json", "--tensors")
    assert code == 0
    assert out.count("\n") == 1
    shown = json.loads(out)
    assert shown["spec"]["num_experts"] == 8
    assert shown["spec"]["layer_kinds"] == ["delta_net"] * 3 + ["attention"]
    assert (shown["spec"]["head_dim"], shown["spec"]["rope_dims"]) == (64, 16)
    assert (shown["spec"]["ssm_state_size"], shown["spec"]["num_value_heads"]) == (64, 4)
    assert (shown["spec"]["intermediate_size"], shown["spec"]["expert_ffn_size"]) == (None, 256)
    assert shown["size_bytes"] == Path(path).stat().st_size
    assert sum(row["bytes"] for row in shown["types"]) == sum(info["num_bytes"] for info in shown["tensors"])
    assert shown["parameters"] == sum(int(np.prod(info["shape"])) for info in shown["tensors"])
    assert shown["parameters"] > shown["active_parameters"] > 0
    assert shown["metadata"]["tokenizer.ggml.tokens"]["length"] == 320
    assert "tensors" not in json.loads(run("show", path, "--json")[1])


def test_a_model_is_not_said_to_have_what_it_lacks(run: Run, tmp_path: Path) -> None:
    (path,) = write_gguf(tmp_path / "tiny.gguf", "qwen3moe", tokenizer=False)
    out = run("show", str(path))[1]
    assert re.search(r"^layers +4 attention$", out, re.MULTILINE)
    assert re.search(r"^experts +8 a layer, 2 a token$", out, re.MULTILINE)


def test_json_of_a_dense_model(run: Run, tmp_path: Path) -> None:
    (path,) = write_gguf(tmp_path / "dense.gguf", "qwen35", tokenizer=False)
    spec = json.loads(run("show", str(path), "--json")[1])["spec"]
    assert (spec["intermediate_size"], spec["num_experts"], spec["expert_ffn_size"]) == (512, 0, 0)


def test_a_model_of_another_architecture_is_shown_and_called_what_it_is(run: Run, tmp_path: Path) -> None:
    model = make_model(quant="F32")
    model.arch = "llama"
    (path,) = write_model(tmp_path / "llama.gguf", model)
    code, out, _ = run("show", str(path))
    assert code == 0
    assert "cannot run" in out
    assert "llama" in out
    assert json.loads(run("show", str(path), "--json")[1])["spec"] is None


@pytest.mark.parametrize("shares", [False, True])
def test_a_sidecar_is_shown_as_what_it_is(run: Run, tmp_path: Path, shares: bool) -> None:
    _, _, path = write_split(
        tmp_path, make_whole("qwen4exp", quant="F32", dims=SMALL, tokenizer=False), shares=shares
    )
    code, out, _ = run("show", path)
    assert code == 0
    for expected in (
        "architecture  qwen4exp",
        "none but block 4, for multi-token prediction (MTP)",
        "a sidecar, which drafts for a model of 4 layers as its --model-draft",
        "open the model's own file, with this one as --model-draft",
    ):
        assert expected in out
    assert ("shares that model's embedding and head" in out) == shares
    shown = json.loads(run("show", path, "--json")[1])
    assert (shown["spec"], shown["sidecar_blocks"]) == (None, [4])


@pytest.mark.parametrize("name", ["mixed", "second", "gpt-oss"])
def test_a_dflash_drafter_is_shown_as_what_it_is(run: Run, tmp_path: Path, name: str) -> None:
    values = CASES[name]
    path = write_converted(tmp_path / "drafter", values, random_tensors(spec_of(values)))
    code, out, _ = run("show", str(path))
    assert code == 0
    found = " ".join(out.split())
    layers = {
        "mixed": "DFlash layers 1 attention and 2 attention in a window of 9 reads",
        "second": "DFlash 2 layers 3 attention in a window of 9 reads",
        "gpt-oss": "DFlash layers 3 attention, with biases reads",
    }
    assert f"architecture {layers[name]}" in found
    assert "reads residual streams after layers 1, 3, 6 of a model of 8 layers hidden size 64" in found
    assert "holds a drafter of 7 tokens at once, for that model's --model-draft" in found
    problem = "is a DFlash drafter: open the model that it drafts for, with this file as --model-draft"
    assert problem in found
    assert problem in json.loads(run("show", str(path), "--json")[1])["problem"]
    assert problem in run("plan", str(path))[2]


def test_a_drafter_that_cannot_draft_is_shown_with_the_reason(run: Run, tmp_path: Path) -> None:
    spec = spec_of(CASES["full"])
    tensors = random_tensors(spec)
    path = write_gguf_drafter(tmp_path / "d.gguf", spec, tensors | {"markov_w1.weight": tensors["fc.weight"]})
    code, out, _ = run("show", str(path))
    assert code == 0
    assert re.search(r"^cannot draft .*a DSpark head, which is not supported", out, re.MULTILINE)


def test_names_from_the_file_cannot_drive_the_terminal(run: Run, tmp_path: Path) -> None:
    model = make_model(quant="F32")
    model.metadata["general.name"] = "\x1b]0;owned\x07[bold]x[/bold]"
    (path,) = write_model(tmp_path / "hostile.gguf", model)
    out = run("show", str(path))[1]
    assert "\x1b" not in out
    assert "\\x1b]0;owned\\x07[bold]x[/bold]" in out


def test_infinite_numbers_are_still_json(run: Run, tmp_path: Path) -> None:
    model = make_model(quant="F32")
    model.metadata["general.sampling.temp"] = float("inf")
    (path,) = write_model(tmp_path / "inf.gguf", model)

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    shown = json.loads(run("show", str(path), "--json")[1], parse_constant=refuse)
    assert shown["metadata"]["general.sampling.temp"] == "inf"


def test_gg01_a_truncated_file_is_one_error(run: Run, path: str, tmp_path: Path) -> None:
    (tmp_path / "cut.gguf").write_bytes(Path(path).read_bytes()[:1000])
    code, out, err = run("show", str(tmp_path / "cut.gguf"))
    assert (code, out) == (65, "")
    assert err.startswith("error: ")
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    ("name", "code", "problem"),
    [
        ("", 2, "model must be a path or org/repo[:QUANT], not ''"),
        ("empty", 66, "empty: a folder with no model in it: name a GGUF file"),
        ("several", 66, "several: a folder with several models: a.gguf, b.gguf: name a file"),
        ("part", 66, "part: the model in this folder is not complete: m-00001-of-00002.gguf (1 of 2 parts)"),
        ("short.gguf", 65, "short.gguf: magic at byte 0: b'abcd', not b'GGUF': this is not a GGUF file"),
        ("cut.gguf", 65, "cut.gguf: header at byte 4: needs 20 bytes, the file has 2 left"),
        ("text.gguf", 65, "this is not a GGUF file"),
        ("none.gguf", 66, "none.gguf: no such file"),
    ],
)
def test_what_is_no_model_is_called_what_it_is(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, code: int, problem: str
) -> None:
    monkeypatch.chdir(tmp_path)
    for file in ("several/a.gguf", "several/b.gguf", "part/m-00001-of-00002.gguf"):
        Path(file).parent.mkdir(exist_ok=True)
        Path(file).write_bytes(b"x")
    Path("empty").mkdir()
    Path("short.gguf").write_bytes(b"abcdef")
    Path("cut.gguf").write_bytes(b"GGUF\3\0")
    Path("text.gguf").write_text("Once upon a time there was a model.\n")
    got, out, err = run("show", name)
    assert (got, out) == (code, "")
    assert problem in err
    assert err.count("\n") == 1
