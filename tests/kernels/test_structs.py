"""Reading structs from CUDA sources; `test_layouts.py` compares all of them with CUDA's compiler."""

import ctypes
from pathlib import Path

import pytest

from coldstream.kernels.cuda import structs
from coldstream.kernels.cuda.structs import declared_in

INCLUDED = """
#pragma once
constexpr int num_parts = 3, unused = 7;

// A part.
struct Part {
  const float *first, *second;  // int third;
  uint16_t count;
};
"""
SOURCE = """
#include "parts.cuh"
namespace coldstream {
constexpr int rows = 2;

struct Whole {
  int kind, most;
  Part parts[num_parts];
  int64_t* addresses[4];
  uint64_t sums[rows][num_parts];

  __device__ int size() const { return most; }
};

template <int size, bool is_last>
struct Keys {
  uint64_t keys[size];
  float sum;
};

struct Unreadable {
  int (*call)(int);
};
struct Unknown {
  half value;
};
struct Odd {
  int values[size_t(3)];
};
struct Sized {
  int values[most_values];
};
}
"""


@pytest.fixture(autouse=True)
def sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "parts.cuh").write_text(INCLUDED)
    (tmp_path / "whole.cu").write_text(SOURCE)
    monkeypatch.setattr(structs, "SOURCES", tmp_path)
    monkeypatch.setattr(structs, "_classes", {})
    structs._read.cache_clear()
    structs._closure.cache_clear()


def test_fields_have_the_sources_names_types_and_lengths() -> None:
    @declared_in("parts.cuh")
    class Part(ctypes.Structure):
        pass

    @declared_in("whole.cu", "Whole")
    class _All(ctypes.Structure):
        pass

    assert Part._fields_ == [
        ("first", ctypes.c_void_p),
        ("second", ctypes.c_void_p),
        ("count", ctypes.c_uint16),
    ]
    whole = _All(1, 2, (Part * 3)(Part(count=4)))
    assert [name for name, *_ in _All._fields_] == ["kind", "most", "parts", "addresses", "sums"]
    assert (whole.most, whole.parts[0].count, len(whole.addresses)) == (2, 4, 4)
    assert (len(whole.sums), len(whole.sums[0])) == (2, 3)
    assert ctypes.sizeof(_All) == 8 + 3 * 24 + 4 * 8 + 2 * 3 * 8


def test_an_instance_of_a_template_has_its_arguments() -> None:
    @declared_in("whole.cu", "Keys<5, true>")
    class Keys(ctypes.Structure):
        pass

    assert ctypes.sizeof(Keys) == 5 * 8 + 8
    with pytest.raises(ValueError, match="zip"):
        declared_in("whole.cu", "Keys<5>")(type("Fewer", (ctypes.Structure,), {}))


def test_a_struct_within_another_gets_a_class_of_its_own() -> None:
    declared_in("whole.cu")(type("Whole", (ctypes.Structure,), {}))
    assert {name for _, name in structs.declared_structs()} == {"Part", "Whole"}
    with pytest.raises(LookupError, match=r"Part of parts\.cuh has a class"):
        declared_in("parts.cuh")(type("Part", (ctypes.Structure,), {}))


@pytest.mark.parametrize(
    ("name", "what"),
    [
        ("Missing", "declares no struct Missing"),
        ("Unreadable", "no fields"),
        ("Unknown", "half is no type of a field"),
        ("Odd", "no fields"),
        ("Sized", "most_values is no number"),
    ],
)
def test_what_cannot_be_read_is_named(name: str, what: str) -> None:
    with pytest.raises(LookupError, match=what):
        declared_in("whole.cu", name)(type("Made", (ctypes.Structure,), {}))
