"""C++ and CUDA name types in CamelCase, as Python does; functions, variables and constants are snake_case."""

import re
from pathlib import Path

import pytest

from coldstream.kernels.cuda.compiler import KERNELS

HOST = Path(__file__).parents[1] / "host"
SOURCES = sorted(
    path
    for root in (KERNELS, HOST)
    for suffix in ("h", "inl", "cpp", "cuh", "cu")
    for path in root.rglob(f"*.{suffix}")
)
TYPE = re.compile(
    r"^ *(?:struct|class|enum class|enum)(?: alignas\(\w+\))? (\w+)\b[^;(){]*\{"
    r"|^ *using (\w+) =",
    re.MULTILINE,
)
CONSTANT = re.compile(r"\bconstexpr [\w:]+ (\w{2,})\b|[<,] ?(?:int|bool) (\w{2,})(?=[,>])")
# CUDA's own names, and its integers, for the host's compiler or where there are no headers.
OF_CUDA = re.compile(r"dim3|u?(int|float)\d|u?int\d+_t|sigaction")


def types_in(text: str) -> list[str]:
    return [name for names in TYPE.findall(text) for name in names if name and not OF_CUDA.fullmatch(name)]


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: path.name)
def test_types_are_camel_case_and_constants_are_not(path: Path) -> None:
    text = path.read_text()
    assert [name for name in types_in(text) if not name[0].isupper()] == []
    constants = [name for names in CONSTANT.findall(text) for name in names if name]
    assert [name for name in constants if name.isupper()] == []


def test_names_are_found() -> None:
    text = """
struct alignas(16) Work {
enum class Tier : int {
template <int size>
struct part {
  using Rows = int;
"""
    assert types_in(text) == ["Work", "Tier", "part", "Rows"]
