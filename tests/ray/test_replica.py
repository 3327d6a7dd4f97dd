"""A replica by itself, without Ray: what it says of submissions, and of its own end."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from coldstream.decoding import SamplingParams
from coldstream.engine.engine import Engine
from coldstream.engine.events import Delta, Failed, Started
from coldstream.engine.limits import EngineLimits
from coldstream.engine.submission import Submission
from coldstream.errors import (
    ContextFullError,
    DeadlineError,
    GenerationFault,
    ModelChangedError,
    QueueFullError,
)
from coldstream.ray.messages import ReplicaState
from coldstream.ray.options import ServiceOptions
from coldstream.ray.replica import EngineReplica
from coldstream.server.client import Health
from coldstream.server.codec import decode, encode
from coldstream.server.messages import Accepted, Died, FromEngine, Refused
from coldstream.server.restarts import RestartPolicy
from http_serving import CTX_SIZE

ARGS = {"engine": {"ctx_size": CTX_SIZE, "threads": 1, "device": "cpu"}}
ENDLESS = SamplingParams(ignore_eos=True)


@pytest.fixture
def replica() -> Iterator[EngineReplica]:
    options = replace(ServiceOptions.from_args(ARGS), limits=EngineLimits(max_running=1, max_waiting=1))
    replica = EngineReplica(options, "one")
    yield replica
    for _ in range(2):
        replica.close()
    with pytest.raises(ValueError, match="is closed"):
        replica._opened.runner.file.descriptor(0)


def submission(
    replica: EngineReplica, request_id: int = 1, params: SamplingParams | None = None
) -> Submission:
    params = params or SamplingParams(max_tokens=8, ignore_eos=True)
    return Submission(request_id, replica._client.model.requests.of_prompt("def", "prompt", params))


def fingerprint_of(replica: EngineReplica) -> str:
    return replica._client.model.facts.fingerprint


def asked(
    replica: EngineReplica, what: Submission, fingerprint: str | None = None, remaining_s: float | None = None
) -> Any:
    """The batches that come back, decoded."""
    payload = encode(what, Submission)
    batches = replica.submit(payload, fingerprint or fingerprint_of(replica), remaining_s, None)

    async def decoded() -> Any:
        try:
            async for batch in batches:
                yield [decode(data, FromEngine) for data in batch]
        finally:
            await batches.aclose()

    return decoded()


async def messages(batches: Any) -> list[Any]:
    return [message async for batch in batches for message in batch]


async def state_of(replica: EngineReplica) -> ReplicaState:
    state = decode(await replica.state(), ReplicaState)
    assert isinstance(state, ReplicaState)
    return state


async def test_a_submission_is_accepted_and_its_events_follow(replica: EngineReplica) -> None:
    first, started, *others = await messages(asked(replica, submission(replica)))
    assert first == Accepted(1)
    assert isinstance(started, Started)
    assert all(isinstance(each, Delta) for each in others)
    assert sum(len(each.piece.token_ids) for each in others) == 8
    state = await state_of(replica)
    assert (state.replica, state.health.state) == ("one", "ready")
    assert state.live is not None
    assert state.live.statistics.finished_requests == 1
    await replica.check_health()


async def test_what_it_cannot_serve_is_refused(replica: EngineReplica) -> None:
    long = submission(replica)
    long = replace(long, request=replace(long.request, prompt_token_ids=(1,) * CTX_SIZE))
    (refused,) = await messages(asked(replica, long))
    assert isinstance(refused, Refused)
    assert isinstance(refused.error, ContextFullError)
    (refused,) = await messages(asked(replica, submission(replica), fingerprint="of another model"))
    assert isinstance(refused, Refused)
    assert isinstance(refused.error, ModelChangedError)


async def test_a_full_engine_refuses_and_closing_ends_a_request(replica: EngineReplica) -> None:
    first = asked(replica, submission(replica, 1, ENDLESS))
    assert await anext(first) == [Accepted(1)]
    while not (state := await state_of(replica)).live or not state.live.statistics.running:
        pass
    second = asked(replica, submission(replica, 2, ENDLESS))
    assert await anext(second) == [Accepted(2)]
    (refused,) = await messages(asked(replica, submission(replica, 3)))
    assert isinstance(refused, Refused)
    assert isinstance(refused.error, QueueFullError)
    await first.aclose()
    await replica.cancel(2)
    await replica.cancel(99)
    *_, last = await messages(second)
    assert last.piece.finish_reason == "cancelled"
    state = await state_of(replica)
    assert state.live is not None
    assert state.live.statistics.cancelled_requests == 2


async def test_a_deadline_is_passed_on_as_the_time_that_is_left(replica: EngineReplica) -> None:
    *_, last = await messages(asked(replica, submission(replica, 1, ENDLESS), remaining_s=0.0))
    assert isinstance(last, Failed)
    assert isinstance(last.error, DeadlineError)
    assert last.request_id == 1
    *_, last = await messages(asked(replica, submission(replica, 2), remaining_s=60.0))
    assert isinstance(last, Delta)
    assert last.piece.finish_reason == "length"


async def test_an_engine_that_fails_has_died_for_everybody(
    replica: EngineReplica, monkeypatch: pytest.MonkeyPatch
) -> None:
    batches = asked(replica, submission(replica, 1, ENDLESS))
    assert await anext(batches) == [Accepted(1)]
    assert (await state_of(replica)).live is not None

    def fail(engine: Engine) -> None:
        raise RuntimeError("as planned")

    monkeypatch.setattr(Engine, "step", fail)
    *_, last = await messages(batches)
    assert isinstance(last, Died)
    assert "as planned" in str(last.error)
    (died,) = await messages(asked(replica, submission(replica, 2)))
    assert isinstance(died, Died)
    state = await state_of(replica)
    assert (state.health.state, state.live) == ("failed", None)
    with pytest.raises(GenerationFault, match="replica one is failed: RuntimeError: as planned"):
        await replica.check_health()


async def test_an_engine_that_hangs_is_unhealthy(
    replica: EngineReplica, monkeypatch: pytest.MonkeyPatch
) -> None:
    batches = asked(replica, submission(replica, 1, ENDLESS))
    await anext(batches)
    await replica.check_health()
    age_s = RestartPolicy().hang_s - 1

    async def health() -> Health:
        return Health("ready", last_progress_age_s=age_s)

    monkeypatch.setattr(replica._client, "health", health)
    await replica.check_health()
    age_s += 2
    with pytest.raises(GenerationFault, match="made no progress for 601 s"):
        await replica.check_health()
    await batches.aclose()
