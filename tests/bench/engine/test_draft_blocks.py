"""Drafts of two commits are compared from end to end, here of these sources with themselves."""

import json
import shutil
import sys
from pathlib import Path

import pytest

from bench.engine import draft_blocks
from bench.random_drafter import write as write_drafter
from bench.results import ROOT
from coldstream.kernels import _csrc
from coldstream.models.dflash.file import DflashFile
from dflash_cases import config, spec_of


@pytest.mark.sharded(of="measurements")
def test_a_comparison_of_these_sources_with_themselves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Drafts take time, and their acceptance is the same: it depends on no time."""
    shutil.copytree(ROOT / "src", tmp_path / "src", ignore=shutil.ignore_patterns("__pycache__", "_csrc*.so"))
    shutil.copy(str(_csrc.__file__), tmp_path / "src" / "coldstream" / "kernels")
    out = tmp_path / "found.json"
    options = "--against HEAD --device cpu --kinds bundled --pairs 1 --repeats 2 --old"
    words = ["draft_blocks", *options.split(), str(tmp_path)]
    monkeypatch.setattr(sys, "argv", [*words, "--out", str(out)])
    assert draft_blocks.main() == 0
    result = json.loads(out.read_text())
    *drafts, text = result["cells"]
    assert [cell["rows_behind"] for cell in drafts] == list(draft_blocks.ROWS_BEHIND)
    for cell in drafts:
        assert cell["ratio"] == pytest.approx(cell["old_ms"] / cell["new_ms"])
    assert text["new_accepted_a_step"] == text["old_accepted_a_step"] > 1


@pytest.mark.parametrize("kind", draft_blocks.TYPES)
def test_a_random_drafter_has_matrices_of_its_type(kind: str, tmp_path: Path) -> None:
    values = config(True)
    values["dflash_config"]["selector_rank"] = 32
    spec = spec_of(values)
    path = tmp_path / "drafter.gguf"
    write_drafter(path, spec, kind)
    with DflashFile.open(path) as file:
        assert file.tensor("fc.weight").quant_type.name == kind
        assert file.tensor("blk.0.attn_conv_base").quant_type.name == "BF16"
        assert file.tensor("blk.0.attn_norm.weight").quant_type.name == "F32"
