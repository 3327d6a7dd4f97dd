"""What kernels reach of a machine's rates, and what their launches take. Pure.

Where a GPU's steps were measured, each share follows from its own kernels. Elsewhere the shares are those of
H200s, and a plan names them as estimates.
"""

from collections.abc import Collection
from dataclasses import dataclass
from typing import Final, Self

from coldstream.placement.hardware import GpuHardware, Hardware

# A prompt's products with all that its rows take beside them (mixers, norms, routing), of the measured
# product. Nothing of a prompt but its dense product is measured (docs/notes/startup.md).
PROMPT_OF_PRODUCT: Final = 0.69
# What a prompt's launch takes the thread that queues it, of a measured one: both are this program's Python,
# and a layer of a prompt has more kernels for each operation with its arrays and checks.
QUEUED_OF_MEASURED: Final = 0.6
_NAMES: Final = (
    *("launch_s", "request_s", "queue_s", "vram", "bus", "bus_beside", "staged", "misses", "misses_beside"),
    "products",
)
_WORDS: Final = {
    "launch_s": ("a launch {:.2g} µs", 1e6),
    "vram": ("kernels read GPU memory at {:.0f} % of a copy's rate", 100.0),
    "products": ("prompts multiply at {:.0f} % of the GPU's rate", 100.0),
    "bus": ("kernels read over the bus at {:.0f} %", 100.0),
    "bus_beside": ("beside the CPU at {:.0f} %", 100.0),
    "misses": ("the CPU reads missing weights at {:.0f} % of RAM's rate", 100.0),
    "queue_s": ("the thread queues a launch in {:.2g} µs", 1e6),
}
OF_GPU: Final = ("launch_s", "vram", "products")
OF_MISSES: Final = ("bus", "bus_beside", "staged", "request_s", "misses", "queue_s", "misses_beside")


@dataclass(frozen=True)
class KernelShares:
    """Shares of rates, and seconds. By default estimates, from docs/results/gpu on H200s.

    estimated: names of those that were not measured.
    """

    launch_s: float = 3.0e-6  # fixed part of a short kernel in a captured graph
    request_s: float = 0.0  # of a request for missing experts, beside bytes and the handshake
    queue_s: float = 6e-5  # of the thread that launches what no graph has, with arrays and checks: a kernel
    vram: float = 0.7  # of a copy's rate in GPU memory: products of one row
    bus: float = 0.85  # of a copy's rate over the bus: kernels that read over it
    bus_beside: float = 0.72  # of a copy's rate beside the CPU: kernels that read over the bus
    staged: float = 0.96  # of a copy's rate alone: launches that stage whole experts beside the CPU
    misses: float = 0.6  # of the rate at which threads read: what a GPU asks for in a layer
    misses_beside: float = 0.6  # the same beside the bus
    # Of the rate of large matrices: a prompt's products, with all that rows take beside them.
    products: float = 0.215
    estimated: tuple[str, ...] = _NAMES

    @classmethod
    def of(cls, hardware: Hardware) -> Self:
        """By the rates of steps of a machine, as far as they were measured."""
        measured = _measured(hardware, hardware.gpu) if hardware.gpu else {}
        found = {name: value for name, value in measured.items() if value is not None}
        return cls(**found, estimated=tuple(name for name in _NAMES if name not in found))

    @property
    def measured(self) -> tuple[str, ...]:
        """Names of those that are no estimates."""
        return tuple(name for name in _NAMES if name not in self.estimated)

    def describe_estimated(self, names: Collection[str]) -> str:
        """Those of `names` that were not measured, as text; empty if all were."""
        return ", ".join(
            words.format(scale * getattr(self, name))
            for name, (words, scale) in _WORDS.items()
            if name in names and name in self.estimated
        )


def _measured(hardware: Hardware, gpu: GpuHardware) -> dict[str, float | None]:
    steps = gpu.steps
    if steps is None:
        return {}
    products = _share(steps.prompt_ops_per_s, gpu.product_ops_per_s)
    return {
        "launch_s": steps.launch_s,
        "request_s": steps.request_s,
        "queue_s": QUEUED_OF_MEASURED * steps.queue_s,
        "vram": _share(steps.row_bytes_per_s, gpu.copy_bytes_per_s),
        "bus": _share(steps.row_bus_alone, gpu.link_bytes_per_s),
        "bus_beside": _share(steps.row_bus_beside, gpu.link_beside_read),
        "staged": _share(steps.staged_beside, gpu.link_bytes_per_s),
        "misses": _share(steps.misses_alone, hardware.read_bytes_per_s),
        "misses_beside": _share(steps.misses_beside, gpu.read_beside_link),
        "products": products and PROMPT_OF_PRODUCT * products,
    }


def _share(of_kernels: float | None, rate: float | None) -> float | None:
    return of_kernels / rate if of_kernels and rate else None
