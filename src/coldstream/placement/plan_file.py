"""Writes and reads a RunPlan as JSON, so that people and scripts can store and change it.

A plan belongs to one model, known by its fingerprint. A plan that was read contradicts neither itself nor the
sizes of the model.
"""

import json
from collections.abc import Collection, Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any, Final, NoReturn

from coldstream.errors import (
    InconsistentError,
    LimitError,
    ModelFormatError,
    ModelNotFoundError,
    TruncatedError,
    UnsupportedError,
)
from coldstream.files import write_file
from coldstream.gguf.messages import shorten
from coldstream.kernels.experts.split import MissTimes
from coldstream.placement.plan import FixedPart, PlacementPlan
from coldstream.placement.pool_plan import HostPart, PoolPlan
from coldstream.placement.routing_trace import RoutedModel
from coldstream.placement.run_plan import COUNTS, RunPlan
from coldstream.placement.sizes import ModelSizes

FORMAT: Final = "coldstream plan"
VERSION: Final = 16
MAX_BYTES: Final = 1 << 24
_NO_USES: Final = "uses are not lists of numbers"
_AGAIN: Final = "make it again with `coldstream plan --out`"


def plan_to_json(plan: RunPlan) -> str:
    """One line."""
    run = asdict(plan)
    placement = run.pop("placement")
    return json.dumps({"format": FORMAT, "version": VERSION, **placement, **run})


def plan_from_json(text: str, sizes: Collection[ModelSizes], name: Path = Path("plan")) -> RunPlan:
    """The plan that `text` describes. `name` is its name in errors.

    sizes: of one model, for its experts in different memories. Raises a subclass of ModelFormatError for text
    that is no JSON or no plan, and for a plan that contradicts itself or is of another version or model.
    """
    document = _document(text, name)
    routed = next(iter(sizes)).routed
    if document["model"] not in [asdict(each.routed) for each in sizes]:
        given = document["model"]
        if isinstance(given, dict) and given.get("fingerprint") != routed.fingerprint:
            _refuse(
                InconsistentError,
                name,
                "fingerprint",
                f"the plan is another model's, not of {routed.fingerprint}",
            )
        _refuse(InconsistentError, name, "model", "other numbers of layers or experts than the model has")
    known = [list(each.expert_bytes) for each in sizes]
    if document["expert_bytes"] not in known:
        _refuse(InconsistentError, name, "expert_bytes", "experts of other sizes than the model has")
    try:
        plan = _plan(document)
    except (ValueError, TypeError) as error:
        _refuse(InconsistentError, name, "plan", str(error))
    if plan.pool is not None and not any(_are_of(plan.pool.expert_bytes, each) for each in known):
        _refuse(InconsistentError, name, "pool", "experts of other sizes than the model has")
    return plan


def save_plan(plan: RunPlan, path: Path) -> None:
    """Writes the file at once: there is the old one or the whole new one. Raises StorageError."""
    write_file(path, f"{plan_to_json(plan)}\n".encode())


def load_plan(path: Path, sizes: Collection[ModelSizes]) -> RunPlan:
    """The plan in the file at `path`. Raises as `plan_from_json`, ModelNotFoundError if it cannot be read."""
    try:
        if not path.is_file():  # a pipe would be waited for
            raise ModelNotFoundError(f"{shorten(path)}: no such file. Give the path of a plan")
        with open(path, "rb") as file:
            data = file.read(MAX_BYTES + 1)
    except (OSError, ValueError) as error:  # ValueError: a NUL byte in the path
        raise ModelNotFoundError(f"{shorten(path)}: {error}. Give the path of a plan") from error
    if len(data) > MAX_BYTES:
        _refuse(LimitError, path, "file", f"more than {MAX_BYTES} bytes")
    try:
        text = data.decode()
    except UnicodeDecodeError:
        _refuse(UnsupportedError, path, "file", "not text: this is not a plan")
    return plan_from_json(text, sizes, path)


def _document(text: str, name: Path) -> dict[str, Any]:
    """The JSON object of a plan of this version, with exactly the fields of a plan."""
    try:
        document = json.loads(text)
    except (ValueError, RecursionError) as error:
        is_truncated = isinstance(error, json.JSONDecodeError) and error.pos >= len(text.rstrip())
        _refuse(TruncatedError if is_truncated else UnsupportedError, name, "file", f"not JSON: {error}")
    if not isinstance(document, dict) or document.pop("format", None) != FORMAT:
        _refuse(UnsupportedError, name, "format", "this is not a plan")
    version = document.pop("version", None)
    if version != VERSION:
        _refuse(UnsupportedError, name, "version", f"{version!r}, this program knows {VERSION}")
    names = {field.name for kind in (PlacementPlan, RunPlan) for field in fields(kind)} - {"placement"}
    if document.keys() != names:
        wrong = ", ".join(sorted(document.keys() ^ names))
        _refuse(InconsistentError, name, "fields", f"missing or unknown: {wrong}")
    return document


def _plan(document: dict[str, Any]) -> RunPlan:
    """Raises ValueError or TypeError for values that are none of a plan."""
    window = document["attention_window"]
    given = [name for name in ("attention_window", "card") if document[name] is not None]
    for name in (*COUNTS, *given):
        if not _is_count(document[name]):
            raise ValueError(f"{name} is {document[name]!r}")
    return RunPlan(
        placement=_placement(document),
        uses=None if document["uses"] is None else tuple(_numbers(row, _NO_USES) for row in document["uses"]),
        miss_times=None if document["miss_times"] is None else _miss_times(document["miss_times"]),
        attention_window=window,
        spec_type=document["spec_type"],
        ahead=document["ahead"],
        pool=None if document["pool"] is None else _pool(document["pool"]),
        card=document["card"],
        **{name: document[name] for name in COUNTS},
    )


def _placement(document: dict[str, Any]) -> PlacementPlan:
    """Raises ValueError or TypeError for values that are none of a plan."""
    fixed = document["fixed"]
    if not isinstance(fixed, dict) or fixed.keys() != {field.name for field in fields(FixedPart)}:
        raise ValueError("fixed has other fields than expected")
    for name, value in fixed.items():
        if not (isinstance(value, str) if name == "kv_type" else _is_count(value)):
            raise ValueError(f"{name} is {value!r}")
    if document["tier"] not in ("vram", "ram"):
        raise ValueError(f"tier is {document['tier']!r}")
    for name in ("budget_bytes", "ring_bytes"):
        if not _is_count(document[name]):
            raise ValueError(f"{name} is {document[name]!r}")
    return PlacementPlan(
        model=RoutedModel(**document["model"]),
        tier=document["tier"],
        budget_bytes=document["budget_bytes"],
        fixed=FixedPart(**fixed),
        ring_bytes=document["ring_bytes"],
        expert_bytes=_counts(document["expert_bytes"]),
        resident=tuple(map(_counts, document["resident"])),
        pinned_layers=_counts(document["pinned_layers"]),
        layer_weights=_numbers(document["layer_weights"], "weights of layers are no numbers"),
    )


def _miss_times(document: object) -> MissTimes:
    """Raises ValueError for values that are none of such times."""
    if not isinstance(document, dict) or document.keys() != {field.name for field in fields(MissTimes)}:
        raise ValueError("miss_times has other fields than expected")
    for name, value in document.items():
        if name != "cpu" and not _is_count(value):
            raise ValueError(f"{name} of miss_times is {value!r}")
    return MissTimes(**document | {"cpu": _counts(document["cpu"])})


def _pool(document: object) -> PoolPlan:
    """Raises ValueError for values that are none of a pool."""
    if not isinstance(document, dict) or document.keys() != {field.name for field in fields(PoolPlan)}:
        raise ValueError("pool has other fields than expected")
    fixed = document["fixed"]
    if not isinstance(fixed, dict) or fixed.keys() != {field.name for field in fields(HostPart)}:
        raise ValueError("fixed of the pool has other fields than expected")
    for value in (document["budget_bytes"], *fixed.values()):
        if not _is_count(value):
            raise ValueError(f"a size of the pool is {value!r}")
    if not isinstance(document["loaded"], list):
        raise ValueError("a list of numbers is none")
    return PoolPlan(
        budget_bytes=document["budget_bytes"],
        fixed=HostPart(**fixed),
        expert_bytes=_counts(document["expert_bytes"]),
        loaded=tuple(map(_counts, document["loaded"])),
    )


def _are_of(sizes: Sequence[int], known: Sequence[int]) -> bool:
    """Whether each of `sizes` is 0 or the `known` one of its layer."""
    return all(size in (0, other) for size, other in zip(sizes, known, strict=True))


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**63


def _counts(values: object) -> tuple[int, ...]:
    if not isinstance(values, list) or not all(map(_is_count, values)):
        raise ValueError("a list of numbers is none")
    return tuple(values)


def _numbers(values: object, problem: str) -> tuple[float, ...]:
    """ValueError, which says `problem`, for anything but a list of floats."""
    if not isinstance(values, list) or not all(isinstance(value, float) for value in values):
        raise ValueError(problem)
    return tuple(values)


def _refuse(kind: type[ModelFormatError], name: Path, field: str, problem: str) -> NoReturn:
    raise kind(f"{shorten(name)}: {field}: {problem}; {_AGAIN}")
