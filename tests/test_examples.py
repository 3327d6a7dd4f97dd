"""The files in examples/ say what is true: options that exist, code that parses, one address throughout."""

import ast
import importlib
import json
import re
import shlex
import tomllib
from pathlib import Path

import pytest
import yaml

from coldstream.cli.serve import command
from coldstream.ray.options import ServiceOptions

EXAMPLES = Path(__file__).parent.parent / "examples"
CLIENTS = (EXAMPLES / "clients.md").read_text()
OPTIONS = {name for param in command.params for name in param.opts}


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", CLIENTS, re.MULTILINE | re.DOTALL)


def used_options(text: str) -> set[str]:
    return {word for word in text.split() if word.startswith("--")}


def test_the_systemd_unit_starts_a_server_with_options_that_exist() -> None:
    unit = (EXAMPLES / "coldstream.service").read_text().replace("\\\n", " ")
    (start,) = re.findall(r"^ExecStart=(.*)$", unit, re.MULTILINE)
    words = shlex.split(start)
    assert words[1] == "serve"
    assert used_options(" ".join(words)) <= OPTIONS
    assert "\nKillMode=mixed\n" in unit  # systemd would send SIGTERM to the engine as well, which ignores it
    (stop_s,) = re.findall(r"^TimeoutStopSec=(\d+)$", unit, re.MULTILINE)
    assert_stops_in_time(int(stop_s))


def test_the_container_starts_a_server_with_options_that_exist() -> None:
    dockerfile = (EXAMPLES / "Dockerfile").read_text()
    (entry,) = re.findall(r"^ENTRYPOINT (.*)$", dockerfile, re.MULTILINE)
    words = json.loads(entry)
    assert words[:2] == ["coldstream", "serve"]
    assert used_options(" ".join(words)) <= OPTIONS
    (stop_s,) = re.findall(r"--stop-timeout (\d+)", dockerfile)
    assert_stops_in_time(int(stop_s))


def test_ray_serves_replicas_with_settings_that_exist() -> None:
    text = (EXAMPLES / "ray_serve.yaml").read_text()
    config = yaml.safe_load(text)
    (application,) = config["applications"]
    module, name = application["import_path"].split(":")
    assert name in importlib.import_module(module).__all__
    options = ServiceOptions.from_args(application["args"])
    assert (options.replicas, options.config.ctx_size) == (2, 4096)
    assert options.settings_at(config["http_options"]["host"]).is_loopback


def assert_stops_in_time(stop_s: int) -> None:
    """Whoever kills the server after this many seconds lets it finish what it grants itself."""
    from coldstream.server.serving import CLOSE_S, DRAIN_S

    assert stop_s > DRAIN_S + CLOSE_S


def test_settings_of_clients_parse_and_name_one_address() -> None:
    for code in blocks("python"):
        ast.parse(code)
    (codex,) = map(tomllib.loads, blocks("toml"))
    assert codex["model_providers"][codex["model_provider"]]["base_url"] == "http://127.0.0.1:8080/v1"
    (opencode,) = map(json.loads, blocks("json"))
    provider, model = opencode["model"].split("/")
    assert model in opencode["provider"][provider]["models"]
    urls = set(re.findall(r"http://127\.0\.0\.1[^\s\"'`,)]*", CLIENTS))
    assert urls == {"http://127.0.0.1:8080", "http://127.0.0.1:8080/v1"}
    assert used_options(" ".join(re.findall(r"`(--[^`]*)`", CLIENTS))) <= OPTIONS


@pytest.mark.parametrize(
    "client", ["OpenAI's", "Anthropic's", "Claude Code", "Codex", "OpenCode", "Open WebUI", "LangChain"]
)
def test_each_client_has_its_section(client: str) -> None:
    assert re.search(rf"^## {re.escape(client)}", CLIENTS, re.MULTILINE)
