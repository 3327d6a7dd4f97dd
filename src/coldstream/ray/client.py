"""ReplicasClient: the `EngineClient` of all replicas together, over a handle of Ray Serve.

A request belongs to one replica from its acceptance to its end. If that replica is lost before, another one
is asked; afterwards the request ends with one error.
"""

import asyncio
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, Final

from ray.exceptions import RayError
from ray.serve.exceptions import RayServeException
from ray.serve.handle import DeploymentHandle

from coldstream.engine.engine_statistics import EngineStatistics, LiveState
from coldstream.engine.events import Delta, Failed, PromptProgress, Started
from coldstream.engine.submission import Submission
from coldstream.errors import ColdstreamError, InvalidRequestError, ModelChangedError
from coldstream.ray.messages import ReplicaState
from coldstream.ray.prefix_router import Route
from coldstream.ray.prefix_routes import PrefixRoutes, block_keys
from coldstream.ray.totals import total_live
from coldstream.server.client import Health, ServiceUnavailable
from coldstream.server.codec import ProtocolError, decode, encode
from coldstream.server.event_stream import EventStream
from coldstream.server.messages import Accepted, Died, FromEngine, Refused
from coldstream.server.served_model import ServedModel

TRIES: Final = 3  # replicas that are asked to begin a request
ROUTE_S: Final = 5.0  # for Ray to have a replica to ask
STATE_S: Final = 5.0  # for all replicas to report their state
LOOK_S: Final = 0.5  # seconds between two looks for the first replica
LOAD_S: Final = 5.0  # what `Retry-After` says while no replica is there
LOST_S: Final = 1.0  # the same while other replicas are there

_Lost = (RayError, RayServeException)


@dataclass
class _ReplicaCall:
    """A request that a replica has accepted."""

    stream: EventStream
    response: Any = None  # a `DeploymentResponseGenerator`, while the replica may say more
    reading: "asyncio.Task[None] | None" = None


class ReplicasClient:
    """For one event loop, in which it is made; `close` ends what is under way."""

    def __init__(
        self, replicas: DeploymentHandle, name: str, num_replicas: int, routes: PrefixRoutes
    ) -> None:
        """name: of the model, as clients ask for it. num_replicas: wanted. routes: this client's own."""
        self._replicas = replicas
        self._submit = replicas.options(method_name="submit", stream=True)
        self._name = name
        self._num_replicas = num_replicas
        self._routes = routes
        self._created = int(time.time())
        self._calls: dict[int, _ReplicaCall] = {}
        self._model: ServedModel | None = None
        self._reason = ""  # why the model is not known yet
        self._present: set[str] = set()
        self._num_gone = 0
        self._heard_at = time.monotonic()  # when a replica answered last
        self._finding = asyncio.get_running_loop().create_task(self._find_model(), name="model")

    def close(self) -> None:
        """End all requests, and the process that renders templates. Closing twice is allowed."""
        self._finding.cancel()
        for call in list(self._calls.values()):
            call.stream.fail(ServiceUnavailable("the server stops: send the request again", LOAD_S))
            self._leave(call.stream)
        if self._model is not None:
            self._model.chat_template.close()

    @property
    def model(self) -> ServedModel:
        """The model. Raises ServiceUnavailable before a replica was ready for the first time."""
        if self._model is None:
            raise ServiceUnavailable("no replica has loaded the model yet: try again later", LOAD_S)
        return self._model

    @property
    def is_sleeping(self) -> bool:
        """Never: Ray decides how many replicas there are."""
        return False

    async def submit(self, submission: Submission) -> EventStream:
        """Begin a request, see `EngineClient`; the reader closes the stream in every case."""
        request_id, model = submission.request_id, self.model
        if request_id in self._calls:
            raise InvalidRequestError(f"request {request_id} is being served: give each a new id")
        try:
            payload = encode(replace(submission, deadline=None), Submission)
        except ProtocolError as error:
            raise InvalidRequestError(f"request {request_id}: {error}") from error
        keys = block_keys(submission.namespace, submission.request.prompt_token_ids)
        route = Route(self._routes, request_id, keys)
        call = _ReplicaCall(EventStream(request_id, submission.request.params.n, self._leave))
        self._calls[request_id] = call
        try:
            for _ in range(TRIES):
                left = None if submission.deadline is None else submission.deadline - time.monotonic()
                call.response = self._submit.remote(payload, model.facts.fingerprint, left, route)
                if await self._is_accepted(call):
                    call.reading = asyncio.create_task(self._read(call), name=f"request {request_id}")
                    return call.stream
            raise ServiceUnavailable("no replica could begin the request: send it again", LOST_S)
        except BaseException:
            self._end(call)
            raise

    async def cancel(self, request_id: int) -> None:
        """End the answers of a request as cancelled; unknown ids are ignored."""
        if request_id in self._calls:
            with suppress(TimeoutError, *_Lost):
                sent = self._replicas.broadcast("cancel", request_id)
                await sent.results_async(timeout_s=STATE_S, return_exceptions=True)

    async def health(self) -> Health:
        """ready while one replica is. Of all that are, the age of the one that moved last."""
        states = await self._states()
        ready = [state.health for state in states or () if state.health.state == "ready"]
        if self._model is None:
            return Health(
                "loading",
                retry_after_s=LOAD_S,
                what="replicas",
                done=len(ready),
                total=self._num_replicas,
                reason=self._reason,
            )
        if states is None:
            return Health("ready", time.monotonic() - self._heard_at, restarts=self._num_gone)
        if not ready:
            reasons = [state.health.reason for state in states]
            reason = reasons[0] if reasons else "no replica is there"
            return Health("restarting", retry_after_s=LOAD_S, reason=reason, restarts=self._num_gone)
        age = min(health.last_progress_age_s for health in ready)
        return Health("ready", age, restarts=self._num_gone)

    async def statistics(self) -> EngineStatistics:
        """The sums over all replicas that answer. Raises ServiceUnavailable if none does."""
        return (await self.live()).statistics

    async def live(self) -> LiveState:
        """The same, with the experts of one replica. Raises as `statistics`."""
        states = sorted(await self._states() or (), key=lambda state: state.replica)
        live = [state.live for state in states if state.live is not None]
        if not live:
            raise ServiceUnavailable("no replica reports its state: try again later", LOAD_S)
        return total_live(live)

    async def _is_accepted(self, call: _ReplicaCall) -> bool:
        """Whether the replica that was asked has begun the request; False if it is lost, so that another may.

        Raises the replica's refusal, and ServiceUnavailable if there is no replica.
        """
        request_id = call.stream.request_id
        asking = asyncio.ensure_future(anext(call.response))
        try:
            await asyncio.wait({asking}, timeout=ROUTE_S)
            if not asking.done() and self._routes.route_of(request_id) is None:
                raise ServiceUnavailable("no replica is there: try again later", LOAD_S)
            (first,) = await asking
        except _Lost:
            return False
        finally:
            asking.cancel()
        match decode(first, FromEngine):
            case Accepted():
                return True
            case Refused(error=error):
                if isinstance(error, ModelChangedError) and self._finding.done():
                    self._finding = asyncio.create_task(self._look(), name="model")
                raise error
            case Died():
                return False
            case other:
                raise ProtocolError(f"a {type(other).__name__} out of turn")

    async def _read(self, call: _ReplicaCall) -> None:
        """Pass a request's events on to its stream, which has ended when this has."""
        try:
            with suppress(*_Lost):
                async for batch in call.response:
                    self._heard_at = time.monotonic()
                    if not self._pass_on(call.stream, batch):
                        return
                call.response = None
        except ColdstreamError as error:
            call.stream.fail(error)
        finally:
            lost = "the replica that computed this answer was lost: send the request again"
            call.stream.fail(ServiceUnavailable(lost, LOST_S))  # nothing, if it has ended
            self._end(call)

    def _pass_on(self, stream: EventStream, batch: Sequence[bytes]) -> bool:
        """Whether the reader keeps up. Raises ServiceUnavailable for a dead engine, and ProtocolError."""
        for data in batch:
            match decode(data, FromEngine):
                case Died(error=error):
                    raise ServiceUnavailable(
                        f"the replica that computed this answer has ended ({error})", LOST_S
                    )
                case Started() | PromptProgress() | Delta() | Failed() as event:
                    if not stream.push(event):
                        return False
                case other:
                    raise ProtocolError(f"a {type(other).__name__} out of turn")
        return True

    def _leave(self, stream: EventStream) -> None:
        """The reader of a stream has closed it before its end."""
        call = self._calls.get(stream.request_id)
        if call is not None and call.stream is stream:
            if call.reading is not None:
                call.reading.cancel()
            self._end(call)

    def _end(self, call: _ReplicaCall) -> None:
        """The request needs its replica no more, which ends it if it has not. Ending twice is allowed."""
        request_id = call.stream.request_id
        if self._calls.get(request_id) is call:
            del self._calls[request_id]
            self._routes.release(request_id)
            if call.response is not None:
                _cancel(call.response)

    async def _find_model(self) -> None:
        """Read the model when a replica has opened it."""
        while self._model is None:
            await self._look()
            await asyncio.sleep(LOOK_S)

    async def _look(self) -> None:
        """Read the model of a replica that has opened another one than the known, after an update."""
        known = None if self._model is None else self._model.facts.fingerprint
        try:
            facts = [state.facts for state in await self._states() or ()]
            other = next((each for each in facts if each.fingerprint != known), None)
            if other is not None:
                self._model = await asyncio.to_thread(ServedModel.read, self._name, self._created, other)
        except ColdstreamError as error:
            self._reason = str(error)

    async def _states(self) -> list[ReplicaState] | None:
        """The states of all replicas that have one; None if some have not answered in time."""
        try:
            sent = self._replicas.broadcast("state")
            answers = await sent.results_async(timeout_s=STATE_S, return_exceptions=True)
        except TimeoutError:
            return None
        except _Lost:  # there is none
            answers = []
        states = [decode(answer, ReplicaState) for answer in answers if isinstance(answer, bytes)]
        names = {state.replica for state in states}
        self._num_gone += len(self._present - names)
        self._present = names
        if states:
            self._heard_at = time.monotonic()
        return states


def _cancel(response: Any) -> None:
    with suppress(*_Lost):  # then there is nothing to cancel
        response.cancel()
