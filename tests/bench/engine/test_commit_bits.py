"""Comparing the bits of two commits: one that is the same, and one that rounds otherwise."""

import json
from pathlib import Path

import pytest
from test_versus_commit import checkout_of_this

from bench.engine import commit_bits
from bench.engine.commit_bits import BitsSetting, compared
from builders import write_gguf


def test_digests_that_differ_or_are_missing_are_named() -> None:
    assert compared({"a": "1", "b": "2"}, {"a": "1", "b": "2"}) == {"digests": 2, "different": []}
    assert compared({"a": "1", "b": "2"}, {"a": "3", "c": "2"})["different"] == ["a", "b", "c"]


@pytest.mark.sharded(of="measurements")
@pytest.mark.parametrize("is_changed", [False, True])
def test_a_commit_with_other_bits_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_changed: bool
) -> None:
    """The other commit is this one, or one whose logits have another last bit."""
    old = checkout_of_this(tmp_path / "old")
    tiny = str(write_gguf(tmp_path / "tiny.gguf")[0])
    if is_changed:
        source = old / "src/coldstream/models/cpu/runner.py"
        text = source.read_text()
        source.unlink()
        source.write_text(
            text + "\n_logits = CpuRunner.logits\nCpuRunner.logits = lambda *a: _logits(*a) * 2\n"
        )
    monkeypatch.setattr(
        commit_bits, "settings", lambda *_: [BitsSetting("a", {"model": tiny, "device": "cpu"}, "generic")]
    )
    monkeypatch.setattr(commit_bits, "gpu_name", lambda: None)
    out = tmp_path / "out.json"
    words = ["commit_bits", "--against", "self", "--old", str(old), "--commit", "mine", "--out", str(out)]
    monkeypatch.setattr("sys.argv", words)
    assert commit_bits.main() == is_changed
    found = json.loads(out.read_text())["settings"]["a"]
    assert found["different"] == ([f"logits of {count}" for count in (1, 300, 70, 9)] if is_changed else [])
    assert (found["digests"], found["commit"]) == (6, "mine")
