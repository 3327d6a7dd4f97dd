"""What `coldstream plan` expects of the full-size model on cards that are not here, by their data sheets.

    python -m bench.engine.card_forecast --out docs/results/card_forecast.json

A card's rates are the shares of its data sheet that an H200 reached of its own, in a result file. The machine
around each card is the same: eight cores with AVX2, and two channels of memory. The model's file has a header
and small tensors; holes stand for its matrices, which a plan does not read.
"""

import argparse
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

import numpy as np

import gguf
from bench.full_size_model import FULL_SHAPE, FullSizeWriter
from bench.report.tables import load
from bench.results import write_result
from coldstream.gguf.reader import GGUFFile
from coldstream.models.read_spec import read_spec
from coldstream.models.spec.model_spec import ModelSpec
from coldstream.placement.forecast import forecast
from coldstream.placement.hardware import GpuHardware, Hardware
from coldstream.planning.config import EngineConfig
from coldstream.planning.gather import Sources, plan_model

GIB: Final = 2**30
CTX_SIZE: Final = 8192
CONTEXT: Final = 256  # tokens before a decoded one
PROMPT: Final = 2048
SCREEN_BYTES: Final = GIB // 2  # of a card, for the desktop
READ_BYTES_PER_S: Final = 6e10  # two channels of DDR5-5600: two thirds of 89.6 GB/s
CORES: Final = 8
RAM_BYTES: Final = 64 * GIB
SMALL_BYTES: Final = 2**16  # of tensors that are written


@dataclass(frozen=True)
class Card:
    """A line of a data sheet."""

    name: str
    memory_gib: int
    bytes_per_s: float
    int8_ops_per_s: float  # of dense matrices
    bus_bytes_per_s: float  # in one direction


_PCIE_4_X8, _PCIE_4, _PCIE_5 = 15.75e9, 31.5e9, 63e9
H200: Final = Card("H200", 141, 4.8e12, 1.979e15, _PCIE_5)
CARDS: Final = (
    Card("RTX 4060", 8, 272e9, 121e12, _PCIE_4_X8),
    Card("RTX 3060", 12, 360e9, 102e12, _PCIE_4),
    Card("RTX 5070", 12, 672e9, 247e12, _PCIE_5),
    Card("RTX 4060 Ti", 16, 288e9, 177e12, _PCIE_4_X8),
    Card("RTX 5080", 16, 960e9, 450e12, _PCIE_5),
    Card("RTX 3090", 24, 936e9, 284e12, _PCIE_4),
    Card("RTX 4090", 24, 1008e9, 661e12, _PCIE_4),
    Card("RTX 5090", 32, 1792e9, 838e12, _PCIE_5),
)


@dataclass(frozen=True)
class Reached:
    """Shares of a data sheet that a program reaches."""

    copy: float
    products: float
    bus: float

    @classmethod
    def of(cls, measured: dict[str, Any]) -> "Reached":
        """Those of the H200 whose rates a result names."""
        return cls(
            measured["copy_bytes_per_s"] / H200.bytes_per_s,
            measured["product_ops_per_s"] / H200.int8_ops_per_s,
            measured["link_bytes_per_s"] / H200.bus_bytes_per_s,
        )


def hardware_with(card: Card, reached: Reached) -> Hardware:
    """A computer with the card."""
    gpu = GpuHardware(
        card.name,
        driver="",
        total_bytes=card.memory_gib * GIB,
        free_bytes=card.memory_gib * GIB - SCREEN_BYTES,
        copy_bytes_per_s=reached.copy * card.bytes_per_s,
        product_ops_per_s=reached.products * card.int8_ops_per_s,
        link_bytes_per_s=reached.bus * card.bus_bytes_per_s,
    )
    return Hardware(
        cpu_name="eight cores",
        cpu_flags=("avx2",),
        num_logical_cpus=2 * CORES,
        num_physical_cores=CORES,
        ram_total_bytes=RAM_BYTES,
        ram_available_bytes=RAM_BYTES - 4 * GIB,
        read_bytes_per_s=READ_BYTES_PER_S,
        gpu=gpu,
    )


def write_without_matrices(path: Path) -> None:
    """The file of full_size_model.py with holes in place of its matrices."""
    writer = FullSizeWriter(path, FULL_SHAPE, 0, 1)
    writer.plan()
    offset = writer.write_header(path)
    with path.open("r+b") as file:
        for tensor in writer.tensors:
            if tensor.num_bytes <= SMALL_BYTES:
                for begin, make in tensor.pieces():
                    file.seek(offset + begin)
                    file.writelines(np.ascontiguousarray(buffer).tobytes() for buffer in make())
            offset += gguf.GGUFWriter.ggml_pad(tensor.num_bytes, gguf.GGUF_DEFAULT_ALIGNMENT)
        file.truncate(offset)


def forecast_row(card: Card, reached: Reached, file: GGUFFile, spec: ModelSpec) -> dict[str, Any]:
    """What a plan expects with all of the card's free memory."""
    hardware = hardware_with(card, reached)
    budget = card.memory_gib * GIB - SCREEN_BYTES
    config = EngineConfig("full", vram=budget, ctx_size=CTX_SIZE, device="cuda", spec_type="none")
    planned = plan_model(config, Sources(file, spec, hardware))
    expected = forecast(planned.plan, planned.known, CONTEXT, planned.run.pool)
    return {
        **asdict(card),
        "vram_bytes": budget,
        "experts_share": planned.plan.num_resident / planned.plan.num_all,
        "decode_tok_s": expected.decode,
        "prefill_tok_s": expected.prefill[PROMPT],
        "hit_rate": expected.hit_rate,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    source = load("gpu/hybrid_ahead")
    reached = Reached.of(source["hardware"]["gpu"])
    with TemporaryDirectory() as folder:
        path = Path(folder) / "full.gguf"
        write_without_matrices(path)
        with GGUFFile.open(path) as file:
            spec = read_spec(file.metadata, file.tensors)
            rows = [forecast_row(card, reached, file, spec) for card in CARDS]
    result = {
        "command": "python -m bench.engine.card_forecast",
        "model": "Qwen3.6-35B-A3B shape, Q4_K_M",
        "ctx_size": CTX_SIZE,
        "context": CONTEXT,
        "prompt": PROMPT,
        "shares_of_data_sheet": asdict(reached),
        "shares_from": {"result": "gpu/hybrid_ahead", "commit": source["commit"]},
        "computer": {
            "cores": CORES,
            "instructions": "avx2",
            "read_bytes_per_s": READ_BYTES_PER_S,
            "ram_bytes": RAM_BYTES,
            "screen_bytes": SCREEN_BYTES,
        },
        "rows": rows,
    }
    write_result(result, options.out)


if __name__ == "__main__":
    main()
