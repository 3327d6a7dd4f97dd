"""GET /health, /live, /metrics and /props: how the server is, in words for machines and for people."""

import time
from dataclasses import asdict
from typing import Any, Final

from fastapi import APIRouter
from starlette.concurrency import run_in_threadpool
from starlette.responses import JSONResponse, Response

from coldstream.engine.engine_statistics import EngineStatistics, LiveState
from coldstream.errors import TemplateError
from coldstream.server.client import EngineClient, Health, ServiceUnavailable
from coldstream.server.http.metrics import CONTENT_TYPE, Metrics
from coldstream.server.http.problems import Problem
from coldstream.server.http.settings import ServerSettings
from coldstream.server.http.shapes import HealthBody, Live, Props, documented
from coldstream.server.http.volatile_lines import DROPPED
from coldstream.server.served_model import ServedModel

_STALLED_RETRY_S: Final = 5.0
_TAKES_REQUESTS: Final = ("ready", "sleeping", "waking")
_DEFAULT_FIELDS: Final = (
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "repeat_last_n",
)


def state_router(client: EngineClient, settings: ServerSettings, metrics: Metrics) -> APIRouter:
    """The routes over an engine."""
    router = APIRouter()

    @router.head("/health", include_in_schema=False)
    @router.get("/health", response_model=None, responses=documented(HealthBody))
    async def health() -> Response:
        """Whether requests make progress: 200, or 503 with what is wrong."""
        return _health_response(await client.health(), settings.stall_s)

    @router.get("/metrics", response_class=Response, responses={200: {"content": {"text/plain": {}}}})
    async def metrics_text() -> Response:
        """Counts and times, for Prometheus."""
        statistics = await _statistics(client)
        return Response(metrics.render(statistics, client.is_sleeping), media_type=CONTENT_TYPE)

    @router.get("/props", response_model=None, responses=documented(Props))
    async def props() -> dict[str, Any]:
        """The model, where it lies, and what is done to be fast. Does not wait for the engine's steps."""
        served = client.model
        known = _props(served, await client.health(), await _statistics(client))
        known |= await run_in_threadpool(_template_facts, served, settings)
        return {**known, "dropped_lines": [each.name for each in DROPPED] if settings.drop_volatile else []}

    @router.get("/live", response_model=None, responses=documented(Live))
    async def live() -> dict[str, Any]:
        """The engine's counts and its experts as they are, to be asked for every second. Does not wait for
        the engine's steps.
        """
        return _live(await client.health(), _model(client), await _live_state(client))

    return router


def _model(client: EngineClient) -> ServedModel | None:
    try:
        return client.model
    except ServiceUnavailable:
        return None


async def _live_state(client: EngineClient) -> LiveState | None:
    try:
        return await client.live()
    except ServiceUnavailable:
        return None


async def _statistics(client: EngineClient) -> EngineStatistics | None:
    try:
        return await client.statistics()
    except ServiceUnavailable:
        return None


def _health_response(health: Health, stall_s: float) -> Response:
    is_stalled = health.last_progress_age_s > stall_s
    if health.state in _TAKES_REQUESTS and not is_stalled:
        return JSONResponse({"status": "ok"} | ({"is_sleeping": True} if health.is_sleeping else {}))
    status = "stalled" if health.state in _TAKES_REQUESTS else health.state
    reason = f"no progress for {health.last_progress_age_s:.0f} s" if is_stalled else health.reason
    problem = Problem(
        503,
        f"the engine is {status}" + (f": {reason}" if reason else ""),
        "unavailable_error",
        "service_unavailable",
        retry_after_s=health.retry_after_s or _STALLED_RETRY_S,
    )
    progress = {"what": health.what, "done": health.done, "total": health.total}
    body = {**problem.body, "status": status, "progress": progress, "restarts": health.restarts}
    return JSONResponse(body, problem.status, headers=problem.headers)


def _live(health: Health, served: ServedModel | None, live: LiveState | None) -> dict[str, Any]:
    return {
        "model_alias": served and served.name,
        "state": health.state,
        "reason": health.reason,
        "progress": {"what": health.what, "done": health.done, "total": health.total},
        "restarts": health.restarts,
        "unloads": health.unloads,
        "clock_s": time.monotonic(),
        "statistics": live and asdict(live.statistics),
        "experts": asdict(live.experts) if live and live.experts else None,
    }


def _template_facts(served: ServedModel, settings: ServerSettings) -> dict[str, Any]:
    """What the chat template accepts and what it is given for each effort; null if it cannot be used."""
    try:
        can = served.chat_template.capabilities
        accepted: dict[str, Any] | None = {
            "supports_system_role": can.accepts_system,
            "supports_late_system_role": can.accepts_late_system,
            "supports_tools": can.accepts_tools,
            "requires_typed_content": can.wants_parts,
            "reasoning_efforts": {effort: dict(given) for effort, given in can.efforts.items()},
        }
    except TemplateError:
        accepted = None
    return {"chat_template_caps": accepted, "chat_template_kwargs": dict(settings.chat_template_kwargs)}


def _props(served: ServedModel, health: Health, statistics: EngineStatistics | None) -> dict[str, Any]:
    facts = served.facts
    counts = None if statistics is None else asdict(statistics)
    defaults = {name: getattr(served.default_sampling, name) for name in _DEFAULT_FIELDS}
    return {
        "model_alias": served.name,
        "state": health.state,
        "restarts": health.restarts,
        "is_sleeping": health.is_sleeping,
        "unloads": health.unloads,
        "default_generation_settings": {"n_ctx": served.ctx_size, "params": defaults},
        "chat_template": served.template_source,
        "model": {
            "architecture": facts.architecture,
            "fingerprint": facts.fingerprint,
            "ctx_size": facts.ctx_size,
            "vocab_size": served.tokenizer.vocab_size,
        },
        "placement": {
            "device": facts.device,
            "threads": facts.threads,
            "tier": facts.tier,
            "fast_memory": facts.fast_tier,
            "budget_bytes": facts.budget_bytes,
            "prompt_cache_bytes": facts.prompt_cache_bytes,
            "resident_experts": facts.resident_experts,
            "experts": facts.num_experts,
            "expert_hits": None if statistics is None else statistics.expert_hits,
            "expert_misses": None if statistics is None else statistics.expert_misses,
        },
        "cache": {
            "type": facts.cache_type,
            "memory": counts and counts["memory"],
            "free": counts and counts["free_memory"],
            "prefixes": counts and counts["prefixes"],
        },
        "speculation": {
            "type": facts.spec_type,
            "drafted_tokens": counts and counts["drafted_tokens"],
            "accepted_tokens": counts and counts["accepted_tokens"],
        },
        "statistics": counts,
        "warnings": list(facts.warnings),
    }
