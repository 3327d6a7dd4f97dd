"""The GPU tests of the kernels under compute-sanitizer's memcheck: `make sanitize-gpu`, where there is a GPU.

    python bench/gpu_sanitizer.py --out docs/results/gpu/sanitizer.json

One parameter set of every test, or a few evenly spaced ones, because the sanitizer slows every access down.
PyTorch takes each tensor from the driver by itself, with a gap behind it, so that an access beyond a tensor
is one beyond an allocation. The exit code is 0 if no test failed and nothing was reported.
"""

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from xml.etree import ElementTree

from device import describe
from results import ROOT, write_result

TESTS = "tests/kernels"
PYTEST = (sys.executable, "-m", "pytest", "-m", "gpu", "-p", "no:cacheprovider")
OPTIONS = (
    *("--tool", "memcheck", "--report-api-errors", "no", "--error-exitcode", "1"),
    *("--padding", "64", "--destroy-on-device-error", "kernel"),  # so that the next test still runs
)
UNCACHED = {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
# Long ones, whose accesses shorter ones make too, and captures, in which PyTorch cannot take uncached memory.
LEFT_OUT = re.compile("thousand|any_settings|full_vocabulary|large_and_wide|long_contexts|no_cut|graph")
SUMMARY = re.compile(r"ERROR SUMMARY: (\d+) error")


def choose(test_ids: Iterable[str], count: int) -> list[str]:
    """At most `count` parameter sets of every test function, in order."""
    functions: dict[str, list[str]] = {}
    for test_id in test_ids:
        functions.setdefault(test_id.partition("[")[0], []).append(test_id)
    return [
        ids[i]
        for function, ids in functions.items()
        if not LEFT_OUT.search(function.partition("::")[2])
        for i in sorted({(2 * part + 1) * len(ids) // (2 * count) for part in range(count)})
    ]


def collect() -> list[str]:
    """The ids of all GPU tests of kernels."""
    command = [*PYTEST, "-o", "addopts=", "--collect-only", "-q", TESTS]
    output = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    return [line for line in output.splitlines() if "::" in line]


def count_tests(junit_xml: str) -> dict[str, int]:
    """Passed, skipped and failed tests."""
    counts = {"passed": 0, "skipped": 0, "failed": 0}
    for case in ElementTree.fromstring(junit_xml).iter("testcase"):
        outcomes = {child.tag for child in case}
        counts[
            "failed" if outcomes & {"failure", "error"} else "skipped" if "skipped" in outcomes else "passed"
        ] += 1
    return counts


def count_errors(log: str) -> int:
    """What the sanitizer reported. ValueError if it didn't come to its end."""
    found = SUMMARY.findall(log)
    if not found:
        raise ValueError(f"the sanitizer wrote no summary: {log[-500:]}")
    return sum(map(int, found))


def run(sanitizer: str, test_ids: Sequence[str]) -> dict[str, object]:
    """Runs the tests and counts."""
    with tempfile.TemporaryDirectory() as folder:
        log, report = Path(folder, "log"), Path(folder, "report.xml")
        command = [sanitizer, *OPTIONS, "--log-file", str(log), *PYTEST, f"--junit-xml={report}", *test_ids]
        start = time.perf_counter()
        subprocess.run(command, cwd=ROOT, env=os.environ | UNCACHED, check=False)
        wall_s = time.perf_counter() - start
        text = log.read_text() if log.exists() else ""
        errors = count_errors(text)
        if errors:
            print(text[:4000], file=sys.stderr)
        if not report.exists():
            sys.exit(f"the tests did not come to their end, {errors} errors were reported")
        tests = count_tests(report.read_text())
    return {"tests": tests, "errors": errors, "wall_s": round(wall_s, 1)}


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--per-test", type=int, default=1, help="parameter sets of a test")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--commit", help="of these sources, where there is no repository")
    arguments = parser.parse_args()
    sanitizer = shutil.which("compute-sanitizer")
    if sanitizer is None:
        sys.exit("compute-sanitizer is not on the PATH: it comes with the CUDA toolkit")
    version = subprocess.run([sanitizer, "--version"], capture_output=True, text=True, check=True).stdout
    counts = run(sanitizer, choose(collect(), arguments.per_test))
    result = {
        "command": "python bench/gpu_sanitizer.py",
        "machine": describe("cuda"),
        "sanitizer": version.split("Version ")[-1].split()[0],
        "options": " ".join(OPTIONS),
        "per_test": arguments.per_test,
        **counts,
    }
    write_result(result, arguments.out, arguments.commit)
    tests = counts["tests"]
    assert isinstance(tests, dict)
    return int(bool(counts["errors"] or tests["failed"] or not tests["passed"]))


if __name__ == "__main__":
    sys.exit(main())
