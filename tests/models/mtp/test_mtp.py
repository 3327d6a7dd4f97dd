"""The block for multi-token prediction: against llama.cpp, against the definition, and against itself."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from mtp_cases import CONTEXT, VARIANTS, Reference, keys_and_values, make_variant, write_variant
from one_sequence import OneSequence, open_cpu
from runner_cases import token_ids

from builders import write_gguf, write_model
from coldstream.decoding.tree_builder import top_log_probs
from coldstream.errors import GenerationFault, InconsistentError, OutOfMemoryError, UnsupportedError
from coldstream.kernels import _csrc
from coldstream.kvcache import CacheSize
from coldstream.models.cpu import mtp as cpu_mtp
from coldstream.models.cpu.mtp import CpuMtp, MtpSequence
from tools.llama_cpp_mtp import open_trunk_and_block

PUBLISHED = ("moe", "dense", "tied", "fused", "own tables", "no norm of its own")


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """Tensors this small cost more to share out than to compute."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.sharded(6)
@pytest.mark.parametrize("name", PUBLISHED)
def test_outputs_and_logits_equal_llama_cpp(tmp_path: Path, name: str) -> None:
    """Rows of a prompt, then two of a draft, whose hidden states are the block's own outputs."""
    path = write_variant(tmp_path, name, quant="F32", types=None)
    ids, reference = token_ids(40), Reference(path, exact=False)
    with open_trunk_and_block(path, 64) as (trunk, block):
        theirs = trunk.feed(ids)
        hidden = reference.feed_trunk(ids)
        assert np.abs(hidden - theirs.hidden).max() < 1e-4
        steps = [(ids[1:], hidden[:-1])]
        for _ in range(3):
            tokens, states = steps[-1]
            expected, found = block.feed(tokens, states), reference.feed_block(tokens, states)
            assert expected.logits.std() > 1
            assert np.abs(found.hidden - expected.hidden).max() < 1e-4
            assert np.abs(found.logits - expected.logits).max() < 1e-4
            steps.append(([int(found.logits[-1].argmax())], found.hidden[-1:]))


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return write_variant(tmp_path, "moe")


@pytest.fixture
def runner(path: Path) -> Iterator[OneSequence]:
    size = CacheSize.of(3, CONTEXT)
    with open_cpu(path, threads=2, context_length=CONTEXT, cache_size=size) as opened:
        yield opened


@pytest.fixture
def block(runner: OneSequence) -> CpuMtp:
    return runner.load_mtp()


def states(count: int, name: str = "moe") -> np.ndarray:
    hidden_size = 4 * 256 if name.startswith("streams") else 256
    return np.random.default_rng(count).normal(size=(count, hidden_size)).astype(np.float32)


def appended(sequence: MtpSequence, ids: list[int], hidden: np.ndarray) -> np.ndarray:
    """The output after the last row."""
    sequence.append(ids, list(hidden))
    assert sequence.last is not None
    return sequence.last.outputs


def outputs_of(sequence: MtpSequence, ids: list[int], hidden: np.ndarray) -> np.ndarray:
    """After each row."""
    return np.stack([appended(sequence, [token], hidden[i : i + 1]) for i, token in enumerate(ids)])


@pytest.mark.sharded(9)
@pytest.mark.parametrize("kv_type", ["f32", "i16", "i4"])
@pytest.mark.parametrize("name", VARIANTS)
def test_the_graph_computes_what_the_reference_defines(tmp_path: Path, name: str, kv_type: str) -> None:
    path, ids, hidden = write_variant(tmp_path, name), token_ids(6), states(6, name)
    expected = Reference(path, exact=True, kv_type=kv_type).feed_block(ids, hidden)
    with open_cpu(path, threads=2, context_length=64, kv_type=kv_type) as runner:
        sequence = runner.load_mtp().new_sequence()
        found, candidates = [], []
        for i, token in enumerate(ids):
            found.append(appended(sequence, [token], hidden[i : i + 1]))
            candidates.append(next(sequence.chain(1)))
        assert np.array_equal(found, expected.hidden)
        token_ids_, log_probs = zip(*candidates, strict=True)
        expected_ids, expected_log_probs = top_log_probs(expected.logits, 4)
        assert np.array_equal(token_ids_, expected_ids)
        assert np.allclose(log_probs, expected_log_probs, rtol=1e-5, atol=1e-5)


def test_the_window_of_the_model_is_the_window_of_the_block(path: Path) -> None:
    ids, hidden = token_ids(9), states(9)
    expected = Reference(path, exact=True, kv_type="i16", window=3).feed_block(ids, hidden)
    with open_cpu(path, threads=2, context_length=64, attention_window=3) as runner:
        found = outputs_of(runner.load_mtp().new_sequence(), ids, hidden)
    assert np.array_equal(found, expected.hidden)


@pytest.mark.sharded(of="models on the CPU")
@pytest.mark.parametrize("tier", _csrc.supported_tiers())
@pytest.mark.parametrize("threads", [1, 2])
def test_rows_do_not_depend_on_tier_threads_or_how_they_come(path: Path, tier: str, threads: int) -> None:
    count = CpuMtp.chunk_size + 9
    ids, hidden = token_ids(count), states(count)
    with open_cpu(path, threads=2, tier="generic", context_length=count) as runner:
        plain = runner.load_mtp()
        sequence = plain.new_sequence()
        expected = appended(sequence, ids, hidden)
        cached = keys_and_values(plain, sequence)
    with open_cpu(path, threads=threads, tier=tier, context_length=count) as runner:
        block = runner.load_mtp()
        sequence, start = block.new_sequence(), 0
        for size in (1, 2, 15, 16, 64, count):
            output = appended(sequence, ids[start : start + size], hidden[start : start + size])
            start += size
        assert np.array_equal(output, expected)
        assert np.array_equal(keys_and_values(block, sequence), cached)


def test_candidates_are_among_the_first_ids(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a vocabulary has more, with log-probabilities over these alone."""
    monkeypatch.setattr(cpu_mtp, "MAX_DRAFT_IDS", 40)
    ids, hidden = token_ids(6), states(6)
    logits = Reference(path, exact=True, kv_type="i16").feed_block(ids, hidden).logits
    expected_ids, expected = top_log_probs(logits[:, :40], 4)
    assert (expected_ids != top_log_probs(logits, 4)[0]).any()
    with open_cpu(path, threads=2, context_length=64) as runner:
        sequence = runner.load_mtp().new_sequence()
        for i, token in enumerate(ids):
            appended(sequence, [token], hidden[i : i + 1])
            found_ids, log_probs = next(sequence.chain(1))
            assert found_ids == expected_ids[i].tolist()
            np.testing.assert_allclose(log_probs, expected[i], rtol=1e-5, atol=1e-5)


def test_sequences_do_not_disturb_each_other(block: CpuMtp) -> None:
    ids, hidden = token_ids(20), states(20)
    expected = outputs_of(block.new_sequence(), ids, hidden)
    first, second = block.new_sequence(), block.new_sequence()
    for i, token in enumerate(ids):
        output = appended(first, [token], hidden[i : i + 1])
        second.append([7], hidden[3:4])
        assert np.array_equal(output, expected[i])


def test_rows_behind_a_truncation_never_were(block: CpuMtp) -> None:
    ids, hidden = token_ids(300), states(300)
    expected = outputs_of(block.new_sequence(), ids, hidden)
    sequence = block.new_sequence()
    sequence.append(ids, hidden)
    for length in (290, 256, 255, 40, 0):
        sequence.truncate(length)
        sequence.append([5, 6, 7], hidden[:3])
        sequence.truncate(length)
        assert sequence.length == length
        output = appended(sequence, ids[length : length + 2], hidden[length : length + 2])
        assert np.array_equal(output, expected[length + 1])


def test_a_sequence_that_is_truncated_to_none_gives_its_memory_back(block: CpuMtp) -> None:
    """Or the fourth would find no room."""
    for _ in range(4):
        sequence = block.new_sequence()
        sequence.append(token_ids(CONTEXT), states(CONTEXT))
        sequence.truncate(0)
    assert block._sequences.blocks.num_free == block._sequences.blocks.num_blocks
    assert block._sequences.states.num_free == block._sequences.states.num_blocks


def test_rows_that_cannot_be_appended_leave_the_others(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ids, hidden = token_ids(CONTEXT), states(CONTEXT)
    with open_cpu(path, threads=2, context_length=CONTEXT, cache_size=CacheSize(5, 2)) as runner:
        block = runner.load_mtp()
        sequence, other = block.new_sequence(), block.new_sequence()
        sequence.append(ids[:10], hidden[:10])
        cached = keys_and_values(block, sequence)
        for bad in (np.nan, np.inf):
            damaged = hidden[10:20].copy()
            damaged[7, 3] = bad
            with pytest.raises(GenerationFault, match="not finite"):
                sequence.append(ids[10:20], damaged)
        assert sequence.room == CONTEXT - 10
        with pytest.raises(OutOfMemoryError, match="591 rows of a draft, but 590 fit"):
            sequence.append([*ids[10:], 0], np.concatenate((hidden[10:], hidden[:1])))
        other.append(ids, hidden)
        with pytest.raises(OutOfMemoryError, match="blocks of 256 positions"):
            sequence.append(ids[10:], hidden[10:])
        other.truncate(0)
        run, calls = block._run, []

        def fail_at_the_second(*arguments: object) -> int:
            calls.append(arguments)
            if len(calls) == 2:
                raise RuntimeError("made to fail")
            return run(*arguments)

        monkeypatch.setattr(block, "_run", fail_at_the_second)
        with pytest.raises(RuntimeError, match="made to fail"):
            sequence.append(ids[10:], hidden[10:])
        assert np.array_equal(keys_and_values(block, sequence), cached)
        assert len(sequence._sequence.blocks) == 1


@pytest.mark.parametrize("name", ["moe", "tied", "own tables", "no norm of its own"])
def test_what_the_block_shares_with_the_trunk_is_there_once(tmp_path: Path, name: str) -> None:
    with open_cpu(write_variant(tmp_path, name), threads=1, context_length=64) as runner:
        block, trunk = runner.load_mtp(), runner.runner._model
        layer, is_own = block._model.layer, name == "own tables"
        assert (layer.token_embd is trunk.token_embd) != is_own
        assert (layer.output is trunk.output) != is_own
        assert (layer.output_norm is trunk.output_norm) == (name == "no norm of its own")
        tensors = runner.file.tensors.values()
        assert block.weight_bytes == sum(i.num_bytes for i in tensors if i.name.startswith("blk.4."))


def test_its_memory_is_counted(path: Path) -> None:
    """Of one attention layer for as many positions, and activations for its own, shorter runs."""
    sizes = {}
    for context in (256, 512):
        with open_cpu(path, threads=1, context_length=context) as runner:
            block = runner.load_mtp()
            assert 4 * block.cache_bytes < 3 * runner._sequences.tensors.num_bytes
            assert 0 < block.activation_bytes < runner.activation_bytes
            sizes[context] = block.cache_bytes
    assert sizes[512] == 2 * sizes[256]


def test_the_trunk_is_the_same_with_it(path: Path) -> None:
    ids = token_ids(20)
    with open_cpu(path, threads=2, context_length=64) as runner:
        expected = runner.prefill(ids)
        routed, activation_bytes = runner.topk_ids(20), runner.activation_bytes
        block = runner.load_mtp()
        block.new_sequence().append(ids, states(20))
        runner.reset()
        assert np.array_equal(runner.prefill(ids), expected)
        assert np.array_equal(runner.topk_ids(20), routed)
        assert runner.activation_bytes == activation_bytes


def test_experts_of_the_block_are_mapped_where_the_trunks_come_from_the_disk(path: Path) -> None:
    ids, hidden = token_ids(20), states(20)
    with open_cpu(path, threads=2, context_length=64) as plain:
        expected = outputs_of(plain.load_mtp().new_sequence(), ids, hidden)
        file_bytes = path.stat().st_size
        budget = plain._sequences.tensors.num_bytes + plain.activation_bytes + file_bytes - file_bytes // 4
    with open_cpu(path, threads=2, context_length=64, ram_bytes=budget) as runner:
        assert runner.disk is not None
        sequence = runner.load_mtp().new_sequence()
        runner.prefill(ids)
        assert np.array_equal(outputs_of(sequence, ids, hidden), expected)


def test_a_file_without_a_block_is_named(tmp_path: Path) -> None:
    (path,) = write_gguf(tmp_path / "trunk.gguf")
    with (
        open_cpu(path, threads=1, context_length=64) as runner,
        pytest.raises(UnsupportedError, match=r"trunk\.gguf has 0 blocks for multi-token prediction"),
    ):
        runner.load_mtp()


def test_a_damaged_norm_is_refused(tmp_path: Path) -> None:
    model = make_variant("moe")
    model.tensors["blk.4.nextn.hnorm.weight"][3] = np.nan
    (path,) = write_model(tmp_path / "damaged.gguf", model)
    with (
        open_cpu(path, threads=1, context_length=64) as runner,
        pytest.raises(InconsistentError, match=r"blk\.4\.nextn\.hnorm\.weight holds a NaN"),
    ):
        runner.load_mtp()
