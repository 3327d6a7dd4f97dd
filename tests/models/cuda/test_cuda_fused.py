"""Fused steps of a model and its block: drafts, tokens and states are those of the CPU; on the host too."""

from pathlib import Path

import numpy as np
import pytest
from mtp_cases import write_variant
from runner_cases import token_ids
from test_cuda_mtp import CONTEXT, Pair, open_gpu, pair, states_of

from builders import Dims
from coldstream.errors import InvalidRequestError
from coldstream.kernels.fused.reference import FusedText
from coldstream.kernels.sample.admit import MAX_ENDS
from coldstream.kernels.sample.settings import RowSettings
from coldstream.models.cuda import fused_draft as cuda_fused
from coldstream.models.cuda.fused_draft import CudaFusedRun

LENGTH, ROOT = 5, 7
SETTINGS = RowSettings(0.0, 0, 1.0, 0.0, 1.0, 0.0, 0.0, (), 3, LENGTH + 1)


def begin(both: Pair, left: int) -> CudaFusedRun:
    """Fused steps after a prompt and a root, of which the CPU's block knows as much."""
    on_gpu, on_cpu = states_of(both, LENGTH)
    ids = [*token_ids(LENGTH)[1:], ROOT]
    both.on_gpu.append(ids, on_gpu)
    both.on_cpu.append(ids, on_cpu)
    fused = both.on_gpu.begin_fused(both.gpu.sequence, FusedText(3, ROOT, left, SETTINGS, frozenset()))
    assert fused is not None
    return fused


def follow(both: Pair, rows: list[int], tokens: tuple[int, ...]) -> None:
    """The CPU computes the rows one by one, after which these tokens are the likeliest."""
    states: list[np.ndarray] = []
    for row, token in zip(rows, tokens, strict=True):
        assert int(np.argmax(both.cpu.prefill([row]))) == token
        states += both.on_cpu.keep(both.cpu.hidden(range(1)))
    both.on_cpu.append(tokens, states)


def check_fused_steps(both: Pair) -> None:
    fused, root, arrays = begin(both, 30), ROOT, both.gpu.runner._loaded.fused.arrays
    length = both.on_gpu.length
    for num_nodes in (3, 1, 0, 2, 3):
        expected = [ids[0] for ids, _ in both.on_cpu.chain(num_nodes)]
        fused.launch(num_nodes)
        accepted = fused.take()
        assert np.asarray(arrays.model_columns[1 : 1 + num_nodes]).tolist() == expected
        assert (accepted.num_drafted, accepted.fault, accepted.is_last) == (num_nodes, 0, False)
        follow(both, [root, *accepted.token_ids[:-1]], accepted.token_ids)
        root = accepted.token_ids[-1]
    num_held, _ = fused.end()
    assert both.gpu.sequence.length == both.cpu.sequence.length == LENGTH + num_held
    assert both.on_gpu.length == both.on_cpu.length == length + num_held
    assert np.array_equal(both.gpu.prefill([root]), both.cpu.prefill([root]))


@pytest.mark.sharded(of="models on a GPU")
@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize("name", ["dense", "streams, n-grams"])
def test_fused_steps_draft_what_the_host_drafts(tmp_path: Path, name: str) -> None:
    """Also where the host reads rows of n-grams for tokens that it does not know yet, beyond an indexer's
    choice.
    """
    with pair(write_variant(tmp_path, name, dims=Dims(top_k=4))) as both:
        check_fused_steps(both)


@pytest.mark.sharded(of="models on a GPU")
@pytest.mark.usefixtures("gpu")
def test_deep_contexts_have_fused_steps_of_their_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_fused, "SHORT_CONTEXT", LENGTH + 2)
    with pair(write_variant(tmp_path, "dense")) as both:
        check_fused_steps(both)


@pytest.mark.sharded(of="models on a GPU")
@pytest.mark.usefixtures("gpu")
def test_fused_steps_take_blocks_for_their_text_and_no_more(tmp_path: Path) -> None:
    """Up to the end of a text that fills the context."""
    with pair(write_variant(tmp_path, "dense")) as both:
        fused = begin(both, 3)
        fused.launch(3)
        fused.launch(3)
        first, second = fused.take(), fused.take()
        tokens = first.token_ids + second.token_ids
        assert first.num_drafted == 2
        while len(tokens) < 3:
            fused.launch(3)
            tokens += fused.take().token_ids
        assert len(tokens) == 3
        assert fused.end()[0] == 3
        sequences = both.gpu.runner._loaded.sequences
        assert len(both.gpu.sequence.blocks) == 1
        assert both.gpu.sequence.pending is None
        assert sequences.tree_rows.num_free == sequences.tree_rows.num_blocks
        fused = begin_again(both, CONTEXT - LENGTH)
        assert fused.end()[0] == 0


def begin_again(both: Pair, left: int) -> CudaFusedRun:
    both.on_gpu.truncate(0)
    both.on_cpu.truncate(0)
    return begin(both, left)


@pytest.mark.sharded(of="models on a GPU")
@pytest.mark.usefixtures("gpu")
def test_there_are_no_fused_steps_where_the_device_cannot_run_them(tmp_path: Path) -> None:
    """With nothing changed."""
    path = write_variant(tmp_path, "moe")
    with pair(path) as both:
        on_gpu, _ = states_of(both, LENGTH)
        both.on_gpu.append([*token_ids(LENGTH)[1:], ROOT], on_gpu)
        free = both.gpu.runner.free
        ends = frozenset(range(MAX_ENDS + 1))
        for text in (FusedText(3, ROOT, 1, SETTINGS, frozenset()), FusedText(3, ROOT, 9, SETTINGS, ends)):
            assert both.on_gpu.begin_fused(both.gpu.sequence, text) is None
        others = [both.gpu.runner.fork(both.gpu.sequence)]
        while both.gpu.runner.free.num_states:
            others.append(both.gpu.runner.new_sequence())
            both.gpu.runner.extend(others[-1], [1])
        text = FusedText(3, ROOT, 9, SETTINGS, frozenset())
        assert both.on_gpu.begin_fused(both.gpu.sequence, text) is None
        for other in others:
            both.gpu.runner.release(other)
        assert both.gpu.runner.free == free
        with pytest.raises(InvalidRequestError, match="no draft tree"):
            both.gpu.commit(both.gpu.sequence, [0])
    with open_gpu(path, share=0.5) as partly:
        assert partly.load_mtp().fused is None


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["moe", "dense", "own tables", "streams, n-grams"])
def test_fused_steps_on_a_gpu_draft_what_the_host_drafts(tmp_path: Path, name: str) -> None:
    with pair(write_variant(tmp_path, name)) as both:
        check_fused_steps(both)
