"""The real engine process on the demo model: the same answers as in this process, and what ends it."""

import asyncio
import os
import re
import signal
import socket
import subprocess
import sys
from base64 import b64decode
from collections.abc import AsyncIterator, Iterator
from dataclasses import fields, replace
from pathlib import Path
from random import Random
from typing import Any

import psutil
import pytest
import pytest_asyncio

from coldstream import __version__
from coldstream.assets import demo_model_path
from coldstream.decoding import SamplingParams
from coldstream.engine import LLM, CompletionOutput, EngineConfig
from coldstream.engine.answer import completion
from coldstream.engine.engine_statistics import EngineStatistics, LiveState
from coldstream.engine.events import Delta, Event, Failed, PromptProgress, Started
from coldstream.engine.limits import EngineLimits
from coldstream.engine.submission import Submission
from coldstream.errors import ConfigError, InvalidRequestError, ModelNotFoundError, OutOfMemoryError
from coldstream.kvcache import CacheSize, PrefixStatistics
from coldstream.server import engine_process, supervisor
from coldstream.server.client import ServiceUnavailable
from coldstream.server.codec import decode
from coldstream.server.event_stream import EventStream
from coldstream.server.messages import (
    Alive,
    Cancel,
    Died,
    FromEngine,
    Open,
    PromptCache,
    ToEngine,
    framed,
    payload_length,
)
from coldstream.server.restarts import RestartPolicy
from coldstream.server.supervisor import Supervisor

CONFIG = EngineConfig(str(demo_model_path()), ctx_size=1024, threads=1, device="cpu")
PROMPTS = ["import os\n", "def main(", "class Point:\n    def __init__(self", "for i in"]

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(demo_model_path(), ctx_size=1024, threads=1, device="cpu") as llm:
        yield llm


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def engine() -> AsyncIterator[Supervisor]:
    """One process for the tests of this file, which end it now and then."""
    policy = RestartPolicy(first_delay_s=0.0, max_delay_s=0.0, max_deaths=100)
    async with Supervisor(CONFIG, EngineLimits(), name="demo", policy=policy) as supervisor:
        await supervisor.opened()
        yield supervisor


_ids = iter(range(10**9))


async def begin(
    engine: Supervisor, prompt: str, params: SamplingParams, progress: bool = False
) -> EventStream:
    request = engine.model.requests.of_prompt(prompt, "prompt", params)
    return await engine.submit(Submission(next(_ids), request, progress=progress))


async def rest(stream: EventStream) -> list[Event]:
    return [event async for event in stream]


async def submit(
    engine: Supervisor, prompt: str, params: SamplingParams, progress: bool = False
) -> list[Event]:
    return await rest(await begin(engine, prompt, params, progress))


def outputs(events: list[Event], n: int = 1) -> list[CompletionOutput]:
    pieces = [event for event in events if isinstance(event, Delta)]
    return [
        completion(index, [event.piece for event in pieces if event.index == index]) for index in range(n)
    ]


def same(one: CompletionOutput, other: CompletionOutput) -> bool:
    return (one.text, one.token_ids, one.finish_reason, one.stop_reason, one.logprobs) == (
        *(other.text, other.token_ids, other.finish_reason),
        *(other.stop_reason, other.logprobs),
    )


@pytest.mark.sharded(of="processes")
async def test_concurrent_answers_equal_those_of_the_library(engine: Supervisor, llm: LLM) -> None:
    settings = [
        SamplingParams(temperature=0, max_tokens=20, logprobs=2),
        SamplingParams(seed=7, max_tokens=30, n=2),
        SamplingParams(seed=8, max_tokens=30, stop=[")"], logit_bias={5: 3.0}),
        SamplingParams(seed=9, max_tokens=25, presence_penalty=0.5),
    ]
    pairs = [(prompt, params) for prompt in PROMPTS for params in settings]
    expected = [llm.generate(prompt, params)[0] for prompt, params in pairs]
    answers = await asyncio.gather(*(submit(engine, *pair) for pair in pairs))
    for (_, params), events, wanted in zip(pairs, answers, expected, strict=True):
        assert isinstance(events[0], Started)
        for got, each in zip(outputs(events, params.n), wanted.outputs, strict=True):
            assert same(got, each)


async def test_the_model_is_known_without_being_opened(engine: Supervisor, llm: LLM) -> None:
    model = engine.model
    assert (model.name, model.ctx_size) == ("demo", 1024)
    assert model.default_sampling == llm.opened.default_sampling
    assert model.facts.fingerprint == llm.opened.runner.file.fingerprint
    assert model.has_chat_template == llm.opened.has_chat_template
    messages = [{"role": "user", "content": "hello"}]
    request = model.requests.of_chat(messages, SamplingParams(seed=1), {})
    own = llm.opened.chat_template.render(messages)
    assert request.prompt_token_ids == tuple(llm.opened.tokenizer.encode_segments(own.segments))


async def test_statistics_come_from_the_process(engine: Supervisor) -> None:
    await submit(engine, "a", SamplingParams(max_tokens=2))
    before = await engine.statistics()
    await submit(engine, "b", SamplingParams(max_tokens=3, seed=1, ignore_eos=True))
    after = await engine.statistics()
    assert after.generated_tokens - before.generated_tokens == 3
    assert (after.running, after.waiting) == (0, 0)


async def test_nothing_is_kept_of_a_question_that_was_answered_or_given_up(
    engine: Supervisor, monkeypatch: pytest.MonkeyPatch
) -> None:
    for _ in range(3):
        await engine.live()
    running = engine._running
    assert running is not None
    assert not running.counts
    monkeypatch.setattr(supervisor, "COUNT_S", 0.0)
    for _ in range(3):
        await engine.live()  # what was reported last
    assert not running.counts
    await submit(engine, "a", SamplingParams(max_tokens=2))
    assert not running.taken
    assert not running.streams


async def test_the_live_state_has_the_uses_of_experts(engine: Supervisor, llm: LLM) -> None:
    await submit(engine, "a", SamplingParams(max_tokens=5, ignore_eos=True))
    live = await engine.live()
    assert live.statistics == await engine.statistics()
    assert live.experts is not None
    spec = llm.opened.runner.spec
    assert (len(live.experts.layers), live.experts.num_experts) == (spec.num_layers, spec.num_experts)
    uses = b64decode(live.experts.uses)
    assert len(uses) == spec.num_layers * spec.num_experts
    assert any(uses)
    assert live.experts.resident is None


async def test_progress_of_a_long_prompt_is_reported(engine: Supervisor) -> None:
    events = await submit(engine, "x = 1\n" * 190, SamplingParams(max_tokens=1), progress=True)
    reported = [event for event in events if isinstance(event, PromptProgress)]
    assert all(event.done <= event.total for event in reported)


async def test_a_prompt_beyond_the_context_is_refused(engine: Supervisor) -> None:
    request = engine.model.requests.of_prompt("a", "prompt", SamplingParams(max_tokens=1))
    wrong = type(request)(**{**vars(request), "prompt_token_ids": (1,) * 1024})
    with pytest.raises(InvalidRequestError):
        await engine.submit(Submission(next(_ids), wrong))
    outside = type(request)(**{**vars(request), "prompt_token_ids": (10**6,)})
    with pytest.raises(InvalidRequestError):
        await engine.submit(Submission(next(_ids), outside))


async def test_functions_cannot_cross_and_the_error_says_so(engine: Supervisor) -> None:
    params = SamplingParams(logits_processors=[lambda ids, logits: logits])
    request = engine.model.requests.of_prompt("a", "prompt", params)
    with pytest.raises(InvalidRequestError, match="no data"):
        await engine.submit(Submission(next(_ids), request))


@pytest.mark.sharded(of="processes")
async def test_pr02_kill_9_under_load_gives_each_request_one_error_and_service_returns(
    engine: Supervisor, llm: LLM
) -> None:
    """Before its first event, at that one, and at a random one in the middle."""
    params = SamplingParams(seed=3, max_tokens=900, ignore_eos=True)
    for num_events in (0, 1, Random(3).randint(2, 300)):
        restarts = (await engine.health()).restarts
        streams = [await begin(engine, prompt, params) for prompt in PROMPTS * 2]
        for _ in range(num_events):
            await anext(streams[0])
        assert engine.pid is not None
        os.kill(engine.pid, signal.SIGKILL)
        for events in await asyncio.gather(*map(rest, streams)):
            assert isinstance(events[-1], Failed)
            assert isinstance(events[-1].error, ServiceUnavailable)
            assert events[-1].error.retry_after_s >= 1
            assert sum(isinstance(event, Failed) for event in events) == 1
        while (health := await engine.health()).state != "ready":
            assert health.retry_after_s >= 1
            await asyncio.to_thread(os.sched_yield)
        assert health.restarts == restarts + 1
        short = SamplingParams(temperature=0, max_tokens=12)
        (after,) = outputs(await submit(engine, PROMPTS[0], short))
        assert same(after, llm.generate(PROMPTS[0], short)[0].outputs[0])


@pytest.mark.sharded(of="processes")
async def test_sc09_a_process_that_was_suspended_goes_on_where_it_was(engine: Supervisor, llm: LLM) -> None:
    params = SamplingParams(seed=5, max_tokens=60, ignore_eos=True)
    restarts = (await engine.health()).restarts
    streams = [await begin(engine, prompt, params) for prompt in PROMPTS]
    assert isinstance(await anext(streams[0]), Started)
    assert engine.pid is not None
    process = psutil.Process(engine.pid)
    process.suspend()
    while process.status() != psutil.STATUS_STOPPED:
        await asyncio.sleep(0)
    late = asyncio.create_task(submit(engine, PROMPTS[0], params))
    await asyncio.sleep(0)
    assert (await engine.health()).state == "ready"
    process.resume()
    answers = [*await asyncio.gather(*map(rest, streams)), await late]
    for prompt, events in zip([*PROMPTS, PROMPTS[0]], answers, strict=True):
        assert same(outputs(events)[0], llm.generate(prompt, params)[0].outputs[0])
    assert (await engine.health()).restarts == restarts


async def test_trap_52_closing_a_stream_early_frees_the_engine(engine: Supervisor) -> None:
    before = (await engine.statistics()).cancelled_requests
    stream = await begin(engine, "import", SamplingParams(seed=1, max_tokens=900, ignore_eos=True))
    assert isinstance(await anext(stream), Started)
    await stream.aclose()
    while (after := await engine.statistics()).cancelled_requests == before:
        assert after.running == 1
    assert (after.running, after.waiting) == (0, 0)


@pytest.mark.sharded(of="processes")
async def test_sigterm_and_ctrl_c_of_a_whole_group_leave_the_engine_to_its_parent(engine: Supervisor) -> None:
    pid = engine.pid
    assert pid is not None
    assert os.getpgid(pid) != os.getpgid(0)
    for number in (signal.SIGTERM, signal.SIGINT):
        os.kill(pid, number)
    await submit(engine, "a", SamplingParams(max_tokens=2))
    assert engine.pid == pid


@pytest.mark.sharded(of="processes")
async def test_prefixes_in_files_are_used_by_the_next_process_and_change_no_token(
    llm: LLM, tmp_path: Path
) -> None:
    prompt = "def double(x):\n    return 2 * x\n\n" * 40
    params = SamplingParams(temperature=0, max_tokens=12)
    (cold,) = llm.generate(prompt, params)[0].outputs
    policy = RestartPolicy(first_delay_s=0.0, max_delay_s=0.0)
    cache = PromptCache(ram_bytes=1 << 24, folder=str(tmp_path))
    async with Supervisor(CONFIG, EngineLimits(), name="demo", policy=policy, cache=cache) as engine:
        await engine.opened()
        assert same(outputs(await submit(engine, prompt, params))[0], cold)
        while (await engine.statistics()).prefixes.tiers[-1].saved == 0:
            await asyncio.sleep(0)
        for restarts in (1, 2, 3):
            assert engine.pid is not None
            os.kill(engine.pid, signal.SIGKILL)
            while (await engine.health()).restarts < restarts:
                await asyncio.to_thread(os.sched_yield)
            while (await engine.health()).state != "ready":
                await asyncio.to_thread(os.sched_yield)
            started, *rest = await submit(engine, prompt, params)
            assert isinstance(started, Started)
            assert started.num_reused > 0
            assert same(outputs(rest)[0], cold)


@pytest.mark.sharded(of="processes")
async def test_a_model_that_is_not_there_is_the_error_of_opening() -> None:
    config = EngineConfig("/nonexistent/model.gguf")
    async with Supervisor(config, EngineLimits(), name="none") as supervisor:
        with pytest.raises(ModelNotFoundError, match="no such file"):
            await supervisor.opened()


def reported(*frames: bytes, version: str = __version__) -> tuple[FromEngine, int]:
    """The last thing that an engine process says to a parent who sends these bytes, and its exit code."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        for frame in frames:
            ours.sendall(frame)
        code = engine_process.serve(theirs, engine_process.open_real, version)
        data = ours.recv(1 << 20)
    while len(data) > (end := 4 + payload_length(data[:4])):
        data = data[end:]
    return decode(data[4:], FromEngine), code


@pytest.mark.parametrize(
    "frames",
    [
        (b"\0\0\0\5hello",),
        (b"\xff\xff\xff\xff",),
        (framed(Cancel(1), ToEngine),),
        (framed(Open(CONFIG, EngineLimits(), PromptCache()), ToEngine) * 2,),
    ],
)
async def test_pr10_malformed_frames_end_the_process_with_an_error_that_is_reported(
    frames: tuple[bytes, ...],
) -> None:
    last, code = reported(*frames)
    assert isinstance(last, Died)
    assert code == last.error.exit_code != 0


async def test_kept_prefixes_in_ram_are_a_part_of_the_plan_or_refused() -> None:
    config = replace(CONFIG, ram=60 << 20)
    message = Open(config, EngineLimits(), PromptCache(ram_bytes=1 << 20))
    with engine_process.open_real(message, lambda what, done, total: None) as (engine, facts):
        assert facts.prompt_cache_bytes == engine.live().statistics.prefixes.tiers[0].budget_bytes == 1 << 20
    last, code = reported(framed(replace(message, cache=PromptCache(ram_bytes=1 << 30)), ToEngine))
    assert isinstance(last, Died)
    assert isinstance(last.error, OutOfMemoryError)
    assert re.search(
        r"^--ram: 0\.06 GiB .*, the prompt cache 1\.00, .*; try --ram \d+M, or --prompt-cache \d+M",
        str(last.error),
    )
    assert code == last.error.exit_code


async def test_pr03_the_engine_leaves_when_its_socket_closes() -> None:
    ours, theirs = socket.socketpair()
    ours.close()
    with theirs:
        assert engine_process.serve(theirs, engine_process.open_real) == 0


async def test_an_upgrade_under_a_running_server_is_named() -> None:
    """Whatever its messages look like by then."""
    last, _ = reported(b"\0\0\0\5hello", version="0.0.0")
    assert isinstance(last, Died)
    assert isinstance(last.error, ConfigError)
    assert "start the server again" in str(last.error)


_PARENT = """
import asyncio, sys
from coldstream.assets import demo_model_path
from coldstream.decoding import SamplingParams
from coldstream.engine import EngineConfig
from coldstream.engine.limits import EngineLimits
from coldstream.engine.submission import Submission
from coldstream.server.supervisor import Supervisor

async def main():
    config = EngineConfig(str(demo_model_path()), ctx_size=256, threads=1, device="cpu")
    async with Supervisor(config, EngineLimits(), name="demo") as engine:
        await engine.opened()
        if sys.argv[1] == "busy":
            params = SamplingParams(max_tokens=200, ignore_eos=True)
            request = engine.model.requests.of_prompt("a", "prompt", params)
            await anext(await engine.submit(Submission(1, request)))
        print(engine.pid, flush=True)
        await asyncio.Event().wait()

asyncio.run(main())
"""


@pytest.mark.sharded(of="processes")
@pytest.mark.parametrize("state", ["idle", "busy"])
async def test_pr03_the_engine_dies_with_its_parent(state: str) -> None:
    command = [sys.executable, "-c", _PARENT, state]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        child = psutil.Process(int(parent.stdout.readline()))
        parent.kill()
        gone, alive = psutil.wait_procs([child], timeout=10)
    assert (gone, alive) == ([child], [])


class Clock:
    """Time that passes where a test says so."""

    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now


class _EndedError(Exception):
    pass


class Silent:
    """An engine whose steps give no events, as of a long prompt, and take a quarter of a second each."""

    is_idle = False

    def __init__(self, clock: Clock, num_steps: int) -> None:
        self._clock, self._left = clock, num_steps

    def rest(self) -> bool:
        return False

    def step(self) -> list[Event]:
        if not self._left:
            raise _EndedError
        self._left -= 1
        self._clock.now += 0.25
        return []


class Idle:
    """An engine that has done `num_steps` steps, and then nothing for ever; its parent leaves in the end."""

    def __init__(self, parent: socket.socket, num_steps: int) -> None:
        self._parent, self._left, self._looks, self.num_reports = parent, num_steps, 6, 0

    @property
    def is_idle(self) -> bool:
        return not self._left

    def rest(self) -> bool:
        return False

    def check_file(self) -> None:
        self._looks -= 1
        if not self._looks:
            self._parent.shutdown(socket.SHUT_WR)

    def step(self) -> list[Event]:
        self._left -= 1
        return []

    def live(self) -> LiveState:
        self.num_reports += 1
        none = CacheSize(0, 0)
        counts: dict[str, Any] = {each.name: 0 for each in fields(EngineStatistics)}
        counts |= {"memory": none, "free_memory": none, "prefixes": PrefixStatistics(), "expert_times": None}
        return LiveState(EngineStatistics(**counts), None)


@pytest.mark.parametrize("num_steps", [0, 3])
async def test_an_engine_with_nothing_to_do_reports_its_counts_once_and_unasked(
    monkeypatch: pytest.MonkeyPatch, num_steps: int
) -> None:
    monkeypatch.setattr(engine_process, "CHECK_S", 0.0)
    parent, child = socket.socketpair()
    with parent, child:
        engine = Idle(parent, num_steps)
        with pytest.raises(engine_process._ClosedError):
            engine_process._serve(engine_process._Connection(child), engine)
        assert engine.num_reports == (num_steps > 0)


async def test_while_steps_give_no_events_the_parent_hears_of_a_healthy_engine_every_second(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = Clock()
    monkeypatch.setattr(engine_process, "time", clock)
    parent, child = socket.socketpair()
    with parent, child:
        with pytest.raises(_EndedError):
            engine_process._serve(engine_process._Connection(child), Silent(clock, 400))
        child.close()
        with parent.makefile("rb") as stream:
            reported = []
            while header := stream.read(4):
                reported.append(decode(stream.read(payload_length(header)), FromEngine))
    assert reported == [Alive()] * 100  # and not at every step
    assert RestartPolicy().hang_s > 3 * engine_process.ALIVE_S
