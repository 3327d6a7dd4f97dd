"""The blocks on tests: kernels by architecture, those that ran on a GPU, on which sources, faults planted for
tests to find, how many rows of draft trees were compared with plain decoding, and another project's tests of
its server.
"""

from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bench.cuda_sources import digests, unseen
from bench.report.tables import RESULTS, has, load, table
from bench.results import ROOT
from tools.planted_faults import Fault, load_faults, load_rows
from tools.planted_faults import Row as FaultRow
from tools.planted_faults.sources import Sources

ASIDE_BYTES = 64  # of a thread's local memory: some registers set aside
NOT_RUN = "No run is recorded yet: what is said of these sources on a GPU rests on older ones.\n"


def gpu_tests() -> str:
    """Tests by folder, and the sources that are newer: of the last run of all, and of a later one of some."""
    names = [name for name in ("gpu/tests", "gpu/tests_kernels") if has(name)]
    return "\n".join(map(_tests_of, names)) if names else NOT_RUN


def _tests_of(name: str) -> str:
    r = load(name)
    rows = [
        [f"`tests/{folder}`", *(str(counts[name]) for name in ("passed", "failed", "skipped"))]
        for folder, counts in sorted(r["folders"].items())
    ]
    rows.append(["all", *(str(r["tests"][name]) for name in ("passed", "failed", "skipped"))])
    return table(["tests that need a GPU", "passed", "failed", "skipped"], rows) + "\n" + _where(r)


def gpu_sanitizer() -> str:
    """The reports of each tool."""
    if not has("gpu/sanitizer"):
        return NOT_RUN
    r = load("gpu/sanitizer")
    rows = [
        [tool, *(str(run["tests"][name]) for name in ("passed", "failed")), str(run["errors"])]
        for tool, run in r["tools"].items()
    ]
    header = [f"compute-sanitizer {r['sanitizer']}", "tests passed", "failed", "reported"]
    return table(header, rows) + "\n" + _where(r)


def foreign_cases() -> str:
    """Outcomes of other projects' cases by file, and how many failed for which reason."""
    r = load("vllm_parser_cases")
    rows = [
        [f"`{name}`", str(counts.get("passed", 0)), str(counts.get("failed", 0))]
        for name, counts in sorted(r["files"].items())
    ]
    reasons: dict[str, int] = {}
    for each in r["failures"]:
        reasons[each["reason"]] = reasons.get(each["reason"], 0) + 1
    why = "".join(f"- {count} failed: {reason}.\n" for reason, count in reasons.items())
    where = f"vLLM {r['version']}, {r['cpu']}, commit {r['commit']}: `{r['command']}`"
    return f"{table(['cases of', 'passed', 'failed'], rows)}\n{why}\n{where}\n"


def planted_faults() -> str:
    """Of the faults in the tables of each room, how many have a result that holds, and what is lacking."""
    faults, sources = load_faults(), Sources(ROOT)
    by_name = {str(row["name"]): row for row in load_rows(RESULTS / "planted_faults.json")}
    found = [(fault, by_name.get(fault.name)) for fault in faults]
    valid = {fault.name: row for fault, row in found if row and sources.is_of(fault, row)}
    lines = []
    for room in dict.fromkeys(fault.room for fault in faults):
        those = [(fault, row) for fault, row in found if fault.room == room]
        lines.append([f"`{room}`", *_counts(those, valid)])
    lines.append(["all", *_counts(found, valid)])
    header = [
        "room",
        "files",
        "faults",
        "caught",
        "not caught",
        "changed since their result",
        "without a result",
    ]
    missed = [f"- `{name}`: not caught" for name, row in valid.items() if not row["caught"]]
    runs = Counter((str(row["date"]), str(row["commit"])) for row in valid.values() if "date" in row)
    when = [f"{count} on {date} at {commit_name}" for (date, commit_name), count in sorted(runs.items())]
    if undated := len(valid) - runs.total():
        when.append(f"{undated} before dates were kept")
    end = "".join(
        f"{line}\n" for line in [*missed, "", f"`python -m tools.planted_faults`: {', '.join(when)}"]
    )
    return table(header, lines) + end


def _counts(found: list[tuple[Fault, FaultRow | None]], valid: Mapping[str, FaultRow]) -> list[str]:
    """Files and faults; those that were caught, were not, have changed since they ran, never ran."""
    caught = sum(bool(valid[fault.name]["caught"]) for fault, _ in found if fault.name in valid)
    num_valid = sum(fault.name in valid for fault, _ in found)
    without = sum(row is None for _, row in found)
    files = len({fault.file for fault, _ in found})
    counts = (files, len(found), caught, num_valid - caught, len(found) - num_valid - without, without)
    return [*map(str, counts)]


def architectures() -> str:
    """By architecture the kernels that compile, the most that one needs, and those with local memory."""
    r = load("architectures")
    rows, lines = [], []
    for arch, each in r["architectures"].items():
        stacks = each["stacks"].values()
        small = [size for size in stacks if size <= ASIDE_BYTES]
        counts = (each["sources"], each["kernels"], each["most_registers"], each["most_shared_bytes"])
        stack = (len(small), len(stacks) - len(small), max(stacks, default=0))
        rows.append([f"`{arch}`", *(f"{number:,}" for number in (*counts, *stack, each["cpu_s"]))])
        lines += [f"- {problem}\n" for problem in each["problems"]]
    header = ["", "sources", "kernels", "most registers of a thread", "most shared memory of a block, bytes"]
    header += [
        f"with up to {ASIDE_BYTES} bytes of local memory",
        "with more",
        "most, bytes",
        "compiling, CPU s",
    ]
    commits = ", ".join(dict.fromkeys(each["commit"] for each in r["architectures"].values()))
    where = f"NVRTC {r['nvrtc']}, commit {commits}: `{r['command']}`\n"
    return "\n".join([table(header, rows), *(["".join(lines)] if lines else []), where])


def draft_trees() -> str:
    """What of draft trees and batches was compared, by where experts were; nothing while nothing was."""
    files = {"CPU": "trees_cpu", "GPU": "gpu/trees"}
    found = {device: load(name) for device, name in files.items() if has(name)}
    if not found:
        return ""
    rows, lines = [], []
    for device, r in found.items():
        for place in dict.fromkeys(row["place"] for row in r["rows"]):
            those = [row for row in r["rows"] if row["place"] == place]
            names = ("trees", "rows", "next_tokens", "sequences", "logits")
            sums = [f"{sum(row[name] for row in those):,}" for name in names]
            rows.append([device, place, str(len({row["model"] for row in those})), *sums])
        machine = r["machine"].get("gpu", r["machine"]["cpu"])
        trees = sum(row["trees"] for row in r["rows"])
        lines.append(
            f"{machine}, {trees} trees, {r['differences']} differences, {r['wall_s']:.0f} s, commit "
            f"{r['commit']}: `{r['command']}`"
        )
    header = ["", "experts", "models", "trees", "rows of trees", "tokens after a commit or in batches of 32"]
    header += ["sequences in such batches", "logits compared"]
    return table(header, rows) + "".join(f"\n{line}\n" for line in lines)


def llama_cpp_server_tests() -> str:
    """llama.cpp's tests of its server by file, what failed and why, and the files without a counterpart."""
    r = load("llama_cpp_server_tests")
    names = ("passed", "failed", "skipped", "slow")
    rows = [
        [f"`{name}`", *(str(counts[outcome]) for outcome in names)] for name, counts in r["files"].items()
    ]
    sums = [sum(counts[outcome] for counts in r["files"].values()) for outcome in names]
    rows.append(["all", *map(str, sums)])
    header = ["llama.cpp's file", "passed", "failed", "skipped by itself", "for large models, not run"]
    by_reason: dict[str, list[str]] = {}
    for each in r["failures"]:
        by_reason.setdefault(each["reason"], []).append(each["test"])
    reasons = [[why, str(len(tests)), _cases(tests)] for why, tests in sorted(by_reason.items())]
    without = [[f"`{name}`", why] for name, why in r["without_counterpart"].items()]
    commits = ", ".join(dict.fromkeys(counts["commit"] for counts in r["files"].values()))
    where = f"{r['source']}, {r['machine']['cpu']}, commit {commits}: `{r['command']}`. Flags of "
    where += f"`llama-server` that had no effect: {', '.join(f'`{flag}`' for flag in r['dropped_flags'])}.\n"
    tables = [
        table(header, rows),
        table(["why they failed", "cases", "tests"], reasons),
        table(["files without a counterpart", "why"], without),
        where,
    ]
    return "\n".join(tables)


def _cases(tests: list[str]) -> str:
    """Tests without their files, each once, with the number of their cases if those are several."""
    counts = Counter(test.partition("::")[2].partition("[")[0] for test in tests)
    return ", ".join(f"`{name}`" + (f" ({num})" if num > 1 else "") for name, num in counts.items())


def _where(result: dict[str, Any]) -> str:
    """Machine, commit and command of a run, and what it has not seen."""
    machine = result["machine"]
    line = (
        f"{machine['gpu']}, driver {machine['driver']}, PyTorch {machine['torch']}, "
        f"commit {result['commit']}: `{result['command']}`. "
    )
    sources = digests()
    newer = unseen(result["cuda_sources"], sources)
    if not newer:
        return line + "No CUDA source has changed since.\n"
    rooms = sorted({Path(path).parent.name for path in newer})
    return (
        line + f"Of {len(sources)} CUDA sources {len(newer)} are newer than this run, in "
        f"{', '.join(f'`{room}`' for room in rooms)}.\n"
    )
