"""What the clients of a server with a full-size file find, over servers that are played."""

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any

import httpx2
import pytest

from bench.serving.gpu_serving import command, parser
from bench.serving.serving_equality import KINDS, SHARED_TOKENS, Wish, alone, together, wishes
from bench.serving.walking_clients import (
    Streamed,
    WrongTextError,
    conversation,
    first_ids,
    load,
    load_figures,
    stream,
)

VOCAB = 4000
Handler = Callable[[httpx2.Request], Any]


def over(handler: Handler, wanted: Callable[[httpx2.AsyncClient], Awaitable[Any]]) -> Any:
    """What a coroutine over a client of a played server gives."""

    async def run() -> Any:
        transport = httpx2.MockTransport(handler)
        async with httpx2.AsyncClient(base_url="http://played", transport=transport) as http:
            return await wanted(http)

    return asyncio.run(run())


def walking(request: httpx2.Request, *, skips: bool = False) -> httpx2.Response:
    """Goes on with the ids behind the prompt; `skips` leaves one out."""
    if request.url.path == "/props":
        return httpx2.Response(200, json={"cache": {"prefixes": {"repeated_tokens": 5}}})
    body = json.loads(request.content)
    ids = [body["prompt"][-1] + 1 + skips + i for i in range(body["max_tokens"])]
    details = {"prompt_tokens_details": {"cached_tokens": 3}}
    events: list[dict[str, Any]] = [{"choices": [{"text": f" {each}"}]} for each in ids]
    events.append({"choices": [{"text": ""}], "usage": details})
    lines = "".join(f"data: {json.dumps(event)}\n\n" for event in events)
    return httpx2.Response(200, text=f": still here\n\n{lines}data: [DONE]\n\n")


def test_a_text_that_leaves_its_walk_is_no_figure() -> None:
    found = over(walking, lambda http: stream(http, range(7, 12), 4))
    assert len(found.times_s) == 4
    assert found.usage["prompt_tokens_details"]["cached_tokens"] == 3
    with pytest.raises(WrongTextError, match="after 11 came"):
        over(lambda request: walking(request, skips=True), lambda http: stream(http, range(7, 12), 4))


def test_each_turn_extends_the_prompt_and_change_a_line_of_it() -> None:
    prompts: list[list[int]] = []

    def noting(request: httpx2.Request) -> httpx2.Response:
        if request.url.path != "/props":
            prompts.append(json.loads(request.content)["prompt"])
        return walking(request)

    turns = over(noting, lambda http: conversation(http, 2000, 400, VOCAB))
    begun, second, third, *changed = prompts
    assert len(begun) == 400
    assert second[:424] == [*begun, *(begun[-1] + 1 + i for i in range(24))]
    assert third[: len(second)] == second
    places = [
        [at for at, (old, new) in enumerate(zip(begun, each, strict=True)) if old != new] for each in changed
    ]
    assert [place[0] for place in places] == [384, 288, 192, 96, 0]
    assert all(place == list(range(place[0], place[0] + 8)) for place in places)
    assert [each.what for each in turns[3:]] == [f"changed line at {at}%" for at in (100, 75, 50, 25, 0)]
    assert {(each.reused_tokens, each.replayed_tokens) for each in turns} == {(3, 0)}


def test_a_load_counts_what_came_between_two_moments() -> None:
    early = Streamed(0.0, (0.5, 1.0, 1.1, 1.3), {})  # begins before, so its first token is not counted
    late = Streamed(1.0, (1.25, 1.5, 2.0), {})  # its last token comes too late
    found = load_figures([early, late], start=1.0, end=2.0)
    assert found["tok_s"] == pytest.approx(5)
    assert found["answers"] == 1
    assert found["first_token_ms"]["p50"] == pytest.approx(250)
    assert found["between_ms"]["p50"] == pytest.approx(200)  # of 100, 200 and 250
    with pytest.raises(RuntimeError, match="longer"):
        load_figures([early], start=1.0, end=2.0)


def test_clients_of_a_load_do_not_all_begin_again_at_once() -> None:
    counts: list[int] = []

    async def noting(request: httpx2.Request) -> httpx2.Response:
        counts.append(json.loads(request.content)["max_tokens"])
        await asyncio.sleep(0)
        return walking(request)

    found = over(noting, lambda http: load(http, first_ids(VOCAB, 40), 4, 32, 8, 0.2))
    assert found["clients"] == 4
    assert sorted(counts[:4]) == [2, 4, 6, 8]
    assert set(counts[4:]) == {8}


def test_texts_begin_at_ids_of_their_own() -> None:
    ids = first_ids(248_320, 640)
    found = [next(ids) for _ in range(1000)]
    assert len(set(found)) == 1000
    assert min(found) >= 1000
    assert max(found) + 640 < 248_319


def test_requests_are_of_all_kinds_and_half_begin_alike() -> None:
    asked = wishes(32, VOCAB, 1000, seed=5)
    assert asked == wishes(32, VOCAB, 1000, seed=5)
    prompts = [each.body["prompt"] for each in asked if "prompt" in each.body]
    shared = [prompt for prompt in prompts if prompt[:SHARED_TOKENS] == list(range(300, 300 + SHARED_TOKENS))]
    assert 8 <= len(shared) <= 24
    assert all(max(prompt) < VOCAB and len(prompt) <= SHARED_TOKENS + 1000 for prompt in prompts)
    assert sum("response_format" in each.body for each in asked) == 32 // len(KINDS) + (32 % len(KINDS) > 4)
    assert any(prompt[-8:] == prompt[-72:-64] for prompt in prompts), "one that repeats itself"


def echoing(request: httpx2.Request) -> httpx2.Response:
    """An answer that depends on the whole request."""
    body = json.loads(request.content)
    if body.get("stream"):
        return httpx2.Response(200, text="data: {}\n\n" * 20)
    text = json.dumps([request.url.path, body], sort_keys=True)
    counts = {"prompt_tokens": 3, "completion_tokens": 4, "total_tokens": 7}
    return httpx2.Response(200, json={"id": id(request), "choices": [{"text": text}], "usage": counts})


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bench.serving.serving_equality.SPREAD_S", 0.0)


@pytest.mark.usefixtures("impatient")
def test_one_answer_that_differs_once_is_found() -> None:
    asked = wishes(8, VOCAB, 100, seed=1)
    expected = over(echoing, lambda http: alone(http, asked))
    assert over(echoing, lambda http: together(http, asked, expected, 3, seed=2)) == []
    times = {"seen": 0}

    def wrong_once(request: httpx2.Request) -> httpx2.Response:
        response = echoing(request)
        if json.loads(request.content) != asked[5].body:
            return response
        times["seen"] += 1
        if times["seen"] != 2:
            return response
        answer = response.json()
        answer["usage"]["completion_tokens"] += 1
        return httpx2.Response(200, json=answer)

    (found,) = over(wrong_once, lambda http: together(http, asked, expected, 3, seed=2))
    assert (found.repeat, found.place) == (1, 5)
    assert found.found["completion_tokens"] == found.expected["completion_tokens"] + 1


@pytest.mark.usefixtures("impatient")
def test_some_neighbours_are_given_up_and_a_refusal_is_no_answer() -> None:
    asked = [Wish("/v1/completions", {"prompt": [1], "seed": number}) for number in range(8)]
    streams = []

    def noting(request: httpx2.Request) -> httpx2.Response:
        if json.loads(request.content).get("stream"):
            streams.append(request)
        return echoing(request)

    expected = over(noting, lambda http: alone(http, asked))
    assert over(noting, lambda http: together(http, asked, expected, 4, seed=2)) == []
    assert 0 < len(streams) < 32
    with pytest.raises(httpx2.HTTPStatusError):
        over(lambda _: httpx2.Response(503), lambda http: together(http, asked, expected, 1, seed=2))


def test_the_command_says_what_was_asked_otherwise() -> None:
    options = parser().parse_args(
        ["dir/full.gguf", "--vram", "auto", "7G", "--clients", "1,2", "--parts", "load"]
    )
    assert command(options) == "python -m bench.serving.gpu_serving full.gguf --vram auto 7G --clients 1,2"
    assert command(parser().parse_args(["full.gguf"])) == "python -m bench.serving.gpu_serving full.gguf"
