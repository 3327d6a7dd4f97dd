"""Completion by a real shell, with the script that `coldstream completion` prints."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from coldstream.cli.main import VERBS

# A program of this name, as the script calls it by name.
PROGRAM = f"#!{sys.executable}\nimport sys\nfrom coldstream.__main__ import main\nsys.exit(main())\n"
# Prints what bash would offer for the words given.
OFFER = """
eval "$(coldstream completion bash)"
compopt() { :; }
COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1))
_coldstream_completion coldstream
printf '%s\\n' "${COMPREPLY[@]}"
"""


def _offered(folder: Path, *words: str, **environment: str) -> list[str]:
    program = folder / "coldstream"
    program.write_text(PROGRAM)
    program.chmod(0o755)
    done = subprocess.run(
        ["bash", "-c", OFFER, "bash", "coldstream", *words],
        env={**os.environ, "PATH": f"{folder}:{os.environ['PATH']}", **environment},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stderr == ""
    return done.stdout.split()


@pytest.mark.sharded(of="processes")
def test_bash_completes_verbs_options_and_values(tmp_path: Path) -> None:
    assert _offered(tmp_path, "") == list(VERBS)
    assert _offered(tmp_path, "p") == [verb for verb in VERBS if verb.startswith("p")]
    assert _offered(tmp_path, "run", "--model-d") == ["--model-draft"]
    assert _offered(tmp_path, "run", "--device", "c") == ["cpu", "cuda"]
    assert _offered(tmp_path, "serve", "--log-format", "") == ["text", "json"]


@pytest.mark.sharded(of="processes")
def test_bash_completes_downloaded_models(tmp_path: Path) -> None:
    snapshot = tmp_path / "models--org--repo" / "snapshots" / ("0" * 40)
    snapshot.mkdir(parents=True)
    refs = tmp_path / "models--org--repo" / "refs"
    refs.mkdir()
    (refs / "main").write_text("0" * 40)
    (snapshot / "model-Q4_K_M.gguf").write_bytes(b"x")
    offered = _offered(tmp_path, "run", "or", HF_HUB_CACHE=str(tmp_path))
    assert offered == ["org/repo:Q4_K_M"]
    assert _offered(tmp_path, "run", "mod", HF_HUB_CACHE=str(tmp_path)) == []  # the shell's own file names


@pytest.mark.sharded
@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_each_shell_gets_a_script_that_it_can_read(shell: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "coldstream", "completion", shell], capture_output=True, text=True, check=True
    )
    assert f"_COLDSTREAM_COMPLETE={shell}_complete" in done.stdout
    if shutil.which(shell):
        subprocess.run([shell, "-n", "/dev/stdin"], input=done.stdout, text=True, check=True)
