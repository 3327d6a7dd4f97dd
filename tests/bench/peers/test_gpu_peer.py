"""llama.cpp's benchmark, run with a build for the CPU over a small file, and what the tables make of it."""

import ctypes
import json
import re
import shutil
import struct
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xllamacpp

from bench import device
from bench.full_size_mixes import MIXES, PLAIN, Mix
from bench.full_size_model import FullSizeWriter
from bench.peers import gpu_peer
from bench.peers.gpu_peer_library import (
    CONTEXT_LAYOUTS,
    EXPERTS_OF_LAYER,
    MODEL_FIELDS,
    Context,
    Fields,
    Library,
    Model,
    buffer_sizes,
    library_at,
    library_file,
    struct_of,
)
from bench.report import first_page as report_first_page
from bench.report import gpu as report_gpu
from bench.report import peer_figures as gpu_peer_figures
from bench.report import streaming as report_streaming
from bench.report import tables as report_tables
from coldstream.gguf.reader import GGUFFile
from small_shape import SMALL

(LLAMA,) = Path(xllamacpp.__file__).parent.glob("*.abi3.so")
WORDS = "--prompts 20,33 --decode-depths 0,50 --step-depths 40,60 --rows 1,3 --sequences 1,3 --threads 1,2"
MORE = "--cpu-layers 0,2,4 --sequence-depth 10 --generate 5 --repetitions 2 --most-depth-cpu 50"


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("peer") / "small.gguf"
    FullSizeWriter(path, SMALL, seed=3, threads=2).write()
    return path


@pytest.fixture(scope="module")
def library() -> Library:
    return library_at(LLAMA)


@pytest.fixture(scope="module")
def result(path: Path) -> dict[str, Any]:
    """One run."""
    with pytest.MonkeyPatch.context() as patch:
        argv = f"gpu_peer.py {path} --llama {LLAMA} --device cpu {WORDS} {MORE} --commit c0ffee"
        patch.setattr(gpu_peer, "SWEEP_TOKENS", 2)
        patch.setattr(sys, "argv", [*argv.split(), "--out", str(path.with_name("peer.json"))])
        assert gpu_peer.main() == 0
    written: dict[str, Any] = json.loads(path.with_name("peer.json").read_text())
    return written


def context_of(model: Model, are_forks: bool = True) -> Context:
    sizes = {"num_tokens": 256, "micro_batch": 16, "num_sequences": 2, "threads": 2}
    return Context(model, are_forks=are_forks, **sizes)


def logits_after(context: Context, *parts: list[int], sequence: int = 0) -> np.ndarray:
    for part in parts:
        context.extend({sequence: part})
    return context.logits()[0]


@pytest.mark.sharded(of="measurements")
def test_a_fork_goes_on_where_its_source_is_and_leaves_it(library: Library, path: Path) -> None:
    ids = list(range(1000, 1060))
    with Model(library, path, 0, 0) as model, context_of(model) as context:
        whole = logits_after(context, ids[:40], ids[40:])
        context.clear()
        logits_after(context, ids[:40])
        for _ in range(2):
            context.fork(0, 1)
            assert np.array_equal(logits_after(context, ids[40:], sequence=1), whole)
        assert context.lengths == [40, 60]
        assert np.array_equal(logits_after(context, ids[40:]), whole)
        assert not np.array_equal(logits_after(context, ids[40:]), whole)


@pytest.mark.sharded(of="measurements")
def test_logits_are_those_of_each_sequence(library: Library, path: Path) -> None:
    with Model(library, path, 0, 0) as model, context_of(model, are_forks=False) as context:
        context.extend({0: [1000, 1001, 1002], 1: [1010]})
        assert context.logits().argmax(axis=1).tolist() == [1003, 1011]
        context.extend({1: [1011], 0: [1003]})
        assert context.logits().argmax(axis=1).tolist() == [1012, 1004]
        assert context.lengths == [4, 2]


@pytest.mark.sharded(of="measurements")
def test_figures_are_of_texts_that_walk_alone(library: Library, path: Path) -> None:
    with Model(library, path, 0, 0) as model, context_of(model, are_forks=False) as context:
        gpu_peer.extend(context, {0: 5, 1: 1})
        context.extend({0: [1100]})
        with pytest.raises(RuntimeError, match=r"\[1101\] came where \[1006\] should"):
            gpu_peer.check_walk(context, [0])


@pytest.mark.sharded(7)
@pytest.mark.parametrize(
    "mix", [mix for mix in MIXES.values() if not mix.unknown_types], ids=lambda m: m.name
)
def test_texts_of_every_mix_walk(library: Library, mix: Mix, tmp_path: Path) -> None:
    path = tmp_path / "mix.gguf"
    FullSizeWriter(path, SMALL, seed=3, threads=2, mix=mix).write()
    with Model(library, path, 0, 2) as model, context_of(model, are_forks=False) as context:
        for _ in range(3):
            gpu_peer.extend(context, {0: 12, 1: 1})


def test_the_result_of_a_mix_is_a_file_of_its_own() -> None:
    assert gpu_peer.default_out(PLAIN).name == "peer.json"
    assert gpu_peer.default_out(MIXES["UD-IQ3_S"]).name == "peer_UD-IQ3_S.json"
    words = ["iq3.gguf", "--llama", "folder", "--mix", "UD-IQ3_S"]
    assert gpu_peer.command(gpu_peer.arguments().parse_args(words)).endswith(" --mix UD-IQ3_S")
    assert "--mix" not in gpu_peer.command(gpu_peer.arguments().parse_args(words[:3]))


def test_memory_in_use_is_what_nvidia_smi_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert device.gpu_memory_used() is None
    program = tmp_path / "nvidia-smi"
    program.write_text(
        f"#!{sys.executable}\nimport sys\nprint(7531 if 'memory.used' in sys.argv[1] else 'x')\n"
    )
    program.chmod(0o755)
    assert device.gpu_memory_used() == 7531 * 2**20


@pytest.mark.sharded(of="measurements", fixture="result")
def test_every_placement_has_what_was_asked_of_it(result: dict[str, Any]) -> None:
    assert result["commit"] == "c0ffee"
    assert result["model"] == "Qwen3.6-35B-A3B shape, random weights"
    assert result["llama_cpp"].keys() == {"version", "ggml", "system"}
    shares = {each["cpu_expert_layers"]: each["resident_share"] for each in result["placements"]}
    assert shares == {0: 1.0, 2: 0.5, 4: 0.0}
    whole, between, none = result["placements"]
    assert [row["depth"] for row in whole["depths"]] == [0, 40, 50, 60]
    assert [row["depth"] for row in none["depths"]] == [0, 40, 50]
    assert [row["tokens"] for row in none["prefill"]] == [20, 33]
    assert not between["prefill"]  # 2048 tokens weren't asked for
    for placement in result["placements"]:
        assert [row["sequences"] for row in placement["sequences"]] == [1, 3]
        assert placement["threads_tok_s"].keys() == {"1", "2"}
        assert placement["threads_tok_s"][str(placement["threads"])] == max(
            placement["threads_tok_s"].values()
        )
        assert sum(placement["buffers_mib"].values()) > 1
        for row in placement["depths"]:
            assert ("decode_tok_s" in row) == (row["depth"] in (0, 50))
            assert ("step_ms" in row) == (row["depth"] in (40, 60))
            for step in row.get("step_ms", {}).values():
                assert len(step["samples"]) == 2
                assert min(step["samples"]) <= step["median"] <= max(step["samples"])


def test_parts_that_are_not_asked_for_are_left_out() -> None:
    words = ["full.gguf", "--llama", "folder", "--parts", "steps"]
    options = gpu_peer.arguments().parse_args(words)
    work = gpu_peer.work_of(options, 0, 40)
    assert not work.prompts
    assert not work.sequences
    assert work.stops == [512, 32768, 131072]
    assert gpu_peer.work_of(options, 40, 40).stops == [512]
    with pytest.raises(SystemExit):
        gpu_peer.arguments().parse_args([*words[:-1], "step"])


def test_the_default_run_is_what_the_tables_show() -> None:
    options = gpu_peer.arguments().parse_args(["full.gguf", "--llama", "folder"])
    between = gpu_peer.work_of(options, 16, 40)
    assert between.prompts == [2048]
    assert between.decode_depths == [0, 8192]
    assert gpu_peer.work_of(options, 0, 40).decode_depths == [0, 8192, 16384]
    assert gpu_peer.work_of(options, 40, 40).prompts == [168, 512, 2048, 8192]


def raw_of(fields: Fields) -> bytes:
    """Defaults as a library with this layout has them."""
    struct = type("Params", (ctypes.Structure,), {"_fields_": [field[:2] for field in fields]})
    return bytes(struct(*(default for *_, default in fields))).ljust(512, b"\0")


@pytest.mark.parametrize("fields", CONTEXT_LAYOUTS)
def test_a_known_layout_is_found(fields: Fields) -> None:
    params: Any = struct_of("context parameters", raw_of(fields), CONTEXT_LAYOUTS).from_buffer_copy(
        raw_of(fields)
    )
    assert hasattr(params, "later") == (fields is CONTEXT_LAYOUTS[1])
    assert params.op_offload
    assert not params.kv_unified


def test_another_layout_is_an_error_that_names_the_field() -> None:
    with pytest.raises(RuntimeError, match="the default of n_gpu_layers is 0, not -1"):
        struct_of("model parameters", struct.pack("<QQi", 0, 0, 0).ljust(512, b"\0"), [MODEL_FIELDS])
    shifted = raw_of([("new", ctypes.c_uint64, 0), *CONTEXT_LAYOUTS[0]])
    with pytest.raises(RuntimeError, match="the default of n_ctx is 0, not 512"):
        struct_of("context parameters", shifted, CONTEXT_LAYOUTS)


def test_the_library_is_the_one_in_its_folder(tmp_path: Path) -> None:
    for name in ("libllama.cuda.v0.5.0.so", "libllama-common.so", "libggml.so"):
        (tmp_path / name).touch()
    assert library_file(tmp_path).name == "libllama.cuda.v0.5.0.so"
    (tmp_path / "libllama.so.0").touch()
    with pytest.raises(FileNotFoundError, match="there are 2"):
        library_file(tmp_path)


def test_the_experts_of_one_layer_are_meant_and_nothing_else(path: Path) -> None:
    with GGUFFile.open(path) as file:
        names = {name for name in file.tensors if re.search(EXPERTS_OF_LAYER.format(2), name)}
    assert names == {f"blk.2.ffn_{part}_exps.weight" for part in ("gate", "up", "down")}


def test_weights_are_counted_by_kind_of_memory() -> None:
    log = [
        "load_tensors:        CUDA0 model buffer size =  1000.50 MiB",
        "load_tensors:    CUDA_Host model buffer size =   200.00 MiB",
        "load_tensors:    CUDA_Host model buffer size =    50.00 MiB",
        "llama_kv_cache:      CUDA0 KV buffer size =    64.00 MiB",
    ]
    assert buffer_sizes(log) == {"CUDA0": 1000.5, "CUDA_Host": 250.0}


def test_a_file_that_is_no_model_is_an_error_with_the_librarys_words(
    library: Library, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = Library(library.file)
    (tmp_path / "none.gguf").write_bytes(b"nothing")
    with pytest.raises(RuntimeError, match=r"loading .*none\.gguf failed: \S+"):
        Model(library, tmp_path / "none.gguf", 0, 0)
    assert "none.gguf" in capsys.readouterr().err
    assert not other.log, "the log of a process goes to one object"


def test_a_build_without_a_gpu_is_not_measured_as_one(library: Library) -> None:
    with pytest.raises(OSError, match=r"libggml-cuda\.so: cannot open"):
        library.require_gpu()


@pytest.mark.sharded(of="measurements", fixture="result")
def test_tables_take_the_measured_figures_as_soon_as_there_are_some(
    result: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(report_tables, "RESULTS", tmp_path)
    (tmp_path / "gpu").mkdir()
    (tmp_path / "gpu" / "peer_llama_cpp.json").write_text('{"tok_s": {"pp168": 1}}')
    assert gpu_peer_figures.peer_figures() == {"tok_s": {"pp168": 1}}
    measured = {**result, "machine": {"gpu": "one"}}
    (tmp_path / "gpu" / "peer.json").write_text(json.dumps(measured))
    figures = gpu_peer_figures.peer_figures()
    whole = result["placements"][0]
    assert figures["gpu"] == "one"
    assert figures["tok_s"].keys() == {"pp20", "pp33", "tg5", "tg5 @ d50"}
    assert figures["tok_s"]["pp20"] == round(whole["prefill"][0]["tok_s"]["median"])
    assert figures["partial"]["decode_tok_s"].keys() == {"1", "0.5", "0"}
    assert figures["partial"]["prefill_tok_s_none_resident"].keys() == {"20", "33"}
    assert figures["depth"]["step_ms"].keys() == {"40", "60"}
    step = whole["depths"][1]["step_ms"]["3"]["median"]
    assert figures["depth"]["step_ms"]["40"]["3"] == pytest.approx(step, rel=1e-2)
    assert figures["depth"]["fill_tok_s"].keys() == {"40", "50", "60"}


def test_shares_have_the_names_that_tables_look_for() -> None:
    empty = {"prefill": [], "sequences": [], "depths": [{"depth": 0, "decode_tok_s": {"median": 1.6}}]}
    placements = [{"resident_share": 1 - number / 40, **empty} for number in (0, 16, 34, 40)]
    about = {"llama_cpp": {"version": "", "ggml": ""}, "machine": {"gpu": ""}, "date": "", "command": ""}
    figures = gpu_peer_figures.figures_of({**about, "placements": placements, "generate": 128})
    assert figures["partial"]["decode_tok_s"] == {"1": 2, "0.6": 2, "0.15": 2, "0": 2}


def test_every_table_beside_llama_cpp_can_be_made_of_a_default_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = gpu_peer.arguments().parse_args(["full.gguf", "--llama", "folder"])
    placements = []
    for number in options.cpu_layers:
        work, figure = gpu_peer.work_of(options, number, 40), {"median": 4321.0}
        depths = [{"depth": depth, "fill_tok_s": 4321.0, "last_chunk_ms": 4321.0} for depth in work.stops]
        for row in depths:
            row |= {"decode_tok_s": figure} if row["depth"] in work.decode_depths else {}
            steps = dict.fromkeys(map(str, work.rows), figure)
            row |= {"step_ms": steps} if row["depth"] in work.step_depths else {}
        prompts = [{"tokens": count, "tok_s": figure} for count in work.prompts]
        sequences = [{"sequences": count, "step_ms": figure} for count in work.sequences]
        share = {"resident_share": 1 - number / 40}
        placements.append({**share, "depths": depths, "prefill": prompts, "sequences": sequences})
    about = {"llama_cpp": {"version": "", "ggml": ""}, "machine": {"gpu": ""}, "date": "", "command": ""}
    written = {**about, "generate": options.generate, "placements": placements}
    shutil.copytree(report_tables.RESULTS / "gpu", tmp_path / "gpu")
    (tmp_path / "gpu" / "peer.json").write_text(json.dumps(written))
    monkeypatch.setattr(report_tables, "RESULTS", tmp_path)
    tables = (
        report_first_page.first_page,
        report_gpu.gpu,
        report_gpu.gpu_depth,
        report_gpu.gpu_hybrid,
        report_streaming.gpu_streaming,
        report_streaming.gpu_cold_rows,
    )
    for made in tables:
        assert " 4321 " in made() or " 4321.0 " in made() or " 4320.0 " in made(), made
    assert report_gpu.gpu().count(" 4321 ") == len(report_gpu.GPU_CASES)
    thousands = report_streaming.gpu_streams()
    assert all(f" {1e3 * count / 4321.0:.0f} " in thousands for count in options.sequences)
