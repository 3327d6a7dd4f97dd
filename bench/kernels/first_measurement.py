"""What a first start measures: the seconds of each stage, and how far several measurements differ.

    python -m bench.kernels.first_measurement --out docs/results/gpu/first_measurement.json
    python -m bench.kernels.first_measurement --device cpu --times 9

Nothing is read from the file of rates, and nothing kept. The first measurement also loads kernels. The spread
of a rate is its highest value over its least, without that measurement.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from bench.device import describe
from bench.results import add_result_options, write_result
from coldstream.kernels.cuda.device import find_gpu
from coldstream.placement.hardware import Hardware
from coldstream.planning.machine import hardware_of, measure_rates

BY_TYPE = "product_values_per_s"
Row = dict[str, Any]


def measured(machine: Hardware) -> Row:
    """One measurement: its seconds, those until each stage began, and its rates by name."""
    begun = time.perf_counter()
    stages: list[float] = []
    found = measure_rates(machine, lambda *_: stages.append(time.perf_counter() - begun))
    seconds = time.perf_counter() - begun
    return {"seconds": seconds, "stages_began_s": stages, "rates": dict(rates_of(asdict(found)))}


def rates_of(values: object, name: str = "") -> Iterator[tuple[str, float]]:
    """All floats of a record, with their places in it."""
    if isinstance(values, float):
        yield name, values
    elif isinstance(values, Mapping):
        for key, value in values.items():
            yield from rates_of(value, f"{name}.{key}" if name else str(key))
    elif isinstance(values, (list, tuple)):
        for place, value in enumerate(values):
            yield from rates_of(value, f"{name}.{place}")


def spreads(rates: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Of each rate that all measurements have, its highest value over its least."""
    names = [name for name in rates[0] if "conditions" not in name]
    found = {name: [each[name] for each in rates if each.get(name)] for name in names}
    return {name: max(each) / min(each) for name, each in found.items() if len(each) == len(rates)}


def summary(spread: Mapping[str, float]) -> Row:
    """The median and the most of products by type, and of all other rates."""
    of_types = [value for name, value in spread.items() if name.startswith(BY_TYPE)]
    others = {name: value for name, value in spread.items() if not name.startswith(BY_TYPE)}
    return {
        "types_median": statistics.median(of_types),
        "types_most": max(of_types),
        "median": statistics.median(others.values()),
        "most": max(others.values()),
        "most_of": max(others, key=others.__getitem__),
    }


def run(options: argparse.Namespace) -> Row:
    machine = hardware_of(find_gpu() if options.device == "cuda" else None)
    runs = []
    for _ in range(1 + options.times):
        runs.append(measured(machine))
        print(f"{runs[-1]['seconds']:.2f} s", file=sys.stderr, flush=True)
    spread = spreads([each.pop("rates") for each in runs][1:])
    words = f"--device {options.device} --times {options.times}"
    return {
        "command": f"python -m bench.kernels.first_measurement {words}",
        "machine": describe(options.device),
        "seconds": statistics.median(each["seconds"] for each in runs[1:]),
        "spread": summary(spread),
        "spreads": {name: value for name, value in spread.items() if not name.startswith(BY_TYPE)},
        "runs": runs,
    }


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--times", type=int, default=5, help="measurements after the first")
    add_result_options(parser)
    options = parser.parse_args(words)
    result = run(options)
    print(f"median {result['seconds']:.2f} s, spread {result['spread']}", file=sys.stderr)
    write_result(result, options.out, options.commit)
    return 0


if __name__ == "__main__":
    sys.exit(main())
