"""A prompt that begins with a kept prefix has the bits of one computed from its start: the bundled model."""

import inspect
import textwrap
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from bench.runners import open_cpu_runner
from builders import Dims, write_gguf
from coldstream.assets import demo_model_path
from coldstream.gguf import GGUFFile, Tokenizer
from coldstream.kvcache import (
    AttentionState,
    Batch,
    CacheSize,
    DeltaNetState,
    Demand,
    PrefixCache,
    Segment,
    Sequence,
    num_blocks_of,
)
from coldstream.models.cpu.runner import CpuRunner

NUM_DECODED = 12
SIZE = CacheSize(num_blocks=24, num_states=6, num_tree_rows=64)


@pytest.fixture(scope="module")
def runner() -> Iterator[CpuRunner]:
    with open_cpu_runner(demo_model_path(), threads=2, context_length=4096, cache_size=SIZE) as opened:
        yield opened


@pytest.fixture(scope="module")
def source_ids() -> list[int]:
    with GGUFFile.open(demo_model_path()) as file:
        tokenizer = Tokenizer.from_metadata(file.metadata)
    return tokenizer.encode(inspect.getsource(textwrap))[:3000]


@pytest.fixture
def cache(runner: CpuRunner) -> Iterator[PrefixCache]:
    cache = PrefixCache(runner, max_states=4)
    yield cache
    cache.check_integrity()
    cache.clear()
    assert runner.free == SIZE


def contents(runner: CpuRunner, sequence: Sequence) -> list[bytes]:
    """Keys, values and states of a sequence."""
    blocks, length = sequence.blocks[: num_blocks_of(sequence.length)], sequence.length
    result = []
    for layer in runner._sequences.tensors.layers:
        if isinstance(layer, AttentionState):
            for cached in layer.arrays:
                rows = np.concatenate([cached[block] for block in blocks])[:length]
                result.append(rows.tobytes())
        if isinstance(layer, DeltaNetState):
            result += [layer.state[sequence.state].tobytes(), layer.conv_state[sequence.state].tobytes()]
    return result


def continued(
    runner: CpuRunner, sequence: Sequence, ids: list[int], *, with_tree: bool = False
) -> list[bytes]:
    """Logits after a prompt and after each greedy token, then all that the sequence holds. Releases it.

    with_tree: by draft trees of which the likeliest token and another follow one another.
    """
    logits = runner.extend(sequence, ids[sequence.length :])
    result = [logits.tobytes()]
    for _ in range(NUM_DECODED):
        token = int(logits.argmax())
        if with_tree:
            (rows,) = runner.step(Batch((Segment(sequence, [token + 1, token, 7], [-1, -1, 1]),)))
            logits = rows[1].copy()
            runner.commit(sequence, [1])
        else:
            (rows,) = runner.step(Batch((Segment(sequence, [token]),)))
            logits = rows[0].copy()
        result.append(logits.tobytes())
    result += contents(runner, sequence)
    runner.release(sequence)
    return result


def through_cache(
    runner: CpuRunner, cache: PrefixCache, ids: list[int], chunk: int = 512, *, with_tree: bool = False
) -> tuple[int, list[bytes]]:
    """How many tokens were held, and what `continued` says. Makes room as it is needed."""
    prefix = cache.begin(ids)
    sequence = prefix.sequence
    for checkpoint in prefix.checkpoints:
        while sequence.length < checkpoint:
            count = min(checkpoint - sequence.length, chunk)
            need = runner.need_of([Demand(sequence, count)])
            assert cache.make_room(need)
            runner.extend(sequence, ids[sequence.length : sequence.length + count])
        cache.keep(ids, sequence)
    need = runner.need_of([Demand(sequence, len(ids) - sequence.length + NUM_DECODED)])
    assert cache.make_room(need)
    return prefix.length, continued(runner, sequence, ids, with_tree=with_tree)


def alone(runner: CpuRunner, cache: PrefixCache, ids: list[int]) -> list[bytes]:
    """What `continued` says of a prompt that nothing is known of."""
    assert cache.make_room(CacheSize(num_blocks_of(len(ids) + NUM_DECODED), 1))
    return continued(runner, runner.new_sequence(), ids)


@pytest.mark.sharded(of="models on the CPU")
@pytest.mark.parametrize(("chunk", "with_tree"), [(512, False), (100, True)])
def test_trap_54_ca01_hits_give_the_tokens_of_a_cold_run(
    runner: CpuRunner, cache: PrefixCache, source_ids: list[int], chunk: int, with_tree: bool
) -> None:
    """Miss, the whole prompt again, one token more, a part, a prompt shorter than what is kept, in turn."""
    prompts = [
        source_ids[:1800],
        source_ids[:1800],
        source_ids[:1801],
        source_ids[:1300] + source_ids[2000:2100],
        source_ids[:1300] + source_ids[2500:2700],
        source_ids[:700],
    ]
    held = []
    for ids in prompts:
        length, result = through_cache(runner, cache, ids, chunk, with_tree=with_tree)
        held.append(length)
        assert result == alone(runner, cache, ids)
    assert held == [0, 1799, 1799, 0, 1300, 0]


@pytest.mark.sharded(6)
@pytest.mark.parametrize("length", [1, 63, 255, 256, 257, 1000])
def test_ca05_a_kept_state_is_that_of_the_tokens_before_it(
    runner: CpuRunner, cache: PrefixCache, source_ids: list[int], length: int
) -> None:
    sequence = runner.new_sequence()
    runner.extend(sequence, source_ids[:length])
    cache.keep(source_ids, sequence)
    runner.extend(sequence, source_ids[length : length + 300])
    prefix = cache.begin(source_ids)
    assert prefix.length == length
    cold = runner.new_sequence()
    runner.extend(cold, source_ids[:length])
    assert contents(runner, prefix.sequence) == contents(runner, cold)
    for each in (sequence, prefix.sequence, cold):
        runner.release(each)


@pytest.mark.sharded
@pytest.mark.parametrize("count", [1, 2, 512])
def test_trap_56_the_first_tokens_after_a_hit_are_of_the_right_rows(
    runner: CpuRunner, cache: PrefixCache, source_ids: list[int], count: int
) -> None:
    """Wherever the kept prefix ends within a step of `chunk_size` rows."""
    lengths = [runner.chunk_size + offset for offset in (-1, 0, 1)]
    sequence = runner.new_sequence()
    for length in lengths:
        runner.extend(sequence, source_ids[sequence.length : length])
        cache.keep(source_ids, sequence)
    runner.release(sequence)
    for length in lengths:
        ids = source_ids[:length] + source_ids[2000 : 2000 + count]
        prefix = cache.begin(ids)
        assert prefix.length == length
        assert continued(runner, prefix.sequence, ids) == alone(runner, cache, ids)


@pytest.mark.sharded(of="models on the CPU")
def test_the_next_turn_computes_only_what_is_new(
    runner: CpuRunner, cache: PrefixCache, source_ids: list[int]
) -> None:
    """A conversation's answer is kept with its prompt, and the next turn extends both."""
    ids = source_ids[:900]
    for turn in range(3):
        prefix = cache.begin(ids, [len(ids) - 30])
        assert prefix.length == (0 if turn == 0 else len(ids) - 100)
        runner.extend(prefix.sequence, ids[prefix.length :])
        cache.keep(ids, prefix.sequence)
        runner.release(prefix.sequence)
        ids = ids + source_ids[1000 + 100 * turn : 1100 + 100 * turn]
    length, result = through_cache(runner, cache, ids)
    assert length == 1100
    assert result == alone(runner, cache, ids)


@pytest.mark.sharded(of="models on the CPU")
def test_pc02_prompts_through_a_full_cache_give_what_they_give_alone(
    runner: CpuRunner, source_ids: list[int]
) -> None:
    """Ten prompts of two keys with words of their own, twice, while memory is too small for all."""
    cache = PrefixCache(runner, max_states=4)
    ballast = runner.new_sequence()
    runner.extend(ballast, source_ids)
    cold: dict[int, list[bytes]] = {}
    for number in [*range(10), *range(10)]:
        ids = source_ids[: 256 * (number % 4)] + source_ids[100 * number : 100 * number + 150]
        _, result = through_cache(runner, cache, ids)
        if number not in cold:
            cold[number] = alone(runner, cache, ids)
        assert result == cold[number]
        cache.check_integrity()
    assert cache.statistics().hits > 0
    assert cache.statistics().evictions > 0
    cache.clear()
    runner.release(ballast)
    assert runner.free == SIZE


@pytest.mark.sharded(of="models on the CPU")
def test_a_model_without_recurrent_layers_begins_with_parts_of_prompts(tmp_path: Path) -> None:
    """The part ends within a block, which the prompt that goes on has to copy."""
    (path,) = write_gguf(tmp_path / "tiny.gguf", "qwen3moe")
    with open_cpu_runner(path, threads=2, context_length=1024, cache_size=SIZE) as runner:
        cache = PrefixCache(runner, max_states=4)
        ids = np.random.default_rng(1).integers(0, runner.spec.vocab_size, 900).tolist()
        for prompt, held in (
            (ids, 0),
            (ids[:300] + ids[500:800], 300),
            (ids, 899),
            (ids[:300], 299),
            (ids[:256] + ids[:9], 256),
        ):
            length, result = through_cache(runner, cache, prompt)
            assert length == held
            assert result == alone(runner, cache, prompt)
            cache.check_integrity()


@pytest.mark.sharded(of="models on the CPU")
@pytest.mark.parametrize("with_tree", [False, True])
def test_blocks_of_an_indexer_are_kept_with_a_prefix(tmp_path: Path, with_tree: bool) -> None:
    """Also one that a kept prompt leaves unfinished: its keys wait in the cache for those behind it."""
    (path,) = write_gguf(tmp_path / "tiny.gguf", "qwen4exp", dims=Dims(top_k=16))
    with open_cpu_runner(path, threads=2, context_length=1024, cache_size=SIZE) as runner:
        assert runner.spec.is_indexed
        cache = PrefixCache(runner, max_states=4)
        ids = np.random.default_rng(1).integers(0, runner.spec.vocab_size, 600).tolist()
        for prompt in (ids[:301], ids[:301] + ids[400:], ids):
            through_cache(runner, cache, prompt)
            length, result = through_cache(runner, cache, prompt, with_tree=with_tree)
            assert length > 0
            assert result == alone(runner, cache, prompt)
            cache.check_integrity()
        assert cache.statistics().hits > 0
