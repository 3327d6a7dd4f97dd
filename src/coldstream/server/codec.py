"""Dataclasses as JSON and back, for messages between the server's processes. No pickle: nothing is executed.

What a value may be is said by the type hints of its dataclass, and checked when it is read. A dataclass
becomes `{"Name": [fields in order]}`, a mapping `{"map": [[key, value], …]}`, a set `{"set": […]}`, an error
of this package `{"error": [name, message]}`, a tuple or sequence an array. Numbers may be infinite, as
log-probabilities are.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, is_dataclass
from functools import lru_cache
from types import NoneType, UnionType
from typing import Any, Final, Literal, Union, cast, get_args, get_origin, get_type_hints

from coldstream import errors
from coldstream.errors import ColdstreamError

MAX_DIGITS: Final = 20  # of a whole number; 64 bits have as many

Encode = Callable[[Any], Any]
Decode = Callable[[Any], Any]


class ProtocolError(ColdstreamError):
    """Bytes that are no message of this version. The connection that they came over is of no more use."""


_ERRORS: Final = {
    name: kind
    for name, kind in vars(errors).items()
    if isinstance(kind, type) and issubclass(kind, ColdstreamError)
}
_SCALARS: Final = (bool, int, float, str, NoneType)


def encode(value: object, hint: Any) -> bytes:
    """`value`, which must be of type `hint`, as JSON. Raises ProtocolError for what is not data."""
    try:
        plain = _encoder(hint)(value)
        return _WRITER.encode(plain).encode("utf-8", "surrogatepass")
    except (TypeError, ValueError, AttributeError) as error:
        raise ProtocolError(f"{type(value).__name__} cannot be sent: {error}") from error


def decode(data: bytes, hint: Any) -> Any:
    """A value of type `hint`. Raises ProtocolError for anything else."""
    try:
        plain = _READER.decode(data.decode("utf-8", "surrogatepass"))
        return _decoder(hint)(plain)
    except ProtocolError:
        raise
    except (ValueError, RecursionError, ColdstreamError, TypeError, LookupError) as error:
        raise ProtocolError(f"no message: {error}") from error


def _whole(digits: str) -> int:
    if len(digits) > MAX_DIGITS + 1:
        raise ValueError(f"a number of {len(digits)} digits")
    return int(digits)


# Made once: making one takes longer than a message with a token.
_WRITER: Final = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"))
_READER: Final = json.JSONDecoder(parse_int=_whole)


def _as_it_is(value: Any) -> Any:
    return value


@lru_cache(maxsize=256)
def _encoder(hint: Any) -> Encode:
    """How values of a type become JSON; the runtime type decides between members of a union."""
    origin, arguments = get_origin(hint), get_args(hint)
    if hint in _SCALARS or origin is Literal:
        return _as_it_is
    if origin in (Union, UnionType):
        return _union_encoder(arguments)
    if origin in (tuple, Sequence) or origin is list:
        return _sequence_encoder(arguments[0])
    if origin is frozenset:
        return lambda value: {"set": sorted(value)}
    if origin in (Mapping, dict):
        key, item = _encoder(arguments[0]), _encoder(arguments[1])
        return lambda value: {"map": [[key(one), item(two)] for one, two in value.items()]}
    if isinstance(hint, type) and issubclass(hint, ColdstreamError):
        return _encoded_error
    if is_dataclass(hint):
        return _dataclass_encoder(cast(type, hint))
    return _refuse


def _sequence_encoder(item: Any) -> Encode:
    one = _encoder(item)
    return _as_it_is if one is _as_it_is else lambda value: [one(item) for item in value]


def _dataclass_encoder(kind: type) -> Encode:
    hints = get_type_hints(kind)
    members = [(field.name, _encoder(hints[field.name])) for field in fields(kind)]

    def encoded(value: Any) -> Any:
        if type(value) is not kind:
            raise TypeError(f"a {type(value).__name__} where a {kind.__name__} belongs")
        return {kind.__name__: [encode(getattr(value, name)) for name, encode in members]}

    return encoded


def _union_encoder(members: Sequence[Any]) -> Encode:
    classes: dict[Any, Encode] = {kind: _encoder(cast(type, kind)) for kind in members if is_dataclass(kind)}
    others = [(_runtime_types(kind), _encoder(kind)) for kind in members if kind not in classes]

    def encoded(value: Any) -> Any:
        if (own := classes.get(type(value))) is not None:
            return own(value)
        for kinds, encode in others:
            if isinstance(value, kinds):
                return encode(value)
        raise TypeError(f"a {type(value).__name__} where one of {len(members)} other types belongs")

    return encoded


def _runtime_types(hint: Any) -> tuple[type, ...]:
    origin = get_origin(hint)
    if origin is Literal:
        return tuple({type(value) for value in get_args(hint)})
    if origin in (Sequence, tuple, list):
        return (tuple, list)
    if origin is not None:
        return (origin,) if origin is not Callable and isinstance(origin, type) else ()
    return (hint,)


def _encoded_error(error: ColdstreamError) -> Any:
    """An error by its name; one of another module by that of its nearest ancestor in `errors`."""
    known = next(kind for kind in type(error).__mro__ if _ERRORS.get(kind.__name__) is kind)
    return {"error": [known.__name__, str(error)]}


def _refuse(value: Any) -> Any:
    raise TypeError(f"a {type(value).__name__} is no data")


@lru_cache(maxsize=256)
def _decoder(hint: Any) -> Decode:
    """How JSON becomes values of a type, each checked."""
    origin, arguments = get_origin(hint), get_args(hint)
    if hint is float:
        return _number
    if hint in _SCALARS:
        return _scalar_decoder(hint)
    if origin is Literal:
        return _literal_decoder(arguments)
    if origin in (Union, UnionType):
        return _union_decoder(arguments)
    if origin in (tuple, Sequence) or origin is list:
        return _sequence_decoder(arguments)
    if origin is frozenset:
        item = _sequence_decoder((arguments[0], ...))
        return lambda plain: frozenset(item(_only(plain, "set")))
    if origin in (Mapping, dict):
        pair = _sequence_decoder(arguments)
        return lambda plain: dict(map(pair, _listed(_only(plain, "map"))))
    if isinstance(hint, type) and issubclass(hint, ColdstreamError):
        return _decoded_error
    if is_dataclass(hint):
        return _dataclass_decoder(cast(type, hint))
    return _refuse


def _scalar_decoder(kind: type) -> Decode:
    def decoded(plain: Any) -> Any:
        if type(plain) is not kind:
            raise TypeError(f"a {type(plain).__name__} where a {kind.__name__} belongs")
        return plain

    return decoded


def _number(plain: Any) -> float:
    if type(plain) is int:
        return float(plain)
    if type(plain) is not float:
        raise TypeError(f"a {type(plain).__name__} where a number belongs")
    return plain


def _literal_decoder(values: Sequence[Any]) -> Decode:
    def decoded(plain: Any) -> Any:
        if not any(plain == value and type(plain) is type(value) for value in values):
            raise ValueError(f"none of {', '.join(map(repr, values))}")
        return plain

    return decoded


def _sequence_decoder(arguments: Sequence[Any]) -> Decode:
    """Of `tuple[X, …]` and sequences, or of a tuple with a type for each place."""
    if len(arguments) == 1 or arguments[-1] is ...:
        kind = arguments[0]
        one = _decoder(kind)
        if kind is int:
            return _whole_numbers
        return lambda plain: tuple(map(one, _listed(plain)))
    each = [_decoder(kind) for kind in arguments]

    def decoded(plain: Any) -> Any:
        items = _listed(plain)
        if len(items) != len(each):
            raise ValueError(f"{len(items)} values where {len(each)} belong")
        return tuple(decode(item) for decode, item in zip(each, items, strict=True))

    return decoded


def _whole_numbers(plain: Any) -> tuple[int, ...]:
    """A prompt may have a million."""
    items = _listed(plain)
    if not set(map(type, items)) <= {int}:
        raise TypeError("other values where whole numbers belong")
    return tuple(items)


def _dataclass_decoder(kind: type) -> Decode:
    hints = get_type_hints(kind)
    decoders = [_decoder(hints[field.name]) for field in fields(kind)]

    def decoded(plain: Any) -> Any:
        values = _listed(_only(plain, kind.__name__))
        if len(values) != len(decoders):
            raise ValueError(f"{kind.__name__}: {len(values)} values where {len(decoders)} belong")
        return kind(*[decode(value) for decode, value in zip(decoders, values, strict=True)])

    return decoded


def _union_decoder(members: Sequence[Any]) -> Decode:
    tagged = {_tag(kind): _decoder(kind) for kind in members if _tag(kind)}
    arrays = [_decoder(kind) for kind in members if get_origin(kind) in (Sequence, tuple, list)]
    kinds = {kind: _decoder(kind) for kind in members if kind in _SCALARS}
    literals = [_decoder(kind) for kind in members if get_origin(kind) is Literal]

    def decoded(plain: Any) -> Any:
        if isinstance(plain, dict):
            (name,) = plain
            return tagged[name](plain)
        if isinstance(plain, list):
            return arrays[0](plain)
        if (scalar := kinds.get(type(plain))) is not None:
            return scalar(plain)
        if type(plain) is int and float in kinds:
            return float(plain)
        return literals[0](plain)

    return decoded


def _tag(hint: Any) -> str:
    """The key of a type's object; empty if it is written otherwise."""
    origin = get_origin(hint)
    if origin in (Mapping, dict):
        return "map"
    if origin is frozenset:
        return "set"
    if isinstance(hint, type) and issubclass(hint, ColdstreamError):
        return "error"
    return cast(type, hint).__name__ if is_dataclass(hint) else ""


def _decoded_error(plain: Any) -> ColdstreamError:
    name, message = _listed(_only(plain, "error"))
    if not isinstance(message, str):
        raise TypeError("an error without a message")
    return _ERRORS[name](message)


def _only(plain: Any, name: str) -> Any:
    if not isinstance(plain, dict) or plain.keys() != {name}:
        raise ValueError(f"no {name}")
    return plain[name]


def _listed(plain: Any) -> list[Any]:
    if not isinstance(plain, list):
        raise TypeError(f"a {type(plain).__name__} where a list belongs")
    return plain
