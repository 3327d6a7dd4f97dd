"""What one launch for a token's layers can reach: designs of a synthetic token, checked, timed and explained.

    python -m bench.kernels.one_token --out one_token.json
    python -m bench.kernels.one_token --list 17       what block 17 does, and the check of all lists; no GPU

Layers have the shapes and bytes of the full-size file (a DeltaNet layer with experts). Each design is held to
its definition (`one_token_reference.py`) before it is timed, as a whole and without parts: dependencies
alone, memory alone, and so on. A run without dependencies has to have another result. Stamps within the
kernel say for each phase when blocks began to wait, saw the counter, had inputs, had bytes, were done and had
raised theirs. docs/notes/one-token.md has what each design would tell.
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict
from multiprocessing import get_context
from typing import Any

import torch

from bench.device import WARM_S, describe, measure_bandwidth
from bench.full_size_model import FULL_SHAPE
from bench.kernels.one_token_check import faults_of
from bench.kernels.one_token_designs import DESIGNS
from bench.kernels.one_token_launch import (
    PARTS,
    STAMPED,
    Launch,
    StuckError,
    answers,
    filled_weights,
    instances,
    phases,
    random_state,
    same,
    with_signals,
)
from bench.kernels.one_token_program import TokenProgram, plan
from bench.kernels.one_token_program import describe as listed
from bench.kernels.one_token_reference import Reference, TokenState
from bench.kernels.one_token_shapes import SOURCE, Design, LayerShape
from bench.results import add_result_options, write_result
from coldstream.errors import DeviceError
from coldstream.kernels.cuda.compiler import compile_together
from coldstream.kernels.cuda.features import architecture_of
from coldstream.kernels.cuda.limits import device_limits
from coldstream.kernels.cuda.runtime import calls

LAYER = 5  # of the file: its experts are all of Q4_K, as in half of the layers
LAUNCHES, STAMPED_LAUNCHES, QUEUED_BEFORE = 25, 5, 5
FEWER_BLOCKS = 4  # that a grid of clusters is made smaller by until the device takes it


def compile_all(designs: Sequence[Design], arch: str) -> float:
    """Every instance, by as many processes as there are cores, into the cache; seconds."""
    begin = time.perf_counter()
    names = instances(designs)
    with ProcessPoolExecutor(mp_context=get_context("spawn")) as pool:
        for future in [pool.submit(compile_together, SOURCE, (name,), arch) for name in names]:
            future.result()
    return time.perf_counter() - begin


def microseconds(
    launch: Launch, parts: int, launches: int = LAUNCHES, has_stamps: bool = False
) -> list[float]:
    """Of a layer and token, of each launch, in order of size."""
    layers = launch.num_layers * launch.planned.design.tokens
    found = []
    # The host takes about a fifth of a launch's time for the next one, so the first ones are not queued yet.
    for _ in range(QUEUED_BEFORE + launches):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        launch.counters.zero_()
        begin.record()
        launch.queue(parts, has_stamps)
        end.record()
        found.append((begin, end))
    torch.cuda.synchronize()
    launch.check()
    return sorted(begin.elapsed_time(end) * 1e3 / layers for begin, end in found[QUEUED_BEFORE:])


def opened(shape: LayerShape, design: Design, weights: torch.Tensor, layers: int) -> tuple[Launch, list[str]]:
    """A launch that the device takes, of as many blocks as it runs at once, and what it refused before."""
    most, refused = device_limits().num_processors, []
    for num_blocks in range(most // design.cluster * design.cluster, most // 2, -FEWER_BLOCKS):
        launch = Launch(plan(shape, design, num_blocks), weights, layers)
        for is_cooperative in (True, False) if design.cluster > 1 else (True,):
            launch.is_cooperative = is_cooperative
            try:
                launch.run()
                torch.cuda.synchronize()
                launch.check()
            except (DeviceError, StuckError) as error:
                refused.append(f"{num_blocks} blocks, cooperative {is_cooperative}: {error}")
            else:
                return launch, refused
    raise DeviceError(f"{design.name}: no grid fits: {'; '.join(refused)}")


def measured(launch: Launch, begin: TokenState, want: TokenState) -> dict[str, Any]:
    """Whether a design is right, its times with and without parts, and where a layer's time goes."""
    design = launch.planned.design
    launch.begin(begin)
    launch.run()
    launch.check()
    is_right = same(launch.result(), want)
    launch.begin(begin)
    launch.run(PARTS["memory and products"])
    differs = not same(launch.result(), want)
    times = {name: microseconds(launch, parts) for name, parts in PARTS.items()}
    stamped = {}
    for name in STAMPED:
        launch.begin(begin)
        us = microseconds(launch, PARTS[name], STAMPED_LAUNCHES, has_stamps=True)
        stamped[name] = {
            "us_a_layer": round(statistics.median(us), 2),
            "phases": with_signals(phases(launch), launch.planned),
            "answer": answers(launch) if PARTS[name] & PARTS["memory alone"] else {},
        }
    return {
        "design": asdict(design),
        "blocks": launch.planned.num_blocks,
        "shared_bytes": launch.planned.shared_bytes,
        "is_right": is_right,
        "differs_without_waits": differs,
        "us_a_layer": {name: round(statistics.median(each), 2) for name, each in times.items()},
        "least_us_a_layer": {name: round(each[0], 2) for name, each in times.items()},
        "stamped": stamped,
    }


def line_of(row: dict[str, Any]) -> str:
    """A version in a line of the table."""
    if "error" in row:
        return f"{row['name']:24} {row['error']}"
    times = row["us_a_layer"]
    right = "right" if row["is_right"] and row["differs_without_waits"] else "WRONG"
    return f"{row['name']:24} {right} " + "  ".join(f"{name} {us:.1f}" for name, us in times.items())


def run(shape: LayerShape, designs: Sequence[Design], layers: int) -> Iterator[dict[str, Any]]:
    """The rows of the ladder. A design that fails leaves its error, and the others go on."""
    weights = filled_weights(shape.layer_bytes, layers, "cuda")
    begin = random_state(shape, layers, "cuda")
    reference, wanted = Reference(shape, "cuda"), dict[int, TokenState]()
    for design in designs:
        if design.tokens not in wanted:
            wanted[design.tokens] = reference.run(begin, design.tokens)
            torch.cuda.empty_cache()
        row: dict[str, Any] = {"name": design.name, "why": design.why}
        try:
            launch, refused = opened(shape, design, weights, layers)
            row |= measured(launch, begin, wanted[design.tokens]) | {"refused": refused}
        except (DeviceError, RuntimeError) as error:  # PyTorch's are of the second kind
            row["error"] = str(error)
        print(line_of(row), flush=True)
        yield row


def warm_up() -> None:
    """An idle GPU runs at a fraction of its clock."""
    values, until = torch.ones(1 << 26, device="cuda"), time.perf_counter() + WARM_S
    while time.perf_counter() < until:
        values.mul_(1.0)
        torch.cuda.synchronize()


def show_lists(program: TokenProgram, block: int) -> int:
    """Prints a block's list and the faults of all; 1 if there are any."""
    print("\n".join(listed(program, block)))
    faults = faults_of(program)
    print("\n".join(faults) or "every list ends, and reads what was written before")
    return int(bool(faults))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--designs", help="names, separated by semicolons; all")
    parser.add_argument("--layers", type=int, default=FULL_SHAPE.layers)
    parser.add_argument("--experts", type=int, help="stored ones of a layer, for less memory; all")
    parser.add_argument("--list", type=int, metavar="BLOCK", help="print a block's list; no GPU")
    add_result_options(parser)
    options = parser.parse_args()
    wanted = options.designs.split(";") if options.designs else [design.name for design in DESIGNS]
    designs = [design for design in DESIGNS if design.name in wanted]
    shape = LayerShape.of(FULL_SHAPE, layer=LAYER, stored=options.experts)
    if options.list is not None:
        return max(show_lists(plan(shape, design, 132), options.list) for design in designs)
    calls.attach()
    machine = describe("cuda")
    compiled_s = compile_all(designs, architecture_of(calls.capability()))
    bandwidth = measure_bandwidth("cuda", 0)
    floor = shape.floor_us(bandwidth)
    print(f"{torch.cuda.get_device_name()}, copy {bandwidth / 1e12:.2f} TB/s, floor {floor:.1f} µs a layer")
    result = {
        "command": "python -m bench.kernels.one_token",
        "machine": machine,
        "copy_bytes_s": bandwidth,
        "compiled_s": round(compiled_s, 1),
        "layers": options.layers,
        "stored_bytes": shape.layer_bytes * options.layers,
        "layer": {
            "weights_bytes": shape.read_bytes,
            "state_bytes": 2 * shape.state_bytes,
            "floor_us": round(floor, 2),
        },
    }
    rows = []
    warm_up()
    for row in run(shape, designs, options.layers):
        rows.append(row)
        if options.out:  # what there is, should the rest not come
            options.out.write_text(json.dumps({**result, "versions": rows}))
    write_result({**result, "versions": rows}, options.out, options.commit)
    return int(any("error" in row or not row["is_right"] for row in rows))


if __name__ == "__main__":
    sys.exit(main())
