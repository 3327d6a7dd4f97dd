"""A file of how much memory a machine last refused to page-lock for a GPU, beside the file of rates.

Only trying says how much a system locks, and only opening a model tries. So the last refusal is kept for
plans and for people, until more is locked. What is damaged, of another version, or of another machine counts
as absent.
"""

from contextlib import suppress
from dataclasses import asdict, dataclass, fields
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final, Self

from coldstream.placement.hardware import Hardware
from coldstream.placement.hardware_file import DATE_FORMAT, default_path, is_date, machine_of
from coldstream.placement.kept_json import read_json, store_json
from coldstream.placement.limits import Limits, lock_advice

_VERSION: Final = 1
_MAX_BYTES: Final = 1 << 14
_MOST: Final = 1 << 60


@dataclass(frozen=True)
class LockRefusal:
    """So many bytes were wanted, and so many of them were locked."""

    refused_at: str  # in UTC
    wanted_bytes: int
    locked_bytes: int

    def share_of(self, num_bytes: int, *, in_pool: bool = False) -> float:
        """What a GPU may read of so many bytes, if the system locks as much as it did: of a pool all or
        nothing, as experts move in it.
        """
        if in_pool:
            return float(self.locked_bytes >= num_bytes)
        return min(1.0, self.locked_bytes / num_bytes) if num_bytes else 1.0

    @classmethod
    def parsed(cls, document: object) -> Self | None:
        """Of the JSON object that `asdict` gave; None if it is none, or has absurd values."""
        if not isinstance(document, dict) or document.keys() != {field.name for field in fields(cls)}:
            return None
        wanted, locked = document["wanted_bytes"], document["locked_bytes"]
        if type(wanted) is not int or type(locked) is not int or not 0 <= locked < wanted < _MOST:
            return None
        return cls(**document) if is_date(document["refused_at"]) else None


def lock_path() -> Path | None:
    """Beside the file of rates; None for a user without a home directory."""
    rates = default_path()
    return None if rates is None else rates.with_name("lock.json")


def last_refusal(hardware: Hardware, path: Path | None) -> LockRefusal | None:
    """What the machine refused last, if nothing was locked since that is as much; None without a GPU."""
    document = _document(path) if hardware.gpu else {}
    is_of_this = document.get("version") == _VERSION and document.get("machine") == _machine(hardware)
    return LockRefusal.parsed(document.get("refusal")) if is_of_this else None


def note_lock(hardware: Hardware, wanted_bytes: int, locked_bytes: int, path: Path | None) -> None:
    """Keeps a refusal, or forgets the last one where as much as that wanted is locked now.

    Raises StorageError. Without a path nothing is kept.
    """
    if path is None or hardware.gpu is None:
        return
    if locked_bytes < wanted_bytes:
        refused_at = datetime.now(UTC).strftime(DATE_FORMAT)
        refusal = LockRefusal(refused_at, wanted_bytes, locked_bytes)
        document = {"version": _VERSION, "machine": _machine(hardware), "refusal": asdict(refusal)}
        store_json(path, document)
        return
    last = last_refusal(hardware, path)
    if last is not None and locked_bytes > last.locked_bytes:
        with suppress(OSError):  # it is replaced by the next refusal
            path.unlink()


def refusal_warning(refusal: LockRefusal, num_bytes: int, limits: Limits, *, in_pool: bool = False) -> str:
    """What follows for a plan that wants so many bytes page-locked, of the file or for a pool, for people."""
    share = refusal.share_of(num_bytes, in_pool=in_pool)
    rest = "no expert" if share == 0 else f"the experts in {share:.0%} of the file"
    return (
        f"at {refusal.refused_at} this system page-locked {refusal.locked_bytes / 2**30:.1f} of "
        f"{refusal.wanted_bytes / 2**30:.1f} GiB. So this plan, which wants {num_bytes / 2**30:.1f} GiB, has "
        f"the GPU read {rest} over the bus, until a model is opened for which more is locked: "
        f"{lock_advice(limits)}"
    )


def _machine(hardware: Hardware) -> dict[str, Any]:
    return machine_of("gpu", hardware)


def _document(path: Path | None) -> dict[str, Any]:
    if path is None:
        return {}
    try:
        document = read_json(path, _MAX_BYTES)
    except (OSError, ValueError, RecursionError):
        return {}
    return document if isinstance(document, dict) else {}
