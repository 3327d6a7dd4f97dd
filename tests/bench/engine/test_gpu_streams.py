"""Texts side by side: what is timed, and that each is the one it is alone."""

from itertools import count
from types import SimpleNamespace

import pytest

from coldstream import LLM
from coldstream.assets import demo_model_path

pytest.importorskip("cuda.bindings")

from bench.engine import gpu_streams
from bench.engine.gpu_streams import Walks, answers, check_walks, request_of, streams, walk


def test_texts_are_those_of_one_after_the_other_and_each_token_is_counted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """By a clock that ticks with each step, which brings a token of every text."""
    monkeypatch.setattr(gpu_streams, "time", SimpleNamespace(perf_counter=count(1.0).__next__))
    prompts = [[7, 8, 9 + number] for number in range(3)]
    with LLM(demo_model_path(), device="cpu", threads=1, ctx_size=64, parallel=3) as llm:
        found = streams(llm.opened, prompts, warm=2, timed=5, most=20)
        alone = [llm.generate([prompt], request_of(prompt, 7).params)[0].token_ids for prompt in prompts]
    assert [tuple(each[:7]) for each in found["token_ids"]] == alone
    assert found["streams"] == 3
    assert found["between_ms"] == {"p50": 1000.0, "p95": 1000.0}
    assert found["tok_s"] == 3.0


def test_whole_answers_are_timed_from_the_requests_to_the_last_token(monkeypatch: pytest.MonkeyPatch) -> None:
    """By a clock that is looked at before and after."""
    monkeypatch.setattr(gpu_streams, "time", SimpleNamespace(perf_counter=count(1.0).__next__))
    prompts = [[7, 8, 9 + number] for number in range(3)]
    with LLM(demo_model_path(), device="cpu", threads=1, ctx_size=64, parallel=3) as llm:
        seconds, texts = answers(llm.opened, prompts, 5)
        alone = [llm.generate([prompt], request_of(prompt, 5).params)[0].token_ids for prompt in prompts]
    assert seconds == 1.0
    assert list(map(tuple, texts)) == alone


def test_no_text_comes_twice_and_one_that_leaves_its_walk_is_no_figure() -> None:
    walks = Walks()
    firsts = [*walks.take(3), *walks.take(2)]
    assert len(set(firsts)) == 5
    texts = [walk(first, 8, 4) for first in firsts]
    check_walks(firsts, 8, texts)
    texts[2][-1] += 1
    with pytest.raises(RuntimeError, match="left its walk"):
        check_walks(firsts, 8, texts)


def test_a_text_that_ends_before_the_others_are_warm_is_an_error() -> None:
    with (
        LLM(demo_model_path(), device="cpu", threads=1, ctx_size=64) as llm,
        pytest.raises(RuntimeError, match="a text ended with its 7 tokens"),
    ):
        streams(llm.opened, [[7, 8, 9]], warm=2, timed=5, most=7)


def test_a_walk_goes_on_where_its_prompt_ends() -> None:
    assert walk(100, 0, 3) + walk(100, 3, 2) == [100, 101, 102, 103, 104]
