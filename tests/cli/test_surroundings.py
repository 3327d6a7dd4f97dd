"""The command line and the server in poor surroundings: paths that are no text, no home, limits."""

import json
import os
import resource
import shutil
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import httpx2
import pytest
from test_serve import SHORT, serving

from coldstream.assets import demo_model_path
from coldstream.engine import LLM, SamplingParams
from short_rates import PROGRAM

ANSWER = [
    "-n",
    "4",
    "--temp",
    "0",
    "--seed",
    "1",
    "--threads",
    "1",
    "--device",
    "cpu",
    "-c",
    "256",
    "--quiet",
]
Limit = Callable[[], None]


def coldstream(
    *arguments: str, limit: Limit | None = None, **options: str
) -> subprocess.CompletedProcess[str]:
    """The command with no environment but `options`."""
    return subprocess.run(
        [sys.executable, *PROGRAM, *arguments],
        env={"PATH": "/usr/bin:/bin", "LC_ALL": "C.UTF-8", **options},
        preexec_fn=limit,
        capture_output=True,
        text=True,
        errors="surrogateescape",
        check=False,
    )


@pytest.fixture
def odd_model(tmp_path: Path) -> Path:
    """A model at a path whose folder and name are not UTF-8."""
    folder = tmp_path / os.fsdecode(b"Mod\xe8les-\xff")
    folder.mkdir()
    return Path(shutil.copy(demo_model_path(), folder / os.fsdecode(b"d\xe9mo.gguf")))


@pytest.mark.sharded(of="processes")
def test_a_path_that_is_not_utf8_in_every_verb(odd_model: Path) -> None:
    name, plan = str(odd_model), str(odd_model.with_name(os.fsdecode(b"pl\xe4n.json")))
    usual = coldstream("run", str(demo_model_path()), "-p", "def", *ANSWER)
    assert usual.returncode == 0, usual.stderr
    found = coldstream("run", name, "-p", "def", *ANSWER)
    assert (found.returncode, found.stdout) == (0, usual.stdout), found.stderr
    shown = coldstream("show", name, "--json")
    assert json.loads(shown.stdout)["paths"] == [name]
    assert "d\\udce9mo.gguf" in coldstream("show", name).stdout
    planned = coldstream("plan", name, "--device", "cpu", "--out", plan)
    assert planned.returncode == 0, planned.stderr
    by_plan = coldstream("run", name, "--plan", plan, "-p", "def", "-n", "4", "--temp", "0", "--quiet")
    assert (by_plan.returncode, by_plan.stdout) == (0, usual.stdout), by_plan.stderr
    for arguments in (("run", f"{name}x"), ("show", f"{name}x"), ("run", name, "--model-draft", f"{name}x")):
        missing = coldstream(*arguments, "-p", "x") if arguments[0] == "run" else coldstream(*arguments)
        assert missing.returncode == 66, missing.stderr
        assert "d\\udce9mo.ggufx" in missing.stderr


def test_a_path_that_is_not_utf8_in_python(odd_model: Path) -> None:
    params = SamplingParams(temperature=0, max_tokens=4)
    with LLM(odd_model, device="cpu", threads=1, ctx_size=64, ram="64MiB") as llm:
        found = llm.generate("def", params)[0].token_ids
    with LLM(demo_model_path(), device="cpu", threads=1, ctx_size=64) as llm:
        assert llm.generate("def", params)[0].token_ids == found


@pytest.mark.sharded(of="processes")
def test_a_path_that_is_not_utf8_is_served(odd_model: Path) -> None:
    """Answers and the log name the model in text that every client and every log can hold."""
    cache = odd_model.with_name(os.fsdecode(b"c\xe4che"))
    with serving(str(odd_model), "--prompt-cache", str(cache)) as (server, client):
        (model,) = client.get("/v1/models").json()["data"]
        assert model["id"] == "d\\udce9mo"
        answer = client.post("/v1/completions", json=SHORT | {"model": model["id"]})
        assert answer.status_code == httpx2.codes.OK, answer.text
        assert client.get("/health").status_code == httpx2.codes.OK
        server.process.terminate()
        assert server.finish() == 0
    assert cache.is_dir()
    assert not [line for line in server.lines if line["level"] == "error"]


def test_a_user_without_a_home_and_without_an_entry_of_its_own() -> None:
    """Rates of the machine are measured and not kept."""
    script = (
        "import os, pwd, sys\n"
        "def none(uid): raise KeyError(uid)\n"
        "pwd.getpwuid = none\n"
        "import runpy\n"
        f"sys.argv[0] = {PROGRAM[-1]!r}\n"
        "runpy.run_path(sys.argv[0], run_name='__main__')"
    )
    for arguments in (["plan", "--device", "cpu"], ["run", "-p", "def", *ANSWER], ["ls"]):
        done = subprocess.run(
            [sys.executable, "-c", script, *arguments],
            env={"PATH": "/usr/bin:/bin"},
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr


@pytest.mark.sharded(of="processes")
def test_a_home_that_cannot_be_written_and_no_place_for_temporary_files() -> None:
    for options in ({"HOME": "/proc"}, {"HOME": "/proc/1/none", "TMPDIR": "/proc/none"}):
        for arguments in (["plan", "--device", "cpu"], ["run", "-p", "def", *ANSWER]):
            done = coldstream(*arguments, **options)
            assert done.returncode == 0, done.stderr


def limited(what: int, value: int) -> Limit:
    return partial(resource.setrlimit, what, (value, value))


@pytest.mark.parametrize(
    ("limit", "said"),
    [
        (limited(resource.RLIMIT_NOFILE, 8), "ulimit -n"),
        (limited(resource.RLIMIT_AS, 250 << 20), "ulimit -u or -v|memory ran out"),
    ],
    ids=["descriptors", "memory"],
)
def test_limits_of_the_system_are_named(limit: Limit, said: str, tmp_path: Path) -> None:
    done = coldstream("run", "-p", "def", *ANSWER, limit=limit, HOME=str(tmp_path))
    assert done.returncode == 71, done.stderr
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("error:")]
    assert any(each in line for each in said.split("|")), line
