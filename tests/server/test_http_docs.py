"""The page about the HTTP interface says what there is."""

import json
import re
from pathlib import Path

from coldstream.server.http import ServerSettings, app, bodies, create_app
from coldstream.server.http import settings as settings_module
from coldstream.server.http.chat_request import ChatRequest
from coldstream.server.http.completion_request import CompletionRequest
from coldstream.server.local_client import LocalClient

PAGE = (Path(__file__).parents[2] / "docs" / "server.md").read_text()
SOURCES = Path(str(settings_module.__file__)).parent


def test_the_page_names_every_route(local_client: LocalClient) -> None:
    paths = create_app(local_client, ServerSettings()).openapi()["paths"]
    there = {f"{method.upper()} {path}" for path, methods in paths.items() for method in methods}
    assert set(re.findall(r"^\| `([A-Z]+ /\S*)` \|", PAGE, re.MULTILINE)) == there


def test_the_document_defines_every_shape_that_it_refers_to(local_client: LocalClient) -> None:
    document = create_app(local_client, ServerSettings()).openapi()
    named = set(re.findall(r'"#/components/schemas/([^"]+)"', json.dumps(document)))
    assert {"ErrorBody", "AnthropicError"} <= named <= document["components"]["schemas"].keys()


def test_the_page_names_codes_that_there_are() -> None:
    codes = re.findall(r"^\| \d+ \| `(\w+)` \|", PAGE, re.MULTILINE)
    source = "".join(path.read_text() for path in SOURCES.glob("*.py"))
    assert len(codes) >= 12
    assert [code for code in codes if f'"{code}"' not in source] == []


def test_the_page_names_fields_that_there_are() -> None:
    section = PAGE.split("## Fields beyond OpenAI's")[1].split("Reasoning comes as")[0]
    named = set(re.findall(r"`([a-z_]+)`", section)) - {"none", "prompt_progress"}
    assert named <= ChatRequest.model_fields.keys() | CompletionRequest.model_fields.keys()


def test_the_limits_of_the_page_are_the_settings() -> None:
    settings = ServerSettings()
    assert f"at most {settings.max_body_bytes >> 20} MiB" in PAGE
    assert f"at most {settings.max_header_bytes >> 10} KiB" in PAGE
    assert f"every {settings.keep_alive_s:g} seconds" in PAGE


def test_the_page_has_the_limits_of_large_bodies() -> None:
    for limit in (bodies.MAX_CONTAINERS, bodies.MAX_STRINGS, bodies.MAX_VALUES):
        assert f"{limit:,}" in PAGE
    assert f"{bodies.MAX_DEPTH} levels" in PAGE
    assert f"{bodies.MAX_DIGITS} digits" in PAGE
    assert f"a string of {bodies.MAX_STRING_BYTES >> 20} MiB, {bodies.MAX_BLANKS >> 20} MiB of blanks" in PAGE
    assert f"more than {bodies.INLINE_BYTES >> 10} KiB" in PAGE
    assert f"most {app.MAX_BODIES * ServerSettings().max_body_bytes >> 20} MiB together" in PAGE
