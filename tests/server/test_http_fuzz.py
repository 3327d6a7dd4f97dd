"""RQ01: whatever the documented routes are sent, they answer in a documented shape, and never with a 5xx."""

from collections.abc import Iterator

import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.schemas import BaseSchema
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from coldstream.server.http import ServerSettings, create_app
from coldstream.server.local_client import LocalClient
from http_serving import open_demo

CHECKS = [not_a_server_error, status_code_conformance, content_type_conformance, response_schema_conformance]
SLOW = {
    "completions",
    "messages",
    "responses",
    "count_tokens",
    "input_tokens",
    "apply-template",
}  # as they tokenise or generate
ROUTES = [
    "POST /v1/chat/completions",
    "POST /v1/chat/completions/input_tokens",
    "POST /apply-template",
    "POST /v1/completions",
    "POST /v1/responses",
    "POST /v1/responses/input_tokens",
    "POST /v1/messages",
    "POST /v1/messages/count_tokens",
    "GET /v1/models",
    "GET /v1/models/{name}",
    "POST /tokenize",
    "POST /detokenize",
    "GET /health",
    "GET /live",
    "GET /metrics",
    "GET /props",
]


@pytest.fixture(scope="module")
def api() -> Iterator[BaseSchema]:
    opened = open_demo(ctx_size=64)
    with LocalClient(opened, "demo") as client:
        app = create_app(client, ServerSettings(allowed_hosts=("testserver",), max_n=2, max_prompts=4))
        yield schemathesis.openapi.from_asgi("/openapi.json", app)
    opened.close()


def test_all_routes_are_tried(api: BaseSchema) -> None:
    assert sorted(result.ok().label for result in api.get_all_operations()) == sorted(ROUTES)


@pytest.mark.sharded(9)
@pytest.mark.parametrize(
    ("route", "mode"),
    [(route, mode) for route in ROUTES for mode in GenerationMode if mode.is_positive or "POST" in route],
    ids=lambda value: getattr(value, "value", value),
)
def test_rq01_no_request_is_an_error_of_the_server(api: BaseSchema, route: str, mode: GenerationMode) -> None:
    (operation,) = [each for result in api.get_all_operations() if (each := result.ok()).label == route]

    @settings(
        max_examples=5 if route.split("/")[-1] in SLOW else 15,
        suppress_health_check=list(HealthCheck),
    )
    @given(case=operation.as_strategy(generation_mode=mode))
    def answers(case: schemathesis.Case) -> None:
        case.call_and_validate(checks=CHECKS)

    answers()
