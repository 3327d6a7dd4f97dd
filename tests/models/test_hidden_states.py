"""Hidden states that a step leaves for drafters: what the model's head reads."""

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from one_sequence import OneSequence, open_cpu
from runner_cases import VARIANTS, token_ids, write_variant

from coldstream.errors import InvalidRequestError, UnsupportedError
from coldstream.gguf.reader import GGUFFile
from coldstream.kernels.ops import Rows
from coldstream.kernels.reference_ops import ReferenceOps
from coldstream.kvcache import Batch, CacheSize, ModelCache, Segment
from coldstream.models.causal_lm import CausalLM
from coldstream.models.read_spec import read_spec

CONTEXT = 600


def reference_hidden(path: Path, ids: Sequence[int]) -> np.ndarray:
    """By docs/arithmetic.md, of a chain from position 0."""
    with GGUFFile.open(path) as file:
        ops = ReferenceOps(exact=True)
        model = CausalLM.load(file, read_spec(file.metadata, file.tensors), ops)
    cache = ModelCache(model.spec, ops, num_states=1, context_length=len(ids))
    rows = Rows(torch.arange(len(ids), dtype=torch.int32), torch.zeros(len(ids), dtype=torch.int32))
    streams: list[torch.Tensor] = []
    token_ids = torch.tensor(ids, dtype=torch.int32)
    hidden = model.forward(token_ids, rows, cache, lambda layer, x: streams.append(x))
    has_several = model.spec.hyper_connections is not None and model.spec.drafts_by_mtp
    return (streams[-1] if has_several else hidden).numpy()


@pytest.fixture
def runner(tmp_path: Path) -> Iterator[OneSequence]:
    size = CacheSize.of(3, CONTEXT, num_trees=1)
    with open_cpu(
        write_variant(tmp_path, "moe"), threads=2, context_length=CONTEXT, cache_size=size
    ) as opened:
        yield opened


@pytest.mark.sharded(9)
@pytest.mark.parametrize("name", VARIANTS)
def test_they_are_those_of_the_definition(tmp_path: Path, name: str) -> None:
    path, ids = write_variant(tmp_path, name), token_ids(6)
    with open_cpu(path, threads=2, context_length=64) as runner:
        runner.extend(ids)
        assert np.array_equal(runner.hidden(range(6)), reference_hidden(path, ids))


def test_rows_are_given_in_any_order_of_a_batch_of_chains_and_a_tree(runner: OneSequence) -> None:
    chain, tree = token_ids(5), [7, 8, 9]
    expected = []
    for path in (chain, [4, 7], [4, 7, 8], [4, 7, 9]):
        runner.reset()
        runner.extend(path)
        expected.append(runner.hidden([len(path) - 1])[0])
    other = runner.new_sequence()
    runner.runner.extend(other, [4])
    runner.reset()
    runner.step(Batch((Segment(runner.sequence, chain), Segment(other, tree, [-1, 0, 0]))))
    order = [7, 4, 6, 5, 4]
    found = runner.hidden(np.array(order))
    assert found.dtype == np.float32
    assert np.array_equal(found, [expected[row - 4] for row in order])
    runner.commit(other, [0, 2])
    assert np.array_equal(runner.hidden(order), found)
    assert runner.hidden([]).shape == (0, runner.spec.hidden_size)


@pytest.mark.parametrize("rows", [[5], [-1], [0, 1, 5]])
def test_only_rows_of_the_last_step_have_them(runner: OneSequence, rows: list[int]) -> None:
    runner.extend(token_ids(9))
    runner.extend(token_ids(5))
    with pytest.raises(InvalidRequestError, match="the last step computed 5"):
        runner.hidden(rows)


def test_there_are_none_before_a_step_after_a_failed_one_and_after_the_logits_of_a_text(
    runner: OneSequence, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(count: int) -> None:
        raise MemoryError

    def check_none() -> None:
        with pytest.raises(InvalidRequestError, match="the last step computed 0"):
            runner.hidden([0])

    check_none()
    runner.extend([1])
    runner.runner.logits([1, 2])
    check_none()
    runner.extend([1])
    monkeypatch.setattr(runner.runner, "_run_trunk", fail)
    with pytest.raises(Exception, match="memory"):
        runner.extend([1])
    check_none()


def test_each_chunk_of_a_prompt_is_observed_before_its_progress(runner: OneSequence) -> None:
    ids, size = token_ids(CONTEXT), runner.chunk_size
    calls: list[object] = []
    observed: list[np.ndarray] = []

    def on_chunk(chunk: Sequence[int], hidden: np.ndarray) -> None:
        calls.append(list(chunk))
        observed.append(hidden.copy())

    runner.runner.extend(runner.sequence, ids, lambda done, total: calls.append(done), on_chunk)
    assert calls == [ids[:size], size, ids[size:], CONTEXT]
    runner.reset()
    for number, token in enumerate(ids[:20]):
        runner.extend([token])
        assert np.array_equal(runner.hidden([0])[0], observed[0][number])


def test_an_observer_that_fails_leaves_the_sequence_empty(runner: OneSequence) -> None:
    def fail(chunk: Sequence[int], hidden: np.ndarray) -> None:
        raise KeyError("observed")

    runner.extend([1, 2])
    with pytest.raises(KeyError, match="observed"):
        runner.runner.extend(runner.sequence, [3], None, fail)
    assert runner.position == 0


def test_a_runner_without_them_refuses_before_anything_changes(
    runner: OneSequence, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner.extend([1, 2])
    monkeypatch.setattr(type(runner.runner), "gives_hidden", False)
    with pytest.raises(UnsupportedError, match="does not give its hidden states"):
        runner.runner.extend(runner.sequence, [3], None, lambda chunk, hidden: None)
    with pytest.raises(UnsupportedError, match="does not give its hidden states"):
        runner.hidden([0])
    assert runner.position == 2
