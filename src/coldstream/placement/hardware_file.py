"""A file of the measured rates of a machine, with their time.

It has an entry for the CPU and one for the GPU, so that runs on the CPU leave the GPU's rates alone. Each
names what its rates depend on. If an entry is missing, damaged or of another machine, rates are measured
again.
"""

import json
import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final, Literal

from coldstream.errors import StorageError
from coldstream.files import write_file
from coldstream.gguf.quant_types import QuantType
from coldstream.kernels.experts.shapes import EXPERT_ROWS
from coldstream.kernels.linear.cpu_rates import PRODUCT_ROWS
from coldstream.placement.hardware import GpuHardware, Hardware

DATE_FORMAT: Final = "%Y-%m-%d %H:%M UTC"  # of `Hardware.measured_at`
_VERSION: Final = 6
_MAX_BYTES: Final = 1 << 16
_OPTIONAL: Final = "handshake_s"  # not every driver can be asked
_RATES: Final = {
    "cpu": ("read_bytes_per_s", "product_values_per_s"),
    "gpu": (
        "copy_bytes_per_s",
        "product_ops_per_s",
        "link_bytes_per_s",
        "link_beside_read",
        "read_beside_link",
        "handshake_s",
        "expert_bytes_per_s",
    ),
}
# Of several rates: the length of their list, and of each list in it.
_LISTS: Final = {
    "expert_bytes_per_s": (len(EXPERT_ROWS),),
    "product_values_per_s": (len(QuantType), len(PRODUCT_ROWS)),
}


RatesState = Literal[
    "current", "absent", "incomplete", "of another machine", "of another version", "damaged", "unreadable"
]


@dataclass(frozen=True)
class RatesFile:
    """Whether the rates in a file are those of a machine. incomplete: the GPU's are missing.

    measured_at: the time of the older entry; None unless they are current.
    """

    state: RatesState
    measured_at: str | None = None


def default_path() -> Path | None:
    """The default file of rates; None for a user without a home directory."""
    try:
        home = Path.home()
    except RuntimeError:
        return None
    return home / ".cache" / "coldstream" / "hardware.json"


def with_stored_rates(hardware: Hardware, path: Path | None) -> Hardware | None:
    """`hardware` with the rates that the file at `path` has of this machine; None if it lacks some of them.

    `measured_at` is the time of the older entry.
    """
    document = _document(path)
    entries = {name: _entry(document, name, hardware) for name in _parts(hardware)}
    if not all(entries.values()):
        return None
    return replace(
        hardware,
        **_rates(entries["cpu"]),
        gpu=hardware.gpu and replace(hardware.gpu, **_rates(entries["gpu"])),
        measured_at=min(entry["measured_at"] for entry in entries.values()),
    )


def describe_rates(hardware: Hardware, path: Path | None) -> RatesFile:
    """Whether `with_stored_rates` finds rates, and if not, why."""
    if path is None:
        return RatesFile("absent")
    try:
        document = _parsed(path)
    except FileNotFoundError:
        return RatesFile("absent")
    except OSError:
        return RatesFile("unreadable")
    except (ValueError, RecursionError):
        return RatesFile("damaged")
    if not isinstance(document, dict):
        return RatesFile("damaged")
    if document.get("version") != _VERSION:
        return RatesFile("of another version")
    for name in _parts(hardware):
        if name not in document:
            return RatesFile("incomplete")
        if not isinstance(document[name], dict):
            return RatesFile("damaged")
        if document[name].get("machine") != _machine(name, hardware):
            return RatesFile("of another machine")
    stored = with_stored_rates(hardware, path)
    return RatesFile("damaged") if stored is None else RatesFile("current", stored.measured_at)


def fastest_run(hardware: Hardware, path: Path | None) -> float:
    """What `store_rates` was given with the rates of the GPU, or without one of the CPU; 0: nothing."""
    value = _entry(_document(path), [*_parts(hardware)][-1], hardware).get("fastest_run")
    return value if isinstance(value, float) and math.isfinite(value) else 0.0


def store_rates(hardware: Hardware, path: Path | None, fastest_run: float = 0.0) -> None:
    """Writes the measured rates at once: there is the old file or the whole new one. Raises StorageError.

    Without a path nothing is kept. Without a GPU in `hardware`, the file's entry of a GPU is kept.
    fastest_run: the measured run's speed, divided by the speed that these rates explain.
    """
    if path is None:
        return
    document = _document(path) | {"version": _VERSION}
    for name, part in _parts(hardware).items():
        document[name] = {
            "machine": _machine(name, hardware),
            "measured_at": hardware.measured_at,
            "rates": {rate: getattr(part, rate) for rate in _RATES[name]},
            "fastest_run": fastest_run,
        }
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise StorageError(f"{path}: no folder for it: {error.strerror}") from error
    write_file(path, json.dumps(document, indent=2).encode())


def _document(path: Path | None) -> dict[str, Any]:
    """The contents of the file at `path`; empty if there is none, or it is damaged or of another version."""
    if path is None:
        return {}
    try:
        document = _parsed(path)
    except (OSError, ValueError, RecursionError):
        return {}
    is_known = isinstance(document, dict) and document.get("version") == _VERSION
    return document if is_known else {}


def _parsed(path: Path) -> Any:
    """What JSON the file at `path` holds. Raises OSError, ValueError, RecursionError."""
    with open(path, "rb") as file:
        return json.loads(file.read(_MAX_BYTES))


def _parts(hardware: Hardware) -> dict[str, Hardware | GpuHardware]:
    """What has an entry in the file, by the entry's name."""
    return {"cpu": hardware} | ({"gpu": hardware.gpu} if hardware.gpu else {})


def _entry(document: dict[str, Any], name: str, hardware: Hardware) -> dict[str, Any]:
    """The entry of this name; empty if it is damaged or of another machine."""
    entry = document.get(name)
    if not isinstance(entry, dict) or entry.get("machine") != _machine(name, hardware):
        return {}
    rates = entry.get("rates")
    is_whole = (
        isinstance(entry.get("measured_at"), str)
        and isinstance(rates, dict)
        and rates.keys() == set(_RATES[name])
        and all(_is_rate(*rate) for rate in rates.items())
    )
    return entry if is_whole else {}


def _rates(entry: dict[str, Any]) -> dict[str, Any]:
    """Those of an entry, as the fields of `Hardware` and `GpuHardware` have them."""
    return {name: _in_tuples(rate) for name, rate in entry["rates"].items()}


def _in_tuples(value: Any) -> Any:
    """Lists within lists as tuples."""
    return tuple(map(_in_tuples, value)) if isinstance(value, list) else value


def _machine(name: str, hardware: Hardware) -> dict[str, Any]:
    """What the rates of an entry depend on. A GPU's rates depend on the CPU too."""
    machine: dict[str, Any] = {"cpu": hardware.cpu_name, "cores": hardware.num_physical_cores}
    if name == "gpu" and hardware.gpu:
        machine |= {"gpu": hardware.gpu.name, "driver": hardware.gpu.driver}
    return machine


def _is_rate(name: str, value: object) -> bool:
    if value is None:
        return name == _OPTIONAL
    return _are_rates(value, _LISTS.get(name, ()))


def _are_rates(value: Any, lengths: tuple[int, ...]) -> bool:
    """Whether it is a rate, or lists of these lengths within each other that hold rates."""
    if not lengths:
        return isinstance(value, float) and math.isfinite(value) and value > 0
    is_list = isinstance(value, list) and len(value) == lengths[0]
    return is_list and all(_are_rates(each, lengths[1:]) for each in value)
