"""An engine with more to do than it can, and with clocks that jump."""

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from itertools import count, pairwise
from pathlib import Path

import pytest
from engine_clients import Client, FakeClock, alone, engine_of, rows_of_steps

from bench.runners import open_cpu_runner
from builders import write_gguf
from coldstream.engine import LLM, OpenedModel, SamplingParams
from coldstream.engine.limits import EngineLimits
from coldstream.errors import DeadlineError, QueueFullError
from coldstream.kvcache import Batch, CacheSize
from hash_runner import opened_with

CONTEXT = 256
NUM_TOKENS = 8
SAMPLED = SamplingParams(seed=5, max_tokens=NUM_TOKENS, temperature=1.0, ignore_eos=True)
LIMITS = EngineLimits(max_running=8, max_waiting=100)
CAPACITY = LIMITS.max_running / (NUM_TOKENS + 1)  # requests in a step
PATIENCE = 40  # steps
OVERLOADED_STEPS = 240


@pytest.fixture
def opened(tmp_path: Path) -> Iterator[OpenedModel]:
    path = write_gguf(tmp_path / "tiny.gguf")[0]
    runner = open_cpu_runner(path, threads=1, context_length=CONTEXT, cache_size=CacheSize(20, 12))
    with LLM.from_opened(opened_with(runner, CONTEXT)) as llm:
        yield llm.opened


def tokens_of_closed_loop(opened: OpenedModel, num_clients: int, num_steps: int = 60) -> int:
    """Of clients each of which asks again as soon as it is answered."""
    with engine_of(opened, LIMITS, FakeClock(tick=0.0)) as client:
        prompts = count()
        running = [client.add([next(prompts) % 250, 1], SAMPLED) for _ in range(num_clients)]
        for _ in range(num_steps):
            client.step()
            running = [
                client.add([next(prompts) % 250, 1], SAMPLED) if client.is_over(each) else each
                for each in running
            ]
        return client.engine.statistics().generated_tokens


@pytest.mark.sharded(of="models on the CPU")
def test_sc10_more_clients_never_get_less_done(opened: OpenedModel) -> None:
    """In the same number of steps; beyond the answers that fit into a step it stays as it is."""
    done = [tokens_of_closed_loop(opened, num_clients) for num_clients in (1, 2, 4, 8, 16, 64)]
    assert done[0] > 40
    assert all(more >= 1.8 * fewer for fewer, more in pairwise(done[:4]))
    assert all(later >= 0.95 * done[3] for later in done[4:])


@dataclass
class Overload:
    """What became of requests of which half as many again come as can be served."""

    refused: int = 0
    came: dict[int, int] = field(default_factory=dict)  # steps, by request
    answered: dict[int, int] = field(default_factory=dict)
    late: dict[int, int] = field(default_factory=dict)


def overloaded(opened: OpenedModel, max_waiting: int) -> Overload:
    """A step takes a second by the clock."""
    result, clock, num_asked = Overload(), FakeClock(tick=0.0), 0
    with engine_of(opened, replace(LIMITS, max_waiting=max_waiting), clock) as client:
        for step in range(OVERLOADED_STEPS):
            clock.now += 1.0
            while num_asked < 1.5 * CAPACITY * step:
                num_asked += 1
                try:
                    each = client.add([num_asked % 250, 1], SAMPLED, deadline=clock.now + PATIENCE)
                except QueueFullError:
                    result.refused += 1
                else:
                    result.came[each] = step
            for event in client.step():
                if client.is_over(each := event.request_id):
                    error = client.error(each)
                    assert error is None or isinstance(error, DeadlineError)
                    (result.late if error else result.answered)[each] = step
    return result


@pytest.mark.sharded(of="models on the CPU")
def test_sc10_a_queue_that_is_full_keeps_what_is_done_at_capacity(opened: OpenedModel) -> None:
    result = overloaded(opened, max_waiting=20)
    assert result.refused > 0
    assert not result.late
    assert all(step - result.came[each] <= PATIENCE for each, step in result.answered.items())
    second_half = sum(step >= OVERLOADED_STEPS // 2 for step in result.answered.values())
    assert second_half >= 0.9 * CAPACITY * OVERLOADED_STEPS / 2


def test_sc10_in_a_long_queue_deadlines_bound_the_wait(opened: OpenedModel) -> None:
    """And those that will be late take no time of those that can still be answered."""
    result = overloaded(opened, max_waiting=100)
    second_half = sum(step >= OVERLOADED_STEPS // 2 for step in result.answered.values())
    assert second_half >= 0.9 * CAPACITY * OVERLOADED_STEPS / 2
    assert result.late
    assert not result.refused
    ends = {**result.answered, **result.late}
    assert all(step - result.came[each] <= PATIENCE for each, step in ends.items())
    assert all(each in ends for each, step in result.came.items() if step + PATIENCE < OVERLOADED_STEPS)


def steps_of_prompt(client: Client, token_id: int = 3) -> int:
    """Until its first token, beside the answers that are under way."""
    reading = client.add([token_id] * 200, replace(SAMPLED, max_tokens=1))
    for step in count(1):
        client.step()
        if client.is_over(reading):
            return step
    raise AssertionError


@pytest.mark.sharded
@pytest.mark.parametrize("jump", [30.0, 1e7, -1e4])
def test_sc09_a_jump_of_the_clock_ends_those_past_their_deadline_alone(
    opened: OpenedModel, monkeypatch: pytest.MonkeyPatch, jump: float
) -> None:
    """As of a process that was suspended in a step, which counts as a step that took so long."""
    llm, params = LLM.from_opened(opened), replace(SAMPLED, max_tokens=150)
    wanted = alone(llm, [1, 2], params)
    clock = FakeClock(tick=0.0)
    rows_of_steps(opened.runner, clock, seconds_of_row=0.001)
    step = opened.runner.step
    with engine_of(opened, replace(LIMITS, target_step_ms=20), clock) as client:
        free = client.add([1, 2], params)
        patient = client.add([1, 2], params, deadline=clock.now + max(jump, 0) + 1000)
        soon = client.add([1, 2], params, deadline=clock.now + 10)
        for _ in range(12):
            client.step()
        steps_of_prompt(client)  # which learns what a row costs
        before = steps_of_prompt(client, 4)
        assert before > 10

        def suspended(batch: Batch) -> object:
            clock.now += jump
            return step(batch)

        with monkeypatch.context() as patched:
            patched.setattr(opened.runner, "step", suspended)
            client.add([5] * 200, replace(SAMPLED, max_tokens=1))
            client.step()
        while client.engine.statistics().running > 3 - (jump > 10):
            client.step()
        assert steps_of_prompt(client, 6) <= before + 1, "it reads no slower than before"
        client.drain()
        assert client.answers(free) == client.answers(patient) == wanted
        assert isinstance(client.error(soon), DeadlineError) == (jump > 10)
