"""`coldstream profile` on a tiny model."""

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from builders import write_gguf
from coldstream.engine.routing_profile import routed_model
from coldstream.gguf.reader import GGUFFile
from coldstream.models import ModelSpec
from coldstream.placement import RoutingTrace

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text.py").write_text("import os\nprint(os.getcwd())\n")
    return write_gguf(tmp_path / "tiny.gguf")[0]


@pytest.mark.parametrize("out", ["tiny.routing", "elsewhere.trace"])
def test_a_trace_is_written_and_described(run: Run, model: Path, tmp_path: Path, out: str) -> None:
    chosen = [] if out == "tiny.routing" else ["--out", out]
    code, shown, _ = run("profile", str(model), "--text", "text.py", "--threads", "1", *chosen)
    assert code == 0
    assert re.fullmatch(rf"{out}: \d+ tokens, \d+ layers, \d+% of the experts used, 0\.00 MiB\n", shown)
    with GGUFFile.open(model) as file:
        expected = routed_model(file, ModelSpec.from_gguf(file.metadata, file.tensors))
    assert f" {RoutingTrace.load(tmp_path / out, expected).num_steps} tokens" in shown


@pytest.mark.parametrize(
    ("text", "message"),
    [(b"\xff\xfe", "bytes.txt is not UTF-8 text: byte 0"), (b"", "0 tokens"), (None, "No such file")],
)
def test_a_text_that_is_none_is_refused(
    run: Run, model: Path, tmp_path: Path, text: bytes | None, message: str
) -> None:
    if text is not None:
        (tmp_path / "bytes.txt").write_bytes(text)
    code, shown, error = run("profile", str(model), "--text", "bytes.txt")
    assert (code, shown) == (2, "")
    assert message in error
    assert not (tmp_path / "tiny.routing").exists()


@pytest.mark.parametrize("out", [".", "no/such/folder.routing"])
def test_where_nothing_can_be_written_is_said_first(run: Run, model: Path, out: str) -> None:
    code, shown, error = run("profile", str(model), "--text", "text.py", "--out", out)
    assert (code, shown) == (2, "")
    assert f"{out} cannot be written" in error
