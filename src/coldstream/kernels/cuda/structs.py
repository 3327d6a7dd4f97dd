"""Structs that kernels take as arguments: written once, in the CUDA source that declares them.

    @declared_in("rms_norm/norm_row.cuh")
    class Norm(ctypes.Structure): ...

gives the class `Norm` the fields of `struct Norm` in that file, with their order, types and offsets, so that
a new field is one line of the .cuh file. Fields come first in a struct; methods may follow them. A pointer is
an address, whatever it points to. The tests ask CUDA's compiler for all sizes and offsets.
"""

import ctypes
import re
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeVar

Struct = TypeVar("Struct", bound=ctypes.Structure)
SOURCES = Path(__file__).parents[1]  # paths of sources are relative to the folder of all kernels

_SCALARS: Mapping[str, type[Any]] = {
    "int": ctypes.c_int32,
    "int32_t": ctypes.c_int32,
    "uint32_t": ctypes.c_uint32,
    "int64_t": ctypes.c_int64,
    "uint64_t": ctypes.c_uint64,
    "int16_t": ctypes.c_int16,
    "uint16_t": ctypes.c_uint16,
    "int8_t": ctypes.c_int8,
    "uint8_t": ctypes.c_uint8,
    "float": ctypes.c_float,
    "double": ctypes.c_double,
}
_COMMENT = re.compile(r"//[^\n]*")
_INCLUDE = re.compile(r'^#include "(.+)"', re.MULTILINE)
_DECLARATION = re.compile(r"\s*(?:const )?(?P<type>\w+)(?P<names>[\s*]+\w+[^();{}=<>]*);")
_NAME = re.compile(r"(?P<pointer>\*?)\s*(?P<name>\w+)(?P<lengths>(?:\[\w+\])*)")

_classes: dict[tuple[str, str], type[ctypes.Structure]] = {}  # by source and name


def declared_in(source: str, name: str = "") -> Callable[[type[Struct]], type[Struct]]:
    """Decorator that gives a class the fields of a struct of `source`.

    name: of the struct in CUDA, by default that of the class; an instance of a template has the arguments, as
    `TopPart<4>`. The class of a struct within the struct is declared before. Raises LookupError if the source
    has no such struct, or if it has a class.
    """

    def declare(cls: type[Struct]) -> type[Struct]:
        key = source, name or cls.__name__.lstrip("_")
        if key in _classes:
            raise LookupError(f"{key[1]} of {source} has a class, or is part of a struct that has one")
        cls._fields_ = _fields(*key)
        _classes[key] = cls
        return cls

    return declare


def declared_structs() -> Mapping[tuple[str, str], type[ctypes.Structure]]:
    """The classes so far, by source and name in CUDA."""
    return MappingProxyType(_classes)


@cache
def _read(path: str) -> str:
    return (SOURCES / path).read_text()


@cache
def _closure(source: str) -> tuple[str, ...]:
    """The file and what it includes, each once."""
    found = {source: None}
    for path in _INCLUDE.findall(_read(source)):
        found |= dict.fromkeys(_closure(path))
    return tuple(found)


def _struct(source: str, name: str) -> tuple[list[str], str] | None:
    """The parameters of a struct's template, and what stands between its braces; None if there is none."""
    before, is_there, behind = _read(source).partition(f"\nstruct {name} {{\n")
    if not is_there:
        return None
    last_line = before.rpartition("\n")[2]
    parameters = re.findall(r"\w+ (\w+)", last_line) if last_line.startswith("template <") else []
    return parameters, _COMMENT.sub("", behind.partition("\n};")[0] + "\n")


def _fields(source: str, name: str) -> list[tuple[str, type[Any]]]:
    template, _, given = name.rstrip(">").partition("<")
    if (struct := _struct(source, template)) is None:
        raise LookupError(f"{source} declares no struct {template}")
    parameters, body = struct
    arguments = dict(zip(parameters, given.split(", "), strict=bool(given)))
    fields, at = [], 0
    while declared := _DECLARATION.match(body, at):
        at = declared.end()
        for declarator in declared["names"].split(","):
            field = _NAME.fullmatch(declarator.strip())
            if field is None:
                raise LookupError(f"{name} of {source}: cannot read the field {declarator.strip()}")
            kind = ctypes.c_void_p if field["pointer"] else _type(source, declared["type"])
            for length in reversed(re.findall(r"\w+", field["lengths"])):
                kind = kind * _number(source, arguments.get(length, length))
            fields.append((field["name"], kind))
    if not fields:
        raise LookupError(f"{source}: no fields of {name} can be read")
    return fields


def _type(source: str, name: str) -> type[Any]:
    """A scalar, or the class of a struct, which is made if there is none."""
    if name in _SCALARS:
        return _SCALARS[name]
    for path in _closure(source):
        if (path, name) in _classes:
            return _classes[path, name]
        if _struct(path, name) is not None:
            return declared_in(path)(type(name, (ctypes.Structure,), {}))
    raise LookupError(f"{source}: {name} is no type of a field")


def _number(source: str, text: str) -> int:
    """A length: a number, or the name of one."""
    if text.isdigit():
        return int(text)
    for path in _closure(source):
        if found := re.search(rf"^constexpr int (?:.*, )?{text} = (\d+)[,;]", _read(path), re.MULTILINE):
            return int(found[1])
    raise LookupError(f"{source}: {text} is no number that is known when sources are read")
