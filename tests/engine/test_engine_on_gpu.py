"""The engine on a GPU, whose steps are launched before their tokens are known: the answers of the CPU."""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("cuda.bindings")

from engine_clients import Client, alone, engine_of
from test_ahead_on_gpu import ALL_KINDS, GREEDY, WAYS
from test_lists_on_gpu import SEEDED, on_cpu, path

from coldstream.decoding import Outcome
from coldstream.engine import LLM
from coldstream.engine.engine import Engine
from coldstream.engine.job import Job
from coldstream.engine.limits import EngineLimits
from coldstream.engine.model_steps import LaunchedStep
from coldstream.engine.step_cost import StepCost
from coldstream.errors import DeviceError, GenerationFault
from coldstream.kernels.cuda.contents import read, write
from coldstream.kernels.sample.cuda import sample_cuda
from coldstream.kernels.sample.settings import BLOCKS_MISSED
from coldstream.models.cuda import logits
from host_device import HostDevice
from host_gpu import gpu_on

__all__ = ["path"]


@pytest.fixture(scope="module")
def models(path: Path, compiled_for_the_host: HostDevice) -> Iterator[tuple[LLM, LLM]]:
    """With experts that come and go, whose steps are distinguished: what is hardest to get right."""
    with gpu_on(compiled_for_the_host), WAYS["some experts"](path) as gpu, on_cpu(path) as cpu:
        yield gpu, cpu


def check_side_by_side(gpu: LLM, cpu: LLM, at_once: int) -> None:
    """Answers of all kinds, so many at once, some of which end while a step with their next row runs."""
    for start in range(0, len(ALL_KINDS), at_once):
        kinds = ALL_KINDS[start : start + at_once]
        wanted = [alone(cpu, [number + 1, 2, 3], params) for number, params in enumerate(kinds)]
        with engine_of(gpu.opened) as client:
            ids = [client.add([number + 1, 2, 3], params) for number, params in enumerate(kinds)]
            client.drain()
            for number, each in enumerate(ids):
                found = client.answers(each)[0][:5]
                assert found == wanted[number][0][:5], kinds[number]


@pytest.mark.sharded(of="models on a GPU")
def test_answers_side_by_side_are_those_of_the_cpu(models: tuple[LLM, LLM]) -> None:
    check_side_by_side(*models, at_once=5)


@pytest.mark.gpu
@pytest.mark.parametrize("way", WAYS)
def test_trap_26_answers_side_by_side_on_a_gpu_are_those_of_the_cpu(path: Path, way: str) -> None:
    with WAYS[way](path) as gpu, on_cpu(path) as cpu:
        for at_once in (1, 2, len(ALL_KINDS)):
            check_side_by_side(gpu, cpu, at_once)


@pytest.mark.sharded(of="models on a GPU")
def test_steps_of_answers_that_only_decode_are_launched_ahead(models: tuple[LLM, LLM]) -> None:
    gpu, cpu = models
    params = replace(GREEDY, max_tokens=8)
    wanted = [alone(cpu, [number], params)[0][1] for number in range(3)]
    with engine_of(gpu.opened) as client:
        ids = [client.add([number], params) for number in range(3)]
        client.drain()
        assert [tuple(client.tokens_so_far(each)) for each in ids] == wanted
        assert client.engine.statistics().ahead_steps == 7, "all but the first"


def test_what_steps_in_flight_cost_is_learned(
    models: tuple[LLM, LLM], monkeypatch: pytest.MonkeyPatch
) -> None:
    """From their launch, or from the end of the one before, to their own: that of a whole prompt as well."""
    now, recorded = 0.0, []

    def clock() -> float:
        nonlocal now
        now += 1.0
        return now

    def record(self: StepCost, num_rows: int, seconds: float) -> None:
        recorded.append((num_rows, seconds, now))

    monkeypatch.setattr(StepCost, "record", record)
    engine = Engine(models[0].opened, EngineLimits(), clock=clock)
    client = Client(engine, models[0].opened)
    client.add(list(range(20)), GREEDY)
    began = now
    client.drain()
    engine.close()
    assert [rows for rows, *_ in recorded] == [20, *[1] * (GREEDY.max_tokens - 1)]
    ends = [began, *(end for *_, end in recorded)]
    spans = [after - before for before, after in itertools.pairwise(ends)]
    assert [seconds for _, seconds, _ in recorded[1:]] == spans[1:]
    assert 0 < recorded[0][1] <= spans[0]


@pytest.mark.sharded(of="models on a GPU")
def test_one_that_comes_while_steps_are_in_flight_is_taken_on(models: tuple[LLM, LLM]) -> None:
    gpu, cpu = models
    params = replace(GREEDY, max_tokens=8)
    wanted = [alone(cpu, [number], params)[0][1] for number in range(3)]
    with engine_of(gpu.opened) as client:
        ids = [client.add([number], params) for number in range(2)]
        for _ in range(4):
            client.step()
        ids.append(client.add([2], params))
        client.drain()
        assert [tuple(client.tokens_so_far(each)) for each in ids] == wanted
        steps = client.engine.statistics().steps
        assert steps < 20, "they decode together"


def test_a_choice_whose_blocks_were_missed_ends_its_request_and_the_engine_goes_on(
    models: tuple[LLM, LLM], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel's own word for it, behind a choice that it has made."""
    gpu, cpu = models
    params = replace(GREEDY, max_tokens=6)
    wanted = alone(cpu, [1], params)[0][1]
    chosen = []

    def missing_once(*args: Any, **options: Any) -> None:
        sample_cuda(*args, **options)
        chosen.append(read(args[5]))
        if len(chosen) == 3:
            write(args[5], np.array([[0, BLOCKS_MISSED]], np.int32))

    monkeypatch.setattr(logits, "sample_cuda", missing_once)
    with engine_of(gpu.opened) as client:
        ids = [client.add([1], params)]
        client.drain()
        ids.append(client.add([1], params))
        client.drain()
        assert isinstance(client.error(ids[0]), DeviceError)
        assert tuple(client.tokens_so_far(ids[0])) == wanted[:2]
        assert tuple(client.tokens_so_far(ids[1])) == wanted


def test_cancel_invalidates_a_step_in_flight(models: tuple[LLM, LLM]) -> None:
    gpu, cpu = models
    params = replace(GREEDY, max_tokens=8)
    wanted = alone(cpu, [1], params)[0][1]
    with engine_of(gpu.opened) as client:
        other, victim = client.add([1], params), client.add([2], params)
        for _ in range(4):
            client.step()
        before = client.tokens_so_far(victim)
        client.engine.cancel(victim)
        client.drain()
        assert client.tokens_so_far(victim) == before
        assert client.outputs(victim)[0].finish_reason == "cancelled"
        assert tuple(client.tokens_so_far(other)) == wanted


@pytest.mark.sharded(of="models on a GPU")
@pytest.mark.parametrize("ending", ["stop string", "stop token", "length"])
def test_what_ends_in_flight_is_continued_without_re_prefill(models: tuple[LLM, LLM], ending: str) -> None:
    """After a stop string the step in flight has computed the last token too; after the others it has not."""
    gpu, cpu = models
    prompt = list(range(20))
    output = cpu.generate([prompt], replace(GREEDY, max_tokens=5))[0].outputs[0]
    params = {
        "stop string": replace(GREEDY, max_tokens=9, stop=[output.text[2:4]]),
        "stop token": replace(GREEDY, max_tokens=9, stop_token_ids=[output.token_ids[3]]),
        "length": replace(GREEDY, max_tokens=4),
    }[ending]
    with engine_of(gpu.opened) as client:
        first = client.add(prompt, params)
        client.drain()
        turn = [*prompt, *client.outputs(first)[0].token_ids, 7]
        second = client.add(turn, GREEDY)
        client.drain()
        assert client.num_reused(second) == len(turn) - (1 if ending == "stop string" else 2)
        assert client.answers(second)[0][:3] == alone(cpu, turn, GREEDY)[0][:3]


@pytest.mark.sharded(of="models on a GPU")
def test_what_ends_in_flight_is_kept_only_if_its_logits_are_finite(
    models: tuple[LLM, LLM], monkeypatch: pytest.MonkeyPatch
) -> None:
    gpu, cpu = models
    prompt = list(range(20))
    text = cpu.generate([prompt], replace(GREEDY, max_tokens=5))[0].text
    outcomes = LaunchedStep.outcomes

    def damaged(self: LaunchedStep) -> dict[Job, Outcome]:
        fault = GenerationFault("not finite")
        return {job: fault if job.is_over else outcome for job, outcome in outcomes(self).items()}

    with engine_of(gpu.opened) as client, monkeypatch.context() as patched:
        patched.setattr(LaunchedStep, "outcomes", damaged)
        first = client.add(prompt, replace(GREEDY, max_tokens=9, stop=[text[2:4]]))
        client.drain()
        second = client.add([*prompt, *client.outputs(first)[0].token_ids, 7], GREEDY)
        client.drain()
        assert client.num_reused(second) == len(prompt) - 1, "what was kept before the answer"


@pytest.mark.sharded(of="models on a GPU")
def test_a_request_that_is_cancelled_while_one_of_its_answers_is_in_flight_gives_all_memory_back(
    models: tuple[LLM, LLM],
) -> None:
    gpu, _ = models
    params = replace(SEEDED, temperature=1.0, n=2, max_tokens=30, stop=list("aeiou"))
    with engine_of(gpu.opened) as client:
        each = client.add([1, 2, 3], params)
        while not any(piece[-1].finish_reason for piece in client.pieces(each).values()):
            client.step()
        assert not client.is_over(each)
        client.engine.cancel(each)
        client.drain()
        assert sorted(output.finish_reason for output in client.outputs(each)) == ["cancelled", "stop"]


@pytest.mark.sharded(of="models on a GPU")
def test_an_interrupted_flight_is_computed_again(
    models: tuple[LLM, LLM], monkeypatch: pytest.MonkeyPatch
) -> None:
    gpu, cpu = models
    params = replace(GREEDY, max_tokens=7)
    wanted = [alone(cpu, [number], params)[0][1] for number in range(2)]
    step, calls = gpu.opened.runner.step, []

    def interrupted(batch: object) -> Sequence[np.ndarray]:
        calls.append(batch)
        if len(calls) == 4:
            raise KeyboardInterrupt
        return step(batch)  # type: ignore[arg-type]

    with engine_of(gpu.opened) as client, monkeypatch.context() as patched:
        patched.setattr(gpu.opened.runner, "step", interrupted)
        ids = [client.add([number], params) for number in range(2)]
        with pytest.raises(KeyboardInterrupt):
            client.drain()
        client.drain()
        assert [tuple(client.tokens_so_far(each)) for each in ids] == wanted
