"""The metadata of a model file: keys and values, and typed access with explanatory errors.

Knows the file and the byte offset of each value. So code that interprets a key, such as a hyper-parameter,
reports a bad value as precisely as the parser.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Final, TypeVar

import numpy as np

from coldstream.errors import InconsistentError, LimitError, ModelFormatError
from coldstream.gguf.messages import describe, shorten
from coldstream.gguf.wire import UnreadableError

T = TypeVar("T")
E = TypeVar("E", bound=ModelFormatError)

_MOST_WARNINGS: Final = 8

Value = str | int | float | bool | list[str] | np.ndarray

_KINDS = {str: "a string", int: "an integer", float: "a float", bool: "a bool", list: "an array of strings"}


class Metadata(Mapping[str, Value]):
    """Key → value, in file order. Arrays of numbers or bools are read-only 1-D numpy arrays.

    `offsets` gives the byte offset of each value in `path`; both serve error messages only. The typed getters
    raise InconsistentError when a key is missing without a default, is of another type, is not finite or is
    too small. They raise LimitError when it is too large. Reading a value that could not be decoded raises
    InconsistentError, too.
    """

    def __init__(
        self,
        values: Mapping[str, Value | UnreadableError],
        offsets: Mapping[str, int],
        path: Path = Path("metadata"),
    ) -> None:
        self._values: dict[str, Value] = {}
        self._unreadable: dict[str, UnreadableError] = {}
        for key, value in values.items():
            if isinstance(value, UnreadableError):
                self._unreadable[key] = value
            else:
                self._values[key] = value
        self._keys = tuple(values)
        self._offsets = dict(offsets)
        self.path = path

    @property
    def readable(self) -> Mapping[str, Value]:
        """The values that could be decoded, for showing them."""
        return MappingProxyType(self._values)

    @property
    def warnings(self) -> tuple[str, ...]:
        """The values that could not be decoded, as text for people; the first ones if there are many."""
        errors = list(self._unreadable.values())
        more = (f"{len(errors) - _MOST_WARNINGS} more keys of {shorten(self.path)} cannot be read",)
        return tuple(map(str, errors[:_MOST_WARNINGS])) + more * (len(errors) > _MOST_WARNINGS)

    def with_values(self, values: Mapping[str, Value], path: Path | None = None) -> "Metadata":
        """The same with other values of some keys. path: the file that errors are to name, for another one.

        Errors give the offsets of values that are the same, and none if they name another file.
        """
        offsets = (
            {} if path is not None else {key: at for key, at in self._offsets.items() if key not in values}
        )
        return Metadata({**self._values, **self._unreadable, **values}, offsets, path or self.path)

    def __getitem__(self, key: str) -> Value:
        if key in self._unreadable:
            raise InconsistentError(*self._unreadable[key].args)
        return self._values[key]

    def __contains__(self, key: object) -> bool:
        return key in self._values or key in self._unreadable

    def __iter__(self) -> Iterator[str]:
        return iter(self._keys)

    def __len__(self) -> int:
        return len(self._keys)

    def error(self, kind: type[E], key: str, problem: str) -> E:
        """An exception of `kind` that names the file, the key and the offset of its value."""
        if key in self._offsets:
            return kind(describe(self.path, key, self._offsets[key], problem))
        return kind(f"{shorten(self.path)}: {key}: {problem}")

    def integer(self, key: str, low: int, high: int, default: int | None = None) -> int:
        """An integer of any width in low … high."""
        value = self._get(key, int, default)
        self._check_range(key, value, low, high)
        return value

    def number(self, key: str, low: float, high: float, default: float | None = None) -> float:
        """A float in low … high; NaN and infinities are never in range."""
        value = self._get(key, float, default)
        self._check_range(key, value, low, high)
        return value

    def flag(self, key: str, default: bool | None = None) -> bool:
        return self._get(key, bool, default)

    def text(self, key: str, default: str | None = None) -> str:
        return self._get(key, str, default)

    def integers(self, key: str, low: int, high: int) -> tuple[int, ...]:
        """An array of integers, each in low … high; a lone integer counts as an array of one."""
        value = self.get(key)
        if not isinstance(value, np.ndarray):
            return (self.integer(key, low, high),)
        if value.dtype.kind not in "iu":
            raise self.error(InconsistentError, key, f"an array of {value.dtype}, expected integers")
        for extreme in (value.min(), value.max()) if value.size else ():
            self._check_range(key, int(extreme), low, high)
        return tuple(value.tolist())

    def flags(self, key: str) -> tuple[bool, ...]:
        """An array of bools."""
        value = self.get(key)
        if not isinstance(value, np.ndarray) or value.dtype != np.bool_:
            raise self.error(InconsistentError, key, f"{self._kind_name(value)}, expected an array of bools")
        return tuple(value.tolist())

    def _get(self, key: str, kind: type[T], default: T | None) -> T:
        value: object = self.get(key, default)
        if isinstance(value, kind) and type(value) is kind:  # a bool is an int to isinstance alone
            return value
        problem = f"{self._kind_name(value)}, expected {_KINDS[kind]}"
        if value is None:
            problem += ": the file is incomplete, convert or download it again"
        raise self.error(InconsistentError, key, problem)

    @staticmethod
    def _kind_name(value: object) -> str:
        if value is None:
            return "missing"
        return _KINDS.get(type(value), "an array of numbers")

    def _check_range(self, key: str, value: float, low: float, high: float) -> None:
        if low <= value <= high:
            return
        kind: type[ModelFormatError] = LimitError if value > high else InconsistentError
        raise self.error(kind, key, f"{value}, expected {low} to {high}")
