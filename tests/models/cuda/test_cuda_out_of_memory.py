"""CudaRunner when the device's memory is gone: refused, or an error that leaves process and runner usable."""

from pathlib import Path

import numpy as np
import pytest
from cuda_runner_cases import open_cuda, taken_memory
from one_sequence import OneSequence
from runner_cases import reference_logits, token_ids

from bench.device import no_memory_left
from builders import Dims, write_gguf
from coldstream.decoding import SamplingParams
from coldstream.engine import LLM
from coldstream.errors import OutOfMemoryError
from coldstream.kernels.cuda.device import find_gpu
from coldstream.kernels.cuda.runtime import calls
from coldstream.models.cuda import runner as cuda_runner
from coldstream.models.cuda.inputs import StepShape
from coldstream.models.cuda.limits import padded_rows
from coldstream.models.cuda.loaded_model import Loaded


@pytest.mark.gpu
@pytest.mark.alone
def test_mm01_too_little_memory_is_refused_before_anything_is_copied(tmp_path: Path) -> None:
    path = tmp_path / "tiny.gguf"
    write_gguf(path, dims=Dims())
    with taken_memory() as taken:
        with pytest.raises(OutOfMemoryError, match=r"the GPU needs .* smaller --ctx-size"):
            open_cuda(path, context_length=2**31 - 1)
        assert taken.most == 0


@pytest.mark.gpu
@pytest.mark.alone
def test_mm03_memory_taken_away_in_mid_run_is_an_error_and_not_the_end(moe_path: Path) -> None:
    prompts = [token_ids(size) for size in sorted({padded_rows(count) for count in range(17, 2049)})]

    def run_all(runner: OneSequence) -> None:
        for prompt in prompts:  # each is a graph of its own
            runner.reset()
            runner.prefill(prompt)

    with open_cuda(moe_path, context_length=2048) as runner:
        expected = runner.prefill(prompts[0])
        with no_memory_left():
            with pytest.raises(OutOfMemoryError, match=r"memory ran out, 0.0 GiB are free.*--ctx-size"):
                run_all(runner)
            assert runner.position == 0
            with pytest.raises(OutOfMemoryError, match="the GPU needs"):
                open_cuda(moe_path)
            # What has its memory goes on.
            assert np.array_equal(runner.prefill(prompts[0]), expected)
        run_all(runner)
    with LLM(moe_path, device="cuda", ctx_size=64) as llm:
        (output,) = llm.generate([token_ids(5)], SamplingParams(temperature=0, max_tokens=3, ignore_eos=True))
        assert len(output.token_ids) == 3


@pytest.mark.gpu
@pytest.mark.alone
def test_memory_taken_away_while_a_model_is_loaded(moe_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = find_gpu()
    with monkeypatch.context() as patch, no_memory_left(), taken_memory() as taken:
        patch.setattr(cuda_runner, "find_gpu", lambda: gpu)
        with pytest.raises(OutOfMemoryError, match="memory ran out") as caught:
            open_cuda(moe_path)
        assert taken.now() == 0, caught
    open_cuda(moe_path).close()


@pytest.mark.gpu
@pytest.mark.alone
def test_a_capture_that_runs_out_of_memory_leaves_the_runner_usable(
    moe_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids = token_ids(40)
    step, num_steps = Loaded.kept_step, 0

    def failing_when_captured(loaded: Loaded, shape: StepShape) -> object:
        nonlocal num_steps
        num_steps += 1
        result = step(loaded, shape)
        if num_steps == 2:
            assert calls.is_capturing()
            raise calls.out_of_memory()
        return result

    with open_cuda(moe_path) as runner:
        with monkeypatch.context() as patch:
            patch.setattr(Loaded, "kept_step", failing_when_captured)
            with pytest.raises(OutOfMemoryError, match="memory ran out") as caught:
                runner.prefill(ids)
        assert runner.position == 0, caught  # the error, which is still held here, holds nothing itself
        first = runner.prefill(ids)
        runner.reset()
        assert np.array_equal(runner.prefill(ids), first)
        assert np.array_equal(first, reference_logits(moe_path, ids, "i16")[-1].numpy())
