"""On a GPU that lacks experts, the times that go to them only grow, and say so without a step's help."""

from pathlib import Path

import pytest

pytest.importorskip("cuda.bindings")

from test_ahead_on_gpu import on_partial_gpu, path

from coldstream.engine import SamplingParams
from coldstream.engine.submission import Submission
from coldstream.experts.gpu_statistics import PARTS, ExpertTimes
from coldstream.kernels.cuda.contents import clear
from host_device import HostDevice
from host_gpu import gpu_on

__all__ = ["path"]

OTHER = SamplingParams(temperature=0.0, max_tokens=12, seed=7, ignore_eos=True)


def test_times_of_two_sequences_grow_also_where_one_is_cancelled_and_a_step_was_half_done(
    path: Path, compiled_for_the_host: HostDevice
) -> None:
    with (
        gpu_on(compiled_for_the_host),
        on_partial_gpu(path) as llm,
        llm._engine.exclusively() as engine,
    ):
        reader, runner = llm._reader, llm.opened.runner
        for number, params in enumerate((OTHER, OTHER)):
            engine.add(Submission(number, reader.of_prompt([1 + number, 2, 3], "prompt", params)))
        before, number = ExpertTimes(), 0
        while not engine.is_idle:
            engine.step()
            number += 1
            if number == 4:
                engine.cancel(0)
            if number == 7:  # as after a step that failed half-way: layers have different numbers of steps
                clear(runner._partial._executor.decode.stamps[:1])  # type: ignore[attr-defined]
            if number % 3 == 0:
                continue
            now = engine.live().statistics.expert_times
            assert now is not None
            assert len(now.layers) == len(PARTS)
            assert now.timed_steps >= before.timed_steps
            assert now.cpu >= before.cpu
            assert now.copied_bytes >= before.copied_bytes
            assert all(after >= then for after, then in zip(now.layers, before.layers, strict=True))
            if number == 6:
                assert now.timed_steps > 0
            before = now
        assert before.timed_steps >= 8, "counting goes on behind the step that failed"
        assert before.copied_bytes > 0
        assert engine.statistics().expert_times is None, "asked for behind every step, it waits for none"
