"""Prompts that begin alike compute what they share once: one after the other, in a list, and in an engine."""

from collections.abc import Sequence
from pathlib import Path

import pytest
from engine_clients import engine_of

from coldstream.engine import LLM, SamplingParams
from coldstream.engine.served_requests import MIN_SHARED
from hash_runner import HashRunner, open_hash_model
from plain_loop import plain_output

GREEDY = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)
HEADER = [7 + i % 90 for i in range(120)]
PROMPTS = [[*HEADER, 200 + each, *range(30 + each)] for each in range(6)]


def reused(llm: LLM, prompts: Sequence[list[int]]) -> list[int]:
    """Of a list; each answer is that of the plain loop."""
    outputs = llm.generate(prompts, GREEDY)
    for prompt, output in zip(prompts, outputs, strict=True):
        assert output.token_ids == plain_output(llm.opened, prompt, GREEDY).token_ids
    return [output.statistics.reused_tokens for output in outputs]


def test_a_loop_reuses_a_header_from_the_third_prompt_on(llm: LLM) -> None:
    """The second prompt shows where prompts part, and leaves a checkpoint there."""
    found = [reused(llm, [prompt])[0] for prompt in PROMPTS]
    assert found[0] == 0
    assert found[2:] == [len(HEADER)] * 4


def test_a_list_reuses_a_header_from_the_second_prompt_on(llm: LLM, runner: HashRunner) -> None:
    found = reused(llm, PROMPTS)
    assert sorted(found) == [0, *[len(HEADER)] * 5]


def test_the_same_prompt_again_computes_its_last_token(llm: LLM) -> None:
    assert reused(llm, PROMPTS[:1]) == [0]
    assert reused(llm, PROMPTS[:1]) == [len(PROMPTS[0]) - 1]
    llm.forget()
    assert sorted(reused(llm, [PROMPTS[0]] * 3)) == [0, *[len(PROMPTS[0]) - 1] * 2]


@pytest.mark.parametrize("length", [MIN_SHARED - 1, MIN_SHARED])
def test_a_short_common_part_is_not_waited_for(llm: LLM, length: int) -> None:
    prompts = [[*HEADER[:length], 250 + each, *range(40)] for each in range(3)]
    found = sorted(reused(llm, prompts))
    assert found == ([0] * 3 if length < MIN_SHARED else [0, length, length])


def test_who_is_followed_may_leave(tmp_path: Path) -> None:
    """Cancelled before it has computed the common part, the others compute it, once."""
    opened = open_hash_model(tmp_path / "tiny.gguf")
    wanted = [plain_output(opened, prompt, GREEDY).token_ids for prompt in PROMPTS]
    with engine_of(opened) as client:
        ids = [client.add(prompt, GREEDY) for prompt in PROMPTS]
        client.step()
        client.engine.cancel(ids[0])
        client.drain()
        assert client.outputs(ids[0])[0].finish_reason == "cancelled"
        assert [tuple(client.tokens_so_far(each)) for each in ids[1:]] == wanted[1:]
        assert sorted(client.num_reused(each) for each in ids[1:])[1:] == [len(HEADER)] * 4


def test_namespaces_wait_for_none_of_another(tmp_path: Path) -> None:
    opened = open_hash_model(tmp_path / "tiny.gguf")
    with engine_of(opened) as client:
        ids = [client.add(prompt, GREEDY, namespace=str(i)) for i, prompt in enumerate(PROMPTS)]
        client.step()
        assert client.engine.statistics().waiting == 0
        client.drain()
        assert [client.num_reused(each) for each in ids] == [0] * 6


def test_who_comes_when_the_common_part_is_past_computes_it(tmp_path: Path) -> None:
    opened = open_hash_model(tmp_path / "tiny.gguf")
    long = [*HEADER, *range(100)]
    with engine_of(opened) as client:
        first = client.add(long, GREEDY)
        while client.engine._served.running[:1] == [] or (
            client.engine._served.running[0].num_computed <= len(HEADER)
        ):
            client.step()
        assert client.tokens_so_far(first) == []
        second = client.add(PROMPTS[0], GREEDY)
        client.drain()
        assert tuple(client.tokens_so_far(second)) == plain_output(opened, PROMPTS[0], GREEDY).token_ids
        assert client.num_reused(second) == 0
