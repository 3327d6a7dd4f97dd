"""The table of `placement/gpu_types.py`, from the results of `bench.kernels.gpu_types`.

    python -m bench.kernels.gpu_type_table           rewrite the table
    python -m bench.kernels.gpu_type_table --check   exit 1 if it is not what was measured

The types of floats have a result of their own: gpu_types.py --types F32 F16 BF16 --cases dense. Their experts
are taken to be as their dense products where they were not measured.
"""

import argparse
import json
import re
import sys
from collections.abc import Mapping
from typing import Any

from bench.results import ROOT
from coldstream.gguf.quant_types import QuantType
from coldstream.kernels.experts.shapes import MEASURED_TYPE

RESULTS = ("docs/results/gpu/types.json", "docs/results/gpu/float_types.json")
TABLE = ROOT / "src" / "coldstream" / "placement" / "gpu_types.py"
ROWS = (1, 2048)
_ENTRIES = re.compile(r"(    QuantType\.\w+: ProductTime\(.*\),\n)+")

Ratios = Mapping[tuple[str, str, int], float]


def ratios() -> dict[tuple[str, str, int], float]:
    """What was measured over MEASURED_TYPE, by type, case and rows."""
    results: list[dict[str, Any]] = []
    for path in RESULTS:
        results += json.loads((ROOT / path).read_text())["results"]
    return {(row["type"], row["what"], row["rows"]): row["ratio"] for row in results}


def rewrite(text: str, measured: Ratios) -> str:
    """The source of the table with the entries that were measured. ValueError unless it has one table."""
    fresh, count = _ENTRIES.subn("".join(entry(kind, measured) for kind in QuantType), text)
    if count != 1:
        raise ValueError(f"{TABLE.name} has {count} runs of entries: one is rewritten")
    return fresh


def entry(kind: QuantType, measured: Ratios) -> str:
    """A line of the table. KeyError for a type that was not measured."""
    times = [1.0] * 4
    if kind is not MEASURED_TYPE:
        dense = [measured[kind.name, "dense", rows] for rows in ROWS]
        experts = [measured.get((kind.name, "experts", rows), dense[i]) for i, rows in enumerate(ROWS)]
        times = [dense[0], experts[0], dense[1], experts[1]]
    return f"    QuantType.{kind.name}: ProductTime({', '.join(f'{time:.2f}' for time in times)}),\n"


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--check", action="store_true")
    options = parser.parse_args()
    text = TABLE.read_text()
    fresh = rewrite(text, ratios())
    if fresh != text and not options.check:
        TABLE.write_text(fresh)
    return int(options.check and fresh != text)


if __name__ == "__main__":
    sys.exit(main())
