"""The blocks on tests: those that ran on a GPU, on which sources, faults planted for tests to find, and how
many rows of draft trees were compared with plain decoding.
"""

from pathlib import Path
from typing import Any

from cuda_sources import digests, unseen
from report_tables import has, load, table

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


def planted_faults() -> str:
    """How many faults were planted in each room, and how many its tests caught; nothing while none was."""
    if not has("planted_faults"):
        return ""
    r = load("planted_faults")
    rows = []
    for room in dict.fromkeys(fault["room"] for fault in r["faults"]):
        faults = [fault for fault in r["faults"] if fault["room"] == room]
        files = sorted({Path(fault["file"]).name for fault in faults})
        caught = sum(fault["caught"] for fault in faults)
        rows.append([f"`{room}`", ", ".join(f"`{file}`" for file in files), str(len(faults)), str(caught)])
    rows.append(["all", "", str(len(r["faults"])), str(sum(fault["caught"] for fault in r["faults"]))])
    missed = [f"- `{fault['name']}`: not caught" for fault in r["faults"] if not fault["caught"]]
    commits = ", ".join(dict.fromkeys(fault["commit"] for fault in r["faults"]))
    end = "".join(f"{line}\n" for line in [*missed, "", f"`{r['command']}`, commit {commits}"])
    return table(["room", "files", "planted", "caught"], rows) + end


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
