"""A dense model on a GPU that lacks the FFNs of some layers: decoding, steps of some rows, and prompts.

    python -m bench.full_size_model dense.gguf --shape 27B
    python -m bench.engine.gpu_layers dense.gguf

For each number of missing layers: a prompt is computed several times, behind one of 512 tokens a greedy
text goes on, each step launched before the host knows its token, and steps of some rows follow with their
logits on the host. The logits behind the same tokens must be the same whichever layers are missing. Beside
decoding stands its floor: the bytes of missing layers over what RAM and bus read together, and the others
over the GPU's memory.
"""

import argparse
import hashlib
import shlex
import statistics
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from bench.device import describe
from bench.engine.gpu import FIRST_ID, numbers
from bench.engine.gpu_depth import UNTIMED_STEPS, decode_step, generated, seconds_of
from bench.results import ROOT, add_result_options, write_result
from bench.runners import plan_with_workers
from coldstream.engine import LLM, EngineConfig
from coldstream.experts.cpu_share import layers_of_cpu
from coldstream.gguf.reader import GGUFFile
from coldstream.kernels.cuda.device import find_gpu
from coldstream.models.read_spec import read_spec
from coldstream.models.runner import ModelRunner
from coldstream.placement.hardware import Hardware
from coldstream.placement.layer_plan import least_layers_budget, plan_layers, spread_order
from coldstream.placement.plan import PlanOptions
from coldstream.placement.plan_file import save_plan
from coldstream.placement.rates import Rates
from coldstream.placement.run_plan import RunPlan
from coldstream.placement.sizes import ModelSizes
from coldstream.planning.gather import Sources, plan_model
from coldstream.planning.machine import measured_hardware

DEPTH = 512
GIB = 2**30
CONTEXTS = 3  # of a prompt, and forks of it
ROOM_BYTES = 24 * GIB  # for all but FFNs


@dataclass(frozen=True)
class Machine:
    """What all placements have in common."""

    path: Path
    ctx_size: int
    hardware: Hardware
    sizes: ModelSizes

    def plan(self, num_missing: int, threads: int | None) -> RunPlan:
        """For the least memory with all FFNs but `num_missing`."""
        order = spread_order(self.sizes.num_layers)[: self.sizes.num_layers - num_missing]
        held = sum(self.sizes.expert_bytes[layer] for layer in order)
        with GGUFFile.open(self.path) as file:
            spec = read_spec(file.metadata, file.tensors)
            vram = held + ROOM_BYTES
            config = EngineConfig(
                str(self.path),
                device="cuda",
                vram=vram,
                ctx_size=self.ctx_size,
                threads=threads or "auto",
                parallel=CONTEXTS,
            )
            sources = Sources(file, spec, self.hardware)
            fixed = plan_model(config, sources).plan.fixed
            least = least_layers_budget(self.sizes, fixed, PlanOptions()) if num_missing else fixed.total
            placement = plan_layers(self.sizes, fixed, least + held)
            assert placement.num_all - placement.num_resident == num_missing
            return plan_with_workers(RunPlan(placement, 0), config, sources)


def prefill(runner: ModelRunner, count: int, repetitions: int) -> dict[str, Any]:
    """Tokens a second of a prompt, and a hash of the logits behind it."""
    token_ids = [(FIRST_ID + i) % runner.spec.vocab_size for i in range(count)]
    samples, digest = [], ""
    for _ in range(repetitions + 1):
        sequence = runner.new_sequence()
        samples.append(count / seconds_of(runner, sequence, token_ids))
        digest = digest_of(runner.extend(sequence, [0]))
        runner.release(sequence)
    return {"tokens": count, "tok_s": statistics.median(samples[1:]), "logits": digest}


def digest_of(logits: Any) -> str:
    return hashlib.sha256(np.ascontiguousarray(logits)).hexdigest()[:16]


def steps(runner: ModelRunner, rows: Sequence[int], repetitions: int) -> dict[str, Any]:
    """Milliseconds of a greedy text's token and of steps of some rows behind DEPTH tokens."""
    count = UNTIMED_STEPS + repetitions
    token_ids = [(FIRST_ID + i) % runner.spec.vocab_size for i in range(DEPTH + 1 + count * max(rows))]
    sequence = runner.new_sequence()
    runner.extend(sequence, token_ids[:DEPTH])
    found = {
        "generated_ms": 1e3 * generated(runner, sequence, token_ids[: DEPTH + 1]),
        "step_ms": {
            str(n): 1e3 * decode_step(runner, sequence, token_ids[DEPTH : DEPTH + count * n], n) for n in rows
        },
    }
    runner.release(sequence)
    return found


def floor_seconds(machine: Machine, run: RunPlan) -> float:
    """Of a token, if every byte moved at the measured rates and nothing else took time."""
    rates, placement = Rates.of(machine.hardware), run.placement
    both = max(rates.read_bytes_per_s, rates.read_beside_link + rates.link_beside_read)
    dense = machine.sizes.dense_token_bytes + placement.resident_bytes
    return dense / rates.vram_bytes_per_s + placement.cold_bytes / both


def measure(machine: Machine, num_missing: int, options: argparse.Namespace) -> dict[str, Any]:
    """One placement."""
    run = machine.plan(num_missing, options.threads)
    with tempfile.TemporaryDirectory() as folder:
        kept = Path(folder, "plan.json")
        save_plan(run, kept)
        with LLM(machine.path, device="cuda", plan=str(kept)) as llm:
            runner = llm.opened.runner
            found: dict[str, Any] = steps(runner, options.rows, options.repetitions)
            found["prefill"] = [prefill(runner, n, options.repetitions) for n in options.prompts]
    times = run.miss_times
    return {
        "missing": num_missing,
        "layers": machine.sizes.num_layers,
        "vram_bytes": run.placement.total_bytes,
        "cold_bytes": run.placement.cold_bytes,
        "threads": run.threads,
        "of_cpu": {str(n): len(layers_of_cpu(num_missing, n, times)) for n in options.rows} if times else {},
        "floor_ms": 1e3 * floor_seconds(machine, run),
        **found,
    }


def run(options: argparse.Namespace) -> dict[str, Any]:
    """Everything; see the module docstring. AssertionError for logits that depend on the placement."""
    hardware = measured_hardware(find_gpu())
    most_rows = (UNTIMED_STEPS + options.repetitions) * max(options.rows)
    ctx_size = max(DEPTH + most_rows + 64, *(count + 1 for count in options.prompts))
    with GGUFFile.open(options.model) as file:
        spec = read_spec(file.metadata, file.tensors)
        config = EngineConfig(str(options.model), device="cuda", vram=100 * GIB, ctx_size=ctx_size)
        sizes = plan_model(config, Sources(file, spec, hardware)).known.model
    machine = Machine(options.model, ctx_size, hardware, sizes)
    placements = []
    for num_missing in options.missing:
        placements.append(measure(machine, num_missing, options))
        print(placements[-1], flush=True)
    for of_prompt in zip(*(each["prefill"] for each in placements), strict=True):
        assert len({each["logits"] for each in of_prompt}) == 1, "logits depend on what is missing"
    return {
        "command": command(options),
        "machine": describe("cuda"),
        "hardware": asdict(hardware),
        "file_bytes": options.model.stat().st_size,
        "depth": DEPTH,
        "placements": placements,
    }


def command(options: argparse.Namespace) -> str:
    """The command that repeats the measurement."""
    words = ["python", "-m", "bench.engine.gpu_layers", options.model.name]
    for name in ("missing", "rows", "prompts"):
        words += [f"--{name}", ",".join(map(str, getattr(options, name)))]
    return shlex.join(words)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", type=Path)
    add_result_options(parser, ROOT / "docs" / "results" / "gpu" / "layers.json")
    parser.add_argument("--missing", type=numbers, default=[0, 16, 32, 48, 64], help="FFNs, of the 64")
    parser.add_argument("--rows", type=numbers, default=[1, 2, 4, 8, 16, 32, 64])
    parser.add_argument("--prompts", type=numbers, default=[168, 512, 2048, 8192])
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--threads", type=int, help="of the CPU; by default those that the plan chooses")
    options = parser.parse_args()
    write_result(run(options), options.out, options.commit)
    return 0


if __name__ == "__main__":
    sys.exit(main())
