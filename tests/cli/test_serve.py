"""`coldstream serve`: a real server on a free port, from its first line to its exit code."""

import json
import os
import re
import resource
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click
import httpx2
import psutil
import pytest

from coldstream.cli.interrupts import EXIT_INTERRUPTED, EXIT_TERMINATED, Interrupts, TerminatedError
from coldstream.cli.serve import limits_of, parse_minutes, parse_parallel, prompt_cache
from coldstream.errors import ConfigError, ModelFormatError, ModelNotFoundError
from coldstream.server.messages import PromptCache

Run = Callable[..., tuple[int, str, str]]
SERVE = [sys.executable, "-m", "coldstream", "serve", "--port", "0", "--threads", "1", "--device", "cpu"]
SHORT = {"model": "demo", "prompt": "def main(", "max_tokens": 4, "temperature": 0}
LONG = {"model": "demo", "prompt": "import", "max_tokens": 1000, "stream": True, "ignore_eos": True}


class Server:
    """A server process and its log, a JSON object a line."""

    def __init__(self, process: "subprocess.Popen[str]") -> None:
        self.process = process
        self.lines: list[dict[str, Any]] = []

    def wait_for(self, event: str) -> dict[str, Any]:
        assert self.process.stderr is not None
        for text in self.process.stderr:
            self.lines.append(json.loads(text))
            if self.lines[-1]["event"] == event:
                return self.lines[-1]
        raise AssertionError(f"it ended without {event}: {self.lines}")

    def finish(self) -> int:
        """Its exit code, after all of its log."""
        assert self.process.stderr is not None
        self.lines += map(json.loads, self.process.stderr)
        return self.process.wait()


@contextmanager
def serving(*arguments: str, **options: Any) -> Iterator[tuple[Server, httpx2.Client]]:
    """A server that has loaded its model, and a client for it."""
    command = [*SERVE, "--ctx-size", "4096", "--log-format", "json", *arguments]
    with subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, **options
    ) as process:
        try:
            server = Server(process)
            with httpx2.Client(base_url=server.wait_for("ready")["url"], timeout=60) as client:
                yield server, client
        finally:
            process.kill()


def engines_of(server: Server) -> list[psutil.Process]:
    """Its engine processes; another child renders chat templates."""
    children = psutil.Process(server.process.pid).children()
    return [each for each in children if "coldstream.server.engine_process" in each.cmdline()]


def wait_until_refused(url: str) -> None:
    """Wait until nothing listens there."""
    while True:
        try:
            httpx2.get(f"{url}/health")
        except httpx2.ConnectError:
            return
        except httpx2.TransportError:  # of a connection that had come before it listened no more
            continue


def low_descriptor_limit() -> None:
    resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))


def test_pr01_pr07_sigterm_lets_answers_finish_and_refuses_new_ones(tmp_path: Path) -> None:
    """Locale C, no home, a folder that cannot be written, 64 descriptors."""
    tmp_path.chmod(0o500)
    poor = {
        "env": {"LC_ALL": "C", "PATH": os.environ["PATH"]},
        "cwd": tmp_path,
        "preexec_fn": low_descriptor_limit,
    }
    with serving("--alias", "tiny", **poor) as (server, client):
        assert [model["id"] for model in client.get("/v1/models").json()["data"]] == ["tiny"]
        first = client.post("/v1/completions", json={**SHORT, "model": "tiny"}).json()
        children = psutil.Process(server.process.pid).children(recursive=True)
        assert children
        with client.stream("POST", "/v1/completions", json={**LONG, "model": "tiny"}) as stream:
            lines = stream.iter_lines()
            next(lines)
            server.process.send_signal(signal.SIGTERM)
            server.wait_for("stopping")
            wait_until_refused(str(client.base_url))
            data = [line.removeprefix("data: ") for line in lines if line.startswith("data: ")]
        assert data[-1] == "[DONE]"
        assert any(json.loads(line)["choices"][0]["finish_reason"] == "length" for line in data[:-1])
        assert server.finish() == 0
        assert psutil.wait_procs(children, timeout=10)[1] == []
    assert first["choices"][0]["finish_reason"] in ("length", "stop")
    assert server.lines[-1]["event"] == "stopped"
    paths = [line["path"] for line in server.lines if line["event"] == "request"]
    assert paths.count("/v1/completions") == 2


@pytest.mark.sharded(of="processes")
def test_pr01_a_second_signal_ends_answers_early() -> None:
    with serving() as (server, client):
        children = psutil.Process(server.process.pid).children(recursive=True)
        with client.stream("POST", "/v1/completions", json=LONG) as stream:
            lines = stream.iter_lines()
            next(lines)
            for child in children:
                child.suspend()
            server.process.send_signal(signal.SIGTERM)
            server.wait_for("stopping")
            server.process.send_signal(signal.SIGINT)
            rest = "\n".join(lines)
        assert '"error"' in rest
        assert "server stops" in rest
        assert server.finish() == EXIT_INTERRUPTED
        assert psutil.wait_procs(children, timeout=10)[1] == []


@pytest.mark.sharded(of="processes")
def test_a_lost_engine_is_in_the_log_and_comes_back() -> None:
    with serving() as (server, client):
        (engine,) = psutil.Process(server.process.pid).children()
        engine.kill()
        assert "signal 9" in server.wait_for("engine_lost")["message"]
        answer = client.post("/v1/completions", json=SHORT)
        if answer.status_code == 503:  # unless it was back sooner
            assert int(answer.headers["retry-after"]) >= 1
            server.wait_for("engine_back")
            answer = client.post("/v1/completions", json=SHORT)
        assert answer.status_code == 200


@pytest.mark.sharded(of="processes")
def test_a_model_that_was_unloaded_gives_the_same_tokens_again(tmp_path: Path) -> None:
    """With prefixes in files, which outlive the process that kept them."""
    asked = {**SHORT, "prompt": "import os\n" * 150, "max_tokens": 12, "temperature": 1.5, "seed": 7}
    with serving("--idle-unload", "0.02", "--prompt-cache", str(tmp_path)) as (server, client):
        answers, found = [], []
        for _ in range(3):
            answer = client.post("/v1/completions", json=asked).json()
            answers.append(answer["choices"][0]["text"])
            found.append(answer["usage"]["prompt_tokens_details"]["cached_tokens"])
            # By its log: lines of requests that ask again and again fill the pipe, and later ones are lost.
            while server.wait_for("request")["path"] != "/v1/completions":
                continue
            server.wait_for("unloaded")
            assert client.get("/props").json()["is_sleeping"]
            assert not engines_of(server)
        assert len(set(answers)) == 1
        assert found[0] == 0
        assert found[1] > 0
        server.process.terminate()
        assert server.finish() == 0
        events = [line["event"] for line in server.lines]
        assert events.count("unloaded") >= len(answers)
        assert "loaded_again" in events


@pytest.mark.sharded(of="processes")
def test_the_examples_of_clients_get_an_answer(capsys: pytest.CaptureFixture[str]) -> None:
    page = (Path(__file__).parents[2] / "examples" / "clients.md").read_text()
    blocks = re.findall(r"^```python\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    own = [block for block in blocks if block.startswith(("from openai ", "from anthropic "))]
    assert len(own) == 2
    with serving("--api-key", "KEY", "--alias", "MODEL", "--ctx-size", "256") as (_, client):
        refused = client.get("/v1/models")
        for code in own:
            exec(code.replace("http://127.0.0.1:8080", str(client.base_url).rstrip("/")), {})
            assert capsys.readouterr().out.strip()
    assert refused.status_code == 401


def test_au05_beyond_loopback_it_wants_a_key(run: Run) -> None:
    code, out, error = run("serve", "--host", "0.0.0.0", "--port", "0")
    assert (code, out) == (2, "")
    assert "--api-key-file" in error


def test_pr08_a_port_that_is_taken_is_named(run: Run) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        code, _, error = run("serve", "--port", port)
    assert code == 2
    assert f"--port {port} on 127.0.0.1 is in use" in error


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--host", "192.0.2.1", "--api-key", "k"), "--host 192.0.2.1 cannot be listened on"),
        (("--host", "no.such.name.invalid", "--api-key", "k"), "--host no.such.name.invalid is no address"),
        (("--port", "65536"), "port must be a number from 0 to 65535"),
        (("--parallel", "0"), "is not a number from 1 to 64"),
        (("--idle-unload", "soon"), "'soon' is neither 0, for never, nor a number from 0.001 to 525600"),
        (("--api-key-file", "/nonexistent"), "--api-key-file /nonexistent: No such file"),
        (("--api-key", "two words"), "api key"),
        (("--ctx-size", "8q"), "is not a size"),
    ],
)
def test_pr08_wrong_settings_are_one_line_before_anything_is_loaded(
    run: Run, arguments: tuple[str, ...], message: str
) -> None:
    code, out, error = run("serve", "--port", "0", *arguments)
    assert (code, out) == (2, "")
    assert message in error
    assert "two words" not in error
    assert error.count("\n") == 1


@pytest.mark.sharded(of="processes")
def test_a_model_that_does_not_open_ends_the_server_with_its_exit_code(tmp_path: Path) -> None:
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    command = [*SERVE, str(tmp_path / "model.gguf")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == ModelFormatError.exit_code
    assert done.stderr.splitlines()[-1].startswith(f"error: {tmp_path}/model.gguf: ")


def test_a_model_that_is_not_there_is_refused_before_anything_begins(run: Run, tmp_path: Path) -> None:
    """Nothing is listened on for it, or said to be loaded: a port that is taken would be named."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        for name in ("/nonexistent/model.gguf", str(tmp_path)):
            code, out, error = run("serve", "--port", str(taken.getsockname()[1]), name)
            assert (code, out) == (ModelNotFoundError.exit_code, "")
            assert error.startswith(f"error: {name}: ")
            assert error.count("\n") == 1


@pytest.mark.sharded(of="processes")
def test_a_package_that_is_missing_is_named() -> None:
    script = (
        "import sys; sys.modules['uvicorn'] = None\nfrom coldstream.cli.main import main\nsys.exit(main())"
    )
    command = [sys.executable, "-c", script, *SERVE[3:]]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr == "error: the package uvicorn is missing: pip install coldstream\n"


def test_its_help_has_at_most_25_options(run: Run) -> None:
    _, shown, _ = run("serve", "--help")
    assert sum(line.startswith("  -") for line in shown.splitlines()) <= 25


def test_numbers_of_answers_side_by_side() -> None:
    assert (parse_parallel("1"), parse_parallel("64")) == (1, 64)
    for text in ("0", "65", "-1", "x", "9" * 99, "²"):
        with pytest.raises(click.BadParameter):
            parse_parallel(text)


def test_minutes_without_a_request() -> None:
    assert [parse_minutes(text) for text in ("0", "-0", "0.5", "10", "1e3")] == [0, 0, 0.5, 10, 1000]
    for text in ("-1", "", "x", "nan", "inf", "1e-9", "5m", "1e9"):
        with pytest.raises(click.BadParameter, match="is neither 0, for never, nor a number from"):
            parse_minutes(text)


def test_places_of_kept_prefixes() -> None:
    assert prompt_cache(()) == PromptCache()
    assert prompt_cache(("8G", "/var/prompts")) == PromptCache(8 << 30, "/var/prompts")
    assert prompt_cache(("prompts",)) == PromptCache(0, os.path.abspath("prompts"))
    for two in (("8G", "4G"), ("/a", "/b")):
        with pytest.raises(ConfigError, match="one size of RAM and one folder"):
            prompt_cache(two)


def test_the_option_of_tests_works_and_is_not_shown(run: Run) -> None:
    _, shown, _ = run("serve", "--help")
    assert "--tier" not in shown
    assert run("serve", "--port", "0", "--tier", "none")[0] == 2


def test_signals_lent_to_an_event_loop_come_back() -> None:
    with Interrupts() as interrupts:
        with interrupts.lent():
            for number in (signal.SIGINT, signal.SIGTERM):
                signal.signal(number, signal.SIG_DFL)
            signal.set_wakeup_fd(-1)
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
        with pytest.raises(TerminatedError) as raised:
            signal.raise_signal(signal.SIGTERM)
        assert raised.value.code == EXIT_TERMINATED


@pytest.mark.parametrize(("num_keys", "share"), [(0, None), (1, None), (2, 256)])
def test_sc02_of_several_keys_none_fills_the_queue(num_keys: int, share: int | None) -> None:
    limits = limits_of(3, num_keys)
    assert (limits.max_running, limits.max_waiting, limits.max_waiting_of_owner) == (3, 512, share)


@pytest.mark.sharded(of="processes")
def test_the_chat_template_and_its_settings_are_those_of_the_options(tmp_path: Path) -> None:
    template = tmp_path / "own.jinja"
    template.write_text("{{ messages[0].content }}{{ ' = 1' if enable_thinking else '' }}")
    options = ["--chat-template", str(template), "--chat-template-kwargs", '{"enable_thinking": true}']
    with serving(*options) as (_, client):
        props = client.get("/props").json()
        body = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 1}
        lengths = [
            client.post("/v1/chat/completions", json={**body, **more}).json()["usage"]["prompt_tokens"]
            for more in ({}, {"enable_thinking": False})
        ]
    assert (props["chat_template"], props["chat_template_kwargs"]) == (
        template.read_text(),
        {"enable_thinking": True},
    )
    assert lengths[0] > lengths[1]


@pytest.mark.parametrize(
    ("kwargs", "problem"),
    [
        ("{", "not JSON"),
        ("[1]", "not a JSON object"),
        ('{"depth": 1}', "chat template setting 'depth': unknown"),
        ('{"enable_thinking": "yes"}', "expected a bool"),
        ('{"reasoning_effort": "frantic"}', "'frantic' is none of none, minimal"),
    ],
)
def test_template_settings_that_cannot_be_are_refused_at_the_start(
    run: Run, kwargs: str, problem: str
) -> None:
    code, _, message = run("serve", "--chat-template-kwargs", kwargs)
    assert code == 2
    assert problem in message
