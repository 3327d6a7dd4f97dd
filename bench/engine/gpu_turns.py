"""This commit and an older one in turns on a GPU: decoding and prompts with memory for a part of the experts.

    git worktree add /tmp/old COMMIT, build its extension into /tmp/old/src/coldstream/kernels, then
    python -m bench.engine.gpu_turns full.gguf --old /tmp/old --old-commit COMMIT --out FILE

Every turn is a process of its own, which measures the machine and opens the model once for each budget, with
the benchmarks of its own sources. The speed of a shared machine changes from minute to minute, so the
commits take turns and all figures of both are kept. Beside the speed stands what the CPU took for a pair of a
token and an expert.
"""

import argparse
import itertools
import json
import math
import os
import shlex
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from bench.device import describe
from bench.engine.gpu import numbers, write_model
from bench.full_size_model import FULL_SHAPE
from bench.results import ROOT, write_result

WARM_TOKENS, TIMED_TOKENS, DECODED_TEXTS = 384, 192, 2
PROMPT_TEXTS = 3
SIDES = ("old", "new")


def decoding(hybrid: Any, path: Path, budgets: list[float]) -> list[dict[str, Any]]:
    """A row for each budget, by the `gpu_hybrid` of either side, without prefetching."""
    hybrid.WARM_TOKENS, hybrid.TIMED_TOKENS, hybrid.TEXTS = WARM_TOKENS, TIMED_TOKENS, DECODED_TEXTS
    hardware = hybrid.measured_hardware(hybrid.find_gpu())
    ctx_size = hybrid.SHORT_PROMPT + WARM_TOKENS + TIMED_TOKENS
    with hybrid.GGUFFile.open(path) as file:
        spec = hybrid.read_spec(file.metadata, file.tensors)
        config = hybrid.EngineConfig(str(path), device="cuda", vram=100 * hybrid.GIB, ctx_size=ctx_size)
        # A side from before `Sources` takes its parts.
        sources = hybrid.Sources(file, spec, hardware) if hasattr(hybrid, "Sources") else None
        parts = (sources,) if sources else (file, spec, hardware)
        sizes = hybrid.plan_model(config, *parts).known.model
    machine = hybrid.Machine(path, ctx_size, spec.vocab_size, hardware, sizes)
    rows = []
    for gib in budgets:
        (row,) = hybrid.measure(machine, None if gib == math.inf else gib, [0], 0)
        pairs = sum(text.get("cpu_pairs", 0) for text in row["texts"])
        seconds = sum(text.get("cpu_seconds", 0) for text in row["texts"])
        cpu_us = 1e6 * seconds / pairs if pairs else None
        rows.append({"what": "decode", "gib": gib, "tok_s": row["tok_s"], "cpu_us_a_pair": cpu_us})
    return rows


def prompts(streaming: Any, path: Path, budgets: list[float], lengths: list[int]) -> list[dict[str, Any]]:
    """A row for each budget and length, by the `gpu_streaming` of either side."""
    hardware = streaming.measured_hardware(streaming.find_gpu())
    setting = streaming.Setting(
        path=path,
        rates=streaming.Rates.of(hardware),
        threads=hardware.num_physical_cores - 1,
        ring_bytes=256 * streaming.MIB,
        chunk_size=8192,
        lengths=lengths,
        texts=PROMPT_TEXTS,
    )
    last = FULL_SHAPE.vocab - max(lengths)
    first_ids = (i * streaming.TEXT_STEP % last for i in itertools.count(1))
    resident_s: dict[int, float] = {}
    return [
        {"what": row["tokens"], "gib": gib, "tok_s": row["tok_s"]}
        for gib in budgets
        for row in streaming.measure(setting, None if gib == math.inf else gib, resident_s, first_ids)
    ]


def budget(text: str) -> float:
    """GiB; infinity for all experts."""
    return math.inf if text in ("all", "inf") else float(text)


def turn(root: Path, options: argparse.Namespace) -> list[dict[str, Any]]:
    """The rows of one side, measured in a process over the sources below `root`."""
    # -P: not the folder of this file, whose benchmarks are those of the new side.
    paths = [str(root / "src"), str(root), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))}
    with tempfile.TemporaryDirectory() as folder:
        rows = Path(folder, "rows.json")
        command = [sys.executable, "-P", __file__, str(options.model), *words(options), "--rows", str(rows)]
        # Output of the older benchmarks is theirs; only the file has a form that both sides share.
        subprocess.run(command, env=environment, check=True, stdout=subprocess.DEVNULL)
        found: list[dict[str, Any]] = json.loads(rows.read_text())
    return found


def words(options: argparse.Namespace) -> list[str]:
    budgets = ["--decode", *map(str, options.decode), "--prefill", *map(str, options.prefill)]
    return [*budgets, "--prompts", ",".join(map(str, options.prompts))]


def compared(turns: dict[str, list[list[dict[str, Any]]]]) -> list[dict[str, Any]]:
    """By cell the figures of all turns of either side, and the ratio of their medians, new over old."""
    rows = []
    for cells in zip(*(cells for side in SIDES for cells in turns[side]), strict=True):
        olds, news = cells[: len(turns["old"])], cells[len(turns["old"]) :]
        gib = cells[0]["gib"]
        row: dict[str, Any] = {"what": cells[0]["what"], "gib": None if gib == math.inf else gib}
        for side, found in zip(SIDES, (olds, news), strict=True):
            row[f"{side}_tok_s"] = [cell["tok_s"] for cell in found]
            if cells[0].get("cpu_us_a_pair") is not None:
                row[f"{side}_cpu_us_a_pair"] = [cell["cpu_us_a_pair"] for cell in found]
        row["ratio"] = statistics.median(row["new_tok_s"]) / statistics.median(row["old_tok_s"])
        rows.append(row)
    return rows


def run(options: argparse.Namespace) -> dict[str, Any]:
    """Both sides in turn; see the module docstring."""
    write_model(options.model, FULL_SHAPE.layers, FULL_SHAPE.vocab)
    turns: dict[str, list[list[dict[str, Any]]]] = {side: [] for side in SIDES}
    for _ in range(options.rounds):
        for side, root in zip(SIDES, (options.old, ROOT), strict=True):
            turns[side].append(turn(root, options))
    return {
        "command": f"python -m bench.engine.gpu_turns {shlex.join([options.model.name, *words(options)])}",
        "old_commit": options.old_commit,
        "machine": describe("cuda"),
        "rows": compared(turns),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("--old", type=Path, help="the older sources, with their extension built")
    parser.add_argument("--old-commit")
    parser.add_argument("--decode", type=budget, nargs="*", default=[0.0, 3.0], help="GiB of experts, or all")
    parser.add_argument("--prefill", type=budget, nargs="*", default=[math.inf, 0.0], help="the same")
    parser.add_argument("--prompts", type=numbers, default=[168, 512], help="tokens")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--commit", help="of these sources, where they are without their repository")
    parser.add_argument("--rows", type=Path, help=argparse.SUPPRESS)  # of one turn, in its own process
    options = parser.parse_args()
    if options.rows is None:
        write_result(run(options), options.out, options.commit)
        return 0
    # The sources of this turn's side, whose folder comes first on the path.
    from bench.engine import gpu_hybrid, gpu_streaming

    rows = decoding(gpu_hybrid, options.model, options.decode) if options.decode else []
    if options.prefill:
        rows += prompts(gpu_streaming, options.model, options.prefill, options.prompts)
    options.rows.write_text(json.dumps(rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
