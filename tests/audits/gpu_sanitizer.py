"""The GPU tests of the kernels under compute-sanitizer: `make sanitize-gpu`, where there is a GPU.

    python -m tests.audits.gpu_sanitizer --out docs/results/gpu/sanitizer.json

Its four tools run beside each other: memcheck looks for accesses out of bounds, racecheck for hazards in
shared memory, initcheck for reads of device memory that was never written, synccheck for barriers that not
all threads reach. One parameter set of every test, or a few evenly spaced ones, because every access is
slowed down. PyTorch takes each tensor from the driver by itself, with a gap behind it, so that an access
beyond a tensor is one beyond an allocation. The exit code is 0 if no test failed and nothing was reported.
"""

import argparse
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from bench.cuda_sources import digests
from bench.device import describe
from bench.results import ROOT, add_result_options, write_result
from tests.audits.gpu_tests import ONE_THREAD, OUTCOMES, count_tests, in_all

TESTS = "tests/kernels"
# The tools run beside each other, so that no test has the device's memory alone.
PYTEST = (sys.executable, "-m", "pytest", "-m", "gpu and not alone", "-p", "no:cacheprovider")
TOOLS: dict[str, tuple[str, ...]] = {
    # A failed kernel ends no process, so that the next test still runs.
    "memcheck": ("--report-api-errors", "no", "--padding", "64", "--destroy-on-device-error", "kernel"),
    "racecheck": ("--print-limit", "1000000"),
    "initcheck": (),
    "synccheck": (),
}
# How the tests themselves run under a tool: memory that nobody wrote stays so, and kernels have the form that
# the tool can follow, see gemm_copies.cuh.
TESTED_WITH: dict[str, tuple[str, ...]] = {
    "initcheck": ("--unpoisoned",),
    "racecheck": ("--every-lane-arrives",),
}
UNCACHED = {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
# Long ones, whose accesses shorter ones make too, captures, in which PyTorch cannot take uncached memory, and
# measurements.
LEFT_OUT = re.compile("all_rates|thousand|any_settings|full_vocabulary|large_and_wide|no_chunking|graph")
SUMMARY = re.compile(r"(?:ERROR|RACECHECK) SUMMARY: (\d+) (?:error|hazard)")
PREFIX = "========="  # of the sanitizer's lines; alone it ends a report
# What differs between reports of a kind: addresses of memory, and how many hazards are one report.
VARYING = re.compile(r"0x[0-9a-f]{9,}|\[\d+ hazards?\]")
SHOWN_LINES = 16  # of a report


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


def collect(tests: Sequence[str]) -> list[str]:
    """The ids of the GPU tests of files or folders."""
    command = [*PYTEST, "-o", "addopts=", "--collect-only", "-q", *tests]
    output = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    return [line for line in output.splitlines() if "::" in line]


def count_errors(log: str) -> int:
    """The sanitizer's reports. ValueError if it did not finish."""
    found = SUMMARY.findall(log)
    if not found:
        raise ValueError(f"the sanitizer wrote no summary: {log[-500:]}")
    return sum(map(int, found))


def kinds_of_reports(log: str) -> list[str]:
    """How often each kind of report came, and the first of it without frames of the interpreter.

    Those of a kind have the same first two lines, which say what happened, and where.
    """
    found: dict[tuple[str, ...], list[str]] = {}
    for text in re.split(rf"^{PREFIX} *\n", log, flags=re.MULTILINE):
        lines = [line.removeprefix(PREFIX).strip() for line in text.splitlines()]
        lines = [line for line in lines if line not in ("", "COMPUTE-SANITIZER") and "SUMMARY: " not in line]
        shown = [line for line in lines if not re.search(r"Host Frame:.*\[0x", line)]
        key = tuple(VARYING.sub("", line) for line in lines[:2])
        if key:
            found.setdefault(key, []).append("\n    ".join(shown[:SHOWN_LINES]))
    return [f"{len(all_of_kind)} x {all_of_kind[0]}" for all_of_kind in found.values()]


def command_of(sanitizer: str, tool: str, log: Path) -> list[str]:
    """pytest under a tool, which writes `log`."""
    under = [sanitizer, "--tool", tool, *TOOLS[tool], "--error-exitcode", "1", "--log-file", str(log)]
    return [*under, *PYTEST, *TESTED_WITH.get(tool, ())]


def run(sanitizer: str, tool: str, gpu: int, test_ids: Sequence[str]) -> Counter[str]:
    """Outcomes of the tests under one tool on a GPU, and the `errors` that it reported, which are shown."""
    with tempfile.TemporaryDirectory() as folder:
        log, report = Path(folder, "log"), Path(folder, "report.xml")
        command = [*command_of(sanitizer, tool, log), "--durations=5", f"--junit-xml={report}", *test_ids]
        environment = os.environ | ONE_THREAD | UNCACHED | {"CUDA_VISIBLE_DEVICES": str(gpu)}
        done = subprocess.run(command, cwd=ROOT, env=environment, check=False, capture_output=True, text=True)
        text = log.read_text() if log.exists() else ""
        if not report.exists():
            sys.exit(f"the tests did not come to their end under {tool}: {done.stdout[-2000:]}{text[-2000:]}")
        counts = Counter(in_all(count_tests(report.read_text()).values()), errors=count_errors(text))
    shown = "\n".join(kinds_of_reports(text)) if counts["errors"] else ""
    print(f"{tool}, {len(test_ids)} tests:\n{done.stdout[-2000:]}\n{shown}", file=sys.stderr, flush=True)
    return counts


def run_all(
    sanitizer: str, tools: Sequence[str], test_ids: Sequence[str], jobs: int, gpus: int
) -> dict[str, Any]:
    """Each tool's counts; its tests are dealt out to so many processes, and these to the GPUs."""
    dealt = [(tool, test_ids[i::jobs]) for tool in tools for i in range(jobs)]
    parts = [(tool, i % gpus, ids) for i, (tool, ids) in enumerate(dealt)]
    totals: dict[str, Counter[str]] = {tool: Counter() for tool in tools}
    with ThreadPoolExecutor(len(parts)) as pool:
        counts = pool.map(lambda part: run(sanitizer, *part), parts)
        for (tool, *_), outcomes in zip(parts, counts, strict=True):
            totals[tool].update(outcomes)
    return {
        tool: {
            "options": " ".join(TOOLS[tool]),
            "tested_with": " ".join(TESTED_WITH.get(tool, ())),
            "tests": {name: total[name] for name in OUTCOMES},
            "errors": total["errors"],
        }
        for tool, total in totals.items()
    }


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--per-test", type=int, default=1, help="parameter sets of a test")
    parser.add_argument("--jobs", type=int, default=1, help="processes of a tool at a time")
    parser.add_argument("--gpus", type=int, default=1, help="among which processes are dealt out")
    parser.add_argument("--tool", choices=TOOLS, action="append", help="only this one; may be repeated")
    add_result_options(parser)
    parser.add_argument("tests", nargs="*", default=[TESTS], help="files or folders instead of all kernels'")
    arguments = parser.parse_args()
    sanitizer = shutil.which("compute-sanitizer")
    if sanitizer is None:
        sys.exit("compute-sanitizer is not on the PATH: it comes with the CUDA toolkit")
    version = subprocess.run([sanitizer, "--version"], capture_output=True, text=True, check=True).stdout
    start = time.perf_counter()
    test_ids = choose(collect(arguments.tests), arguments.per_test)
    tools = run_all(sanitizer, arguments.tool or list(TOOLS), test_ids, arguments.jobs, arguments.gpus)
    result = {
        "command": f"python -m tests.audits.gpu_sanitizer {shlex.join(sys.argv[1:])}".rstrip(),
        "machine": describe("cuda"),
        "sanitizer": version.split("Version ")[-1].split()[0],
        "per_test": arguments.per_test,
        "tools": tools,
        "wall_s": round(time.perf_counter() - start, 1),
        "cuda_sources": digests(),
    }
    write_result(result, arguments.out, arguments.commit)
    return int(any(r["errors"] or r["tests"]["failed"] or not r["tests"]["passed"] for r in tools.values()))


if __name__ == "__main__":
    sys.exit(main())
