"""`coldstream ls` on a made-up hub cache."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

LS = [sys.executable, "-m", "coldstream", "ls"]


def _ls(cache: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "HF_HUB_CACHE": str(cache)}
    return subprocess.run([*LS, *arguments], env=environment, capture_output=True, text=True, check=True)


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    repo = tmp_path / "models--org--repo"
    commit = "0123456789abcdef0123456789abcdef01234567"
    snapshot = repo / "snapshots" / commit
    snapshot.mkdir(parents=True)
    (repo / "refs").mkdir()
    (repo / "refs" / "main").write_text(commit)
    (snapshot / "model-Q4_K_M.gguf").write_bytes(b"x" * 3 * 2**20)
    return tmp_path


@pytest.mark.sharded(of="processes")
def test_models_by_the_names_that_the_verbs_take(cache: Path) -> None:
    shown = _ls(cache)
    assert "org/repo:Q4_K_M" in shown.stdout
    assert "3.00 MiB" in shown.stdout
    (entry,) = json.loads(_ls(cache, "--json").stdout)
    assert (entry["name"], entry["quant"], entry["size_bytes"]) == ("org/repo:Q4_K_M", "Q4_K_M", 3 * 2**20)


@pytest.mark.sharded(of="processes")
def test_an_empty_cache_is_no_error(tmp_path: Path) -> None:
    shown = _ls(tmp_path / "absent")
    assert shown.stdout == ""
    assert "coldstream pull" in shown.stderr
    assert json.loads(_ls(tmp_path / "absent", "--json").stdout) == []
