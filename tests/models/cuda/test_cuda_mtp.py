"""The block for multi-token prediction on a GPU: the CPU's outputs and drafts; on the host too."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from mtp_cases import CONTEXT, VARIANTS, write_variant
from one_sequence import OneSequence, open_cpu
from runner_cases import token_ids

from bench.runners import open_model_file, resident_plan
from coldstream.assets import demo_model_path
from coldstream.decoding.tree_builder import top_log_probs
from coldstream.errors import OutOfMemoryError, UnsupportedError
from coldstream.kernels.cuda.contents import CudaArray
from coldstream.kvcache import Batch, CacheSize, Segment
from coldstream.models.cpu.mtp import MtpSequence
from coldstream.models.cuda import mtp as cuda_mtp
from coldstream.models.cuda import mtp_block
from coldstream.models.cuda.mtp import CudaMtpSequence
from coldstream.models.cuda.mtp_block import BRANCHING
from coldstream.models.cuda.runner import CudaRunner
from coldstream.models.runner_capacity import DraftMemory
from device_arrays import array_of
from host_device import HostDevice
from host_gpu import gpu_on
from tree_plans import plan_with_trees

TREES = CacheSize.of(3, CONTEXT, num_trees=1)
NAMES = [name for name in VARIANTS if name != "floats"]
RUN_ROWS = 8  # of a run on the host, where they take long


class Pair(NamedTuple):
    """The block on both devices, beside trunks that have computed the same rows."""

    gpu: OneSequence
    cpu: OneSequence
    on_gpu: CudaMtpSequence
    on_cpu: MtpSequence


def open_gpu(path: Path, share: float | None = None) -> OneSequence:
    """share: of the experts that are in slots; None: all are on the device."""
    file, spec = open_model_file(path)
    plan = plan_with_trees(file, spec, CONTEXT, TREES, share, DraftMemory(has_mtp=True), "mtp")
    return OneSequence(CudaRunner.load(file, spec, plan, cache_size=TREES))


@contextmanager
def pair(path: Path, share: float | None = None) -> Iterator[Pair]:
    with (
        open_cpu(path, threads=1, context_length=CONTEXT, cache_size=TREES) as cpu,
        open_gpu(path, share) as gpu,
    ):
        yield Pair(gpu, cpu, gpu.load_mtp().new_sequence(), cpu.load_mtp().new_sequence())


def states_of(both: Pair, count: int) -> tuple[list[CudaArray], list[np.ndarray]]:
    """Hidden states of so many rows of a prompt, which are the same on both devices."""
    on_gpu = _states(both.gpu, both.on_gpu, count)
    on_cpu = _states(both.cpu, both.on_cpu, count)
    assert np.array_equal(np.stack(on_gpu), np.stack(on_cpu))
    return on_gpu, on_cpu


def _states(runner: OneSequence, block: CudaMtpSequence | MtpSequence, count: int) -> list[Any]:
    kept: list[Any] = []
    runner.reset()
    runner.runner.extend(
        runner.sequence, token_ids(count), None, lambda _, hidden: kept.extend(block.keep(hidden))
    )
    return kept


def check_rows_and_chains(both: Pair) -> None:
    """Runs of any length, chains in between that leave no trace, and truncations."""
    most = cuda_mtp.MAX_MTP_ROWS
    counts = (1, 3, 2, most + 1, *(() if most == RUN_ROWS else (16, 2 * most)))
    on_gpu, on_cpu = states_of(both, sum(counts))
    ids, start = token_ids(sum(counts) + 1)[1:], 0
    for count in counts:
        part = slice(start, start + count)
        both.on_gpu.append(ids[part], on_gpu[part])
        both.on_cpu.append(ids[part], on_cpu[part])
        start += count
        for steps in (1, 4):
            check_chain(both, steps)
    both.on_gpu.truncate(7)
    both.on_cpu.truncate(7)
    both.on_gpu.append(ids[7:9], on_gpu[7:9])
    both.on_cpu.append(ids[7:9], on_cpu[7:9])
    check_chain(both, 3)


def check_chain(both: Pair, steps: int) -> None:
    output = np.asarray(both.gpu.runner._loaded.mtp.last.values[0])
    assert np.array_equal(output, both.on_cpu.last.outputs)
    length = both.on_gpu.length
    found, expected = list(both.on_gpu.chain(steps)), list(both.on_cpu.chain(steps))
    assert [ids for ids, _ in found] == [ids for ids, _ in expected]
    log_probs = [values for _, values in expected]
    np.testing.assert_allclose([values for _, values in found], log_probs, rtol=1e-4, atol=1e-4)
    assert both.on_gpu.length == both.on_cpu.length == length


def check_trees(both: Pair) -> None:
    """States of a tree's rows, in any order."""
    both.gpu.prefill(token_ids(6))
    both.cpu.prefill(token_ids(6))
    rows = [3, 0, 1]
    for runner in (both.gpu, both.cpu):
        runner.step(Batch((Segment(runner.sequence, [5, 6, 7, 8], [-1, 0, 1, 0]),)))
    on_gpu = np.asarray(both.gpu.hidden(np.array(rows)))
    assert np.array_equal(on_gpu, both.cpu.hidden(np.array(rows)))
    assert np.array_equal(np.asarray(both.gpu.hidden(range(1, 3))), both.cpu.hidden(range(1, 3)))
    both.gpu.commit(both.gpu.sequence, [0, 1])


@pytest.fixture
def gpu(compiled_for_the_host: HostDevice, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for module in (cuda_mtp, mtp_block):
        monkeypatch.setattr(module, "MAX_MTP_ROWS", RUN_ROWS)
    with gpu_on(compiled_for_the_host):
        yield


@pytest.mark.sharded(of="models on a GPU")
@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize("name", ["moe", "own tables", "streams"])
def test_the_host_computes_the_cpus_rows_and_chains(tmp_path: Path, name: str) -> None:
    with pair(write_variant(tmp_path, name)) as both:
        check_rows_and_chains(both)
        check_trees(both)


@pytest.mark.sharded(of="models on a GPU")
@pytest.mark.usefixtures("gpu")
def test_the_blocks_experts_are_on_the_device_where_the_trunks_are_not(tmp_path: Path) -> None:
    with pair(write_variant(tmp_path, "moe"), share=0.5) as both:
        check_rows_and_chains(both)


@pytest.mark.sharded(of="models on a GPU")
@pytest.mark.usefixtures("gpu")
def test_deep_contexts_have_steps_of_their_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_mtp, "SHORT_CONTEXT", 4)
    with pair(write_variant(tmp_path, "dense")) as both:
        check_rows_and_chains(both)


@pytest.mark.sharded(of="models on a GPU")
@pytest.mark.usefixtures("gpu")
def test_what_fails_leaves_no_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pair(write_variant(tmp_path, "dense")) as both:
        count = RUN_ROWS + 3
        on_gpu, on_cpu = states_of(both, count)
        both.on_gpu.append([1, 2], on_gpu[:2])
        both.on_cpu.append([1, 2], on_cpu[:2])
        block, run_rows = both.on_gpu._block, []

        def fail_at_the_second(*arguments: Any) -> None:
            run_rows.append(arguments)
            if len(run_rows) == 2:
                raise RuntimeError("made to fail")

        with monkeypatch.context() as patched:
            patched.setattr(block, "_run_rows", fail_at_the_second)
            with pytest.raises(RuntimeError, match="made to fail"):
                both.on_gpu.append(token_ids(count), on_gpu)
        assert both.on_gpu.length == 2
        with pytest.raises(OutOfMemoryError, match="599 rows of a draft, but 598 fit"):
            both.on_gpu.append([0] * (CONTEXT - 1), on_gpu[:1] * (CONTEXT - 1))
        both.on_gpu.append([3], on_gpu[2:3])
        both.on_cpu.append([3], on_cpu[2:3])
        check_chain(both, 4)


@pytest.mark.usefixtures("gpu")
def test_candidates_are_among_the_first_ids(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a vocabulary has more, with log-probabilities over these alone."""
    monkeypatch.setattr(mtp_block, "MAX_DRAFT_IDS", 40)
    with pair(write_variant(tmp_path, "dense")) as both:
        on_gpu, _ = states_of(both, 3)
        both.on_gpu.append([1, 2, 3], on_gpu)
        logits = np.asarray(both.gpu.runner._loaded.mtp.model.logits(both.gpu.runner._loaded.mtp.last))
        (found,) = both.on_gpu.chain(1)
        expected_ids, expected = top_log_probs(logits[:, :40], BRANCHING)
        assert found[0] == expected_ids[0].tolist()
        np.testing.assert_allclose(found[1], expected[0], rtol=1e-4, atol=1e-4)


@pytest.mark.sharded(of="models on a GPU")
@pytest.mark.usefixtures("gpu")
def test_a_chain_ends_with_the_context(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (cuda_mtp, mtp_block):
        monkeypatch.setattr(module, "MAX_MTP_ROWS", 64)
    with open_gpu(write_variant(tmp_path, "dense")) as runner:
        sequence = runner.load_mtp().new_sequence()
        state = sequence.keep(array_of(torch.ones(1, runner.spec.hidden_size)))
        sequence.append([1] * (CONTEXT - 2), state * (CONTEXT - 2))
        assert len(list(sequence.chain(9))) == 3
        assert sequence.length == CONTEXT - 2
        sequence.truncate(0)
        mtp = runner.runner._loaded.mtp
        assert mtp.sequences.blocks.num_free == mtp.sequences.blocks.num_blocks


@pytest.mark.usefixtures("gpu")
def test_states_that_are_not_finite_show_in_the_candidates(tmp_path: Path) -> None:
    with open_gpu(write_variant(tmp_path, "dense")) as runner:
        sequence = runner.load_mtp().new_sequence()
        sequence.append([1], sequence.keep(array_of(torch.full((1, runner.spec.hidden_size), torch.nan))))
        (found, *_) = sequence.chain(1)
        assert np.isnan(found[1]).all()
        assert len(found[0]) == BRANCHING


@pytest.mark.usefixtures("gpu")
def test_outputs_of_the_trunk_are_gone_once_the_block_has_run(tmp_path: Path) -> None:
    with open_gpu(write_variant(tmp_path, "dense")) as runner:
        sequence, logits = runner.load_mtp().new_sequence(), runner.extend(token_ids(3))
        sequence.append([1], sequence.keep(runner.hidden(range(2, 3))))
        with pytest.raises(RuntimeError, match="gone"):
            np.asarray(logits)
        with pytest.raises(RuntimeError, match="gone"):
            runner.hidden(range(3))


@pytest.mark.usefixtures("gpu")
def test_a_model_that_was_loaded_without_the_block_has_none(tmp_path: Path) -> None:
    file, spec = open_model_file(write_variant(tmp_path, "dense"))
    with (
        CudaRunner.load(file, spec, resident_plan(file, spec, CONTEXT)) as runner,
        pytest.raises(UnsupportedError, match="without its block"),
    ):
        runner.load_mtp()


@pytest.mark.gpu
@pytest.mark.parametrize("name", NAMES)
def test_the_gpu_computes_the_cpus_rows_and_chains(tmp_path: Path, name: str) -> None:
    with pair(write_variant(tmp_path, name)) as both:
        check_rows_and_chains(both)
        check_trees(both)


@pytest.mark.gpu
@pytest.mark.parametrize("share", [None, 0.0, 0.5])
def test_the_demo_models_block_on_a_gpu(share: float | None) -> None:
    with pair(demo_model_path(), share) as both:
        check_rows_and_chains(both)
