"""Sources of the extension that are written for some instructions: elsewhere they are compiled to nothing."""

import re
from pathlib import Path

import pytest

import coldstream

CSRC = Path(coldstream.__file__).parent / "kernels" / "csrc"
TIER = re.compile(r"_(avx2|avx512|avx_vnni|amx|neon|dotprod)\.cpp$")
# A condition on instructions around everything but includes that all platforms have.
GUARDED = re.compile(
    r"""(?: // [^\n]*\n | \#include\ "[^\n]*\n | \s )*
        \#if\ defined\(__(?: x86_64 | aarch64 | A[VM]X\w+ )__\)\n
        .* \#endif [^\n]* \s*""",
    re.DOTALL | re.VERBOSE,
)


def sources() -> list[str]:
    return sorted(str(path.relative_to(CSRC)) for path in CSRC.rglob("*.cpp") if TIER.search(path.name))


@pytest.mark.parametrize("source", sources())
def test_a_tier_is_compiled_where_its_instructions_are(source: str) -> None:
    assert GUARDED.fullmatch((CSRC / source).read_text())


def test_there_are_sources_of_both_platforms() -> None:
    assert {"quant/gemm_avx512.cpp", "quant/rows_neon.cpp"} <= set(sources())


# A function whose name says that it prefetches.
PREFETCHING = re.compile(r"^[^\n/]*\bvoid prefetch_\w+\(", re.MULTILINE)


def prefetching() -> list[tuple[str, str]]:
    files = (path for path in CSRC.rglob("*") if path.suffix in {".h", ".inl", ".cpp"})
    return [(path.name, line) for path in files for line in PREFETCHING.findall(path.read_text())]


def test_functions_that_only_prefetch_are_always_inline() -> None:
    """GCC leaves out calls of them otherwise, and every weight row waits for memory."""
    assert len(prefetching()) >= 4
    assert [found for found in prefetching() if "always_inline" not in found[1]] == []
