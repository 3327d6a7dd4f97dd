"""Dataclasses as MessagePack and back, for messages between the server's processes. Nothing is executed.

The type hints of a dataclass say what a value may be, and each value is checked when it is read. Messages
are written and read by msgspec (docs/notes/messages.md). For it each dataclass has a tagged struct: the array
of its name and its fields in order. An error of this package is the array of `error`, its name and its
message. A text is bytes, because it may hold lone surrogates, as JSON may.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from functools import cache
from operator import attrgetter
from types import UnionType
from typing import Any, Final, Literal, Union, get_args, get_origin, get_type_hints

import msgspec
from msgspec.structs import astuple

from coldstream import errors
from coldstream.errors import ColdstreamError

Convert = Callable[[Any], Any]


class ProtocolError(ColdstreamError):
    """Bytes that are no message of this version. The connection that they came over is of no more use."""


def encode(value: object, hint: Any) -> bytes:
    """`value`, which must be of type `hint`, as bytes. Raises ProtocolError for what is not data."""
    try:
        return _ENCODER.encode(_form(hint).write(value))
    except (TypeError, ValueError, AttributeError, OverflowError) as error:
        raise ProtocolError(f"{type(value).__name__} cannot be sent: {error}") from error


def decode(data: bytes, hint: Any) -> Any:
    """A value of type `hint`. Raises ProtocolError for anything else."""
    try:
        return _form(hint).read(_decoder(hint).decode(data))
    except ProtocolError:
        raise
    except _UNREADABLE as error:
        raise ProtocolError(f"no message: {error}") from error


@dataclass(frozen=True)
class _WireForm:
    """How values of a type are written. python_types: theirs; wire_types: of what stands for them."""

    wire: Any  # a type hint for msgspec
    write: Convert
    read: Convert
    python_types: tuple[type, ...]
    wire_types: tuple[type, ...]

    @property
    def is_plain(self) -> bool:
        """Whether values stay as they are."""
        return self.write is _same and self.read is _same


class _Error(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, tag="error"):
    name: str
    message: bytes


class _Nothing:
    """The wire type of what is no data, such as functions."""


def _same(value: Any) -> Any:
    return value


def _refuse(value: Any) -> Any:
    raise TypeError(f"a {type(value).__name__} is no data")


def _refuse_type(kind: type, value: Any) -> Any:
    raise TypeError(f"a {type(value).__name__} is no data")


def _write_text(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")


def _read_text(data: bytes) -> str:
    return data.decode("utf-8", "surrogatepass")


_UNREADABLE: Final = (
    *(msgspec.MsgspecError, ValueError, TypeError, LookupError, RecursionError),
    ColdstreamError,  # of a dataclass that checks its values
)
_ENCODER: Final = msgspec.msgpack.Encoder(enc_hook=_refuse)
_ERRORS: Final = {
    name: kind
    for name, kind in vars(errors).items()
    if isinstance(kind, type) and issubclass(kind, ColdstreamError)
}


@cache
def _decoder(hint: Any) -> "msgspec.msgpack.Decoder[Any]":
    return msgspec.msgpack.Decoder(_form(hint).wire, strict=True, dec_hook=_refuse_type)


@cache
def _form(hint: Any) -> _WireForm:
    origin, arguments = get_origin(hint), get_args(hint)
    if origin is Literal:
        kinds = tuple({type(value) for value in arguments})
        return _WireForm(hint, _same, _same, kinds, kinds)
    if origin in (Union, UnionType):
        return _union_form([_form(member) for member in arguments])
    if origin is tuple and arguments[-1] is not ...:
        return _tuple_form([_form(each) for each in arguments])
    if origin in (tuple, Sequence, list):
        return _collection_form(tuple, _form(arguments[0]), (tuple, list))
    if origin is frozenset:
        return _collection_form(frozenset, _form(arguments[0]), (frozenset,))
    if origin in (Mapping, dict):
        return _mapping_form(_form(arguments[0]), _form(arguments[1]))
    if is_dataclass(hint):
        return _class_form(hint)
    return _scalar_form(hint)


def _scalar_form(hint: Any) -> _WireForm:
    if hint is str:
        return _WireForm(bytes, _write_text, _read_text, (str,), (bytes,))
    if hint is float:
        return _WireForm(float, _same, _same, (float, int), (float,))
    if hint in (bool, int, type(None)):
        return _WireForm(hint, _same, _same, (hint,), (hint,))
    if isinstance(hint, type) and issubclass(hint, ColdstreamError):
        return _WireForm(_Error, _write_error, _read_error, (ColdstreamError,), (_Error,))
    return _WireForm(_Nothing, _refuse, _refuse, (), ())


def _class_form(kind: Any) -> _WireForm:
    hints = get_type_hints(kind)
    names = [field.name for field in fields(kind)]
    forms = [_form(hints[name]) for name in names]
    members = [(name, form.wire) for name, form in zip(names, forms, strict=True)]
    struct = msgspec.defstruct(
        kind.__name__, members, frozen=True, array_like=True, forbid_unknown_fields=True, tag=True
    )
    changed = [(place, form) for place, form in enumerate(forms) if not form.is_plain]
    values_of = attrgetter(*names) if len(names) > 1 else lambda value: [getattr(value, n) for n in names]

    def write(value: Any) -> Any:
        if type(value) is not kind:
            raise TypeError(f"a {type(value).__name__} where a {kind.__name__} belongs")
        values = list(values_of(value))
        for place, form in changed:
            values[place] = form.write(values[place])
        return struct(*values)

    def read(wire: Any) -> Any:
        values = list(astuple(wire))
        for place, form in changed:
            values[place] = form.read(values[place])
        return kind(*values)

    return _WireForm(struct, write, read, (kind,), (struct,))


def _union_form(members: Sequence[_WireForm]) -> _WireForm:
    """The type of a value decides between the members of a union."""
    writers = {kind: form.write for form in members for kind in form.python_types}
    readers = {kind: form.read for form in members for kind in form.wire_types}

    def write(value: Any) -> Any:
        found = writers.get(type(value)) or next(
            (one for kind, one in writers.items() if isinstance(value, kind)), None
        )
        if found is None:
            raise TypeError(f"a {type(value).__name__} where one of {len(members)} other types belongs")
        return found(value)

    def read(wire: Any) -> Any:
        return readers[type(wire)](wire)

    wire: Any = Union[tuple(form.wire for form in members)]  # noqa: UP007  # of a tuple
    if all(form.is_plain for form in members):
        return _WireForm(wire, _same, _same, tuple(writers), tuple(readers))
    return _WireForm(wire, write, read, tuple(writers), tuple(readers))


def _tuple_form(items: Sequence[_WireForm]) -> _WireForm:
    def write(values: Any) -> Any:
        return tuple([form.write(value) for form, value in zip(items, values, strict=True)])

    def read(values: Any) -> Any:
        return tuple([form.read(value) for form, value in zip(items, values, strict=True)])

    wires = tuple(form.wire for form in items)
    return _WireForm(tuple[wires], write, read, (tuple,), (tuple,))  # type: ignore[valid-type]


def _collection_form(kind: type, item: _WireForm, python_types: tuple[type, ...]) -> _WireForm:
    wire = frozenset[item.wire] if kind is frozenset else tuple[item.wire, ...]  # type: ignore[name-defined]
    if item.is_plain:  # a prompt may have a million
        return _WireForm(wire, _same, _same, python_types, (kind,))
    return _WireForm(
        wire,
        lambda values: kind(map(item.write, values)),
        lambda values: kind(map(item.read, values)),
        python_types,
        (kind,),
    )


def _mapping_form(key: _WireForm, item: _WireForm) -> _WireForm:
    return _WireForm(
        dict[key.wire, item.wire],  # type: ignore[name-defined]
        lambda values: {key.write(one): item.write(two) for one, two in values.items()},
        lambda values: {key.read(one): item.read(two) for one, two in values.items()},
        (dict, Mapping),
        (dict,),
    )


def _write_error(error: ColdstreamError) -> _Error:
    """An error by its name; one of another module by that of its nearest ancestor in `errors`."""
    known = next(kind for kind in type(error).__mro__ if _ERRORS.get(kind.__name__) is kind)
    return _Error(known.__name__, _write_text(str(error)))


def _read_error(wire: _Error) -> ColdstreamError:
    return _ERRORS[wire.name](_read_text(wire.message))
