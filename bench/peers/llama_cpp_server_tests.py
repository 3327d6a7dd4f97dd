"""llama.cpp's own tests of its server, run against `coldstream serve` with the bundled model.

    python -m bench.peers.llama_cpp_server_tests --out docs/results/llama_cpp_server_tests.json [--tests DIR]

The tests are fetched for the run, from the sdist of llama-cpp-python on the Python package index, or copied
from DIR, `tools/server/tests` of a source tree of llama.cpp. They run as they are, in a temporary folder,
with packages of their own. `llama_server_stand_in.py` is the program that they start, and their conftest.py
is `llama_server_conftest.py`. Nothing of them is kept but names and outcomes. Why a test fails is said in
`llama_cpp_server_reasons.toml`. Exits with 1 if a failure has no reason there.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import tomllib
from collections import Counter
from pathlib import Path
from typing import Any, Final

from bench.peers.llama_server_stand_in import end_servers
from bench.results import commit, write_result
from coldstream.placement.hardware import Hardware

BENCH: Final = Path(__file__).parent
SDIST: Final = "llama-cpp-python==0.3.36"
REASONS: Final = BENCH / "llama_cpp_server_reasons.toml"
PACKAGES: Final = ("pytest~=8.3.3", "pytest-timeout", "openai~=2.14.0", "requests~=2.32.3", "wget~=3.2")
TESTS: Final = "tools/server/tests"
TEMPLATES: Final = "models/templates"
TIMEOUT_S: Final = 240  # of a test
OUTCOMES: Final = ("passed", "failed", "skipped", "slow")


def fetch(folder: Path) -> Path:
    """The tests from the package index, unpacked into `folder` with the chat templates that they name."""
    command = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "--no-deps",
        "--no-binary",
        ":all:",
        "--no-build-isolation",
    ]
    subprocess.run([*command, "--dest", str(folder), SDIST], check=True, stdout=sys.stderr)
    (archive,) = folder.glob("*.tar.gz")
    shutil.unpack_archive(archive, folder)
    (tests,) = folder.glob(f"*/vendor/llama.cpp/{TESTS}")
    return tests


def prepare(tests: Path, folder: Path, packages: Path | None) -> tuple[Path, Path]:
    """Copies the tests into `folder` with what they need here; returns their place and that of packages."""
    root = folder / "llama.cpp"
    here = root / TESTS
    shutil.copytree(tests, here)
    templates = tests.parents[2] / TEMPLATES
    if templates.is_dir():
        shutil.copytree(templates, root / TEMPLATES)
    shutil.copy(BENCH / "llama_server_conftest.py", here / "conftest.py")
    shutil.copy(BENCH / "llama_server_native.py", here)
    (here / "state").mkdir()
    stand_in = here / "state" / "llama-server"
    command = f'"{sys.executable}" "{BENCH / "llama_server_stand_in.py"}" "{here / "state"}"'
    stand_in.write_text(f'#!/bin/sh\nunset PYTHONPATH\nexec {command} "$@"\n')
    stand_in.chmod(0o755)
    if packages is None:
        packages = folder / "packages"
        install = [sys.executable, "-m", "pip", "install", "--quiet", "--target", str(packages)]
        subprocess.run([*install, *PACKAGES], check=True, stdout=sys.stderr)
    return here, packages


def run(here: Path, packages: Path, files: list[str], port: int, only: str | None) -> list[dict[str, str]]:
    """The outcome of each test of `files`, with its error."""
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-m",
        "not slow",
        "--timeout",
        str(TIMEOUT_S),
        "--tb",
        "short",
        "-p",
        "pytest_timeout",
    ]
    command += ["-k", only] if only else []
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join((str(packages), str(here))),
        "LLAMA_SERVER_BIN_PATH": str(here / "state" / "llama-server"),
        "PORT": str(port),
        "NO_PROXY": "127.0.0.1,localhost",
        "PYTHONDONTWRITEBYTECODE": "1",
        "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
    }
    try:
        names = [f"unit/{name}.py" for name in files]
        subprocess.run([*command, *names], cwd=here, env=environment, stdout=sys.stderr, check=False)
    finally:
        end_servers(here / "state")
    out = here / "outcomes.jsonl"
    return [json.loads(line) for line in out.read_text().splitlines()] if out.is_file() else []


def reason_of(test: str, reasons: dict[str, str]) -> str | None:
    """Why `test` fails: by its name with the number of the case, or without."""
    return reasons.get(test) or reasons.get(test.partition("[")[0])


def load_reasons() -> tuple[dict[str, str], dict[str, str]]:
    """Why tests fail, by name; and why whole files have no counterpart. ValueError for a test named twice."""
    table = tomllib.loads(REASONS.read_text())
    reasons: dict[str, str] = {}
    for each in table["failures"]:
        for test in each["tests"]:
            if test in reasons:
                raise ValueError(f"{REASONS.name} names {test} twice")
            reasons[test] = each["why"]
    return reasons, table["without_counterpart"]


def summary(outcomes: list[dict[str, str]], reasons: dict[str, str]) -> dict[str, Any]:
    """Counts by file, and each failure with its reason."""
    files: dict[str, Counter[str]] = {}
    failures = []
    for each in outcomes:
        files.setdefault(each["test"].partition("::")[0], Counter())[each["outcome"]] += 1
        if each["outcome"] == "failed":
            why = reason_of(each["test"], reasons)
            failures.append({"test": each["test"], "reason": why or "unexplained"})
            if why is None:
                error = " ".join(each["error"].split())[:300]
                print(f"unexplained: {each['test']}: {error}", file=sys.stderr, flush=True)
    counts = {
        name: {outcome: found[outcome] for outcome in OUTCOMES} for name, found in sorted(files.items())
    }
    return {"files": counts, "failures": failures}


def _source_of(tests: Path) -> str:
    """The sdist in which `tests` lie, if they lie in one."""
    names = [part for part in tests.resolve().parts if part == SDIST.replace("-", "_").replace("==", "-")]
    return SDIST if names else "a source tree"


def merged(found: dict[str, Any], before: dict[str, Any]) -> dict[str, Any]:
    """What was found, and of files that were not run what an earlier result has. Each file has its commit."""
    files = {name: {**counts, "commit": commit()} for name, counts in found["files"].items()}
    kept = {name: counts for name, counts in before.get("files", {}).items() if name not in files}
    failures = [
        each for each in before.get("failures", []) if each["test"].partition("::")[0] in kept
    ] + found["failures"]
    dropped = sorted(
        {*before.get("dropped_flags", []), *found["dropped_flags"]} if kept else found["dropped_flags"]
    )
    return {
        "files": dict(sorted({**kept, **files}.items())),
        "failures": sorted(failures, key=lambda each: str(each["test"]).partition("::")[0]),
        "dropped_flags": dropped,
    }


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tests", type=Path, help="the tests, in a source tree of llama.cpp")
    parser.add_argument("--packages", type=Path, help="what the tests import, installed with pip --target")
    parser.add_argument("--only", help="tests whose name holds this, as pytest's -k")
    parser.add_argument("--files", nargs="+", help="as test_basic; --out keeps what it has of others")
    parser.add_argument("--port", type=int, default=8080)
    parser.add_argument("--out", type=Path, help="also write the JSON here")
    options = parser.parse_args()
    reasons, without = load_reasons()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        tests = options.tests or fetch(folder)
        here, packages = prepare(tests.resolve(), folder, options.packages)
        present = sorted(path.stem for path in (here / "unit").glob("test_*.py"))
        files = options.files or [file for file in present if file not in without]
        found = summary(run(here, packages, files, options.port, options.only), reasons)
        found["dropped_flags"] = sorted(set((here / "state" / "dropped").read_text().split()))
    for each in found["failures"]:
        print(f"{each['test']}: {each['reason']}", file=sys.stderr)
    is_kept = options.files and options.out and options.out.is_file()
    result = {
        "command": "python -m bench.peers.llama_cpp_server_tests",
        "source": SDIST if options.tests is None else _source_of(options.tests),
        "machine": {"cpu": Hardware.measure().cpu_name},
        **merged(found, json.loads(options.out.read_text()) if is_kept else {}),
        "without_counterpart": {file: without[file] for file in present if file in without},
    }
    write_result(result, options.out)
    return int(not found["files"] or any(each["reason"] == "unexplained" for each in found["failures"]))


if __name__ == "__main__":
    sys.exit(main())
