"""Many requests on one engine: each gets what it gets alone, whatever happens to the others."""

import itertools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from random import Random

import pytest
from engine_clients import Answer, FakeClock, alone, engine_of, rows_of_steps

from bench.runners import open_cpu_runner
from builders import write_gguf
from coldstream.decoding import Logits
from coldstream.engine import LLM, OpenedModel, SamplingParams
from coldstream.engine.events import Delta, PromptProgress, Started
from coldstream.engine.limits import EngineLimits
from coldstream.engine.scheduler import QUANTUM
from coldstream.kernels.ops import BLOCK_POSITIONS
from coldstream.kvcache import CacheSize
from hash_runner import opened_with

CONTEXT = 640
ROOMY = CacheSize(num_blocks=60, num_states=40)
TIGHT = CacheSize(num_blocks=4, num_states=3)
SAMPLED = SamplingParams(seed=5, max_tokens=12, temperature=1.0, ignore_eos=True)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_gguf(tmp_path_factory.mktemp("engine") / "tiny.gguf")[0]


@contextmanager
def opened_model(path: Path, size: CacheSize = ROOMY) -> Iterator[OpenedModel]:
    runner = open_cpu_runner(path, threads=2, context_length=CONTEXT, cache_size=size)
    with LLM.from_opened(opened_with(runner, CONTEXT)) as llm:
        yield llm.opened


@pytest.fixture
def opened(path: Path) -> Iterator[OpenedModel]:
    with opened_model(path) as opened:
        yield opened


Wish = tuple[list[int], SamplingParams]


def mixed_wishes(count: int, longest: int = 300) -> list[Wish]:
    """Prompts, of which many begin as others do, and settings of many kinds."""
    random = Random(7)
    kinds = itertools.cycle(
        (
            {"temperature": 0.0},
            {"temperature": 1.0, "top_k": 0, "min_p": 0.0},
            {"n": 2},
            {"temperature": 0.0, "repetition_penalty": 1.3, "frequency_penalty": 0.5},
            {"stop": ["e", "a", "1"], "min_tokens": 3, "logprobs": 2},
            {"n": 3, "logprobs": 0, "presence_penalty": 0.7},
            {"stop_token_ids": list(range(0, 320, 9)), "temperature": 1.5, "top_p": 1.0},
        )
    )
    system = [random.randrange(256) for _ in range(longest // 2)]
    wishes = []
    for i in range(count):
        own = [random.randrange(256) for _ in range(random.randint(1, longest // 2))]
        params = SamplingParams(seed=random.randrange(2**40), max_tokens=random.randint(3, 40), **next(kinds))  # type: ignore[arg-type]
        wishes.append(((system if i % 2 else []) + own, params))
    return wishes


@pytest.fixture(scope="module")
def expected(path: Path) -> list[list[Answer]]:
    """What each of `mixed_wishes(32)` gets alone."""
    with opened_model(path) as opened:
        return [alone(LLM.from_opened(opened), *wish) for wish in mixed_wishes(32)]


@pytest.mark.sharded
@pytest.mark.parametrize("size", [ROOMY, TIGHT, CacheSize(3, 1)], ids=["roomy", "tight", "one"])
def test_32_concurrent_requests_are_each_what_they_are_alone(
    path: Path, size: CacheSize, expected: list[list[Answer]]
) -> None:
    """Arriving at random, with neighbours that are cancelled at random, twice, so that prefixes are found."""
    random = Random(3)
    with opened_model(path, size) as opened, engine_of(opened) as client:
        for _ in range(2):
            ids, doomed = {}, []
            for number, (prompt, params) in enumerate(mixed_wishes(32)):
                ids[number] = client.add(prompt, params, boundaries=(len(prompt) // 2,) if prompt[2:] else ())
                if random.random() < 0.5:
                    doomed.append(client.add(random.choice(mixed_wishes(32))[0], SAMPLED))
                for _ in range(random.randrange(3)):
                    client.step()
                if doomed and random.random() < 0.5:
                    client.engine.cancel(doomed.pop(random.randrange(len(doomed))))
            for each in doomed:
                client.engine.cancel(each)
            client.drain()
            for number, request_id in ids.items():
                assert client.answers(request_id) == expected[number]
        statistics = client.engine.statistics()
        assert statistics.cancelled_requests > 0
        assert statistics.finished_requests + statistics.cancelled_requests == len(client.events)
        assert statistics.reused_tokens > 0 or size is not ROOMY
        assert statistics.waiting == statistics.running == 0


def test_mid_drain_admission(opened: OpenedModel) -> None:
    """A request that comes while others decode has rows in the next step, and they in each of its steps."""
    llm = LLM.from_opened(opened)
    wanted = [alone(llm, [each] * 9, SAMPLED) for each in range(3)]
    with engine_of(opened) as client:
        first = [client.add([each] * 9, SAMPLED) for each in range(2)]
        for _ in range(4):
            client.step()
        steps = rows_of_steps(opened.runner)
        late = client.add([2] * 9, SAMPLED)
        reported = client.step()
        assert Started(late, 0, 9) in reported
        assert sorted(steps[0]) == [1, 1, 9]
        client.drain()
        assert all(step.count(1) >= 2 for step in steps[:6])
        assert [client.answers(each) for each in (*first, late)] == wanted


def test_continue_without_re_prefill(opened: OpenedModel) -> None:
    """A turn that extends the last one computes what is new, and the last token that was chosen."""
    llm = LLM.from_opened(opened)
    with engine_of(opened) as client:
        first = client.add(list(range(100)), SAMPLED)
        client.drain()
        turn = [*range(100), *client.outputs(first)[0].token_ids, 7, 7]
        steps = rows_of_steps(opened.runner)
        second = client.add(turn, SAMPLED)
        client.drain()
        assert client.num_reused(second) == len(turn) - 3
        assert sum(map(sum, steps)) == 3 + SAMPLED.max_tokens - 1  # type: ignore[operator]
        answers = client.answers(second)
    assert answers == alone(llm, turn, SAMPLED)


def test_a_cancelled_answer_is_continued_without_re_prefill(opened: OpenedModel) -> None:
    with engine_of(opened) as client:
        first = client.add(list(range(100)), SAMPLED)
        for _ in range(5):
            client.step()
        client.engine.cancel(first)
        client.drain()
        (output,) = client.outputs(first)
        assert output.finish_reason == "cancelled"
        turn = [*range(100), *output.token_ids, 7]
        second = client.add(turn, SAMPLED)
        client.drain()
        assert client.num_reused(second) == len(turn) - 2


def test_with_one_state_alone_a_turn_goes_on_where_the_last_one_ended(path: Path) -> None:
    """The kept prefix gives its state to the turn that begins with it."""
    with opened_model(path, CacheSize(3, 1)) as opened, engine_of(opened) as client:
        prompt, expected = list(range(100)), []
        for turn in range(3):
            each = client.add(prompt, SAMPLED)
            client.drain()
            assert client.num_reused(each) == (len(prompt) - 2 if turn else 0)
            expected.append((list(prompt), client.answers(each)))
            prompt += [*client.outputs(each)[0].token_ids, turn]
    with opened_model(path) as opened:
        for prompt, answers in expected:
            assert alone(LLM.from_opened(opened), prompt, SAMPLED) == answers


def test_no_prefix_is_kept_at_the_cost_of_an_answer_that_runs(path: Path) -> None:
    """As a sequence that shares its state with a kept prefix needs another one to go on."""
    with opened_model(path, CacheSize(20, 4)) as opened, engine_of(opened) as client:
        for each in range(4):
            client.add([each] * 100, replace(SAMPLED, max_tokens=30), boundaries=(50,))
        client.drain()
        statistics = client.engine.statistics()
        assert (statistics.preemptions, statistics.prefixes.evictions) == (0, 0)


def test_ca03_a_prompt_that_is_cancelled_half_way_leaves_nothing_that_is_not_known_to_be_finite(
    opened: OpenedModel,
) -> None:
    """No logits were seen after what was computed."""
    with engine_of(opened) as client:
        first = client.add([3] * 600, SAMPLED)
        client.step()
        client.engine.cancel(first)
        client.drain()
        second = client.add([3] * 600, SAMPLED)
        client.drain()
        assert client.num_reused(second) == 0


def test_trap_52_cancel_invalidates_stale_work(opened: OpenedModel) -> None:
    """One that comes while a step computes: what the step gives for the request is reported to nobody."""
    with engine_of(opened) as client:

        def cancel(token_ids: Sequence[int], logits: Logits) -> Logits:
            if len(token_ids) == 14:
                client.engine.cancel(victim)
            return logits

        other = client.add([1] * 9, replace(SAMPLED, seed=8))
        victim = client.add([2] * 9, replace(SAMPLED, logits_processors=[cancel]))
        client.drain()
        (output,) = client.outputs(victim)
        assert (len(output.token_ids), output.finish_reason) == (5, "cancelled")
        assert client.outputs(other)[0].finish_reason == "length"
    with engine_of(opened) as client:
        assert client.add([2] * 9, SAMPLED) == 0, "ids of another engine's requests mean nothing here"
        client.engine.cancel(1)
        client.drain()
        client.engine.cancel(0)
        assert client.engine.is_idle
        assert client.outputs(0)[0].finish_reason == "length"


def test_cancelled_before_it_began(opened: OpenedModel) -> None:
    with engine_of(opened, EngineLimits(max_running=1)) as client:
        running, waiting = (client.add([each], SAMPLED) for each in range(2))
        client.step()
        client.engine.cancel(waiting)
        client.step()
        (output,) = client.outputs(waiting)
        assert (output.token_ids, output.finish_reason) == ((), "cancelled")
        client.drain()
        assert client.outputs(running)[0].finish_reason == "length"


@pytest.mark.sharded(of="models on the CPU")
def test_batched_step_equals_single(opened: OpenedModel) -> None:
    """Greedy tokens and their log-probabilities of 24 answers side by side, to the last bit."""
    params = replace(SAMPLED, temperature=0.0, logprobs=3)
    prompts = [[each, 7 * each % 256, 3] for each in range(24)]
    llm = LLM.from_opened(opened)
    wanted = [alone(llm, prompt, params) for prompt in prompts]
    with engine_of(opened) as client:
        steps = rows_of_steps(opened.runner)
        ids = [client.add(prompt, params) for prompt in prompts]
        client.drain()
        assert [client.answers(each) for each in ids] == wanted
        assert [1] * 24 in steps


def test_answers_to_one_prompt_share_its_rows(opened: OpenedModel) -> None:
    prompt, params = list(range(200)), replace(SAMPLED, n=3)
    with engine_of(opened) as client:
        steps = rows_of_steps(opened.runner)
        each = client.add(prompt, params)
        client.drain()
        assert steps == [[200]] + [[1] * 3] * 11 + [[1] * 2], "the others have its prompt's first 199 rows"
        reused = [output.statistics.reused_tokens for output in client.outputs(each)]
        answers = client.answers(each)
    assert reused == [0, 199, 199]
    assert answers == alone(LLM.from_opened(opened), prompt, params)


@pytest.mark.sharded(of="models on the CPU")
def test_preempted_answers_are_computed_anew_with_the_same_bits(path: Path) -> None:
    """The second gives its blocks back when the first needs them; both begin with room for neither's end."""
    prompts = [[1] * (2 * BLOCK_POSITIONS - 12), [2] * (2 * BLOCK_POSITIONS - 12), [3]]
    params = replace(SAMPLED, max_tokens=30)
    with opened_model(path, TIGHT) as opened:
        llm = LLM.from_opened(opened)
        wanted = [alone(llm, prompt, params) for prompt in prompts]
        with engine_of(opened) as client:
            ids = [client.add(prompt, params) for prompt in prompts]
            client.drain()
            assert [client.answers(each) for each in ids] == wanted
            assert client.engine.statistics().preemptions > 0


@pytest.mark.sharded(of="models on the CPU")
def test_a_prompt_is_read_in_parts_beside_answers_that_go_on(opened: OpenedModel) -> None:
    """At a millisecond a row, 50 rows keep to a target of 50 ms; without others it is read at once.

    Two longer steps show that a row costs as much there.
    """
    clock = FakeClock(tick=0.0)
    with engine_of(opened, EngineLimits(target_step_ms=50), clock) as client:
        speaking = client.add([1], replace(SAMPLED, max_tokens=300))
        client.step()
        steps = rows_of_steps(opened.runner, clock, seconds_of_row=0.001)
        reading = client.add(list(range(256)) * 2, replace(SAMPLED, max_tokens=2), progress=True)
        client.drain()
        shares = [sum(step) - 1 for step in steps if sum(step) > 2]
        assert 30 < sorted(shares)[-3] <= 49
        assert all(1 in step for step in steps)
        progress = [each.done for each in client.events[reading] if isinstance(each, PromptProgress)]
        assert progress == sorted(set(progress))
        assert len(progress) > 4
        deltas = [each for each in client.events[speaking] if isinstance(each, Delta)]
        assert len(deltas) == 301
        del steps[:]
        client.add([5] * 500, SAMPLED)
        client.step()
        assert sum(steps[0]) > 400


@pytest.mark.sharded(of="models on the CPU")
def test_a_first_token_waits_for_short_steps_alone(opened: OpenedModel) -> None:
    """Also that of the last row of its prompt, of which all others are kept, beside one that is long."""
    clock = FakeClock(tick=0.0)
    with engine_of(opened, EngineLimits(target_step_ms=240), clock) as client:
        steps = rows_of_steps(opened.runner, clock, seconds_of_row=0.001)
        once = replace(SAMPLED, max_tokens=1)
        for token_id in range(20):
            client.add([token_id] * 600, once)
            client.drain()
        client.add([20] * 600, once)
        client.step()
        del steps[:]
        short = client.add([21] * 70, once)
        while not client.pieces(short):
            client.step()
        assert [sorted(step) for step in steps] == [[QUANTUM, 70]], (
            "all its rows, and the least of the long one"
        )
        again = client.add([21] * 70, once)
        while not client.pieces(again):
            client.step()
        assert 1 in steps[-1]
        assert len(steps[-1]) == 2
        assert sum(steps[-1]) <= 80, "a third of the target is 80 ms"


def test_what_rows_cost_beside_others_leaves_the_steps_of_a_prompt_alone_short(opened: OpenedModel) -> None:
    """There more is done for a row, whatever the size of the step; a lone prompt's steps tell of sizes."""
    clock = FakeClock(tick=0.0)
    with engine_of(opened, EngineLimits(target_step_ms=240), clock) as client:
        steps = rows_of_steps(opened.runner, clock, seconds_of_row=0.001, more_expensive=3.0)
        once = replace(SAMPLED, max_tokens=1)
        for token_id in range(20):
            client.add([token_id] * 600, once)
            client.step()
            client.add([token_id + 100] * 90, once)
            client.drain()
        del steps[:]
        client.add([20] * 600, once)
        client.step()
        assert sum(steps[0]) <= 96, "a third of the target is 80 ms"


def test_sc01_prompts_alternate(opened: OpenedModel) -> None:
    """A short prompt is not kept waiting by long ones before it."""
    with engine_of(opened) as client:
        for each in range(3):
            client.add([each] * 600, SAMPLED)
        short = client.add([9, 9], SAMPLED)
        client.step()
        client.step()
        assert client.pieces(short), "its first token comes with the first rows of the long ones"


def test_namespaces_share_no_prefix(opened: OpenedModel) -> None:
    with engine_of(opened) as client:
        prompt = list(range(99))
        ids = []
        for namespace in ("a", "b", "a"):
            ids.append(client.add(prompt, SAMPLED, namespace=namespace))
            client.drain()
        assert [client.num_reused(each) for each in ids] == [0, 0, 98]
        assert client.answers(ids[0]) == client.answers(ids[1]) == client.answers(ids[2])


def test_the_higher_priority_is_first(opened: OpenedModel) -> None:
    with engine_of(opened, EngineLimits(max_running=1)) as client:
        low = client.add([1], SAMPLED)
        high = client.add([2], SAMPLED, priority=5)
        while not client.is_over(high):
            client.step()
        assert not client.events[low]
        client.drain()


def test_with_one_state_alone_a_prompt_that_parts_from_a_kept_one_begins_anew(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    """Without recurrent layers a part of the longer one is found, which would not give its state up."""
    path = write_gguf(tmp_path_factory.mktemp("engine") / "attention.gguf", "qwen3moe")[0]
    prompts = [list(range(100)), [*range(60), 7, 7], [*range(80), 9]]
    with opened_model(path, CacheSize(3, 1)) as opened, engine_of(opened) as client:
        answers = []
        for prompt in prompts:
            each = client.add(prompt, SAMPLED)
            client.drain()
            answers.append(client.answers(each))
    with opened_model(path) as opened:
        assert answers == [alone(LLM.from_opened(opened), prompt, SAMPLED) for prompt in prompts]
