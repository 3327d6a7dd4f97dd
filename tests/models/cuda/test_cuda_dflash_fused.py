"""Fused steps that a DFlash drafter drafts: tokens are the likeliest chain of what the host's drafts say."""

from pathlib import Path

import numpy as np
import pytest
import torch

pytest.importorskip("cuda.bindings")

from test_cuda_dflash import CASES, CONTEXT, device, opened_drafter, target

from coldstream.errors import OutOfMemoryError
from coldstream.kernels.draft_block.reference import likeliest_chain
from coldstream.kernels.fused.reference import FusedText
from coldstream.kernels.sample.settings import RowSettings
from coldstream.models.cuda import dflash as cuda_dflash
from coldstream.models.cuda.dflash import CudaDflashSequence
from coldstream.models.runner import ModelRunner

__all__ = ["device", "target"]
PROMPT, ROOT = [1, 2, 3, 4, 5], 7
SETTINGS = RowSettings(0.0, 0, 1.0, 0.0, 1.0, 0.0, 0.0, (), 3, len(PROMPT) + 1)


def text_of(left: int) -> FusedText:
    return FusedText(7, ROOT, left, SETTINGS, frozenset())


def chain_of(context: CudaDflashSequence, root: int, num_nodes: int) -> list[int]:
    """By the host."""
    is_causal = all(layer.is_causal for layer in context.spec.layers)
    lattice = context.draft(root, 1 + num_nodes if is_causal else context.spec.block_size, 16)
    log_probs = torch.from_numpy(lattice.log_probs)
    return likeliest_chain(torch.from_numpy(lattice.token_ids), log_probs, num_nodes)


@pytest.mark.parametrize("name", ["mixed, yarn", "causal", "second", "second, full"])
def test_fused_steps_draft_what_the_host_drafts(
    tmp_path: Path, target: Path, device: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also while another sequence's drafts come between, and while the memory of contexts grows."""
    monkeypatch.setattr(cuda_dflash, "FIRST_CONTEXT_ROWS", 8)
    with opened_drafter(tmp_path / "drafter", target, CASES[name]) as (runner, drafting):
        sequence, context, mirror = runner.new_sequence(), drafting.new_sequence(), drafting.new_sequence()
        runner.extend(sequence, PROMPT)
        for each in (context, mirror):
            each.append(runner.features(range(len(PROMPT))))
        fused = context.begin_fused(sequence, text_of(40))
        assert fused is not None
        root, arrays, features = ROOT, drafting._loaded.fused.arrays, drafting._loaded.features
        for num_nodes in (3, 1, 0, 7, 2, 4, 5):
            expected = chain_of(mirror, root, num_nodes) if num_nodes else []
            fused.launch(num_nodes)
            accepted = fused.take()
            assert np.asarray(arrays.model_columns[1 : 1 + num_nodes]).tolist() == expected
            assert (accepted.num_drafted, accepted.fault, accepted.is_last) == (num_nodes, 0, False)
            mirror.append(features.of(slice(len(accepted.token_ids))))
            root = accepted.token_ids[-1]
        num_held, state = fused.end()
        assert state is None
        assert context.length == mirror.length == sequence.length == len(PROMPT) + num_held
        assert context.has_last
        assert chain_of(context, root, 7) == chain_of(mirror, root, 7)


def begun(runner: ModelRunner, context: CudaDflashSequence) -> object:
    sequence = runner.new_sequence()
    runner.extend(sequence, PROMPT)
    context.append(runner.features(range(len(PROMPT))))
    return context.begin_fused(sequence, text_of(CONTEXT))


@pytest.mark.usefixtures("gpu")
def test_there_are_no_fused_steps_where_they_cannot_be(
    tmp_path: Path, target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With experts missing, with a context that lacks rows, and without memory for more."""
    with opened_drafter(tmp_path / "some", target, CASES["second"], share=0.5) as (runner, drafting):
        assert not drafting.new_sequence().has_fused_steps
        assert begun(runner, drafting.new_sequence()) is None
    with opened_drafter(tmp_path / "all", target, CASES["second"]) as (runner, drafting):
        context, free = drafting.new_sequence(), runner.free
        assert context.has_fused_steps
        sequence = runner.new_sequence()
        runner.extend(sequence, PROMPT)
        assert context.begin_fused(sequence, text_of(9)) is None
        context.append(runner.features(range(len(PROMPT))))

        def no_memory(*_: object, **__: object) -> None:
            raise OutOfMemoryError("out of memory")

        with monkeypatch.context() as failing:
            failing.setattr(cuda_dflash.DflashRings, "make_room", no_memory)
            assert context.begin_fused(sequence, text_of(9)) is None
        assert not context.has_last, "its rows could not be computed"
        context.truncate(0)
        context.append(runner.features(range(len(PROMPT))))
        context._compute_waiting()
        with monkeypatch.context() as failing:
            failing.setattr(cuda_dflash.DflashRings, "make_room", no_memory)
            assert context.begin_fused(sequence, text_of(9)) is None
        assert context.has_last
        assert sequence.pending is None
        runner.release(sequence)
        assert runner.free == free
