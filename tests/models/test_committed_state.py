"""What a sequence holds after a commit: to the last bit what plain decoding leaves.

That is true of keys, values, convolutions and recurrent states, whatever was drafted and accepted.
"""

from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import NamedTuple

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from one_sequence import OneSequence, open_cpu, step_rows
from runner_cases import write_variant
from tree_cases import Tree, extend, prompt, random_tree

from builders import Dims, write_gguf
from coldstream.kernels.attention.cache_layout import CACHE_LAYOUTS
from coldstream.kvcache import Batch, CacheSize, Segment, Sequence
from coldstream.kvcache.batch import PathArrays
from coldstream.kvcache.cache import AttentionState, DeltaNetState
from coldstream.kvcache.sequence_cache import AcceptedPath

CONTEXT = 640
AUX_LAYERS = (0, 3)


class Held(NamedTuple):
    """Of a sequence, each by layer."""

    keys_and_values: list[bytes]
    convolutions: list[bytes]
    states: list[bytes]


def held(runner: OneSequence, sequence: Sequence) -> Held:
    cache = runner.runner._sequences
    found = Held([], [], [])
    for layer in cache.tensors.layers:
        if isinstance(layer, DeltaNetState):
            found.convolutions.append(np.asarray(layer.conv_state[sequence.state]).tobytes())
            found.states.append(np.asarray(layer.state[sequence.state]).tobytes())
        else:
            assert isinstance(layer, AttentionState)
    found.keys_and_values.extend(cache.read_block(sequence, i) for i in range(len(sequence.blocks)))
    return found


@pytest.fixture(scope="module")
def runner(tmp_path_factory: pytest.TempPathFactory) -> Iterator[OneSequence]:
    """Three recurrent layers, then one of attention."""
    path = write_variant(tmp_path_factory.mktemp("models"), "moe")
    size = CacheSize.of(8, CONTEXT, num_trees=3)
    with open_cpu(path, threads=2, context_length=CONTEXT, cache_size=size, aux_layers=AUX_LAYERS) as runner:
        yield runner


def begun(runner: OneSequence, length: int) -> Sequence:
    sequence = runner.new_sequence()
    extend(runner, sequence, prompt(length))
    return sequence


def verify(runner: OneSequence, sequence: Sequence, tree: Tree) -> np.ndarray:
    """Logits of all rows, of which none is committed yet."""
    (logits,) = runner.step(Batch((Segment(sequence, tree.token_ids, tree.parents),)))
    return np.array(logits)


def decoded(runner: OneSequence, length: int, token_ids: list[int]) -> tuple[Held, np.ndarray]:
    """What plain decoding holds after these tokens, each in a step of its own, and their features."""
    sequence, features = begun(runner, length), []
    for token in token_ids:
        step_rows(runner, [sequence], [token])
        features.append(np.array(runner.runner.features([0])[0]))
    result = held(runner, sequence)
    runner.release(sequence)
    return result, np.array(features)


@pytest.mark.sharded(of="models on the CPU")
@given(st.integers(0, 9999), st.sampled_from([0, 1, 3, 62, 255]))
@settings(max_examples=6)
def test_sp04_trap_39_trap_every_recurrent_layer_has_the_state_of_plain_decoding(
    runner: OneSequence, seed: int, length: int
) -> None:
    """Each beginning of a path, from the root alone to a leaf, of chains and of trees that fork.

    So is the output of the auxiliary layers, which drafters observe.
    """
    random = Random(seed)
    tree = next(tree for tree in iter(lambda: random_tree(random), None) if 2 < len(tree.parents) < 24)
    path = tree.path(random.choice(tree.leaves))[:6]
    for count in range(1, len(path) + 1):
        sequence = begun(runner, length)
        verify(runner, sequence, tree)
        observed = np.array(runner.runner.features(path[:count]))
        runner.commit(sequence, path[:count])
        wanted, features = decoded(runner, length, [tree.token_ids[row] for row in path[:count]])
        found = held(runner, sequence)
        assert len(found.states) == len(found.convolutions) == 3
        assert found == wanted
        assert np.array_equal(observed, features)
        runner.release(sequence)


@pytest.mark.parametrize("length", [1, 255, 256])
def test_trap_zero_accepted_leaves_every_sequence_as_it_was(runner: OneSequence, length: int) -> None:
    """The drafted one and its neighbour, all of whose drafts are rolled back at once."""
    sequences = [begun(runner, length), begun(runner, length + 2)]
    before = [held(runner, each) for each in sequences]
    tree = Tree(list(range(12)), [-1, *range(11)])
    runner.step(Batch(tuple(Segment(each, tree.token_ids, tree.parents) for each in sequences)))
    for each in sequences:
        runner.commit(each, [])
    assert [held(runner, each) for each in sequences] == before
    assert [each.length for each in sequences] == [length, length + 2]
    for each in sequences:
        runner.release(each)


def test_trap_whole_batch_rolled_back_goes_on_as_plain_decoding(runner: OneSequence) -> None:
    """Nothing is accepted of several drafts in turn, and then all of one."""
    length, accepted = 70, [5, 6, 7, 8]
    sequence = begun(runner, length)
    for seed in range(3):
        wrong = [Random(seed).randrange(256) for _ in range(9)]
        verify(runner, sequence, Tree(wrong, [-1, *range(8)]))
        runner.commit(sequence, [])
    verify(runner, sequence, Tree(accepted, [-1, 0, 1, 2]))
    runner.commit(sequence, range(4))
    assert held(runner, sequence) == decoded(runner, length, accepted)[0]
    runner.release(sequence)


@pytest.mark.parametrize("broken", ["kept", "sources"])
def test_trap_broken_rollback_shows_in_what_is_held(
    runner: OneSequence, broken: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That of recurrent layers, and that of attention: what is accepted of later drafts would not tell."""
    write = PathArrays.write

    def write_wrongly(arrays: PathArrays, accepted: AcceptedPath) -> None:
        write(arrays, accepted)
        rows = getattr(arrays.path, broken)
        rows[1 : len(accepted.rows)] -= 1  # those of the nodes that were not accepted

    sequence, tree = begun(runner, 30), Tree([1, 2, 3, 4, 5], [-1, 0, 0, 2, 2])
    verify(runner, sequence, tree)
    with monkeypatch.context() as patched:
        patched.setattr(PathArrays, "write", write_wrongly)
        runner.commit(sequence, [0, 2, 4])
    found, wanted = held(runner, sequence), decoded(runner, 30, [1, 3, 5])[0]
    is_recurrent = broken == "kept"
    assert (found.keys_and_values == wanted.keys_and_values) == is_recurrent
    assert (found.states == wanted.states) != is_recurrent
    assert (found.convolutions == wanted.convolutions) != is_recurrent
    runner.release(sequence)


@pytest.mark.parametrize("length", [0, 1, 2, 3, 4, 70])
@pytest.mark.parametrize("at", range(5))
def test_trap_38_a_fork_starts_from_its_parents_state_and_convolution(
    runner: OneSequence, length: int, at: int
) -> None:
    """A fork of five rows behind the first `at` rows of a line of six.

    Convolutions reach back three rows: they see rows of the sequence, of the shared line, and of the fork.
    """
    line, fork = [9, 8, 7, 6, 5, 4], [3, 2, 1, 0, 11]
    parents = [-1, *range(5), at - 1, *range(6, 10)]
    tree = Tree(line + fork, parents)
    sequence = begun(runner, length)
    logits = verify(runner, sequence, tree)
    alone = begun(runner, length)
    for row in tree.path(10):
        (expected,) = step_rows(runner, [alone], [tree.token_ids[row]])
        assert np.array_equal(logits[row], expected)
    runner.commit(sequence, tree.path(10))
    assert held(runner, sequence) == held(runner, alone)
    runner.release(sequence)
    runner.release(alone)


@pytest.mark.sharded(of="models on the CPU")
@pytest.mark.parametrize("kv_type", CACHE_LAYOUTS)
def test_trap_41_thousands_of_drafted_tokens_leave_no_drift(tmp_path: Path, kv_type: str) -> None:
    """States are computed in one order and width, so that nothing has to be replayed to stay exact."""
    dims = Dims(layers=2, interval=2)
    path = write_gguf(tmp_path / "tiny.gguf", "qwen35", dims=dims, quant="Q8_0")[0]
    size = CacheSize.of(2, 2400, num_trees=1)
    with open_cpu(path, threads=2, context_length=2400, cache_size=size, kv_type=kv_type) as runner:
        random, sequence, tokens = Random(kv_type), runner.new_sequence(), []
        while len(tokens) < 2100:
            tree = random_tree(random)
            verify(runner, sequence, tree)
            rows = tree.path(max(tree.leaves, key=lambda leaf: len(tree.path(leaf))))
            runner.commit(sequence, rows)
            tokens += [tree.token_ids[row] for row in rows]
        plain = runner.new_sequence()
        runner.runner.extend(plain, tokens)
        assert held(runner, sequence) == held(runner, plain)
