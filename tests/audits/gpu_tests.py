"""All GPU tests on a GPU, counted by folder: `make test-gpu`.

    python -m tests.audits.gpu_tests --jobs 6 --out docs/results/gpu/tests.json

With `--add` folders of tests may be run one after the other: what the file has of others, at the same commit
and of the same sources, stays.

Tests marked `alone` compare what is free of the device's memory, or take it, and run one after the other when
the others have ended; the result is written before them, too. With `--gpus 4` the others are dealt out to
four GPUs, of which each process sees one. The exit code is 0 if tests passed and none failed.
"""

import argparse
import json
import os
import shlex
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from bench.cuda_sources import digests
from bench.device import describe
from bench.results import ROOT, add_result_options, commit, write_result

# pytest-benchmark, where it is installed, warns beside pytest-xdist, and warnings are errors.
PYTEST = (sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-p", "no:benchmark", "--durations=10")
OUTCOMES = ("passed", "skipped", "failed")
# The definitions that kernels are compared with are many small operations: with a thread a core in each of
# several processes they wait for each other far longer than they compute.
ONE_THREAD = {"OMP_NUM_THREADS": "1"}


def count_tests(junit_xml: str) -> dict[str, Counter[str]]:
    """Passed, skipped and failed tests by folder below `tests`."""
    counts: dict[str, Counter[str]] = {}
    for case in ElementTree.fromstring(junit_xml).iter("testcase"):
        found = {child.tag for child in case}
        is_failed = bool(found & {"failure", "error"})
        outcome = "failed" if is_failed else "skipped" if "skipped" in found else "passed"
        parts = case.get("classname", "").split(".")
        folder = parts[1] if len(parts) > 2 else "tests"
        counts.setdefault(folder, Counter())[outcome] += 1
    return counts


def in_all(counts: Iterable[Counter[str]]) -> dict[str, int]:
    """Each outcome's sum, zeros too."""
    total = sum(counts, Counter[str]())
    return {outcome: total[outcome] for outcome in OUTCOMES}


def processes(jobs: int, gpus: int) -> list[str]:
    """Words for pytest-xdist: so many processes for each GPU, which see no other."""
    if jobs * gpus == 1:
        return []
    each = [f"--tx={jobs}*popen//env:CUDA_VISIBLE_DEVICES={gpu}" for gpu in range(gpus)]
    return [*(each if gpus > 1 else [f"--tx={jobs}*popen"]), "--dist=worksteal"]


def run(marker: str, jobs: int, gpus: int, arguments: Sequence[str]) -> tuple[dict[str, Counter[str]], float]:
    """Counts by folder and seconds of the tests that `marker` chooses, in so many processes for each GPU."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder, "report.xml")
        command = [*PYTEST, "-m", marker, f"--junit-xml={report}", *processes(jobs, gpus), *arguments]
        start = time.perf_counter()
        subprocess.run(command, cwd=ROOT, env=os.environ | ONE_THREAD, check=False)
        seconds = time.perf_counter() - start
        if not report.exists():
            sys.exit(f"the tests marked {marker} did not come to their end")
        return count_tests(report.read_text()), seconds


def with_others(result: dict[str, Any], before: Mapping[str, Any]) -> dict[str, Any]:
    """`result` and the folders that only `before` has. ValueError if that is of other sources or machines."""
    for name in ("commit", "machine", "cuda_sources"):
        if before[name] != result[name]:
            raise ValueError(f"the file is of another {name}: run all tests, without --add")
    folders = {**before["folders"], **result["folders"]}
    return {
        **result,
        "command": f"{before['command']}; {result['command']}",
        "tests": in_all(Counter(counts) for counts in folders.values()),
        "folders": folders,
        "wall_s": round(before["wall_s"] + result["wall_s"], 1),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--jobs", type=int, default=1, help="processes at a time for each GPU")
    parser.add_argument("--gpus", type=int, default=1)
    add_result_options(parser)
    parser.add_argument("--add", action="store_true", help="to what --out has of other folders")
    parser.add_argument("arguments", nargs="*", help="for pytest, such as tests/kernels, after --")
    options = parser.parse_args()
    before = json.loads(options.out.read_text()) if options.out and options.out.exists() else None
    folders: dict[str, Counter[str]] = {}
    wall_s = 0.0
    for marker, jobs, gpus in (("gpu and not alone", options.jobs, options.gpus), ("gpu and alone", 1, 1)):
        counts, seconds = run(marker, jobs, gpus, options.arguments)
        wall_s += seconds
        for folder, outcomes in counts.items():
            folders.setdefault(folder, Counter()).update(outcomes)
        result = result_of(options, before, folders, wall_s)
    return int(bool(result["tests"]["failed"] or not result["tests"]["passed"]))


def result_of(
    options: argparse.Namespace,
    before: Mapping[str, Any] | None,
    folders: Mapping[str, Counter[str]],
    wall_s: float,
) -> dict[str, Any]:
    """What has been counted so far, which is written. before: what the file had."""
    arguments = ["--", *options.arguments] if options.arguments else []
    counted = ["--jobs", str(options.jobs), "--gpus", str(options.gpus)]
    result: dict[str, Any] = {
        "commit": options.commit or commit(),
        "command": f"python -m tests.audits.gpu_tests {shlex.join([*counted, *arguments])}",
        "machine": describe("cuda"),
        "tests": in_all(folders.values()),
        "folders": {folder: in_all([counts]) for folder, counts in folders.items()},
        "wall_s": round(wall_s, 1),
        "cuda_sources": digests(),
    }
    if options.add and before:
        result = with_others(result, before)
    write_result(result, options.out, result["commit"])
    return result


if __name__ == "__main__":
    sys.exit(main())
