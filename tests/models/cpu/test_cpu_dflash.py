"""A drafter on the CPU, beside the one in PyTorch, which other programs check."""

from pathlib import Path

import numpy as np
import pytest

from coldstream.errors import OutOfMemoryError
from coldstream.models.cpu import dflash as cpu_dflash
from coldstream.models.cpu.dflash import CpuDflash, CpuDflashSequence
from coldstream.models.dflash.file import DflashFile
from dflash_cases import (
    ALL_SLIDING,
    ANCHOR,
    CASES,
    CHUNKS,
    LAGUNA,
    NUM_ROWS,
    as_in_gguf,
    config,
    features,
    load_cpu,
    open_model,
    random_tensors,
    spec_of,
    write_gguf_drafter,
)

KINDS = {
    **CASES,
    "second, causal": config(True, **ALL_SLIDING, is_causal=True),
    "Laguna": LAGUNA,
}


def opened(path: Path, values: dict[str, object], types: dict[str, str] | None = None) -> CpuDflash:
    """A drafter with random weights, as float32 unless `types` says otherwise."""
    spec = spec_of(values)
    write_gguf_drafter(path, spec, random_tensors(spec), types=types)
    with DflashFile.open(path) as file:
        assert file.spec == as_in_gguf(spec)
        return load_cpu(file)


def hidden(sequence: CpuDflashSequence) -> np.ndarray:
    return np.asarray(sequence.hidden(ANCHOR, NUM_ROWS))


@pytest.mark.parametrize("name", KINDS)
def test_it_is_what_pytorch_computes(tmp_path: Path, name: str) -> None:
    values = KINDS[name]
    ours = opened(tmp_path / "drafter.gguf", values).new_sequence()
    theirs = open_model(values).new_sequence()
    rows, start = features(theirs.spec, sum(CHUNKS)), 0
    for count in CHUNKS:
        for sequence in (ours, theirs):
            sequence.append(rows[start : start + count])
        start += count
        assert np.allclose(hidden(ours), hidden(theirs), atol=1e-4)
        found, expected = (sequence.draft(ANCHOR, NUM_ROWS, 5) for sequence in (ours, theirs))
        assert np.array_equal(found.token_ids, expected.token_ids)
        assert np.allclose(found.log_probs, expected.log_probs, atol=1e-4)


def test_quantised_matrices_are_near(tmp_path: Path) -> None:
    values = KINDS["second, causal"]
    spec = spec_of(values)
    types = dict.fromkeys(
        (
            name
            for name in random_tensors(spec)
            if "attn_" in name and name.endswith("t") and "norm" not in name
        ),
        "Q8_0",
    )
    types |= {f"selector_{name}cessor.weight": "F16" for name in ("prede", "suc")}
    rows = features(spec, 20)
    found = []
    for number, each in enumerate((None, types)):
        sequence = opened(tmp_path / f"{number}.gguf", values, each).new_sequence()
        sequence.append(rows)
        found.append(hidden(sequence).ravel())
    assert not np.allclose(*found, atol=1e-5)
    assert found[0] @ found[1] > 0.999 * np.linalg.norm(found[0]) * np.linalg.norm(found[1])


def test_rows_may_come_in_any_pieces_and_be_truncated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = opened(tmp_path / "drafter.gguf", KINDS["second, full"])
    rows = features(model.spec, 40)
    whole = model.new_sequence()
    whole.append(rows)
    monkeypatch.setattr(cpu_dflash, "MOST_WAITING", 7)
    sequence = model.new_sequence()
    assert (sequence.num_bytes, sequence.has_last) == (0, False)
    for start, count, length in (
        (0, 3, 3),
        (3, 3, 4),
        (4, 7, 8),
        (8, 3, 2),
        (2, 30, 32),
        (32, 1, 33),
        (33, 7, 40),
    ):
        observed = rows[start : start + count].copy()
        sequence.append(observed)
        observed[:] = np.nan
        sequence.truncate(length)
        assert (sequence.length, sequence.has_last) == (length, True)
    assert np.allclose(hidden(sequence), hidden(whole), atol=1e-5)


def test_rows_that_were_not_observed_are_missing(tmp_path: Path) -> None:
    model = opened(tmp_path / "drafter.gguf", CASES["second"])
    rows = features(model.spec, 40)
    sequence, whole = model.new_sequence(), model.new_sequence()
    sequence.append(rows[:5])
    sequence.truncate(20)
    assert not sequence.has_last
    sequence.append(rows[20:])
    whole.append(rows)
    # The rows that are missing are beyond every window.
    assert np.allclose(hidden(sequence), hidden(whole), atol=1e-5)
    assert sequence.num_bytes <= 2 * 4 * model.spec.kv_dim * model.spec.context_rows(40)


@pytest.mark.parametrize("name", ["full", "second"])
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_values_that_are_not_finite_show_in_the_draft(tmp_path: Path, name: str, bad: float) -> None:
    sequence = opened(tmp_path / "drafter.gguf", CASES[name]).new_sequence()
    rows = features(sequence.spec, 6)
    rows[4, 7] = bad
    sequence.append(rows)
    assert not sequence.draft(ANCHOR, 4, 3).is_finite


def test_without_memory_only_the_rows_being_computed_are_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = opened(tmp_path / "drafter.gguf", CASES["full"])
    sequence = model.new_sequence()
    sequence.append(features(model.spec, 3))
    expected = hidden(sequence)

    def fail(*arguments: object) -> None:
        raise MemoryError

    with monkeypatch.context() as patched:
        patched.setattr(model, "keys_values", fail)
        sequence.append(features(model.spec, 2))
        with pytest.raises(OutOfMemoryError):
            sequence.draft(ANCHOR, 4, 3)
        assert not sequence.has_last
        sequence.append(features(model.spec, 2))
        sequence.truncate(20)  # whose rows that were observed cannot be computed
    sequence.truncate(3)
    assert sequence.has_last
    assert np.array_equal(hidden(sequence), expected)
