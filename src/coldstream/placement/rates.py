"""Rates: bytes and operations per second of a machine, for the cost model. Pure."""

import math
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from coldstream.gguf.quant_types import QuantType
from coldstream.kernels.linear.cpu_rates import PRODUCT_ROWS
from coldstream.kernels.mixer_rates import MixerRates
from coldstream.placement.hardware import Hardware
from coldstream.placement.kernel_shares import KernelShares

# Rates of one core by its best instruction set, if memory is no bound: int8 multiplications and additions per
# second in prefill, and bytes of weights per second in the decode of one row. Sapphire Rapids, two cores;
# AVX-VNNI by its ratio to AVX2 on a Zen 5.
_CORES: Final = {
    "amx_int8": (4.4e11, 2e10),
    "avx512_vnni": (2.8e11, 2e10),
    "avx_vnni": (1.1e11, 8.5e9),
    "avx2": (6.8e10, 8.5e9),
    "asimd": (6.8e10, 8.5e9),  # NEON was not measured: as avx2
}
_GENERIC_CORE: Final = (5.8e9, 4e8)

# What one core does between products, where nobody measured it: an EPYC with AVX-512.
_MIXERS_OF_CORE: Final = MixerRates(
    op_s=2e-6,
    call_s=2e-5,
    cached_bytes_per_s=6e9,
    row_pairs_per_s=6e10,
    pairs_per_s=2.8e10,
    state_values_per_s=1.3e10,
    row_values_per_s=1e10,
)

# Of the rate at which threads read: weights in RAM that they multiply by one row, where nobody measured it.
CPU_SHARE: Final = 0.85
# Assumed without a measurement: a GPU with 400 GB/s on PCIe 4, two channels of DDR5, an NVMe disk.
_ASSUMED: Final = {
    "read_bytes_per_s": 6e10,
    "link_bytes_per_s": 2.4e10,
    "vram_bytes_per_s": 4e11,
    "product_ops_per_s": 1.5e14,
    "handshake_s": 1e-5,
    "disk_bytes_per_s": 2e9,
}


ESTIMATED: Final = KernelShares()
_WORDS: Final = {
    "read_bytes_per_s": ("RAM", 1e9, "GB/s"),
    "row_bytes_per_s": ("products of one row", 1e9, "GB/s"),
    "mixers": ("attention of one row", 1e9, "GB/s"),
    "link_bytes_per_s": ("link", 1e9, "GB/s"),
    "vram_bytes_per_s": ("GPU memory", 1e9, "GB/s"),
    "product_ops_per_s": ("GPU products", 1e12, "TOPS"),
    "handshake_s": ("handshake", 1e-6, "µs"),
    "disk_bytes_per_s": ("disk", 1e9, "GB/s"),
}


_PLACES: Final = {quant_type: place for place, quant_type in enumerate(QuantType)}


@dataclass(frozen=True)
class Rates:
    """Bytes and operations per second, measured. `assumed` names those that were not."""

    read_bytes_per_s: float  # CPU threads from RAM, alone
    link_bytes_per_s: float  # from RAM to the GPU, alone
    read_beside_link: float  # CPU threads from RAM while the link is busy
    link_beside_read: float  # the link while the CPU threads read
    vram_bytes_per_s: float  # what a copy in the GPU's memory reads and writes together
    product_ops_per_s: float  # int8 multiplications and additions of the GPU in large matrices
    cpu_ops_per_s: float  # int8 multiplications and additions of all cores
    cpu_bytes_per_s: float  # weights that all cores multiply by one row
    num_cores: int
    handshake_s: float  # the GPU raises a flag, a thread answers, the GPU goes on
    disk_bytes_per_s: float
    # Weights of experts of EXPERT_ROWS rows each that all cores multiply; empty: not measured.
    expert_bytes_per_s: tuple[float, ...] = ()
    # Weights times rows that all cores multiply, by type and PRODUCT_ROWS; empty: not measured.
    product_values_per_s: tuple[tuple[float, ...], ...] = ()
    row_bytes_per_s: float = 0.0  # weights in RAM that all cores multiply by one row; 0: not known
    mixers: MixerRates | None = None  # what all cores do between products; None: see `mixer_rates`
    assumed: tuple[str, ...] = ()
    shares: KernelShares = ESTIMATED

    @classmethod
    def of(cls, hardware: Hardware, disk_bytes_per_s: float | None = None) -> "Rates":
        """What was measured of `hardware`; the rest is assumed."""
        gpu = hardware.gpu
        measured: dict[str, Any] = {
            "read_bytes_per_s": hardware.read_bytes_per_s,
            "row_bytes_per_s": hardware.row_bytes_per_s,
            "disk_bytes_per_s": disk_bytes_per_s,
        }
        if gpu is not None:
            measured |= {
                "link_bytes_per_s": gpu.link_bytes_per_s,
                "vram_bytes_per_s": gpu.copy_bytes_per_s,
                "product_ops_per_s": gpu.product_ops_per_s,
                "handshake_s": gpu.handshake_s,
            }
        known = {name: value for name, value in measured.items() if value is not None}
        values = _ASSUMED | known
        ops, num_bytes = _core(hardware.cpu_flags)
        read, link = values["read_bytes_per_s"], values["link_bytes_per_s"]
        values.setdefault("row_bytes_per_s", CPU_SHARE * read)
        read_beside = gpu.read_beside_link if gpu else None
        link_beside = gpu.link_beside_read if gpu else None
        return cls(
            **values,
            # Copies over the link read the same memory.
            read_beside_link=read_beside or max(read / 4, read - link),
            link_beside_read=link_beside or link,
            num_cores=hardware.num_physical_cores,
            cpu_ops_per_s=hardware.num_physical_cores * ops,
            cpu_bytes_per_s=hardware.num_physical_cores * num_bytes,
            expert_bytes_per_s=(gpu and gpu.expert_bytes_per_s) or (),
            product_values_per_s=hardware.product_values_per_s or (),
            mixers=hardware.mixers,
            assumed=tuple(name for name in (*_ASSUMED, "row_bytes_per_s") if name not in known)
            + (() if hardware.mixers else ("mixers",)),
            shares=KernelShares.of(hardware),
        )

    @property
    def answer_s(self) -> float:
        """From a GPU's request for missing experts to the CPU's answer, beside their bytes."""
        return self.handshake_s + self.shares.request_s

    @property
    def mixer_rates(self) -> MixerRates:
        """Of all cores; assumed where they were not measured."""
        return self.mixers or _MIXERS_OF_CORE.of_cores(self.num_cores)

    @property
    def ram_bytes_per_s(self) -> float:
        """The most that threads were seen to read: a product may read faster than a loop that only reads."""
        return max(self.read_bytes_per_s, self.row_bytes_per_s)

    @property
    def most_cpu_ops_per_s(self) -> float:
        """Of all cores, with the type of weights and the number of rows that they are fastest with."""
        return (
            2 * float(np.max(self.product_values_per_s)) if self.product_values_per_s else self.cpu_ops_per_s
        )

    @property
    def row_share(self) -> float:
        """Of the rate at which threads read: weights in RAM that they multiply by one row."""
        return self.row_bytes_per_s / self.read_bytes_per_s if self.row_bytes_per_s else CPU_SHARE

    @property
    def row_bus_bytes_per_s(self) -> float:
        """The most that a GPU's kernels of one row read from RAM; no limit without types of weights."""
        return math.inf

    def product_seconds(self, quant_type: QuantType, num_values: float, rows: float) -> float:
        """Seconds in which all cores multiply so many weights, in caches, by `rows` rows."""
        per_s = self.product_values_per_s[_PLACES[quant_type]]
        return num_values * rows / float(np.interp(rows, PRODUCT_ROWS, per_s))

    def describe_assumed(self, names: Collection[str]) -> str:
        """Those of `names` that were assumed, as text; empty if none was."""
        return self._describe([name for name in names if name in self.assumed])

    def describe_measured(self, names: Collection[str]) -> str:
        """Those of `names` that were measured and stored, as text; the disk is measured for each plan."""
        return self._describe([name for name in names if name not in (*self.assumed, "disk_bytes_per_s")])

    def _describe(self, names: Collection[str]) -> str:
        return ", ".join(
            f"{what} {self._figure(name) / scale:.3g} {unit}"
            for name, (what, scale, unit) in _WORDS.items()
            if name in names
        )

    def _figure(self, name: str) -> float:
        """Of the rates between products, what a long text depends on most."""
        figure: float = self.mixer_rates.cached_bytes_per_s if name == "mixers" else getattr(self, name)
        return figure


def _core(flags: tuple[str, ...]) -> tuple[float, float]:
    return next((figures for flag, figures in _CORES.items() if flag in flags), _GENERIC_CORE)
