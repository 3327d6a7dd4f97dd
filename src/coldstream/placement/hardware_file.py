"""A file of the measured rates of a machine, with their time.

It has an entry for the CPU and one for the GPU, so that runs on the CPU leave the GPU's rates alone. Each
names what its rates depend on, when they were measured, and what disturbed that. If an entry is missing,
damaged, absurd or of another machine, rates are measured again. Rates of steps may be missing, as in files
that were written before they were measured.
"""

import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final, Literal

from coldstream.gguf.quant_types import QuantType
from coldstream.kernels.experts.shapes import EXPERT_ROWS
from coldstream.kernels.experts.step_rates import StepRates
from coldstream.kernels.linear.cpu_rates import PRODUCT_ROWS
from coldstream.kernels.mixer_rates import MixerRates
from coldstream.placement.conditions import Conditions
from coldstream.placement.hardware import GpuHardware, Hardware
from coldstream.placement.kept_json import NoFileError, read_json, store_json

RATES_FILE: Final = "hardware.json"
DATE_FORMAT: Final = "%Y-%m-%d %H:%M UTC"  # of `Hardware.measured_at`
_VERSION: Final = 11
_MAX_BYTES: Final = 1 << 16
_OPTIONAL: Final = (
    "handshake_s",
    "row_bytes_per_s",
)  # not every driver can be asked; the other has an estimate
_CPU_RATES: Final = ("read_bytes_per_s", "product_values_per_s", "row_bytes_per_s")
CPU_RATES: Final = (*_CPU_RATES, "mixers")  # of which the last are a record of their own
_RATES: Final = {
    "cpu": _CPU_RATES,
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
# What no machine falls below or exceeds: bytes a second, multiplications or weights a second, and seconds.
_BYTES_BOUNDS: Final = (1e6, 1e14)
_BOUNDS: Final = {
    **dict.fromkeys(("product_values_per_s", "product_ops_per_s", "expert_bytes_per_s"), (1e5, 1e17)),
    "handshake_s": (1e-9, 1.0),
}
# Of several rates: the length of their list, and of each list in it.
_LISTS: Final = {
    "expert_bytes_per_s": (len(EXPERT_ROWS),),
    "product_values_per_s": (len(QuantType), len(PRODUCT_ROWS)),
}


RatesState = Literal[
    "current",
    "absent",
    "incomplete",
    "of another machine",
    "of another version",
    "damaged",
    "unreadable",
    "no file",
]


@dataclass(frozen=True)
class RatesEntry:
    """When rates of the CPU or the GPU were measured, and what disturbed that. is_due: as in `Conditions`."""

    name: str
    measured_at: str
    problems: tuple[str, ...]
    is_due: bool


@dataclass(frozen=True)
class RatesFile:
    """Whether the rates in a file are those of a machine. incomplete: the GPU's are missing. no file: what is
    in its place cannot be replaced by one.

    entries: none unless they are current. absurd: what no machine has, as text; empty if something else is
    wrong.
    """

    state: RatesState
    entries: tuple[RatesEntry, ...] = ()
    absurd: str = ""


def default_path() -> Path | None:
    """The default file of rates; None for a user without a home directory."""
    try:
        home = Path.home()
    except RuntimeError:
        return None
    return home / ".cache" / "coldstream" / RATES_FILE


def with_stored_rates(hardware: Hardware, path: Path | None) -> Hardware | None:
    """`hardware` with the rates that the file at `path` has of this machine; None if some are missing, other
    than those of steps.
    """
    document = _document(path)
    entries = {name: _entry(document, name, hardware) for name in _parts(hardware)}
    if not all(entries.values()):
        return None
    return replace(
        hardware,
        **_fields(entries["cpu"]),
        mixers=MixerRates.parsed(entries["cpu"].get("mixers")),
        gpu=hardware.gpu
        and replace(
            hardware.gpu,
            **_fields(entries["gpu"]),
            steps=StepRates.parsed(entries["gpu"].get("steps")),
        ),
    )


def describe_rates(hardware: Hardware, path: Path | None) -> RatesFile:
    """Whether `with_stored_rates` finds rates, and if not, why."""
    if path is None:
        return RatesFile("absent")
    try:
        document = read_json(path, _MAX_BYTES)
    except NoFileError:
        return RatesFile("no file")
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
        if document[name].get("machine") != machine_of(name, hardware):
            return RatesFile("of another machine")
    stored = with_stored_rates(hardware, path)
    if stored is not None:
        return RatesFile("current", entries_of(stored))
    absurd = [text for name in _parts(hardware) for text in _absurd(name, document[name].get("rates"))]
    return RatesFile("damaged", absurd=absurd[0] if absurd else "")


def entries_of(hardware: Hardware) -> tuple[RatesEntry, ...]:
    """What was measured of `hardware`, and when."""
    return tuple(
        RatesEntry(name, part.measured_at, *((under.problems, under.is_due) if under else ((), False)))
        for name, part in _parts(hardware).items()
        for under in (part.conditions,)
        if part.measured_at is not None
    )


def age_days(measured_at: str, now: datetime) -> int:
    """Whole days since then; 0 where the clock was set back. Raises ValueError for no `DATE_FORMAT`."""
    return max(0, (now - datetime.strptime(measured_at, DATE_FORMAT).replace(tzinfo=UTC)).days)


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
            "machine": machine_of(name, hardware),
            "measured_at": part.measured_at,
            "conditions": asdict(part.conditions) if part.conditions else None,
            "rates": {rate: getattr(part, rate) for rate in _RATES[name]},
            "fastest_run": fastest_run,
        }
        if isinstance(part, GpuHardware) and part.steps is not None:
            document[name]["steps"] = asdict(part.steps)
        if isinstance(part, Hardware) and part.mixers is not None:
            document[name]["mixers"] = asdict(part.mixers)
    store_json(path, document)


def _document(path: Path | None) -> dict[str, Any]:
    """The contents of the file at `path`; empty if there is none, or it is damaged or of another version."""
    if path is None:
        return {}
    try:
        document = read_json(path, _MAX_BYTES)
    except (OSError, ValueError, RecursionError):
        return {}
    is_known = isinstance(document, dict) and document.get("version") == _VERSION
    return document if is_known else {}


def _parts(hardware: Hardware) -> dict[str, Hardware | GpuHardware]:
    """What has an entry in the file, by the entry's name."""
    return {"cpu": hardware} | ({"gpu": hardware.gpu} if hardware.gpu else {})


def _entry(document: dict[str, Any], name: str, hardware: Hardware) -> dict[str, Any]:
    """The entry of this name; empty if it is damaged or of another machine."""
    entry = document.get(name)
    if not isinstance(entry, dict) or entry.get("machine") != machine_of(name, hardware):
        return {}
    rates = entry.get("rates")
    is_whole = (
        is_date(entry.get("measured_at"))
        and (entry.get("conditions") is None or Conditions.parsed(entry["conditions"]) is not None)
        and (entry.get("mixers") is None or MixerRates.parsed(entry["mixers"]) is not None)
        and isinstance(rates, dict)
        and rates.keys() == set(_RATES[name])
        and all(_is_rate(*rate) for rate in rates.items())
    )
    return entry if is_whole else {}


def _fields(entry: dict[str, Any]) -> dict[str, Any]:
    """What an entry says, by the names of the fields of `Hardware` and `GpuHardware`."""
    return {
        **{name: _in_tuples(rate) for name, rate in entry["rates"].items()},
        "measured_at": entry["measured_at"],
        "conditions": Conditions.parsed(entry.get("conditions")),
    }


def is_date(value: object) -> bool:
    """Whether it is a `DATE_FORMAT`."""
    try:
        return isinstance(value, str) and age_days(value, datetime.now(UTC)) >= 0
    except ValueError:
        return False


def _in_tuples(value: Any) -> Any:
    """Lists within lists as tuples."""
    return tuple(map(_in_tuples, value)) if isinstance(value, list) else value


def machine_of(name: str, hardware: Hardware) -> dict[str, Any]:
    """What the rates of an entry depend on. A GPU's rates depend on the CPU too."""
    machine: dict[str, Any] = {"cpu": hardware.cpu_name, "cores": hardware.num_physical_cores}
    if name == "gpu" and hardware.gpu:
        machine |= {"gpu": hardware.gpu.name, "driver": hardware.gpu.driver}
    return machine


def _is_rate(name: str, value: object) -> bool:
    if value is None:
        return name in _OPTIONAL
    return _are_rates(value, _LISTS.get(name, ()), _BOUNDS.get(name, _BYTES_BOUNDS))


def _absurd(part: str, rates: object) -> Iterator[str]:
    """What `_is_rate` refuses in an entry's rates, as text."""
    for name in _RATES[part]:
        if isinstance(rates, dict) and name in rates and not _is_rate(name, rates[name]):
            least, most = _BOUNDS.get(name, _BYTES_BOUNDS)
            yield f"{name} is not from {least:g} to {most:g}"


def _are_rates(value: Any, lengths: tuple[int, ...], bounds: tuple[float, float]) -> bool:
    """Whether it is a rate within `bounds`, or lists of these lengths within each other that hold such."""
    if not lengths:
        return isinstance(value, float) and bounds[0] <= value <= bounds[1]
    is_list = isinstance(value, list) and len(value) == lengths[0]
    return is_list and all(_are_rates(each, lengths[1:], bounds) for each in value)
