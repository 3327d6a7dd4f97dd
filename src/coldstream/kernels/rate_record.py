"""Records of measured rates that a file keeps: what is read back is what a machine may have, or nothing."""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import ClassVar, Self

Bounds = tuple[float, float]


@dataclass(frozen=True)
class RateRecord:
    """A frozen dataclass of floats, each of which has bounds.

    bounds: of a field that `bounds_of` does not name. unsaid: fields that are None if one of them is.
    """

    bounds: ClassVar[Bounds]
    bounds_of: ClassVar[Mapping[str, Bounds]] = {}
    unsaid: ClassVar[tuple[str, ...]] = ()

    @classmethod
    def parsed(cls, document: object) -> Self | None:
        """Of the JSON object that `asdict` gave; None if it is none, or has absurd values."""
        if not isinstance(document, dict) or document.keys() != {each.name for each in fields(cls)}:
            return None
        is_unsaid = bool(cls.unsaid) and all(document[name] is None for name in cls.unsaid)
        said = {name: value for name, value in document.items() if not (is_unsaid and name in cls.unsaid)}
        return cls(**document) if all(cls._is_rate(*each) for each in said.items()) else None

    @property
    def is_sane(self) -> bool:
        """Whether a machine may have these, so that they are worth keeping."""
        return self.parsed(vars(self)) is not None

    @classmethod
    def _is_rate(cls, name: str, value: object) -> bool:
        least, most = cls.bounds_of.get(name, cls.bounds)
        return isinstance(value, float) and least <= value <= most
