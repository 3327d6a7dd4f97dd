"""The package's help, signatures and types in Python."""

import inspect
import os
import pydoc
import re
import subprocess
import sys
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any, get_type_hints

import pytest

import coldstream
from coldstream import ConfigError
from coldstream.cli.run import command as run_command
from coldstream.cli.serve import command as serve_command
from coldstream.engine import LLM, EngineConfig
from coldstream.engine.opened_model import OwnParts

ROOT = Path(__file__).parent.parent

RIGHT = """\
from typing import Any

import numpy as np

from coldstream import (
    LLM, ColdstreamError, CompletionOutput, Executor, Piece, Policy, RequestOutput, SamplingParams,
    TextPrompt, TokensPrompt,
)


def answers(llm: LLM, texts: list[str], ids: list[list[int]]) -> list[str]:
    params = SamplingParams(temperature=0, stop="end", stop_token_ids=[1], logprobs=2)
    outputs: list[RequestOutput] = llm.generate(texts, params)
    outputs += llm.generate(ids, sampling_params=[params, params])
    outputs += llm.generate(np.array([1, 2]))
    outputs += llm.generate([TextPrompt(prompt="a"), TokensPrompt(prompt_token_ids=[1]), "b", [2], (3, 4)])
    outputs += llm.generate({"prompt_token_ids": [1, 2]})
    outputs += llm.chat([{"role": "user", "content": "a"}], params, chat_template_kwargs={"thinking": True})
    outputs += llm.chat([[{"role": "user", "content": "a"}]], tools=[{"type": "function"}])
    first: CompletionOutput = outputs[0].outputs[0]
    for by_id in first.logprobs or ():
        total: float = sum(found.logprob for found in by_id.values())
        print(total)
    return [output.text for output in outputs]


class Mine(Policy):
    def start(self, profile: np.ndarray[Any, Any]) -> None:
        self.scores = profile.copy()

    def observe(self, used: np.ndarray[Any, Any]) -> None:
        self.scores[used] += 1.0


class Passing:
    def __init__(self, product: Executor, kernels: object) -> None:
        self.product = product

    def route(self, x: Any, weights: Any, experts: Any) -> Any:
        return self.product.route(x, weights, experts)

    def compute(self, x: Any, routing: Any, weights: Any) -> Any:
        return self.product.compute(x, routing, weights)


def open_own(model: str) -> LLM:
    return LLM(model, policy=Mine(max_copies=4), executor=Passing)


def show(model: str) -> None:
    try:
        with LLM(model, ctx_size=512, vram="6G", threads="auto", seed=3) as llm, llm.stream("a") as stream:
            for piece in stream:
                piece_text: Piece = piece
                print(piece_text.text, piece.stop_reason)
    except ColdstreamError as error:
        print(error, error.exit_code)
"""

WRONG = {
    'LLM("model.gguf", thread=2)': "arg-type",
    'LLM("model.gguf", threads="all")': "arg-type",
    "LLM(5)": "arg-type",
    'LLM("model.gguf", policy=5)': "arg-type",
    'LLM("model.gguf", policy=coldstream.Policy)': "arg-type",
    'LLM("model.gguf", executor=5)': "arg-type",
    'LLM("model.gguf", executor=lambda product: product)': "arg-type",
    'LLM("model.gguf").generate(None)': "call-overload",
    'LLM("model.gguf").generate("a", params=SamplingParams())': "call-overload",
    'LLM("model.gguf").chat("a")': "arg-type",
    'SamplingParams(temperature="hot")': "arg-type",
    "SamplingParams(heat=1)": "call-arg",
    "coldstream.Llm": "attr-defined",
}


@pytest.fixture(scope="module")
def help_text() -> str:
    return pydoc.plain(pydoc.render_doc(coldstream))


@pytest.mark.parametrize(
    ("metadata", "version"),
    [("Name: coldstream\nVersion: 9.8.7.dev3+gabc\n", "9.8.7.dev3+gabc"), ("", "0+uninstalled")],
)
def test_the_version_is_that_of_the_installation(tmp_path: Path, metadata: str, version: str) -> None:
    if metadata:
        (tmp_path / "coldstream-9.8.7.dist-info").mkdir()
        (tmp_path / "coldstream-9.8.7.dist-info" / "METADATA").write_text(
            f"Metadata-Version: 2.1\n{metadata}"
        )
    folders = [str(ROOT / "src"), str(tmp_path)]
    code = f"import sys; sys.path[:0] = {folders}; import coldstream; print(coldstream.__version__)"
    done = subprocess.run(
        [sys.executable, "-I", "-S", "-c", code], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == version


@pytest.mark.parametrize("name", [name for name in coldstream.__all__ if name != "__version__"])
def test_help_shows_every_public_name(help_text: str, name: str) -> None:
    assert f"    class {name}(" in help_text or f"    class {name}\n" in help_text
    assert getattr(coldstream, name).__name__ == name
    assert name in dir(coldstream)


def test_help_shows_signatures_and_how_to_begin(help_text: str) -> None:
    assert "from coldstream import LLM, SamplingParams" in help_text
    assert "ctx_size: int | str | None = None" in help_text
    assert "temperature: float = 0.8" in help_text


def test_what_is_not_there_is_said_as_python_does() -> None:
    with pytest.raises(AttributeError, match="module 'coldstream' has no attribute 'Llm'"):
        coldstream.Llm  # noqa: B018


def test_errors_do_not_wait_for_the_engine() -> None:
    code = "import coldstream, sys; coldstream.ConfigError; print('coldstream.engine' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n", done.stderr


def test_the_settings_of_llm_are_the_fields_of_its_configuration() -> None:
    parameters = dict(inspect.signature(LLM.__init__).parameters)
    del parameters["self"]
    assert parameters.pop("unknown").kind is inspect.Parameter.VAR_KEYWORD
    for name in ("policy", "executor"):  # objects, which no file of settings and no flag could hold
        assert (parameters[name].default, parameters[name].kind) == (None, inspect.Parameter.KEYWORD_ONLY)
        assert f"{name}: " in (LLM.__doc__ or "")
        del parameters[name]
    hints = get_type_hints(LLM.__init__)
    assert list(parameters) == [field.name for field in fields(EngineConfig)]
    for field, parameter in zip(fields(EngineConfig), parameters.values(), strict=True):
        default = inspect.Parameter.empty if field.default is MISSING else field.default
        assert (field.name, parameter.default) == (field.name, default)
        accepted = get_type_hints(EngineConfig)[field.name]
        if field.name in ("model", "plan", "model_draft", "chat_template"):
            accepted = accepted | os.PathLike[str]
        if field.name == "ctx_size":
            accepted = accepted | str  # "32k"
        assert (field.name, hints[field.name]) == (field.name, accepted)
        assert field.name == "model" or parameter.kind is inspect.Parameter.KEYWORD_ONLY
        assert re.search(rf"^ *- (\w+, )*{field.name}(, \w+)*: ", LLM.__doc__ or "", re.MULTILINE)


def test_the_settings_of_llm_are_flags_of_the_command_line() -> None:
    commands = run_command, serve_command
    flags = {flag for command in commands for parameter in command.params for flag in parameter.opts}
    for field in fields(EngineConfig):
        assert field.name == "model" or f"--{field.name.replace('_', '-')}" in flags


def test_every_setting_reaches_the_configuration(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each value differs from its default; opening stops as soon as the configuration is there."""

    class Seen(Exception):
        pass

    def stop(config: EngineConfig, own: OwnParts) -> None:
        assert own == OwnParts()
        raise Seen(config)

    settings: dict[str, Any] = {
        "model": Path("m.gguf"),
        "ctx_size": 5,
        "vram": 6,
        "ram": 7,
        "threads": 2,
        "device": "cuda",
        "cache_type_k": "i8",
        "cache_type_v": "i8",
        "prefetch": 1,
        "seed": 4,
        "offline": True,
    }
    monkeypatch.setattr("coldstream.engine.llm.open_model", stop)
    for given in (settings, {"model": "m", "plan": Path("p.json")}, {"model": "m", "tier": "avx2"}):
        with pytest.raises(Seen) as caught:
            LLM(**given)
        expected = {key: str(value) if isinstance(value, Path) else value for key, value in given.items()}
        assert caught.value.args == (EngineConfig(**expected),)


@pytest.mark.parametrize(
    ("model", "settings", "message"),
    [
        (5, {}, "model must be a path or org/repo[:QUANT], not 5"),
        (None, {}, "model must be a path or org/repo[:QUANT], not None"),
        ("", {}, "model must be a path or org/repo[:QUANT], not ''"),
        (b"m.gguf", {}, "model must be a path or org/repo[:QUANT], not b'm.gguf'"),
        ("m.gguf", {"plan": 5}, "plan (--plan) must be the path of a file, not 5"),
        ("m.gguf", {"thread": 2}, "unknown setting thread: did you mean threads?"),
        (
            "m.gguf",
            {"seed": 10**5000},
            "seed must be an integer from 0 to 18446744073709551615, not a value of type int",
        ),
    ],
)
def test_wrong_settings_are_typed_errors(model: Any, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        LLM(model, **settings)
    assert message in str(caught.value)


@pytest.fixture(scope="module")
def complaints(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The output of a strict mypy for `RIGHT`, and for each line of `WRONG`."""
    folder = tmp_path_factory.mktemp("user")
    (folder / "right.py").write_text(RIGHT)
    lines = ["import coldstream", "from coldstream import LLM, SamplingParams", *WRONG]
    (folder / "wrong.py").write_text("\n".join(lines) + "\n")
    command = [sys.executable, "-m", "mypy", "--config-file", str(ROOT / "pyproject.toml")]
    done = subprocess.run(
        [*command, str(folder / "right.py"), str(folder / "wrong.py")],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stderr == ""
    return done.stdout


def test_user_code_passes_a_strict_type_checker(complaints: str) -> None:
    assert [line for line in complaints.splitlines() if "right.py" in line] == []


@pytest.mark.parametrize(("number", "line"), enumerate(WRONG, start=3), ids=list(WRONG))
def test_wrong_user_code_does_not_pass(complaints: str, number: int, line: str) -> None:
    found = [text for text in complaints.splitlines() if f"wrong.py:{number}: error" in text]
    assert [text for text in found if text.endswith(f"[{WRONG[line]}]")], complaints
