"""The kernels of attention compile where there is no GPU; test_host_integers.py compares their bits."""

from dataclasses import replace
from pathlib import Path

import pytest

from bench.kernels.machine_code import stack_bytes
from coldstream.errors import UnsupportedError
from coldstream.kernels.attention.arguments import AttentionShape
from coldstream.kernels.attention.cache_types import CACHE_TYPES
from coldstream.kernels.attention.cuda import IntegerKernels, kind_of
from coldstream.kernels.attention.workspace_sizes import rows_at_once
from coldstream.kernels.cuda.compiler import compile_instance
from coldstream.kernels.cuda.limits import DeviceLimits

H200 = DeviceLimits(132, 227 * 1024, 228 * 1024)
WITH_WARPGROUPS = replace(H200, has_warpgroups=True)
SMALL = DeviceLimits(84, 99 * 1024, 100 * 1024)
MAX_STACK_BYTES = (
    320  # that a thread of warpgroups sets aside; more passes the cache, and costs what they save
)


@pytest.mark.parametrize(("head_dim", "cache_name"), [(40, "f32"), (48, "i16"), (288, "i8"), (64, "f16")])
def test_what_no_kernel_takes_is_refused(head_dim: int, cache_name: str) -> None:
    with pytest.raises(ValueError, match=f"no kernels for heads of {head_dim} values in {cache_name}"):
        IntegerKernels(AttentionShape(4, 2, head_dim, CACHE_TYPES[cache_name]), H200)


def test_too_many_heads_on_one_are_refused() -> None:
    with pytest.raises(UnsupportedError, match="129 heads of 64 values on one key/value head"):
        IntegerKernels(AttentionShape(129, 1, 64, CACHE_TYPES["i16"]), H200)


# What a type changes is in every instance of a file, and what an instance changes in every type: two types
# have all instances of all files, in three parts each, the others one of each.
@pytest.mark.sharded(6)
@pytest.mark.parametrize(
    ("head_dim", "cache_name", "device", "arch", "part"),
    [
        *((256, "i16", WITH_WARPGROUPS, "sm_90a", part) for part in range(3)),
        *((96, "i8", SMALL, "sm_80", part) for part in range(3)),
        (128, "i4", H200, "sm_90", None),
        (96, "i3", SMALL, "sm_80", None),
    ],
)
def test_kernels_compile_without_a_gpu(
    head_dim: int, cache_name: str, device: DeviceLimits, arch: str, part: int | None, tmp_path: Path
) -> None:
    kernels = IntegerKernels(AttentionShape(16, 2, head_dim, CACHE_TYPES[cache_name]), device)
    count = 1 if part is None else None
    instances = [(each.source, name) for each in kernels.programs.values() for name in each.instances[:count]]
    for source, instance in instances[part::3] if part is not None else instances:
        code = compile_instance(source, instance, arch, tmp_path)
        assert "warpgroups" not in instance or stack_bytes(code) <= MAX_STACK_BYTES


@pytest.mark.parametrize(
    ("num_rows", "is_deep", "has_trees", "at_once"),
    [
        (64, True, False, 64),
        (65, True, False, 64),
        (512, True, False, 64),
        (513, True, False, 513),
        (65, False, False, 65),
        (65, True, True, 65),
    ],
)
def test_a_few_hundred_rows_far_into_a_text_are_computed_in_parts(
    num_rows: int, is_deep: bool, has_trees: bool, at_once: int
) -> None:
    assert rows_at_once(num_rows, is_deep=is_deep, has_trees=has_trees) == at_once


@pytest.mark.parametrize(
    ("num_rows", "is_deep", "is_branching", "kind"),
    [
        (1, True, False, "decode_half"),
        (1, False, False, "decode_half"),
        (2, True, False, "decode"),
        (3, True, False, "group"),
        (8, True, False, "group"),
        (9, True, False, "groups"),
        (64, True, False, "groups"),
        (64, False, False, "decode"),
        (65, False, False, "groups"),
        (2048, True, False, "groups"),
        (1, True, True, "prefill_small"),
        (9, True, True, "prefill"),
    ],
)
def test_warpgroups_take_what_they_are_faster_at(
    num_rows: int, is_deep: bool, is_branching: bool, kind: str
) -> None:
    shape = AttentionShape(16, 2, 256, CACHE_TYPES["i16"])
    assert kind_of(shape, num_rows, is_branching, is_deep, by_warpgroups=True) == kind
    assert kind_of(shape, num_rows, is_branching, is_deep, by_warpgroups=False) in (
        "decode_half", "decode", "prefill_small", "prefill",
    )  # fmt: skip
    assert (kind, is_branching) in IntegerKernels(shape, WITH_WARPGROUPS)._forms
