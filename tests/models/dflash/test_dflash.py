"""What drafters compute, in PyTorch and on the CPU: beside two implementations of others, and the traps."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import dflash_reference
from coldstream.errors import OutOfMemoryError
from coldstream.models.cpu import dflash as cpu_dflash
from coldstream.models.cpu.dflash import CpuDflash, CpuDflashSequence
from coldstream.models.dflash.file import DflashFile
from dflash_cases import (
    ALL_SLIDING,
    ANCHOR,
    CASES,
    CHUNKS,
    MIXED,
    NUM_ROWS,
    VOCAB,
    WIDTH,
    as_in_gguf,
    config,
    features,
    load_cpu,
    random_tensors,
    spec_of,
    target_tables,
    write_gguf_drafter,
)
from dflash_reference import DflashModel, DflashSequence
from tools.llama_cpp_dflash import open_drafter

RECORD = Path(__file__).parent / "dflash_published.npz"
TOLERANCE = 1e-4
SECOND = [name for name in CASES if name.startswith("second")]
# llama.cpp has one flag of causality for all layers, windows that end on the left only, and no biases.
FOR_LLAMA_CPP = [
    name for name in CASES if name not in ("mixed", "second, narrow", "gpt-oss", "second, biases")
]

Model = DflashModel | CpuDflash
Sequence = DflashSequence | CpuDflashSequence
Open = Callable[..., Any]  # (values, tensors=None) → a model


@pytest.fixture(scope="module")
def recorded() -> dict[str, np.ndarray]:
    """By the published implementation; see record_dflash.py."""
    with np.load(RECORD) as arrays:
        return dict(arrays)


def load_reference(file: DflashFile) -> DflashModel:
    embedding, head = target_tables()
    return DflashModel.load(file, lambda ids: embedding[list(ids)], lambda x: np.asarray(x) @ head.T)


LOADERS: dict[str, Callable[[DflashFile], Model]] = {"reference": load_reference, "cpu": load_cpu}


@pytest.fixture(params=LOADERS)
def load(request: pytest.FixtureRequest) -> Callable[[DflashFile], Model]:
    return LOADERS[request.param]


@pytest.fixture
def opened(tmp_path: Path, load: Callable[[DflashFile], Model]) -> Open:
    """Opens a drafter with random weights, or these."""
    return opener(tmp_path, load)


def opener(folder: Path, load: Callable[[DflashFile], Model]) -> Open:
    def open_drafter(values: dict[str, Any], tensors: dict[str, np.ndarray] | None = None) -> Model:
        spec = spec_of(values)
        weights = random_tensors(spec) if tensors is None else tensors
        path = write_gguf_drafter(folder / f"{len(list(folder.iterdir()))}.gguf", spec, weights)
        with DflashFile.open(path) as file:
            return load(file)

    return open_drafter


def hidden_after(sequence: Sequence, num_rows: int = NUM_ROWS) -> np.ndarray:
    return np.asarray(sequence.hidden(ANCHOR, num_rows))


def kept_rows(sequence: Sequence) -> list[tuple[np.ndarray, ...]]:
    """Copies of the keys, values and positions of all layers."""
    if isinstance(sequence, DflashSequence):
        found = [(rows.keys, rows.values, rows.positions) for rows in sequence._contexts]
        return [tuple(np.asarray(part).copy() for part in layer) for layer in found]
    none = np.empty((0, sequence.spec.num_kv_heads, sequence.spec.head_dim), np.float32)
    parts = [rows.with_block(0, none, none, np.empty(0, np.int64)) for rows in sequence._contexts]
    return [tuple(part.copy() for part in layer) for layer in parts]


def are_same(some: list[tuple[np.ndarray, ...]], others: list[tuple[np.ndarray, ...]]) -> bool:
    return all(
        np.array_equal(*parts) for pair in zip(some, others, strict=True) for parts in zip(*pair, strict=True)
    )


def sequence_with(model: Model, rows: np.ndarray) -> Sequence:
    sequence = model.new_sequence()
    sequence.append(rows)
    return sequence


@pytest.mark.parametrize("name", CASES)
def test_hidden_states_are_those_of_the_published_implementation(
    recorded: dict[str, np.ndarray], name: str, opened: Open
) -> None:
    model = opened(CASES[name])
    rows = features(model.spec, sum(CHUNKS))
    sequence, expected = model.new_sequence(), recorded[f"{name}/hidden"]
    for draft, count in enumerate(CHUNKS):
        sequence.append(rows[sequence.length : sequence.length + count])
        assert np.abs(hidden_after(sequence) - expected[draft]).max() < TOLERANCE


@pytest.mark.parametrize("name", SECOND)
def test_selected_tokens_and_probabilities_are_those_of_the_published_implementation(
    recorded: dict[str, np.ndarray], name: str, opened: Open
) -> None:
    model = opened(CASES[name])
    sequence = sequence_with(model, features(model.spec, sum(CHUNKS)))
    lattice = sequence.draft(ANCHOR, NUM_ROWS, 1)
    assert lattice.is_conditional
    before = 0
    for depth, token in enumerate(recorded[f"{name}/greedy"]):
        before = int(lattice.log_probs[depth, before].argmax())
        assert lattice.token_ids[depth, before] == token
    before = 0
    for depth, token in enumerate(recorded[f"{name}/sampled"]):
        found = dict(zip(lattice.token_ids[depth], np.exp(lattice.log_probs[depth, before]), strict=True))
        candidates = recorded[f"{name}/candidates"][depth]
        expected = dict(zip(candidates, recorded[f"{name}/probs"][depth], strict=True))
        assert found == pytest.approx(expected, abs=TOLERANCE)
        before = lattice.token_ids[depth].tolist().index(token)


@pytest.mark.parametrize("name", FOR_LLAMA_CPP)
def test_logits_are_those_of_llama_cpp(
    tmp_path: Path, load: Callable[[DflashFile], Model], name: str
) -> None:
    """From the same file, but for the tables of the target, which llama.cpp wants in it."""
    spec = spec_of(CASES[name])
    tensors = random_tensors(spec)
    embedding, head = target_tables()
    tables = {"token_embd.weight": embedding, "output.weight": head}
    own = write_gguf_drafter(tmp_path / "own.gguf", spec, tensors)
    theirs = write_gguf_drafter(
        tmp_path / "theirs.gguf", spec, tensors | tables, changes={"tokenizer.ggml.model": "no_vocab"}
    )
    with DflashFile.open(own) as file:
        assert file.spec == as_in_gguf(spec)
        model = load(file)
    rows = features(spec, sum(CHUNKS))
    block = [ANCHOR] + [spec.mask_id] * (NUM_ROWS - 1)
    sequence = model.new_sequence()
    with open_drafter(theirs, is_causal=spec.layers[0].is_causal) as drafter:
        for count in CHUNKS:
            part = rows[sequence.length : sequence.length + count]
            sequence.append(part)
            drafter.append(part)
            expected = drafter.draft(block)
            assert np.abs(hidden_after(sequence) @ head.T - expected).max() < TOLERANCE


def test_candidates_of_the_first_kind_are_the_likeliest_tokens_of_every_row(opened: Open) -> None:
    model = opened(config())
    sequence = sequence_with(model, features(model.spec, 9))
    logits = (hidden_after(sequence, 4) @ target_tables()[1].T).astype(np.float64)[1:]
    log_probs = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
    lattice = sequence.draft(ANCHOR, 4, 6)
    order = np.argsort(-logits, axis=1)[:, :6]
    assert not lattice.is_conditional
    assert np.array_equal(lattice.token_ids, order)
    assert np.allclose(lattice.log_probs, np.take_along_axis(log_probs, order, 1), atol=1e-5)
    assert sequence.draft(ANCHOR, 4, VOCAB + 5).token_ids.shape == (3, VOCAB)


def test_a_draft_is_the_same_whatever_the_chunks_its_rows_came_in(opened: Open) -> None:
    model = opened(config(**MIXED))
    rows = features(model.spec, 1100)
    expected = hidden_after(sequence_with(model, rows))
    sequence = model.new_sequence()
    for part in np.split(rows, [1, 3, 600, 1099]):
        sequence.append(part)
    assert np.allclose(hidden_after(sequence), expected, atol=1e-5)


def test_a_shorter_block_is_not_the_beginning_of_a_longer_one(opened: Open) -> None:
    model = opened(config())
    sequence = sequence_with(model, features(model.spec, 5))
    assert not np.allclose(hidden_after(sequence, 8)[:4], hidden_after(sequence, 4), atol=1e-2)
    causal = opened(config(is_causal=True))
    sequence = sequence_with(causal, features(causal.spec, 5))
    assert np.allclose(hidden_after(sequence, 8)[:4], hidden_after(sequence, 4), atol=1e-5)


@torch.inference_mode()
def test_trap_31_rows_of_the_context_do_not_pass_the_norm_of_a_layer_but_that_of_its_keys(
    opened: Open,
) -> None:
    values = config()
    spec = spec_of(values)
    plain, changed = random_tensors(spec), random_tensors(spec)
    for index in range(spec.num_layers):
        # A factor alone would be taken out again by the norm of the keys.
        changed[f"blk.{index}.attn_norm.weight"] *= np.linspace(1, 3, WIDTH, dtype=np.float32)
        plain[f"blk.{index}.attn_k_norm.weight"][:] = 2
        changed[f"blk.{index}.attn_k_norm.weight"][:] = 2
    kept = []
    for tensors in (plain, changed):
        sequence = sequence_with(opened(values, tensors=tensors), features(spec, 4))
        sequence.truncate(5)  # which computes the rows that wait
        kept.append([keys for keys, _, _ in kept_rows(sequence)])
    for keys, others in zip(*kept, strict=True):
        assert keys.shape == (4, spec.num_kv_heads, spec.head_dim)
        assert np.allclose(keys, others, atol=1e-5)
        assert np.allclose((keys**2).mean(axis=-1), 4, atol=1e-3)  # as rotations keep lengths


def test_trap_32_the_row_of_the_anchor_predicts_nothing(opened: Open) -> None:
    model = opened(config())
    sequence = sequence_with(model, features(model.spec, 5))
    assert len(sequence.draft(ANCHOR, 8, 3).token_ids) == 7
    with pytest.raises(AssertionError, match="an anchor and masks"):
        sequence.draft(ANCHOR, 9, 3)


@pytest.mark.parametrize(
    ("values", "nearest_unseen"),
    [
        (config(**ALL_SLIDING), 9),
        (config(**ALL_SLIDING, is_causal=False), 9),
        (config(), None),
        (config(**MIXED), None),
    ],
    ids=["causal", "bidirectional", "full", "mixed"],
)
def test_trap_33_only_rows_within_the_window_are_seen(
    values: dict[str, Any], nearest_unseen: int | None, opened: Open
) -> None:
    """The anchor is one position behind the last row of the context."""
    model = opened(values)
    rows = features(model.spec, 30)
    expected = hidden_after(sequence_with(model, rows))
    for distance in (1, 8, 9, 30):
        changed = rows.copy()
        changed[30 - distance] += 1
        seen = nearest_unseen is None or distance < nearest_unseen
        found = hidden_after(sequence_with(model, changed))
        assert (np.abs(found - expected).max() > 1e-3) == seen, distance


@pytest.mark.parametrize("is_causal", [None, True, False])
def test_trap_33_layers_with_a_window_are_causal_unless_the_file_says_otherwise(
    is_causal: bool | None,
) -> None:
    changes = {} if is_causal is None else {"is_causal": is_causal}
    mixed, sliding = (spec_of(config(**layers, **changes)) for layers in (MIXED, ALL_SLIDING))
    default = [True, True, False]
    assert [layer.is_causal for layer in mixed.layers] == (default if is_causal is None else [is_causal] * 3)
    assert all(layer.is_causal for layer in sliding.layers) == (is_causal is not False)


@pytest.mark.parametrize("name", ["mixed", "second"])
def test_trap_34_a_draft_leaves_nothing_behind(name: str, opened: Open) -> None:
    model = opened(CASES[name])
    rows = features(model.spec, 20)
    sequence = sequence_with(model, rows[:12])
    first, kept = hidden_after(sequence), kept_rows(sequence)
    assert [at.tolist()[-1] for _, _, at in kept] == [11] * model.spec.num_layers
    sequence.draft(7, 8, 3)
    assert sequence.length == 12
    assert are_same(kept_rows(sequence), kept)
    assert np.allclose(hidden_after(sequence), first, atol=1e-5)
    sequence.append(rows[12:])
    assert np.allclose(hidden_after(sequence), hidden_after(sequence_with(model, rows)), atol=1e-5)
    sequence.truncate(0)
    assert not sequence.has_last
    sequence.append(rows)
    assert np.allclose(hidden_after(sequence), hidden_after(sequence_with(model, rows)), atol=1e-5)


@pytest.mark.sharded(of="models on the CPU")
@pytest.mark.parametrize(
    ("layers", "kept"),
    [
        (ALL_SLIDING | {"sliding_window": 100}, [200, 200, 200]),
        (ALL_SLIDING | {"sliding_window": 2}, [10, 10, 10]),
        (MIXED, [18, 18, 2 * 3008]),
        ({}, [2 * 3008] * 3),
    ],
    ids=["sliding", "narrow", "mixed", "full"],
)
def test_memory_is_bounded_by_the_windows_where_layers_have_one(
    tmp_path: Path, layers: dict[str, Any], kept: list[int]
) -> None:
    model = opener(tmp_path, load_cpu)(config(**layers))
    spec, sequence = model.spec, model.new_sequence()
    assert sequence.num_bytes == 0
    rows = features(spec, 3000)
    for start in range(0, 3000, 150):
        sequence.append(rows[start : start + 150])
        sequence.draft(ANCHOR, 8, 3)
    assert spec.context_rows(3000) == sum(kept)
    row_bytes = 2 * 4 * spec.kv_dim
    assert sequence.num_bytes <= row_bytes * sum(kept)
    if max(kept) <= 200:
        assert sequence.num_bytes == row_bytes * sum(kept)
    expected = hidden_after(sequence_with(model, rows))
    assert np.allclose(hidden_after(sequence), expected, atol=1e-5)


def test_rows_that_were_not_observed_are_missing_and_the_others_keep_their_positions(opened: Open) -> None:
    model = opened(config(**ALL_SLIDING))
    rows = features(model.spec, 40)
    sequence = sequence_with(model, rows[:5])
    sequence.truncate(20)
    assert not sequence.has_last
    sequence.append(rows[20:])
    assert sequence.has_last
    # The rows that are missing are beyond every window.
    assert np.allclose(hidden_after(sequence), hidden_after(sequence_with(model, rows)), atol=1e-5)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_values_that_are_not_finite_show_in_the_draft(bad: float, opened: Open) -> None:
    for name in ("full", "second"):
        model = opened(CASES[name])
        rows = features(model.spec, 6)
        rows[4, 7] = bad
        assert not sequence_with(model, rows).draft(ANCHOR, 4, 3).is_finite


def test_a_failure_loses_no_rows_but_those_being_computed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = opener(tmp_path, load_cpu)(config())
    sequence = sequence_with(model, features(model.spec, 3))
    expected, kept = hidden_after(sequence), kept_rows(sequence)
    keys_values, calls = model.keys_values, []

    def fail_at_the_second_layer(*arguments: Any) -> Any:
        calls.append(arguments)
        if len(calls) % 2 == 0:
            raise MemoryError
        return keys_values(*arguments)

    with monkeypatch.context() as patched:
        patched.setattr(model, "keys_values", fail_at_the_second_layer)
        sequence.append(features(model.spec, 2))
        for _ in range(2):
            with pytest.raises(OutOfMemoryError):
                sequence.draft(ANCHOR, 4, 3)
            assert not sequence.has_last
            assert are_same(kept_rows(sequence), kept), "no layer has rows that another lacks"
        sequence.append(features(model.spec, 2))
        sequence.truncate(20)  # whose rows that were observed cannot be computed
    sequence.truncate(3)
    assert sequence.has_last
    assert are_same(kept_rows(sequence), kept)
    assert np.allclose(hidden_after(sequence), expected, atol=1e-5)


def test_rows_that_wait_are_copies_and_are_truncated_like_others(
    monkeypatch: pytest.MonkeyPatch, opened: Open
) -> None:
    model = opened(config())
    rows = features(model.spec, 40)
    for module in (dflash_reference, cpu_dflash):
        monkeypatch.setattr(module, "MOST_WAITING", 7)
    sequence = model.new_sequence()
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
    assert np.allclose(hidden_after(sequence), hidden_after(sequence_with(model, rows)), atol=1e-5)
