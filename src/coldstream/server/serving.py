"""Serves a model over HTTP from its loading to the last answer: what `coldstream serve` does."""

import asyncio
import signal
import socket
import time
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass, field
from functools import partial
from types import TracebackType
from typing import Any, Final, Self

from coldstream.engine.limits import EngineLimits
from coldstream.planning.config import EngineConfig
from coldstream.server.access_log import AccessLog
from coldstream.server.client import Health
from coldstream.server.engine_child import ENGINE_COMMAND
from coldstream.server.http.app import create_app
from coldstream.server.http.settings import ServerSettings
from coldstream.server.http.volatile_lines import DROPPED
from coldstream.server.idle_rates import Outcome, RatesSettings
from coldstream.server.log import Log
from coldstream.server.messages import PromptCache
from coldstream.server.restarts import RestartPolicy
from coldstream.server.served_model import ServedModel
from coldstream.server.supervisor import NO_CACHE, OnProgress, Supervisor
from coldstream.server.web_server import WebServer, url_of

DRAIN_S: Final = 30.0  # for answers under way when the server is asked to stop
CLOSE_S: Final = 5.0  # then for their connections


@dataclass(frozen=True)
class Service:
    """What is served, and how."""

    name: str  # the model's name for clients
    config: EngineConfig
    limits: EngineLimits
    settings: ServerSettings
    cache: PromptCache = NO_CACHE
    idle_unload_s: float | None = None  # without a request until the model is unloaded; None: never
    drain_s: float = DRAIN_S
    close_s: float = CLOSE_S
    command: Sequence[str] = field(default=ENGINE_COMMAND)  # command of the engine process


class Stop:
    """SIGINT and SIGTERM while an event loop runs: the first asks to stop, the second to stop at once."""

    def __init__(self) -> None:
        self.asked = asyncio.Event()
        self.forced = asyncio.Event()
        self.last: int | None = None  # number of the signal

    def __enter__(self) -> Self:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._take, number)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.remove_signal_handler(number)

    def _take(self, number: int) -> None:
        self.last = number
        (self.forced if self.asked.is_set() else self.asked).set()


async def serve(service: Service, listener: socket.socket, log: Log, on_progress: OnProgress) -> int | None:
    """Serve on a listening socket until a signal; then let answers under way finish, for `drain_s` at most.

    Returns the number of the second signal, if that ended answers early. Raises what opening the model
    raises.
    """
    with Stop() as stop:
        supervisor = Supervisor(
            service.config,
            service.limits,
            name=service.name,
            cache=service.cache,
            policy=RestartPolicy(on_change=service.settings.restart_on_change),
            idle_unload_s=service.idle_unload_s,
            command=service.command,
            on_progress=on_progress,
            on_state=_StateLog(log, service.idle_unload_s),
            rates=RatesSettings(on_end=partial(_say_measured, log)),
        )
        async with supervisor as engine:
            web = WebServer(
                AccessLog(create_app(engine, service.settings), log),
                listener,
                service.settings.slow_headers_s,
            )
            serving = asyncio.create_task(web.run(), name="web")
            log.write("info", "loading", f"loading {service.name}; until then {url_of(listener)} answers 503")
            try:
                opened = asyncio.create_task(engine.opened())
                await _first_of(opened, stop.asked.wait(), serving)
                if opened.done():
                    _say_ready(log, service, opened.result(), url_of(listener))
                    await _first_of(stop.asked.wait(), serving)
                else:
                    opened.cancel()
                await _stop(engine, web, serving, stop, log, service)
            finally:
                await _leave(web, serving)
            return stop.last if stop.forced.is_set() else None


async def _stop(
    engine: Supervisor, web: WebServer, serving: "asyncio.Task[None]", stop: Stop, log: Log, service: Service
) -> None:
    """Take no more connections, and wait for answers under way, for connections, or for the second signal."""
    log.write(
        "info",
        "stopping",
        f"stopping: answers under way have {service.drain_s:g} s; a second signal ends them",
    )
    web.stop()
    await _first_of(engine.drain(service.drain_s), stop.forced.wait())
    engine.abort()
    await _first_of(serving, stop.forced.wait(), asyncio.sleep(service.close_s))


async def _leave(web: WebServer, serving: "asyncio.Task[None]") -> None:
    web.stop()
    if not serving.done():
        forcing = asyncio.create_task(web.force())
        await asyncio.wait({serving})
        forcing.cancel()
    await serving


async def _first_of(*waits: "asyncio.Task[Any] | Coroutine[Any, Any, Any]") -> None:
    """Wait until one of these is done; those that only this function has are cancelled then."""
    own = {asyncio.create_task(each) for each in waits if not isinstance(each, asyncio.Task)}
    given = {each for each in waits if isinstance(each, asyncio.Task)}
    try:
        await asyncio.wait(own | given, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in own:
            task.cancel()


def _say_ready(log: Log, service: Service, model: ServedModel, url: str) -> None:
    facts = model.facts
    for warning in facts.warnings:
        log.write("warning", "warning", warning)
    where = facts.device if facts.device == "cuda" else f"{facts.tier}, {facts.threads} threads"
    log.write(
        "info",
        "ready",
        f"serving {model.name} at {url}/v1 (context {model.ctx_size}, {where})",
        model=model.name,
        url=url,
        ctx_size=model.ctx_size,
        device=facts.device,
        threads=facts.threads,
        protected=bool(service.settings.api_keys),
    )
    if service.settings.drop_volatile:
        what = "; ".join(each.what for each in DROPPED)
        log.write("info", "drops", f"the model is not shown these parts of system prompts: {what}")


def _say_measured(log: Log, outcome: Outcome) -> None:
    if outcome == "measured":
        text = "this machine was measured again while nobody asked: the next model is planned by that"
        log.write("info", "measured", text)
    else:
        text = "this machine could not be measured again: plans stay with rates that other programs disturbed"
        log.write("warning", "not_measured", text)


class _StateLog:
    """Says when the engine is lost and when it is back, and the same of a model that is unloaded."""

    def __init__(self, log: Log, idle_unload_s: float | None) -> None:
        self._log = log
        self._idle_unload_s = idle_unload_s
        self._was_down = False
        self._woken_at: float | None = None

    def __call__(self, health: Health) -> None:
        if health.state in ("restarting", "failed") and health.restarts:
            self._was_down = True
            level = "warning" if health.state == "restarting" else "error"
            back = f"; back in about {health.retry_after_s:.1f} s" if health.retry_after_s else ""
            text = f"the engine is lost: {health.reason}{back}"
            self._log.write(level, "engine_lost", text, restarts=health.restarts, state=health.state)
        elif health.state == "sleeping":
            self._say_sleeping(health)
        elif health.state == "waking":
            self._woken_at = time.monotonic()
        elif health.state == "ready" and self._woken_at is not None:
            took = time.monotonic() - self._woken_at
            self._woken_at = None
            text = f"the model is loaded again, for the next request, after {took:.1f} s"
            self._log.write("info", "loaded_again", text)
        elif health.state == "ready" and self._was_down:
            self._was_down = False
            self._log.write("info", "engine_back", "the engine is back", restarts=health.restarts)

    def _say_sleeping(self, health: Health) -> None:
        if health.reason:
            self._woken_at = None
            text = f"the model could not be loaded again: {health.reason}; the next request tries it"
            self._log.write("error", "not_loaded", text)
            return
        assert self._idle_unload_s is not None
        text = (
            f"the model is unloaded after {self._idle_unload_s / 60:g} minutes without a request; the next "
            "one loads it again"
        )
        self._log.write("info", "unloaded", text, unloads=health.unloads)
