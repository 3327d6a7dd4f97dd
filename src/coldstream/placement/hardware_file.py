"""A file of the measured rates of a machine, with their time. Bound to the CPU and the GPU.

A file that is missing, damaged or of another machine counts as none: rates are measured again.
"""

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from coldstream.errors import StorageError
from coldstream.files import write_file
from coldstream.placement.hardware import Hardware

_VERSION: Final = 2
_MAX_BYTES: Final = 1 << 16
_OPTIONAL: Final = "handshake_s"  # not every driver can be asked
_GPU_RATES: Final = (
    "copy_bytes_per_s",
    "product_ops_per_s",
    "link_bytes_per_s",
    "link_beside_read",
    "read_beside_link",
    "handshake_s",
)


def default_path() -> Path:
    """The default file of rates."""
    return Path.home() / ".cache" / "coldstream" / "hardware.json"


def with_stored_rates(hardware: Hardware, path: Path) -> Hardware | None:
    """`hardware` with the rates that the file at `path` has of this machine; None if it has none."""
    document = _document(hardware, path)
    rates, measured_at = document.get("rates"), document.get("measured_at")
    names = ("read_bytes_per_s", *(_GPU_RATES if hardware.gpu else ()))
    if (
        not isinstance(measured_at, str)
        or not isinstance(rates, dict)
        or not all(name in rates and _is_rate(name, rates[name]) for name in names)
    ):
        return None
    gpu = hardware.gpu and replace(hardware.gpu, **{name: rates[name] for name in _GPU_RATES})
    return replace(hardware, read_bytes_per_s=rates["read_bytes_per_s"], gpu=gpu, measured_at=measured_at)


def fastest_run(hardware: Hardware, path: Path) -> float:
    """Bytes per second of the fastest run for which the rates at `path` were measured again; 0: none."""
    value = _document(hardware, path).get("fastest_run")
    return value if isinstance(value, float) and math.isfinite(value) else 0.0


def store_rates(hardware: Hardware, path: Path, fastest_run: float = 0.0) -> None:
    """Writes the measured rates at once: there is the old file or the whole new one. Raises StorageError."""
    rates = {"read_bytes_per_s": hardware.read_bytes_per_s}
    if hardware.gpu:
        rates |= {name: getattr(hardware.gpu, name) for name in _GPU_RATES}
    document = {
        "machine": _machine(hardware),
        "measured_at": hardware.measured_at,
        "rates": rates,
        "fastest_run": fastest_run,
    }
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise StorageError(f"{path}: no folder for it: {error.strerror}") from error
    write_file(path, json.dumps(document, indent=2).encode())


def _document(hardware: Hardware, path: Path) -> dict[str, Any]:
    """The contents of the file at `path`; empty if it is damaged or of another machine."""
    try:
        with open(path, "rb") as file:
            document = json.loads(file.read(_MAX_BYTES))
    except (OSError, ValueError, RecursionError):
        return {}
    is_ours = isinstance(document, dict) and document.get("machine") == _machine(hardware)
    return document if is_ours else {}


def _machine(hardware: Hardware) -> dict[str, Any]:
    """The parts of a machine that rates depend on."""
    return {
        "version": _VERSION,
        "cpu": hardware.cpu_name,
        "cores": hardware.num_physical_cores,
        "gpu": hardware.gpu.name if hardware.gpu else None,
        "driver": hardware.gpu.driver if hardware.gpu else None,
    }


def _is_rate(name: str, value: object) -> bool:
    if value is None:
        return name == _OPTIONAL
    return isinstance(value, float) and math.isfinite(value) and value > 0
