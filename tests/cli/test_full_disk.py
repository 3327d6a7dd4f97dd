"""The verbs that write files, where there is no room for them."""

import resource
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest

from builders import write_gguf
from short_rates import PROGRAM


@pytest.fixture
def model(tmp_path: Path) -> str:
    (tmp_path / "text.py").write_text("import os\nprint(os.getcwd())\n")
    return str(write_gguf(tmp_path / "tiny.gguf")[0])


def _with_limit(limit: int, folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """The command where no file may be longer than `limit` bytes, as on a disk with so little room."""
    return subprocess.run(
        [sys.executable, *PROGRAM, *arguments],
        cwd=folder,
        # Without its own writing of bytecode, which would run into the limit.
        env={"HOME": str(folder), "PATH": "/usr/bin:/bin", "PYTHONDONTWRITEBYTECODE": "1"},
        preexec_fn=partial(resource.setrlimit, resource.RLIMIT_FSIZE, (limit, limit)),
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.sharded(of="processes")
@pytest.mark.parametrize(
    ("arguments", "out", "limit"),
    [
        (("profile", "--text", "text.py", "--threads", "1", "--out", "tiny.routing"), "tiny.routing", 100),
        (("profile", "--text", "text.py", "--threads", "1", "--plot", "my.svg"), "my.svg", 1000),
        (("plan", "--device", "cpu", "--out", "my.plan"), "my.plan", 100),
        (("bench", "-p", "8", "-n", "0", "-r", "1", "--threads", "1", "--report", "r.md"), "r.md", 100),
    ],
)
@pytest.mark.parametrize("existed", [True, False])
def test_no_file_is_truncated(
    model: str, tmp_path: Path, arguments: tuple[str, ...], out: str, limit: int, existed: bool
) -> None:
    path = tmp_path / out
    if existed:
        path.write_bytes(b"old")
    before = {entry.name for entry in tmp_path.iterdir()}
    verb, *options = arguments
    done = _with_limit(limit, tmp_path, verb, model, *options)
    assert done.returncode == 73
    assert f"error: {out} cannot be written: File too large; " in done.stderr
    assert "write to another disk" in done.stderr
    left = {entry.name for entry in tmp_path.iterdir()} - before - {".cache"}
    assert left == ({"tiny.routing"} if out == "my.svg" else set())  # the trace is whole
    assert not existed or path.read_bytes() == b"old"
