"""`coldstream profile` on a tiny model."""

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from builders import write_gguf
from coldstream.gguf.reader import GGUFFile
from coldstream.models import read_spec
from coldstream.models.footprint import routed_model
from coldstream.placement import RoutingTrace

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))  # where rates of the machine are kept
    (tmp_path / "text.py").write_text("import os\nprint(os.getcwd())\n")
    return write_gguf(tmp_path / "tiny.gguf")[0]


@pytest.mark.parametrize("out", ["tiny.routing", "elsewhere.trace"])
def test_a_trace_is_written_and_described(run: Run, model: Path, tmp_path: Path, out: str) -> None:
    chosen = [] if out == "tiny.routing" else ["--out", out]
    code, shown, _ = run("profile", str(model), "--text", "text.py", "--threads", "1", *chosen)
    assert code == 0
    assert re.fullmatch(rf"{out}: \d+ tokens, \d+ layers, \d+% of the experts used, 0\.00 MiB\n", shown)
    with GGUFFile.open(model) as file:
        expected = routed_model(file, read_spec(file.metadata, file.tensors))
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


@pytest.mark.sharded(of="processes")
def test_uses_and_residents_are_drawn(run: Run, model: Path, tmp_path: Path) -> None:
    planned = ("plan", str(model), "--device", "cpu", "--pin-layers", "1", "--out", "my.plan")
    assert run(*planned)[0] == 0
    arguments = ("profile", str(model), "--text", "text.py", "--threads", "1", "--plot", "my.svg")
    assert run(*arguments)[0] == 0
    plain = (tmp_path / "my.svg").read_text()
    assert "<title>tiny.gguf: experts used by text.py, " in plain
    assert "resident" not in plain
    assert run(*arguments, "--plan", "my.plan")[0] == 0
    assert "resident" in (tmp_path / "my.svg").read_text()


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (("--plan", "my.plan"), 2, "--plan is for --plot"),
        (("--plot", "no/folder.svg"), 2, "cannot be written"),
        (("--plot", "my.svg", "--plan", "none.plan"), 66, "none.plan"),
        (("--plot", "my.svg", "--plan", "text.py"), 65, "not JSON"),
    ],
)
def test_a_picture_that_cannot_be_is_refused_before_the_work(
    run: Run, model: Path, tmp_path: Path, arguments: tuple[str, ...], code: int, message: str
) -> None:
    got, shown, error = run("profile", str(model), "--text", "text.py", *arguments)
    assert (got, shown) == (code, "")
    assert message in error
    assert not (tmp_path / "tiny.routing").exists()
    assert not (tmp_path / "my.svg").exists()
