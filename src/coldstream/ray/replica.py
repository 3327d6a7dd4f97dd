"""EngineReplica: an open model and its engine in a process of Ray's, which starts another when this one ends.

Unit of work: one submission. Knows nothing of HTTP, other replicas or routes.
"""

import asyncio
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import replace
from typing import Final

from coldstream.engine.cache_tiers import open_tiers
from coldstream.engine.engine_statistics import LiveState
from coldstream.engine.opened_model import open_model
from coldstream.engine.submission import Submission
from coldstream.errors import ColdstreamError, GenerationFault, ModelChangedError
from coldstream.ray.messages import ReplicaState, encoded
from coldstream.ray.options import ServiceOptions
from coldstream.server.client import ServiceUnavailable
from coldstream.server.codec import decode, encode
from coldstream.server.local_client import LocalClient
from coldstream.server.messages import Accepted, Died, Refused
from coldstream.server.restarts import RestartPolicy

LIVE_S: Final = 1.0  # for the engine to report its state between two steps
_HANG_S: Final = RestartPolicy().hang_s


class EngineReplica:
    """For one event loop, which Ray runs. Raises what opening the model raises."""

    def __init__(self, options: ServiceOptions, name: str) -> None:
        """name: of this replica, in Ray Serve."""
        self._name = name
        self._opened = open_model(options.config, prompt_cache_bytes=options.tiers.ram_bytes)
        self._opened.grammars.prepare()
        tiers = open_tiers(options.tiers, self._opened)
        self._client = LocalClient(self._opened, options.name, options.limits, tiers)
        self._live: LiveState | None = None  # the state that was reported last

    async def submit(
        self, payload: bytes, fingerprint: str, remaining_s: float | None, route: None
    ) -> AsyncGenerator[list[bytes], None]:
        """Serve a submission; see `messages.py` for what comes back. Closing the generator cancels it.

        payload: the submission without its deadline, which is `remaining_s` from now: clocks of machines
        differ. fingerprint: of the model whose tokens these are. route: was for the router on the way here.
        """
        submission: Submission = decode(payload, Submission)
        if remaining_s is not None:
            submission = replace(submission, deadline=time.monotonic() + remaining_s)
        try:
            if fingerprint != self._client.model.facts.fingerprint:
                raise ModelChangedError(
                    "the model's file is another one for the server than for this replica: give each machine "
                    "the same file, and deploy again"
                )
            events = await self._client.submit(submission)
        except ServiceUnavailable as error:
            yield encoded([Died(GenerationFault(str(error)))])
            return
        except ColdstreamError as error:
            yield encoded([Refused(submission.request_id, error)])
            return
        async with aclosing(events):
            yield encoded([Accepted(submission.request_id)])
            while batch := await events.batch():
                yield encoded(batch)

    async def cancel(self, request_id: int) -> None:
        """End the answers of a request as cancelled; unknown ids are ignored."""
        await self._client.cancel(request_id)

    async def state(self) -> bytes:
        """A `ReplicaState`; in a step that takes long with the counts that were reported last."""
        try:
            async with asyncio.timeout(LIVE_S):
                self._live = await self._client.live()
        except TimeoutError:
            pass
        except ServiceUnavailable:
            self._live = None
        health = await self._client.health()
        return encode(ReplicaState(self._name, self._client.model.facts, health, self._live), ReplicaState)

    async def check_health(self) -> None:
        """Raises GenerationFault for an engine that has ended or hangs; Ray then starts another replica."""
        health = await self._client.health()
        if health.state != "ready":
            raise GenerationFault(f"the engine of replica {self._name} is {health.state}: {health.reason}")
        if health.last_progress_age_s > _HANG_S:
            raise GenerationFault(
                f"the engine of replica {self._name} made no progress for {health.last_progress_age_s:.0f} s"
            )

    def close(self) -> None:
        """End what is under way, and release the model."""
        self._client.close()
        self._opened.close()
