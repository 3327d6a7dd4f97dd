"""A chat template of a file in the place of the model's own: the library, the server's reading, refusals."""

import os
from dataclasses import replace
from pathlib import Path

import pytest

from builders import write_gguf
from coldstream import LLM, SamplingParams
from coldstream.engine import EngineConfig, open_model, opened_model
from coldstream.engine.opened_model import chat_template_of
from coldstream.errors import ConfigError, OutOfMemoryError, TemplateError
from coldstream.gguf.reader import GGUFFile
from coldstream.gguf.template_process import MAX_SOURCE_CHARS
from coldstream.gguf.tokenizer import Tokenizer
from coldstream.server.served_model import ServedModel

SOURCE = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
USER = [{"role": "user", "content": "hi"}]


@pytest.fixture
def model(tmp_path: Path) -> str:
    return str(write_gguf(tmp_path / "tiny.gguf")[0])


def test_the_library_and_the_server_use_the_template_of_the_file(model: str, tmp_path: Path) -> None:
    path = tmp_path / "own.jinja"
    path.write_text(SOURCE)
    params = SamplingParams(max_tokens=1, seed=1)
    with LLM(model, device="cpu", chat_template=path) as llm, LLM(model, device="cpu") as plain:
        (answer,) = llm.chat(USER, params)
        (own,) = plain.chat(USER, params)
        assert answer.prompt_token_ids == tuple(llm.opened.tokenizer.encode("[user]hi"))
        assert own.prompt_token_ids != answer.prompt_token_ids
        shared = ServedModel.of_opened("tiny", 0, llm.opened)
        served = ServedModel.read("tiny", 0, shared.facts)
        assert served.template_source == shared.template_source == SOURCE
        assert served.chat_template.render(USER).text == "[user]hi"
        other = replace(shared.facts, chat_template=SOURCE + "!")
        assert served.opened_anew(other).template_source == SOURCE + "!"
        assert served.opened_anew(shared.facts).chat_template is served.chat_template
        own_source = plain.opened.chat_template.source
        assert ServedModel.read(
            "tiny", 0, ServedModel.of_opened("t", 0, plain.opened).facts
        ).template_source == (own_source)
        served.chat_template.close()


def test_a_model_that_is_refused_leaves_no_process_of_its_template(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, children = tmp_path / "own.jinja", Path(f"/proc/self/task/{os.getpid()}/children")
    path.write_text(SOURCE)
    before, during = children.read_text(), list[str]()

    def refuse(*of: object, **named: object) -> None:
        during.append(children.read_text())
        raise OutOfMemoryError("no room for drafts")

    monkeypatch.setattr(opened_model, "open_speculation", refuse)
    with pytest.raises(OutOfMemoryError, match="no room for drafts") as caught:
        open_model(EngineConfig(model, device="cpu", chat_template=str(path), spec_type="ngram"))
    assert during != [before], "the template is compiled in a process"
    assert children.read_text() == before, "although the traceback has all that was opened"
    assert caught.tb


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (None, r"own\.jinja: No such file or directory"),
        (b"a\xff", r"own\.jinja: byte 1 is no UTF-8"),
        (b"a" * (MAX_SOURCE_CHARS + 1), r"own\.jinja: more than 1048576 bytes"),
    ],
    ids=["absent", "no text", "too long"],
)
def test_a_file_that_is_no_template_is_refused(
    model: str, tmp_path: Path, content: bytes | None, problem: str
) -> None:
    path = tmp_path / "own.jinja"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ConfigError, match=problem):
        open_model(EngineConfig(model, device="cpu", chat_template=str(path)))


def test_a_template_that_does_not_compile_is_refused_before_the_model_is_loaded(
    model: str, tmp_path: Path
) -> None:
    path = tmp_path / "own.jinja"
    path.write_text("{% if %}")
    with GGUFFile.open(model) as file:
        vocabulary = Tokenizer.from_metadata(file.metadata).vocabulary
        with pytest.raises(TemplateError, match="not compiled"):
            chat_template_of(str(path), file.metadata, vocabulary)


@pytest.mark.parametrize("value", ["", 5])
def test_the_setting_is_a_path(value: object) -> None:
    with pytest.raises(ConfigError, match="chat_template"):
        EngineConfig("m.gguf", chat_template=value)  # type: ignore[arg-type]
