"""A file of what the last runs took, beside what was planned, by machine and model file.

For people who ask whether a forecast holds here, and for what `plan` says of decoding as it went. Nothing is
placed by it. What is damaged, or of another version, is left out and written anew by the next run.
"""

import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Final, Literal, Self

from coldstream.placement.hardware import Hardware
from coldstream.placement.hardware_file import default_path, is_date, machine_of
from coldstream.placement.kept_json import read_json, store_json

VERSION: Final = 1
MOST_RUNS: Final = 3  # of a machine and a file
MOST_KEPT: Final = 32  # of those, the last ones
ALIKE: Final = 0.01  # of a forecast: it was of the same plan, by the same rates
_MAX_BYTES: Final = 1 << 17
_MOST_COUNT: Final = 1 << 60
_MOST_NUMBER: Final = 1e6  # seconds of a token, or times as long as planned

RunsState = Literal["current", "absent", "of another version", "damaged", "unreadable"]


@dataclass(frozen=True)
class Observed:
    """Of steps of one token with missing experts on a GPU: their number, and the seconds of their layers.

    cpu_factor, bus_factor: how many times as long as planned an expert took; None: there was none.
    """

    steps: int
    seconds: float
    cpu_factor: float | None
    bus_factor: float | None


@dataclass(frozen=True)
class LastRun:
    """A run that has ended. step_s, hit_rate: of a token, as in `Observed`; expected_s: of a whole one."""

    ended_at: str
    vram_bytes: int
    steps: int
    step_s: float
    expected_s: float
    hit_rate: float
    expected_hit_rate: float
    cpu_factor: float | None
    bus_factor: float | None

    @classmethod
    def parsed(cls, document: object) -> Self | None:
        """Of the JSON object that `asdict` gave; None if it is none, or has absurd values."""
        if not isinstance(document, dict) or document.keys() != {field.name for field in fields(cls)}:
            return None
        values = dict(document)
        counts = [values.pop(name) for name in ("vram_bytes", "steps")]
        factors = [values.pop(name) for name in ("cpu_factor", "bus_factor")]
        if not is_date(values.pop("ended_at")):
            return None
        if not all(type(each) is int and 0 < each < _MOST_COUNT for each in counts):
            return None
        numbers = [*values.values(), *(each for each in factors if each is not None)]
        if not all(isinstance(each, float) and 0 <= each < _MOST_NUMBER for each in numbers):
            return None
        return cls(**document)


def runs_path() -> Path | None:
    """Beside the file of rates; None for a user without a home directory."""
    rates = default_path()
    return None if rates is None else rates.with_name("runs.json")


def last_runs(
    hardware: Hardware, fingerprint: str, path: Path | None
) -> tuple[RunsState, tuple[LastRun, ...]]:
    """The kept runs of a machine and a model file, the last one first, and whether the file could be read."""
    state, entries = _read(path)
    key = _key(hardware, fingerprint)
    return state, next((runs for each, runs in entries if each == key), ())


def keep_run(hardware: Hardware, fingerprint: str, run: LastRun, path: Path | None) -> None:
    """Adds a run to the file, at once. Without a path nothing is kept. Raises StorageError."""
    if path is None:
        return
    key, (_, entries) = _key(hardware, fingerprint), _read(path)
    before = next((runs for each, runs in entries if each == key), ())
    others = [(each, runs) for each, runs in entries if each != key]
    kept = [(key, (run, *before)[:MOST_RUNS]), *others][:MOST_KEPT]
    document = {
        "version": VERSION,
        "runs": [{"of": each, "runs": [asdict(one) for one in runs]} for each, runs in kept],
    }
    store_json(path, document)


_Entries = list[tuple[dict[str, Any], tuple[LastRun, ...]]]


def _read(path: Path | None) -> tuple[RunsState, _Entries]:
    if path is None:
        return "absent", []
    try:
        document = read_json(path, _MAX_BYTES)
    except FileNotFoundError:
        return "absent", []
    except OSError:
        return "unreadable", []
    except (ValueError, RecursionError):
        return "damaged", []
    if not isinstance(document, dict):
        return "damaged", []
    if document.get("version") != VERSION:
        return "of another version", []
    entries = _entries(document.get("runs"))
    return ("damaged", []) if entries is None else ("current", entries)


def _entries(document: object) -> _Entries | None:
    """None if anything in it is not as `keep_run` writes it."""
    if not isinstance(document, list):
        return None
    found: _Entries = []
    for entry in document:
        if not isinstance(entry, dict) or not isinstance(entry.get("of"), dict):
            return None
        if not isinstance(entry.get("runs"), list) or len(entry["runs"]) > MOST_RUNS:
            return None
        runs = [LastRun.parsed(each) for each in entry["runs"]]
        if None in runs:
            return None
        found.append((entry["of"], tuple(run for run in runs if run is not None)))
    return found


def _key(hardware: Hardware, fingerprint: str) -> dict[str, Any]:
    return machine_of("gpu" if hardware.gpu else "cpu", hardware) | {"file": fingerprint}


def decode_of(
    runs: Sequence[LastRun], budget_bytes: int, expected_s: float, unstamped_s: float
) -> tuple[float, int] | None:
    """Tokens a second of decoding as the last runs of a plan went, and their number. None if there is none.

    runs: of the same file and machine. Those count that had `budget_bytes` of memory, and of which about
    `expected_s` seconds a token were expected: what has changed since, as rates do, would change them too.
    They say what their layers took; unstamped_s is forecast for what is before the first router and behind
    all layers.
    """
    same = [run for run in runs if run.vram_bytes == budget_bytes]
    layers_s = [run.step_s for run in same if abs(run.expected_s / expected_s - 1) <= ALIKE]
    return (1 / (statistics.median(layers_s) + unstamped_s), len(layers_s)) if layers_s else None


def described(run: LastRun) -> str:
    """In a line, what a run took beside what was expected of it."""
    took = f"{run.steps} tokens by themselves, {1e3 * run.step_s:.2f} ms each in their layers"
    factors = [
        f"the {name} {factor:.2f} times as long as planned"
        for name, factor in (("CPU", run.cpu_factor), ("bus", run.bus_factor))
        if factor is not None
    ]
    text = (
        f"the run that ended {run.ended_at}, with {run.vram_bytes / 2**30:.2f} GiB: {took}, "
        f"{1e3 * run.expected_s:.2f} ms were expected of a whole token; {run.hit_rate:.0%} of uses were "
        f"hits, {run.expected_hit_rate:.0%} expected"
    )
    return text + (f"; an expert took {' and '.join(factors)}" if factors else "")
