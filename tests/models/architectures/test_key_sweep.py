"""Keys of metadata beside llama.cpp: followed, or refused by name, as the recorded sweep of all has it."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from bench.peers.key_sweep import (
    ARCHITECTURES,
    OUTCOMES,
    LlamaCpp,
    Result,
    Setting,
    Sweep,
    has_effect,
    known_keys,
)

ROOT = Path(__file__).parents[3]
RECORDED: dict[str, Any] = json.loads((ROOT / "docs/results/key_sweep.json").read_text())


@pytest.fixture(scope="module")
def oracle() -> Iterator[LlamaCpp]:
    with LlamaCpp() as oracle:
        yield oracle


def recorded(arch: str) -> list[Result]:
    """The settings that matter to one of the two programs."""
    return [Result(**result) for result in RECORDED["architectures"][arch]["effects"]]


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_every_key_that_matters_is_followed_or_refused(arch: str, oracle: LlamaCpp, tmp_path: Path) -> None:
    sweep = Sweep(arch, tmp_path, oracle)
    for before in recorded(arch):
        result = sweep.result(Setting(before.key, before.value, before.beside))
        assert result.outcome in ("alike", "refused"), result
        assert result.outcome == before.outcome, result
        assert has_effect(result), result


@pytest.mark.sharded(of="models on the CPU")
def test_the_recorded_sweep_has_every_known_key_and_no_silent_difference() -> None:
    """A new version of a package with new keys needs another sweep: see the page on files."""
    missing = set(known_keys()) - set(RECORDED["keys"])
    assert not missing, "run: python -m bench.peers.key_sweep --out docs/results/key_sweep.json"
    for arch in ARCHITECTURES:
        counts = RECORDED["architectures"][arch]["outcomes"]
        assert set(counts) <= set(OUTCOMES)
        assert "different" not in counts
        assert len(recorded(arch)) > 20
