"""The benchmark of prompts whose experts are not all on the GPU, on the host."""

from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("cuda.bindings")

from bench.engine.gpu_streaming import counted_experts, shared_out_by_the_host
from bench.runners import open_model_file, partial_plan
from builders import Dims, write_gguf
from coldstream.kernels.experts.shapes import MAX_MAILBOX_ROWS, MAX_SHARED_ROWS
from coldstream.models.cuda.runner import CudaRunner
from host_device import HostDevice
from host_gpu import gpu_on

PROMPT = [7, 3, 1] * 22  # longer than MAX_MAILBOX_ROWS


def logits_behind(prompt: list[int], runner: CudaRunner) -> np.ndarray:
    sequence = runner.new_sequence()
    logits = np.array(runner.extend(sequence, prompt))
    runner.release(sequence)
    return logits


@pytest.mark.sharded(of="measurements")
def test_prompts_are_shared_out_by_the_host_only_where_that_is_asked_for(
    compiled_for_the_host: HostDevice, tmp_path: Path
) -> None:
    types, dims = {"*_exps.weight": "Q4_K"}, Dims(layers=2, interval=2)
    path = write_gguf(tmp_path / "tiny.gguf", types=types, dims=dims)[0]
    file, spec = open_model_file(path)
    sizes = {"context_length": 256, "chunk_size": 128, "ring_bytes": 2**23}
    plan = partial_plan(file, spec, 0, **sizes, threads=2, streamed=0.5)
    with gpu_on(compiled_for_the_host), CudaRunner.load(file, spec, plan) as runner:
        found = []
        with shared_out_by_the_host(runner) as is_other:
            assert is_other
            assert runner.limits.shared_rows == MAX_MAILBOX_ROWS
            found.append(logits_behind(PROMPT, runner))
            counted = counted_experts(runner)
            assert counted["wanted"] > 0
        assert runner.limits.shared_rows == MAX_SHARED_ROWS
        found.append(logits_behind(PROMPT, runner))
        assert counted_experts(runner) == counted
        assert np.array_equal(*found)
