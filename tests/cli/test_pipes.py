"""Every verb with an output that is not read: pipes closed at the other end, streams closed at the start."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from builders import write_gguf
from coldstream.planning.machine import measured_hardware
from short_rates import PROGRAM

# Of every verb but `pull`, which needs a hub; MODEL stands for a tiny one.
COMMANDS = [
    *("--help", "--version", "run --help", "ls", "ls --json", "show MODEL", "show MODEL --json"),
    *("run MODEL -p def -n 8 --threads 1", "run MODEL -p def --ignore-eos --threads 1 --quiet"),
    *("plan MODEL --device cpu", "plan MODEL --device cpu --json"),
    *("bench MODEL -p 8 -n 4 -r 1 --threads 1", "bench MODEL -p 8 -n 4 -r 1 --threads 1 --json"),
    "profile MODEL --text text.py --threads 1",
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A home with a model beside it, another in the hub's cache, and the rates of this machine."""
    folder = tmp_path_factory.mktemp("pipes")
    repo, commit = folder / "cache" / "models--org--repo", "0" * 40
    (repo / "snapshots" / commit).mkdir(parents=True)
    (repo / "refs").mkdir()
    (repo / "refs" / "main").write_text(commit)
    (repo / "snapshots" / commit / "model-Q4_K_M.gguf").write_bytes(b"x")
    (folder / "text.py").write_text("import os\n")
    measured_hardware(None, path=folder / ".cache" / "coldstream" / "hardware.json")
    write_gguf(folder / "tiny.gguf")
    return folder


def _arguments(command: str) -> list[str]:
    """Of a process. Only `bench` measures, and so begins in another way than people begin it."""
    verb, *options = command.replace("MODEL", "tiny.gguf").split()
    return [sys.executable, *(PROGRAM if verb == "bench" else ("-m", "coldstream")), verb, *options]


def _run(folder: Path, command: str, redirection: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["sh", "-c", f'"$@" {redirection}', "sh", *_arguments(command)],
        cwd=folder,
        env={**os.environ, "HOME": str(folder), "HF_HUB_CACHE": str(folder / "cache")},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )


def _run_with_closed_pipes(folder: Path, command: str, *streams: str) -> tuple[int, str]:
    """Exit code, and what came to the stream of the two that is not in `streams`."""
    reader, closed = os.pipe()
    os.close(reader)
    pipes = dict.fromkeys(("stdout", "stderr"), subprocess.PIPE) | dict.fromkeys(streams, closed)
    with subprocess.Popen(
        _arguments(command),
        cwd=folder,
        env={**os.environ, "HOME": str(folder), "HF_HUB_CACHE": str(folder / "cache")},
        stdin=subprocess.DEVNULL,
        text=True,
        **pipes,  # type: ignore[call-overload]
    ) as process:
        os.close(closed)
        out, err = process.communicate()
    return process.returncode, out or err or ""


@pytest.mark.sharded(9)
@pytest.mark.parametrize("command", COMMANDS)
def test_the_output_is_not_read(folder: Path, command: str) -> None:
    code, notes = _run_with_closed_pipes(folder, command, "stdout")
    assert code == 141
    assert "error" not in notes
    assert "Traceback" not in notes
    assert "Exception" not in notes


@pytest.mark.sharded(9)
@pytest.mark.parametrize("command", COMMANDS)
def test_no_stream_is_read(folder: Path, command: str) -> None:
    assert _run_with_closed_pipes(folder, command, "stdout", "stderr") == (141, "")


@pytest.mark.sharded(9)
@pytest.mark.parametrize("command", COMMANDS)
def test_the_output_is_closed_from_the_start(folder: Path, command: str) -> None:
    done = _run(folder, command, ">&-")
    assert (done.returncode, done.stderr) == (1, "error: standard output is closed\n")


@pytest.mark.sharded(of="processes")
@pytest.mark.parametrize("command", COMMANDS[:4] + COMMANDS[5:8])
def test_what_is_for_people_is_closed_from_the_start(folder: Path, command: str) -> None:
    expected = _run(folder, command, "")
    done = _run(folder, command, "2>&-")
    assert done.returncode == expected.returncode == 0
    assert bool(done.stdout) == bool(expected.stdout)


@pytest.mark.sharded(6)
@pytest.mark.parametrize(
    ("command", "code"),
    [
        ("show none.gguf", 66),
        ("show none.gguf --verbose", 66),
        ("frob", 2),
        ("show text.py", 65),
        ("run MODEL -p def -n 8 --threads 1", 141),
        ("show MODEL --json", 0),
    ],
)
def test_the_errors_are_not_read(folder: Path, command: str, code: int) -> None:
    """An error keeps its code; a note that can't be shown ends the program as any other output does."""
    assert _run_with_closed_pipes(folder, command, "stderr")[0] == code


@pytest.mark.sharded(of="processes")
def test_a_first_line_is_enough(folder: Path) -> None:
    command = " ".join(_arguments("run MODEL -p def --ignore-eos --threads 1"))
    script = f"{{ {command} -q; echo $? >&2; }} | head -c 1"
    done = subprocess.run(["sh", "-c", script], cwd=folder, capture_output=True, check=False)
    assert (len(done.stdout), done.stderr) == (1, b"141\n")
