"""`coldstream run` as a process: one answer, a pipe, a chat on a terminal, Ctrl-C."""

import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from terminals import Terminal

from builders import make_model, write_gguf, write_model
from coldstream import LLM, SamplingParams, files
from coldstream.assets import demo_model_path
from coldstream.cli import run as cli_run
from coldstream.cli.main import EXIT_INTERRUPTED
from coldstream.cli.terminal import visible
from coldstream.cli.text_input import MAX_TEXT_BYTES
from coldstream.engine import Stream, open_model
from coldstream.engine.opened_model import FirstPrompt, OpenedModel
from coldstream.gguf.quant_types import QuantType
from coldstream.kernels import memory_readers
from coldstream.placement.hardware import Hardware
from coldstream.planning import machine
from coldstream.planning.machine import LateRates, rates_are_known

Run = Callable[..., tuple[int, str, str]]

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


@pytest.mark.sharded(of="processes")
def test_one_answer_to_a_prompt(model: str) -> None:
    done = _run(model, "-p", "def", *SHORT)
    with LLM(model, threads=1) as llm:
        params = SamplingParams(max_tokens=8, ignore_eos=True, seed=1)
        expected = llm.chat([{"role": "user", "content": "def"}], params)[0].text
        with_system = llm.chat(
            [{"role": "system", "content": "brief"}, {"role": "user", "content": "def"}], params
        )[0].text
        completion = llm.generate("def", params)[0].text
    assert (done.returncode, done.stdout) == (0, f"{expected}\n".encode())
    assert b"generated 8 tokens" in done.stderr
    assert b"seed 1" in done.stderr
    quiet = _run(model, "-p", "def", "-sys", "brief", "--quiet", *SHORT)
    assert (quiet.stdout, quiet.stderr) == (f"{with_system}\n".encode(), b"")
    raw = _run(model, "-p", "def", "--raw", "--echo", *SHORT)
    assert raw.stdout == f"def{completion}\n".encode()


@pytest.mark.sharded(of="processes")
def test_piped_text_is_the_prompt_and_the_output_is_plain(model: str) -> None:
    piped = _run(model, *SHORT, stdin=b"def\n")
    assert piped.returncode == 0
    assert piped.stdout == _run(model, "-p", "def", *SHORT).stdout
    assert b"\x1b" not in piped.stderr


@pytest.mark.sharded(of="processes")
def test_a_prompt_and_piped_text_are_one_prompt(model: str, tmp_path: Path) -> None:
    both = _run(model, "-p", "x\ndef", *SHORT).stdout
    (tmp_path / "x.txt").write_text("x\n")
    assert _run(model, "-p", "def", *SHORT, stdin=b"x\n").stdout == both
    assert _run(model, "-p", "def", "-f", str(tmp_path / "x.txt"), *SHORT, stdin=b"ignored").stdout == both
    assert _run(model, "-p", "def", "-f", "-", *SHORT, stdin=b"x\n").stdout == both
    assert _run(model, "--file", "-", *SHORT, stdin=b"x\ndef").stdout == both
    (tmp_path / "x.txt").write_text("x\ndef\n")
    assert _run(model, "-f", str(tmp_path / "x.txt"), *SHORT).stdout == both
    with open(tmp_path / "x.txt", "w+") as file:  # standard input may be a file too
        file.write("x")
        file.seek(0)
        done = subprocess.run([*RUN, model, "-p", "def", *SHORT], stdin=file, capture_output=True, check=True)
    assert done.stdout == both
    assert _run(model, "-p", "def", *SHORT, stdin=b"").stdout == _run(model, "-p", "def", *SHORT).stdout


@pytest.mark.sharded(of="processes")
def test_a_socket_that_somebody_left_open_is_not_waited_for(model: str) -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        command = [*RUN, model, "-p", "def", *SHORT]
        done = subprocess.run(command, stdin=theirs, capture_output=True, check=True, timeout=300)
    assert done.stdout == _run(model, "-p", "def", *SHORT).stdout


@pytest.mark.sharded
@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", b"x.txt is empty: give a file with a prompt"),
        (b"\n", b"x.txt is empty: give a file with a prompt"),
        (b"ab\xff", b"x.txt is not UTF-8 text: byte 2"),
        (b"a" * (MAX_TEXT_BYTES + 1), b"x.txt has more than 16777216 bytes; give a part of it"),
        (None, b"x.txt: No such file or directory; give a text file with -f"),
    ],
    ids=["empty", "a line", "no text", "too long", "not there"],
)
def test_tk03_a_file_that_is_no_prompt(tmp_path: Path, content: bytes | None, message: bytes) -> None:
    if content is not None:
        (tmp_path / "x.txt").write_bytes(content)
    done = _run("-f", str(tmp_path / "x.txt"), *SHORT)
    assert (done.returncode, done.stdout) == (2, b"")
    assert message in done.stderr
    assert done.stderr.count(b"\n") == 1


@pytest.mark.sharded(of="processes")
def test_minus_one_generates_until_the_context_is_full(model: str) -> None:
    done = _run(model, "-p", "def", "-n", "-1", "-c", "40", *ENDLESS, "--raw")
    with LLM(model, threads=1, ctx_size=40) as llm:
        (expected,) = llm.generate("def", SamplingParams(ignore_eos=True, seed=1))
    assert len(expected.prompt_token_ids) + len(expected.token_ids) == 40
    assert done.stdout.removesuffix(b"\n") == expected.text.encode().removesuffix(b"\n")


@pytest.mark.sharded(of="processes")
def test_a_model_without_template_completes(plain_model: str) -> None:
    assert (
        _run(plain_model, "-p", "def", *SHORT).stdout
        == _run(plain_model, "-p", "def", "--raw", *SHORT).stdout
    )


@pytest.mark.sharded
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


@pytest.mark.sharded(of="processes")
def test_a_system_prompt_that_would_be_ignored_is_refused(model: str) -> None:
    done = _run(model, "-p", "def", "-sys", "brief", "--raw", *SHORT)
    assert done.returncode == 2
    assert b"chat template" in done.stderr


@pytest.mark.sharded(of="processes")
def test_without_a_model_the_bundled_one_completes() -> None:
    done = _run("-p", "def fibonacci(n):", "-n", "24", "--temp", "0", "--threads", "1")
    assert done.returncode == 0
    assert done.stdout.strip()
    raw = _run("-p", "def fibonacci(n):", "-n", "24", "--temp", "0", "--threads", "1", "--raw")
    assert raw.stdout == done.stdout
    assert b"length" in done.stderr or b"stop" in done.stderr


@pytest.mark.sharded(of="processes")
def test_the_bundled_model_completes_by_whatever_path_it_is_named(tmp_path: Path) -> None:
    shutil.copy(demo_model_path(), tmp_path / "copy.gguf")
    arguments = ("-p", "def fibonacci(n):", "-n", "12", "--temp", "0", "--threads", "1")
    expected = _run(*arguments).stdout
    assert expected
    for path in (str(demo_model_path()), str(tmp_path / "copy.gguf")):
        assert _run(path, *arguments).stdout == expected
    assert b"this one continues text" in _run(path, *arguments, "-sys", "brief").stderr


@pytest.mark.sharded(of="processes")
@pytest.mark.parametrize(("count", "line"), [("1", rb"d 1 token "), ("2", rb"2 tokens, [\d.]+ tok/s")])
def test_a_speed_is_shown_only_where_there_is_one(model: str, count: str, line: bytes) -> None:
    done = _run(model, "-p", "def", "-n", count, *ENDLESS, "--raw", "-c", "50")
    assert re.search(line, done.stderr)
    assert b" 0.0 tok/s" not in done.stderr
    (prompt_tokens,) = re.findall(rb"prompt (\d+) tokens?, ", done.stderr)
    assert b"context %d of 50" % (int(prompt_tokens) + int(count)) in done.stderr
    assert b"1 thread " in done.stderr


@pytest.mark.sharded(of="processes")
@pytest.mark.parametrize(("arguments", "code"), [(["-p", ""], 2), (["", "-p", "def"], 2)])
def test_empty_texts_are_no_prompt_and_no_model(arguments: list[str], code: int) -> None:
    done = _run(*arguments)
    assert (done.returncode, done.stdout) == (code, b"")
    assert b"empty" in done.stderr or b"model must be" in done.stderr


@pytest.mark.sharded(of="processes")
def test_a_prompt_beyond_the_context_says_so(model: str) -> None:
    done = _run(model, "-p", "x" * 5000, *SHORT)
    assert done.returncode == 2
    assert b"--ctx-size" in done.stderr


@pytest.mark.sharded(of="processes")
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


@pytest.mark.sharded(of="processes")
def test_ctrl_c_in_a_chat_stops_the_answer_and_keeps_the_session(model: str, tmp_path: Path) -> None:
    with LLM(model, threads=1) as llm:
        params = SamplingParams(max_tokens=30, ignore_eos=True, seed=1)
        answer = visible(llm.chat([{"role": "user", "content": "def"}], params)[0].text).replace("\n", "\r\n")
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
    assert len(list((tmp_path / "coldstream" / "chats").iterdir())) == 1


@pytest.mark.sharded(of="processes")
def test_without_history_a_chat_leaves_nothing_behind(model: str, tmp_path: Path) -> None:
    with Terminal([*RUN, model, "-n", "2", "--no-history"], home=str(tmp_path)) as terminal:
        start = terminal.read_until(">>>")
        terminal.type("def\r")
        start = terminal.read_until(">>>", terminal.read_until("generated", start))
        terminal.type("/resume\r")
        terminal.read_until(">>>", terminal.read_until("leave --no-history out", start))
        terminal.type("\x04")
        assert terminal.wait() == 0
    assert not (tmp_path / "coldstream").exists()


@pytest.mark.sharded(of="processes")
def test_doubts_about_a_file_are_reported_and_it_runs(tmp_path: Path) -> None:
    model = make_model()
    for name in model.tensors:
        if name.endswith("attn_norm.weight"):
            model.tensors[name] += 1
    write_model(tmp_path / "odd.gguf", model)
    done = _run(str(tmp_path / "odd.gguf"), "-p", "a", "--raw", *SHORT)
    assert done.returncode == 0
    assert b"warning: the attn_norm weights are centred on 2" in done.stderr


@pytest.mark.parametrize("is_cancelled", [False, True])
def test_what_a_plan_assumed_is_measured_behind_the_answer(
    model: str, run: Run, monkeypatch: pytest.MonkeyPatch, is_cancelled: bool
) -> None:
    """When the model is closed, and not for somebody who has left."""
    events: list[str] = []

    class Late:
        def measure(self, progress: object) -> None:
            events.append("measured")

    def opened(*arguments: Any, prompt: FirstPrompt, **options: Any) -> OpenedModel:
        assert prompt == FirstPrompt("def", is_raw=False)
        found = open_model(*arguments, prompt=prompt, **options)
        close = found.runner.close
        monkeypatch.setattr(found.runner, "close", lambda: (events.append("closed"), close()))
        return replace(found, late_rates=Late())

    monkeypatch.setattr(cli_run, "open_model", opened)
    if is_cancelled:
        answer = cli_run.show_answer
        monkeypatch.setattr(
            cli_run, "show_answer", lambda *of: replace(answer(*of), finish_reason="cancelled")
        )
    monkeypatch.setattr(cli_run, "prompt_of", lambda prompt, file: prompt)  # which would look for a pipe
    code, _, _ = run("run", model, "-p", "def", *SHORT)
    assert code == (EXIT_INTERRUPTED if is_cancelled else 0)
    assert events == ["closed", *([] if is_cancelled else ["measured"])]


@pytest.mark.parametrize("is_measured", [False, True])
def test_ctrl_c_just_as_the_answer_ends_is_not_lost(
    model: str, run: Run, monkeypatch: pytest.MonkeyPatch, is_measured: bool
) -> None:
    """The answer is whole. What would be measured behind it is not."""

    def interrupt(stream: Stream) -> None:
        signal.raise_signal(signal.SIGINT)
        end(stream)

    def opened(*arguments: Any, **options: Any) -> OpenedModel:
        found = open_model(*arguments, **options)
        return replace(found, late_rates=None if is_measured else object())

    monkeypatch.setattr(cli_run, "prompt_of", lambda prompt, file: prompt)  # which would look for a pipe
    asked = ("run", model, "-p", "def", *SHORT)
    _, answer, _ = run(*asked)
    end = Stream.close
    monkeypatch.setattr(Stream, "close", interrupt)
    monkeypatch.setattr(cli_run, "open_model", opened)
    code, out, err = run(*asked)
    assert (code, out) == (0 if is_measured else EXIT_INTERRUPTED, answer)
    assert "generated 8 tokens" in err
    assert ("the answer had ended when Ctrl-C came" in err) == is_measured


@pytest.mark.parametrize("when", ["reading", "multiplying", "writing", "written"])
def test_ctrl_c_while_the_machine_is_measured_leaves_nothing_half_done(
    model: str, run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, when: str
) -> None:
    """The answer stays, the model is closed, no thread goes on, and rates are kept whole or not at all."""
    here, path, events = Hardware.measure(), tmp_path / "kept" / "hardware.json", list[str]()
    late = LateRates(here, path)
    asked = ("run", model, "-p", "def", *SHORT)
    monkeypatch.setattr(cli_run, "prompt_of", lambda prompt, file: prompt)  # which would look for a pipe
    _, answer, _ = run(*asked)

    def opened(*arguments: Any, **options: Any) -> OpenedModel:
        found = open_model(*arguments, **options)
        close = found.runner.close
        monkeypatch.setattr(found.runner, "close", lambda: (close(), events.append("closed")))
        late.find()
        return replace(found, late_rates=late)

    def interrupt(*of: object) -> None:
        assert events == ["closed"]
        events.append(when)
        signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(cli_run, "open_model", opened)
    monkeypatch.setattr(machine, "measure_product_rates", lambda threads: ((1e9,) * 3,) * len(QuantType))
    row = SimpleNamespace(bytes_per_s=lambda: 1e10, run=lambda: None)
    monkeypatch.setattr(machine, "RowProduct", lambda threads, num_bytes: row)
    clock = SimpleNamespace(perf_counter=time.perf_counter, sleep=interrupt)
    module, name, found = {
        "reading": (memory_readers, "time", clock),
        "multiplying": (machine, "measure_product_rates", interrupt),
        "writing": (files.os, "fsync", interrupt),
        "written": (files, "sync_folder", interrupt),
    }[when]
    with monkeypatch.context() as patch:
        patch.setattr(module, name, found)
        threads = threading.enumerate()
        code, out, err = run(*asked)
    assert (code, out, events) == (EXIT_INTERRUPTED, answer, ["closed", when])
    assert "Traceback" not in err
    assert threading.enumerate() == threads
    assert [each.name for each in tmp_path.glob("kept/*")] == (["hardware.json"] if when == "written" else [])
    assert rates_are_known(here, path) == (when == "written")
    late.measure()
    assert rates_are_known(here, path), "a later measurement is kept"


def test_what_comes_to_light_behind_the_first_token_is_said_once(capsys: pytest.CaptureFixture[str]) -> None:
    """Such as memory that could not be locked, which is tried then."""
    opened: Any = SimpleNamespace(warnings=("known before", "1.0 of 20.1 GiB could be page-locked"))
    cli_run._note_late(opened, ("known before",))
    assert capsys.readouterr().err == "warning: 1.0 of 20.1 GiB could be page-locked\n"
    cli_run._note_late(opened, opened.warnings)
    assert capsys.readouterr().err == ""
