"""What machines ask a server of itself: health, metrics, properties, its document."""

import re
from base64 import b64decode
from dataclasses import fields
from importlib.resources import files
from typing import Any

import httpx2
import pytest
from prometheus_client.parser import text_string_to_metric_families

from coldstream.engine.engine_statistics import EngineStatistics, LiveState
from coldstream.experts.gpu_statistics import PARTS, ExpertTimes
from coldstream.kvcache import CacheSize, PrefixStatistics
from coldstream.server.client import Health, ServiceUnavailable, State
from coldstream.server.http.metrics import Metrics
from coldstream.server.http.page import PAGE_FILES
from coldstream.server.local_client import LocalClient
from coldstream.server.served_model import ServedModel
from http_serving import Connect

NOT_SENT = {"vendor/README.md", "vendor/LICENSE.markdown-it"}  # what says whose work the library is
BODY = {"prompt": "import os\n", "max_tokens": 5, "ignore_eos": True}


class InState:
    """An engine in some state; before it was ready for the first time it has no model."""

    def __init__(self, health: Health, model: ServedModel | None) -> None:
        self._health = health
        self._model = model

    @property
    def model(self) -> ServedModel:
        if self._model is None:
            raise ServiceUnavailable("the model is loading", 3)
        return self._model

    @property
    def is_sleeping(self) -> bool:
        return self._health.is_sleeping

    async def health(self) -> Health:
        return self._health

    async def statistics(self) -> EngineStatistics:
        raise ServiceUnavailable("there is no engine", 3)

    async def live(self) -> LiveState:
        raise ServiceUnavailable("there is no engine", 3)


@pytest.mark.parametrize(
    ("health", "status", "retry_after", "message"),
    [
        (Health("loading", retry_after_s=3, what="weights", done=1, total=4), "loading", "3", "is loading"),
        (Health("restarting", retry_after_s=0.2, reason="it died"), "restarting", "1", "restarting: it died"),
        (Health("failed", reason="it died too often"), "failed", "5", "failed: it died too often"),
        (Health("stopping"), "stopping", "5", "the engine is stopping"),
        (Health("ready", last_progress_age_s=61), "stalled", "5", "stalled: no progress for 61 s"),
    ],
    ids=lambda value: getattr(value, "state", None),
)  # fmt: skip
async def test_health_means_progress(
    connect: Connect, local_client: LocalClient, health: Health, status: str, retry_after: str, message: str
) -> None:
    async with connect(InState(health, local_client.model)) as http:
        response = await http.get("/health")
        assert (await http.head("/health")).status_code == 503
    assert response.status_code == 503
    assert response.headers["retry-after"] == retry_after
    assert response.json()["status"] == status
    assert message in response.json()["error"]["message"]
    assert response.json()["progress"] == {"what": health.what, "done": health.done, "total": health.total}


async def test_an_engine_that_works_is_healthy_also_after_a_pause(
    connect: Connect, local_client: LocalClient
) -> None:
    async with connect(InState(Health("ready", last_progress_age_s=59), local_client.model)) as http:
        assert (await http.get("/health")).status_code == 200
    async with connect() as http:
        assert (await http.get("/health")).json() == {"status": "ok"}
        assert (await http.head("/health")).status_code == 200


@pytest.mark.parametrize("state", ["sleeping", "waking"])
async def test_a_model_that_sleeps_is_healthy_and_every_route_says_that_it_does(
    connect: Connect, local_client: LocalClient, state: State
) -> None:
    """Whoever asks for health only sends requests afterwards; a reason is that of the last failure."""
    is_sleeping = state == "sleeping"
    health = Health(state, reason="needs 9 GiB" if is_sleeping else "", unloads=2)
    async with connect(InState(health, local_client.model)) as http:
        response = await http.get("/health")
        assert response.status_code == 200
        assert response.json() == {"status": "ok"} | ({"is_sleeping": True} if is_sleeping else {})
        assert (await http.head("/health")).status_code == 200
        (listed,) = (await http.get("/v1/models")).json()["data"]
        assert listed["meta"]["is_sleeping"] is is_sleeping
        anthropic = (await http.get("/v1/models/demo", headers={"anthropic-version": "1"})).json()
        assert anthropic["is_sleeping"] is is_sleeping
        props = (await http.get("/props")).json()
        assert (props["state"], props["is_sleeping"], props["unloads"]) == (state, is_sleeping, 2)
        live = (await http.get("/live")).json()
        assert (live["state"], live["reason"], live["unloads"]) == (state, health.reason, 2)
        metrics = samples((await http.get("/metrics")).text)
        assert metrics["coldstream_sleeping"] == is_sleeping
        counted = await http.post("/tokenize", json={"content": "import os"})
        assert counted.status_code == 200
    stalled = Health("waking", last_progress_age_s=61)
    async with connect(InState(stalled, local_client.model)) as http:
        assert (await http.get("/health")).status_code == 503


async def test_before_the_model_is_known_every_route_says_when_to_come_back(connect: Connect) -> None:
    async with connect(InState(Health("loading"), None)) as http:
        for method, path, body in (
            ("POST", "/v1/completions", BODY),
            ("POST", "/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}]}),
            ("POST", "/tokenize", {"content": "a"}),
            ("POST", "/detokenize", {"tokens": [1]}),
            ("GET", "/v1/models", None),
            ("GET", "/v1/models/demo", None),
            ("GET", "/props", None),
        ):
            response = await http.request(method, path, json=body)
            assert (response.status_code, response.headers["retry-after"]) == (503, "3"), path
        assert (await http.get("/metrics")).status_code == 200


def samples(text: str) -> dict[str, float]:
    """Values by name, or by name and the value of their only label."""
    families = text_string_to_metric_families(text)
    found = [sample for family in families for sample in family.samples]
    return {" ".join([each.name, *each.labels.values()]): each.value for each in found}


async def test_metrics_count_requests_tokens_and_times(http: httpx2.AsyncClient) -> None:
    before = samples((await http.get("/metrics")).text)
    await http.post("/v1/completions", json=BODY)
    await http.post("/v1/completions", json={**BODY, "prompt": ""})
    await http.post("/v1/completions", json={**BODY, "response_format": None, "stop_token_ids": [6144]})
    response = await http.get("/metrics")
    after = samples(response.text)

    def grown(name: str) -> float:
        return after[name] - before[name]

    assert response.headers["content-type"].startswith("text/plain")
    assert grown("coldstream_generated_tokens_total") == 5
    assert grown("coldstream_prompt_tokens_total") == 3
    assert grown("coldstream_requests_total finished") == 1
    assert grown("coldstream_http_requests_total ok") == 1
    assert grown("coldstream_time_to_first_token_seconds_count") == 1
    assert grown("coldstream_inter_token_seconds_count") == 4
    assert grown("coldstream_steps_total") >= 5
    parts = [
        grown(f"coldstream_step_part_seconds_total {part}") for part in ("draft", "launch", "wait", "token")
    ]
    assert min(parts[1:]) > 0
    assert sum(parts) == pytest.approx(grown("coldstream_step_seconds_total"))
    assert after["coldstream_requests_running"] == 0
    assert all(":" not in name for name in after)


def test_every_metric_is_the_count_that_it_names() -> None:
    """No two counts are equal here, so that none can stand for another."""
    names = (each.name for each in fields(EngineStatistics))
    counts: dict[str, Any] = {name: 100 + number for number, name in enumerate(names)}
    of_prefixes = {each.name: 500 + number for number, each in enumerate(fields(PrefixStatistics))}
    memory, free = CacheSize(11, 12, 15, 16), CacheSize(13, 14, 17, 18)
    held = {"memory": memory, "free_memory": free, "expert_times": None}
    statistics = EngineStatistics(**counts | held | {"prefixes": PrefixStatistics(**of_prefixes)})
    found = samples(Metrics().render(statistics, False).decode())
    same = ("prompt_tokens", "generated_tokens", "steps", "preemptions")
    expected = {f"{name}_total": counts[name] for name in same}
    expected |= {
        f"requests_total {how}": counts[f"{how}_requests"] for how in ("finished", "cancelled", "failed")
    }
    expected |= {f"prefix_{name}_total": of_prefixes[name] for name in ("prompts", "hits", "evictions")}
    expected |= {
        f"step_part_seconds_total {part}": counts[f"{part}_s"]
        for part in ("draft", "launch", "wait", "token")
    }
    expected |= {"requests_running": counts["running"], "requests_waiting": counts["waiting"]}
    expected |= {"kv_blocks": 11, "states": 12, "kv_blocks_free": 13, "states_free": 14}
    expected |= {"kv_sliding_window_blocks": 16, "kv_sliding_window_blocks_free": 18}
    expected |= {
        "prefixes_kept": of_prefixes["kept"],
        "prompt_tokens_reused_total": counts["reused_tokens"],
        "step_rows_total": counts["computed_rows"],
        "step_seconds_total": counts["step_s"],
        "draft_tokens_total": counts["drafted_tokens"],
        "draft_tokens_accepted_total": counts["accepted_tokens"],
        "expert_uses_total fast": counts["expert_hits"],
        "expert_uses_total other": counts["expert_misses"],
    }
    of_http = ("coldstream_http_", "coldstream_time_", "coldstream_inter_", "coldstream_sleeping")
    of_engine = {name: value for name, value in found.items() if not name.startswith(of_http)}
    assert of_engine == {f"coldstream_{name}": value for name, value in expected.items()}


def test_metrics_say_where_time_went_that_experts_outside_fast_memory_took() -> None:
    none = CacheSize(0, 0)
    counts: dict[str, Any] = {each.name: 0 for each in fields(EngineStatistics)}
    counts |= {"memory": none, "free_memory": none, "prefixes": PrefixStatistics(), "expert_times": None}
    metrics = Metrics()
    without = samples(metrics.render(EngineStatistics(**counts), False).decode())
    assert not any("layer" in name or "disk" in name for name in without)
    times = ExpertTimes(7, tuple(float(1 + each) for each in range(len(PARTS))), 11.5, 0.25, 4096)
    found = samples(metrics.render(EngineStatistics(**counts | {"expert_times": times}), False).decode())
    assert [found[f"coldstream_gpu_layer_seconds_total {part}"] for part in PARTS] == list(times.layers)
    assert found["coldstream_gpu_layer_steps_total"] == 7
    assert found["coldstream_cpu_expert_seconds_total"] == 11.5
    assert found["coldstream_disk_wait_seconds_total"] == 0.25
    assert found["coldstream_expert_copied_bytes_total"] == 4096


async def test_requests_that_the_engine_refuses_are_errors_in_the_metrics(
    connect: Connect, local_client: LocalClient
) -> None:
    class Down(InState):
        async def submit(self, submission: Any) -> Any:
            raise ServiceUnavailable("down")

        async def cancel(self, request_id: int) -> None: ...

    async with connect(Down(Health("ready"), local_client.model)) as http:
        await http.post("/v1/completions", json=BODY)
        after = samples((await http.get("/metrics")).text)
    assert after["coldstream_http_requests_total error"] == 1
    assert "coldstream_steps_total" not in after


async def test_props_say_where_the_model_lies_and_what_is_cached_and_drafted(
    connect: Connect, http: httpx2.AsyncClient, local_client: LocalClient
) -> None:
    props = (await http.get("/props")).json()
    facts = local_client.model.facts
    assert props["model_alias"] == "demo"
    assert props["placement"]["resident_experts"] == facts.resident_experts
    assert props["placement"]["prompt_cache_bytes"] == facts.prompt_cache_bytes == 0
    assert props["cache"]["type"] == facts.cache_type
    assert props["cache"]["prefixes"]["kept"] >= 0
    assert props["speculation"]["type"] == facts.spec_type
    assert props["default_generation_settings"]["n_ctx"] == 2048
    assert facts.path not in str(props)
    async with connect(InState(Health("restarting"), local_client.model)) as other:
        down = (await other.get("/props")).json()
    assert (down["state"], down["statistics"], down["cache"]["prefixes"]) == ("restarting", None, None)


async def test_the_live_state_has_counts_and_every_expert(
    http: httpx2.AsyncClient, local_client: LocalClient
) -> None:
    before = (await http.get("/live")).json()
    await http.post("/v1/completions", json={**BODY, "max_tokens": 9})
    live = (await http.get("/live")).json()
    assert (live["model_alias"], live["state"], live["reason"], live["restarts"]) == ("demo", "ready", "", 0)
    assert live["statistics"]["generated_tokens"] - before["statistics"]["generated_tokens"] == 9
    assert live["clock_s"] > before["clock_s"]
    experts = live["experts"]
    assert len(experts["layers"]) * experts["num_experts"] == local_client.model.facts.num_experts
    assert len(b64decode(experts["uses"])) == local_client.model.facts.num_experts
    assert experts["uses"] != before["experts"]["uses"]
    assert experts["resident"] is None


@pytest.mark.parametrize("is_known", [False, True])
async def test_the_live_state_is_reported_when_there_is_no_engine(
    connect: Connect, local_client: LocalClient, is_known: bool
) -> None:
    health = Health("restarting", what="weights", done=1, total=4, reason="it died", restarts=2)
    async with connect(InState(health, local_client.model if is_known else None)) as http:
        response = await http.get("/live")
    live = response.json()
    assert response.status_code == 200
    assert live["model_alias"] == ("demo" if is_known else None)
    assert (live["state"], live["reason"], live["restarts"]) == ("restarting", "it died", 2)
    assert live["progress"] == {"what": "weights", "done": 1, "total": 4}
    assert (live["statistics"], live["experts"]) == (None, None)


async def test_the_page_is_all_files_of_its_folder_under_a_strict_policy(http: httpx2.AsyncClient) -> None:
    folder = files("coldstream.server") / "page"
    kept = {each.name for each in folder.iterdir() if each.is_file()}
    kept |= {f"vendor/{each.name}" for each in (folder / "vendor").iterdir()} - NOT_SENT
    assert {name for name, _ in PAGE_FILES.values()} == kept
    for path, (name, media_type) in PAGE_FILES.items():
        response = await http.get(path)
        assert response.content == (folder / name).read_bytes()
        assert response.headers["content-type"] == media_type
        policy = response.headers["content-security-policy"]
        assert policy.startswith("default-src 'none'; ")
        assert "unsafe" not in policy
        assert "*" not in policy
        assert response.headers["x-content-type-options"] == "nosniff"
        head = await http.head(path)
        assert (head.status_code, head.content) == (200, b"")
        is_own = not name.startswith("vendor/")  # the library names its own address in a comment
        assert not is_own or not re.search(rb"https?://(?!www\.w3\.org)", response.content)
    index = (await http.get("/")).text
    assert not re.search(r"<script(?![^>]*\bsrc=)|<style|\bon[a-z]+=|\bstyle=", index)


@pytest.mark.sharded(of="processes")
async def test_the_document_describes_every_route_and_its_errors(http: httpx2.AsyncClient) -> None:
    document = (await http.get("/openapi.json")).json()
    for path, methods in document["paths"].items():
        for operation in methods.values():
            assert operation["summary"], path
            assert path == "/metrics" or {"200", "400", "401", "503"} <= operation["responses"].keys()
