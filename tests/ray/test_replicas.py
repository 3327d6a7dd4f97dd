"""Two replicas of the bundled model behind Ray Serve, on this machine, over HTTP. Needs the extra `ray`."""

import asyncio
import json
import os
import socket
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx2
import pytest
import yaml
from openai import APIError, AsyncOpenAI

pytest.importorskip("ray.serve", reason="the extra `ray` is not installed: make ray")

import ray
from ray import serve
from ray.serve.exceptions import DeploymentUnavailableError
from ray.serve.schema import ServeDeploySchema

from coldstream.ray import build
from coldstream.ray.deployment import REPLICA
from coldstream.ray.messages import ReplicaState
from coldstream.server.codec import decode
from coldstream.server.http import ServerSettings, create_app
from coldstream.server.local_client import LocalClient
from http_serving import events_of, open_demo

CONFIG = yaml.safe_load((Path(__file__).parents[2] / "examples" / "ray_serve.yaml").read_text())
(APPLICATION,) = CONFIG["applications"]
APP, ARGS = APPLICATION["name"], APPLICATION["args"]
CTX_SIZE = ARGS["engine"]["ctx_size"]
KEYS = ("first-key", "second-key")
FUNCTION = (
    "def read_lines(path):\n    '''The lines of a file, without their ends.'''\n" + "    # as text\n" * 20
)
ENDLESS = {"max_tokens": CTX_SIZE - 200, "ignore_eos": True}


@pytest.fixture(scope="session")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Where the application is reached, with a key; it serves, as its health says."""
    keys = tmp_path_factory.mktemp("ray") / "keys"
    keys.write_text("\n".join(KEYS))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    os.environ["RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S"] = "60"  # a busy machine takes more than its 5 s
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, object_store_memory=80 << 20)
    try:
        serve.start(http_options={"host": "127.0.0.1", "port": port})
        serve.run(build({**ARGS, "api_key_file": str(keys)}), name=APP)
        url = f"http://127.0.0.1:{port}"
        # The replicas have their models before the server has asked them for one.
        while httpx2.get(f"{url}/health", timeout=300).status_code != 200:
            pass
        yield url
    finally:
        serve.shutdown()
        ray.shutdown()


@asynccontextmanager
async def client(url: str, key: str = KEYS[0]) -> AsyncIterator[httpx2.AsyncClient]:
    headers = {"Authorization": f"Bearer {key}"}
    async with httpx2.AsyncClient(base_url=url, headers=headers, timeout=300) as http:
        yield http


@pytest.fixture
async def http(url: str) -> AsyncIterator[httpx2.AsyncClient]:
    async with client(url) as http:
        await both_idle()
        yield http


@pytest.fixture(scope="session")
def single() -> Iterator[LocalClient]:
    """The same model on one engine."""
    opened = open_demo(CTX_SIZE)
    with LocalClient(opened, "demo") as client:
        yield client
    opened.close()


async def states() -> dict[str, ReplicaState]:
    """All replicas that answer, asked without the server."""
    try:
        reported = serve.get_deployment_handle(REPLICA, APP).broadcast("state")
        answers = await reported.results_async(return_exceptions=True)
    except DeploymentUnavailableError:
        return {}
    found = [decode(answer, ReplicaState) for answer in answers if isinstance(answer, bytes)]
    return {state.replica: state for state in found}


async def both_idle() -> dict[str, ReplicaState]:
    """Waits for two replicas without work; the test's own time limit says that it takes too long."""
    while True:
        found = await states()
        live = [state.live.statistics for state in found.values() if state.live is not None]
        if len(live) == 2 and all(one.running == one.waiting == 0 for one in live):
            return found


def prompts_of(found: dict[str, ReplicaState]) -> dict[str, int]:
    return {name: state.live.statistics.prefixes.prompts for name, state in found.items() if state.live}


async def asked_where(http: httpx2.AsyncClient, prompt: str, **fields: Any) -> tuple[str, dict[str, Any]]:
    """The replica that computed an answer, and the answer."""
    before = prompts_of(await both_idle())
    answer = await http.post("/v1/completions", json={"prompt": prompt, "max_tokens": 4, **fields})
    assert answer.status_code == 200, answer.text
    after = prompts_of(await both_idle())
    (name,) = [name for name in after if after[name] > before[name]]
    return name, answer.json()


def cached(answer: dict[str, Any]) -> int:
    return int(answer["usage"]["prompt_tokens_details"]["cached_tokens"])


def without_times(answer: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in answer.items() if name not in ("id", "created", "timings")}


def test_the_example_is_a_config_of_ray_serve() -> None:
    schema = ServeDeploySchema.model_validate(CONFIG)
    assert schema.applications[0].import_path == "coldstream.ray:build"


async def test_answers_are_those_of_a_single_server(http: httpx2.AsyncClient, single: LocalClient) -> None:
    app = create_app(single, ServerSettings())
    transport = httpx2.ASGITransport(app)
    async with httpx2.AsyncClient(transport=transport, base_url="http://127.0.0.1") as alone:
        completion = {"prompt": "import os\n", "max_tokens": 24, "seed": 5, "temperature": 0.9, "logprobs": 2}
        chat = {"messages": [{"role": "user", "content": "def f"}], "max_tokens": 12, "seed": 1, "n": 2}
        for path, body in (("/v1/completions", completion), ("/v1/chat/completions", chat)):
            one = await alone.post(path, json=body)
            replicated = await http.post(path, json=body)
            assert without_times(replicated.json()) == without_times(one.json())
        for path in ("/openapi.json", "/"):
            assert (await http.get(path)).text == (await alone.get(path)).text
        for path, body in (
            ("/v1/completions", {"prompt": "x", "model": "another"}),
            ("/v1/completions", {"prompt": [7] * CTX_SIZE}),
            ("/v1/messages", {"max_tokens": 0}),
            ("/v1/embeddings", {}),
        ):
            one, replicated = await alone.post(path, json=body), await http.post(path, json=body)
            assert (replicated.status_code, replicated.json()) == (one.status_code, one.json())


async def test_a_prompt_that_goes_on_is_computed_where_it_began(http: httpx2.AsyncClient) -> None:
    prompt, places = FUNCTION, []
    for turn in range(4):
        place, answer = await asked_where(http, prompt)
        assert cached(answer) > 32 or turn == 0
        places.append(place)
        prompt += answer["choices"][0]["text"]
    assert len(set(places)) == 1


async def test_prompts_that_share_nothing_are_spread(http: httpx2.AsyncClient) -> None:
    places = [(await asked_where(http, f"class Number{number}:\n" * 12))[0] for number in range(4)]
    assert {places.count(place) for place in places} == {2}


async def test_keys_do_not_share_prefixes(url: str, http: httpx2.AsyncClient) -> None:
    prompt = "class Secret:\n" * 12
    first, _ = await asked_where(http, prompt)
    async with client(url, KEYS[1]) as other:
        second, answer = await asked_where(other, prompt)
        assert cached(answer) == 0
        assert second != first  # the router has not compared it with the first one's, and they alternate
        again, answer = await asked_where(other, prompt)
    assert (again, cached(answer) > 32) == (second, True)
    back, answer = await asked_where(http, prompt)
    assert (back, cached(answer) > 32) == (first, True)


async def test_a_key_is_asked_for_and_health_is_open(url: str) -> None:
    async with httpx2.AsyncClient(base_url=url) as nobody:
        assert (await nobody.get("/v1/models")).status_code == 401
        assert (await nobody.get("/health")).status_code == 200
        assert (await nobody.get("/health", headers={"Host": "elsewhere.example"})).status_code == 403


async def test_the_official_client_streams(url: str, single: LocalClient) -> None:
    async with AsyncOpenAI(base_url=f"{url}/v1", api_key=KEYS[1], max_retries=0) as openai:
        stream = await openai.completions.create(
            model="demo", prompt="import os\n", max_tokens=24, seed=5, temperature=0.9, stream=True
        )
        chunks = [chunk async for chunk in stream]
        with pytest.raises(APIError) as refused:
            await openai.completions.create(model="another", prompt="x")
    assert refused.value.code == "model_not_found"
    texts = [choice.text for chunk in chunks for choice in chunk.choices]
    assert len(texts) > 4
    transport = httpx2.ASGITransport(create_app(single, ServerSettings()))
    async with httpx2.AsyncClient(transport=transport, base_url="http://127.0.0.1") as alone:
        body = {"prompt": "import os\n", "max_tokens": 24, "seed": 5, "temperature": 0.9}
        whole = (await alone.post("/v1/completions", json=body)).json()
    assert "".join(texts) == whole["choices"][0]["text"]


@pytest.mark.parametrize("streams", [True, False])
async def test_a_client_that_leaves_ends_its_request(http: httpx2.AsyncClient, streams: bool) -> None:
    before = await both_idle()
    body = {"prompt": "def", "stream": streams, **ENDLESS}
    if streams:
        async with http.stream("POST", "/v1/completions", json=body) as answer:
            await anext(answer.aiter_lines())
    else:
        asking = asyncio.create_task(http.post("/v1/completions", json=body))
        while not any(state.live and state.live.statistics.running for state in (await states()).values()):
            pass
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)
    after = await both_idle()

    def cancelled(found: dict[str, ReplicaState]) -> int:
        return sum(state.live.statistics.cancelled_requests for state in found.values() if state.live)

    assert cancelled(after) == cancelled(before) + 1


async def test_state_is_that_of_all_replicas_together(http: httpx2.AsyncClient) -> None:
    for number in range(2):
        await asked_where(http, f"x{number} = 1\n" * 12)
    live = [state.live.statistics for state in (await both_idle()).values() if state.live]
    assert all(one.generated_tokens for one in live)
    reported = (await http.get("/live")).json()
    assert reported["statistics"]["generated_tokens"] == sum(one.generated_tokens for one in live)
    assert reported["statistics"]["memory"]["num_blocks"] == sum(one.memory.num_blocks for one in live)
    assert (
        f"coldstream_generated_tokens_total {float(sum(one.generated_tokens for one in live))}"
        in (await http.get("/metrics")).text
    )
    props = (await http.get("/props")).json()
    assert (props["state"], props["model"]["ctx_size"]) == ("ready", CTX_SIZE)
    assert props["statistics"] == reported["statistics"]


async def test_a_lost_replica_costs_its_answers_one_error_and_comes_back(http: httpx2.AsyncClient) -> None:
    """Of four requests, two on each replica, those of the lost one fail, each in its way."""
    before = await both_idle()
    lost, stays = before
    stream = {"prompt": "def", "stream": True, **ENDLESS}  # none is complete when the replica is killed
    tasks = []
    for body in (stream, stream, {**stream, "stream": False}, {**stream, "stream": False}):
        tasks.append(
            asyncio.create_task(http.post("/v1/completions", json={**body, "cache_salt": str(len(tasks))}))
        )
        while running(await states()) < len(tasks):
            pass
    kill(lost)
    answers = await asyncio.gather(*tasks)
    outcomes = [ending(answer) for answer in answers]
    assert sorted(outcomes) == ["cut", "refused", "whole", "whole"]
    _, answer = await asked_by_one(http)
    assert answer.status_code == 200
    assert (await http.get("/health")).status_code == 200
    after = await both_idle()
    assert lost not in after
    assert stays in after
    assert (await http.get("/live")).json()["restarts"] == 1
    places = {(await asked_where(http, f"def back{number}():\n" * 12))[0] for number in range(2)}
    assert places == set(after)


async def test_engines_that_end_are_replaced(http: httpx2.AsyncClient) -> None:
    before = await both_idle()
    closing = serve.get_deployment_handle(REPLICA, APP).broadcast("close")
    await closing.results_async()
    answer = await http.post("/v1/completions", json={"prompt": "def", "max_tokens": 4})
    assert (answer.status_code, answer.headers["Retry-After"]) == (503, "1")
    assert "no replica could begin the request" in answer.json()["error"]["message"]
    health = await http.get("/health")
    assert (health.status_code, health.json()["status"]) == (503, "restarting")
    after = await both_idle()
    assert not after.keys() & before.keys()
    answer = await http.post("/v1/completions", json={"prompt": "def", "max_tokens": 4})
    assert answer.status_code == 200
    assert (await http.get("/health")).status_code == 200


def running(found: dict[str, ReplicaState]) -> int:
    return sum(state.live.statistics.running for state in found.values() if state.live)


async def asked_by_one(http: httpx2.AsyncClient) -> tuple[float, httpx2.Response]:
    answer = await http.post("/v1/completions", json={"prompt": "def", "max_tokens": 4})
    return answer.elapsed.total_seconds(), answer


def kill(name: str) -> None:
    """End the process of a replica, as a crash would."""
    (actor,) = [
        ray.get_actor(each["name"], namespace=each["namespace"])
        for each in ray.util.list_named_actors(all_namespaces=True)
        if name in each["name"]
    ]
    ray.kill(actor, no_restart=True)


def ending(answer: httpx2.Response) -> str:
    """How an answer ended: whole; refused with a status; cut off with an error as a stream's last event."""
    if answer.status_code != 200:
        problem = answer.json()["error"]
        assert (answer.status_code, problem["code"]) == (503, "service_unavailable")
        assert answer.headers["Retry-After"] == "1"
        assert "the replica that computed this answer was lost" in problem["message"]
        return "refused"
    if not answer.headers["Content-Type"].startswith("text/event-stream"):
        assert answer.json()["choices"][0]["finish_reason"] == "length"
        return "whole"
    *events, last, done = events_of(answer.text)
    assert done == "[DONE]"
    assert not any("error" in event for event in events), json.dumps(events)
    if "error" in last:
        assert last["error"]["code"] == "service_unavailable"
        return "cut"
    return "whole"
