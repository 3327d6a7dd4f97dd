"""`coldstream run` as a process: one answer, a pipe, a chat on a terminal, Ctrl-C."""

import signal
import subprocess
import sys
from pathlib import Path

import pytest
from terminals import Terminal

from builders import make_model, write_gguf, write_model
from coldstream import LLM, SamplingParams
from coldstream.cli.main import EXIT_INTERRUPTED
from coldstream.cli.terminal import visible

RUN = [sys.executable, "-m", "coldstream", "run"]
ENDLESS = ["--ignore-eos", "--seed", "1", "--threads", "1"]
SHORT = ["-n", "8", *ENDLESS]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_gguf(tmp_path_factory.mktemp("run") / "tiny.gguf")[0])


@pytest.fixture(scope="module")
def plain_model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A model without a chat template."""
    tiny = make_model()
    del tiny.metadata["tokenizer.chat_template"]
    return str(write_model(tmp_path_factory.mktemp("run") / "plain.gguf", tiny)[0])


def _run(*arguments: str, stdin: bytes | None = None) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(
        [*RUN, *arguments],
        input=stdin,
        stdin=subprocess.DEVNULL if stdin is None else None,
        capture_output=True,
        check=False,
    )


def test_one_answer_to_a_prompt(model: str) -> None:
    done = _run(model, "-p", "def", *SHORT)
    with LLM(model, threads=1) as llm:
        params = SamplingParams(max_tokens=8, ignore_eos=True, seed=1)
        expected = llm.chat([{"role": "user", "content": "def"}], params).text
        with_system = llm.chat(
            [{"role": "system", "content": "brief"}, {"role": "user", "content": "def"}], params
        ).text
        completion = llm.generate("def", params)[0].text
    assert (done.returncode, done.stdout) == (0, f"{expected}\n".encode())
    assert b"generated 8 tokens" in done.stderr
    assert b"seed 1" in done.stderr
    quiet = _run(model, "-p", "def", "-sys", "brief", "--quiet", *SHORT)
    assert (quiet.stdout, quiet.stderr) == (f"{with_system}\n".encode(), b"")
    raw = _run(model, "-p", "def", "--raw", "--echo", *SHORT)
    assert raw.stdout == f"def{completion}\n".encode()


def test_piped_text_is_the_prompt_and_the_output_is_plain(model: str) -> None:
    piped = _run(model, *SHORT, stdin=b"def\n")
    assert piped.returncode == 0
    assert piped.stdout == _run(model, "-p", "def", *SHORT).stdout
    assert b"\x1b" not in piped.stderr


def test_a_model_without_template_completes(plain_model: str) -> None:
    assert (
        _run(plain_model, "-p", "def", *SHORT).stdout
        == _run(plain_model, "-p", "def", "--raw", *SHORT).stdout
    )


@pytest.mark.parametrize(
    ("stdin", "message"),
    [
        (b"", b"standard input is empty"),
        (b"\n", b"standard input is empty"),
        (b"ab\xff", b"not UTF-8 text: byte 2"),
    ],
)
def test_tk03_input_that_is_no_prompt(model: str, stdin: bytes, message: bytes) -> None:
    done = _run(model, stdin=stdin)
    assert done.returncode == 2
    assert message in done.stderr
    assert done.stdout == b""


def test_a_system_prompt_that_would_be_ignored_is_refused(model: str) -> None:
    done = _run(model, "-p", "def", "-sys", "brief", "--raw", *SHORT)
    assert done.returncode == 2
    assert b"chat template" in done.stderr


def test_without_a_model_the_bundled_one_completes() -> None:
    done = _run("-p", "def fibonacci(n):", "-n", "24", "--temp", "0", "--threads", "1")
    assert done.returncode == 0
    assert done.stdout.strip()
    raw = _run("-p", "def fibonacci(n):", "-n", "24", "--temp", "0", "--threads", "1", "--raw")
    assert raw.stdout == done.stdout
    assert b"length" in done.stderr or b"stop" in done.stderr


@pytest.mark.parametrize(("arguments", "code"), [(["-p", ""], 2), (["", "-p", "def"], 2)])
def test_empty_texts_are_no_prompt_and_no_model(arguments: list[str], code: int) -> None:
    done = _run(*arguments)
    assert (done.returncode, done.stdout) == (code, b"")
    assert b"empty" in done.stderr or b"model must be" in done.stderr


def test_a_prompt_beyond_the_context_says_so(model: str) -> None:
    done = _run(model, "-p", "x" * 5000, *SHORT)
    assert done.returncode == 2
    assert b"--ctx-size" in done.stderr


def test_ctrl_c_ends_the_answer_and_the_program(model: str) -> None:
    process = subprocess.Popen(
        [*RUN, model, "-p", "def", *ENDLESS],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    with process:
        assert process.stdout is not None
        assert process.stderr is not None
        assert process.stdout.read(1)
        process.send_signal(signal.SIGINT)
        rest, notes = process.stdout.read(), process.stderr.read()
    assert process.returncode == EXIT_INTERRUPTED
    assert rest.endswith(b"\n")
    assert b"cancelled" in notes
    assert b"Traceback" not in notes


def test_ctrl_c_in_a_chat_stops_the_answer_and_keeps_the_session(model: str, tmp_path: Path) -> None:
    with LLM(model, threads=1) as llm:
        params = SamplingParams(max_tokens=30, ignore_eos=True, seed=1)
        answer = visible(llm.chat([{"role": "user", "content": "def"}], params).text).replace("\n", "\r\n")
    with Terminal([*RUN, model, *ENDLESS], home=str(tmp_path)) as terminal:
        start = terminal.read_until(">>>")
        terminal.type("def\r")
        start = terminal.read_until(answer[:20], start)
        terminal.type("\x03")
        start = terminal.read_until("cancelled", start)
        start = terminal.read_until(">>>", start)
        terminal.type("/set max_tokens 4\r")
        start = terminal.read_until(">>>", terminal.read_until("\n", start))
        terminal.type('"""a\rb"""\r')
        start = terminal.read_until("generated 4 tokens", start)
        start = terminal.read_until(">>>", start)
        terminal.type("\x04")
        assert terminal.wait() == 0
    assert "Traceback" not in terminal.screen
    assert (tmp_path / "coldstream" / "history").stat().st_mode & 0o077 == 0


def test_doubts_about_a_file_are_told_and_it_runs(tmp_path: Path) -> None:
    model = make_model()
    for name in model.tensors:
        if name.endswith("attn_norm.weight"):
            model.tensors[name] += 1
    write_model(tmp_path / "odd.gguf", model)
    done = _run(str(tmp_path / "odd.gguf"), "-p", "a", "--raw", *SHORT)
    assert done.returncode == 0
    assert b"warning: the attn_norm weights are centred on 2" in done.stderr
