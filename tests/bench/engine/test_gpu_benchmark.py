"""The GPU's benchmark, run on the CPU over a small file, and the table made of what it writes."""

import json
import re
import shutil
import sys
from pathlib import Path

import pytest

from bench import results
from bench.engine import gpu
from bench.full_size_model import FullSizeWriter
from bench.report import gpu as report_gpu
from bench.report import tables as report_tables
from coldstream.planning.config import TIERS
from small_shape import SMALL

CASES = ("pp20", "pp33", "tg4", "tg4_d50")


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The result files of one run."""
    directory = tmp_path_factory.mktemp("gpu")
    model = directory / "small.gguf"
    FullSizeWriter(model, SMALL, seed=3, threads=2).write()
    with pytest.MonkeyPatch.context() as patch:
        words = f"gpu.py {model} --device cpu --prompts 20,33 --depths 0,50 --generate 4 --repetitions 2"
        patch.setattr(sys, "argv", [*words.split(), "--out", str(directory / "out"), "--commit", "c0ffee"])
        assert gpu.main() == 0
    return directory / "out"


@pytest.mark.sharded(of="measurements", fixture="out")
def test_each_case_has_a_file_that_says_what_ran(out: Path) -> None:
    assert sorted(path.stem for path in out.iterdir()) == sorted(CASES)
    for name in CASES:
        result = json.loads((out / f"{name}.json").read_text())
        assert result["commit"] == "c0ffee"
        assert re.fullmatch(r"\d{4}-\d\d-\d\d", result["date"])
        assert result["ran"]["device"] == "cpu"
        assert result["ran"]["tier"] in TIERS[1:][1:]
        assert len(result["samples_tok_s"]) == 2
        assert min(result["samples_tok_s"]) <= result["median_tok_s"] <= max(result["samples_tok_s"])
        assert result["command"].startswith("python -m bench.engine.gpu small.gguf --device cpu")
        assert str(out) not in json.dumps(result)


@pytest.mark.sharded(of="measurements", fixture="out")
def test_the_floor_counts_weights_and_the_cache(out: Path) -> None:
    short, deep = (json.loads((out / f"{name}.json").read_text()) for name in ("tg4", "tg4_d50"))
    # Keys and values of two bytes and a scale in 16, in one attention layer.
    cached_bytes = SMALL.kv_heads * (SMALL.head_dim * 2 + 16) * 2
    assert deep["bytes_per_token"] - short["bytes_per_token"] == 50 * cached_bytes
    assert short["bytes_per_token"] - short["weight_bytes_per_token"] == 3 * cached_bytes
    for result in (short, deep):
        share = result["median_tok_s"] * result["floor_s_per_token"]
        assert result["share_of_floor"] == pytest.approx(share)
    assert "share_of_floor" not in json.loads((out / "pp20.json").read_text())


@pytest.mark.sharded(of="measurements", fixture="out")
def test_the_table_sets_figures_beside_the_peers(
    out: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(out, tmp_path / "gpu")
    peer = {"tok_s": {"pp20": 1.0}}
    (tmp_path / "gpu" / "peer_llama_cpp.json").write_text(json.dumps(peer))
    monkeypatch.setattr(report_tables, "RESULTS", tmp_path)
    monkeypatch.setattr(report_gpu, "GPU_CASES", ("pp20", "tg4 @ d50", "tg4 @ d99"))
    for path in (tmp_path / "gpu").glob("[pt]?[24]*.json"):
        result = json.loads(path.read_text())
        result["machine"] |= {"gpu": "Some GPU", "driver": "1.2"}
        path.write_text(json.dumps(result))
    lines = report_gpu.gpu().splitlines()
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.startswith("|")]
    assert [row[0] for row in cells[2:]] == ["pp20", "tg4 @ d50"]
    assert cells[2][2] == "1"
    assert cells[2][3].endswith("×")
    assert cells[3][2:4] == ["", ""]
    assert cells[3][4].endswith("%")
    assert lines[-1] == "Some GPU, driver 1.2, commit c0ffee"


def test_without_figures_there_is_no_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "gpu").mkdir()
    shutil.copy(report_tables.RESULTS / "gpu" / "peer_llama_cpp.json", tmp_path / "gpu")
    monkeypatch.setattr(report_tables, "RESULTS", tmp_path)
    assert report_gpu.gpu() == ""
    assert report_gpu.gpu_profile() == ""


def test_results_name_their_commit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert re.fullmatch(r"[0-9a-f]{12}(-changed)?|unknown", results.commit())
    monkeypatch.setattr(results, "ROOT", tmp_path)
    assert results.commit() == "unknown"
    results.write_result({"figure": 1}, tmp_path / "new" / "result.json")
    written = json.loads((tmp_path / "new" / "result.json").read_text())
    assert list(written) == ["commit", "date", "figure"]
