"""tools/wheel_trial.py: the environment that a wheel is tried in, and the server there."""

import shutil
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from tools.wheel_trial import UserEnvironment, served

READY = (
    'import sys, time; print(\'{"event": "ready", "url": "http://x:1"}\', file=sys.stderr); time.sleep(600)'
)


def test_a_user_has_no_compiler_and_nothing_of_the_caller(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    user = UserEnvironment(sys.executable, tmp_path / "user")
    for name in ("cc", "c++", "gcc", "g++", "clang++", "cmake", "ninja", "make"):
        assert shutil.which(name, path=user.variables["PATH"]) is None
    script = "import os, sys; print(sorted(os.environ), os.getcwd(), sys.prefix)"
    command = [user.command()[0], "-c", script]
    shown = subprocess.run(command, env=user.variables, capture_output=True, text=True, check=True).stdout
    assert "PYTHONPATH" not in shown
    assert str(user.venv) in shown


def test_a_server_that_ends_is_reported_with_its_last_words(tmp_path: Path) -> None:
    command = [sys.executable, "-c", "import sys; sys.exit('there is no model')"]
    with pytest.raises(RuntimeError, match="there is no model"), served(command, tmp_path / "log", {}):
        pass


def test_a_server_that_is_ready_is_named_and_stopped(tmp_path: Path) -> None:
    before = psutil.Process().children()
    with served([sys.executable, "-c", READY], tmp_path / "log", {}) as url:
        assert url == "http://x:1"
        (server,) = set(psutil.Process().children()) - set(before)
    assert not server.is_running()
