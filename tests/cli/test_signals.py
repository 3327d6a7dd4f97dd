"""Ctrl-C and SIGTERM, as real signals to real processes, at moments that the processes themselves tell."""

import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from terminals import TIMEOUT_S, Terminal

from builders import make_model, write_gguf, write_model

COLDSTREAM = [sys.executable, "-m", "coldstream"]
ENDLESS = ["--ignore-eos", "--threads", "1"]

# Runs `coldstream ls` and sends itself a signal when a module of the given name is looked for.
_AT_IMPORT = """
import os, runpy, sys
module, number = sys.argv[1:]
class Signal:
    def find_spec(self, name, path=None, target=None):
        if name == module:
            os.kill(os.getpid(), int(number))
sys.meta_path.insert(0, Signal())
sys.argv = ["coldstream", "ls"]
runpy.run_module("coldstream", run_name="__main__")
"""

# Runs a verb that says so and then computes without end, where no Python runs, and never looks for signals.
_ENDLESS_COMPUTATION = """
import hashlib, mmap, sys
from coldstream.__main__ import main
from coldstream.cli import interrupts, ls
def compute(as_json):
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x4000  # without a reserve of memory for it
    endless = mmap.mmap(-1, 1 << 42, flags=flags, prot=mmap.PROT_READ)
    lines = ["computing"]
    while True:
        try:
            if lines:
                print(lines.pop(), flush=True)
            hashlib.sha256(endless)
        except BaseException:  # the signal came before it began
            pass
ls.command.callback = compute
interrupts.GRACE_S = 0.01
sys.argv = ["coldstream", "ls"]
sys.exit(main())
"""

# Runs a verb that gets a signal while the callback of a weak reference runs, and then waits for its effect.
_IN_A_FINALIZER = """
import os, signal, sys, weakref
from coldstream.__main__ import main
from coldstream.cli import interrupts, ls
class Collected: pass
number = int(sys.argv.pop())
def wait(as_json):
    weakref.finalize(Collected(), os.kill, os.getpid(), number)
    while True:
        signal.pause()
set_timer = signal.setitimer
def end_at_once(which, seconds, interval):
    signal.setitimer = set_timer
    signal.raise_signal(signal.SIGALRM)
def lose_the_first(which, seconds, interval=0.0):
    set_timer(which, interval, interval)
alarm = sys.argv.pop()
if alarm == "at once":
    signal.setitimer = end_at_once
elif alarm == "lost":
    signal.setitimer = lose_the_first
ls.command.callback = wait
interrupts.GRACE_S = 600
sys.argv = ["coldstream", "ls"]
sys.exit(main())
"""

# Chats, and sends itself SIGTERM when its line editor draws: in callbacks of an event loop too.
_CHAT = """
import asyncio, os, signal, sys
from prompt_toolkit.renderer import Renderer
from coldstream.__main__ import main
from coldstream.cli import interrupts
def send():
    os.kill(os.getpid(), signal.SIGTERM)
    sys.stdout.write("sent")
render = Renderer.render
def render_and_send(*arguments, **options):
    %s
    return render(*arguments, **options)
Renderer.render = render_and_send
sys.argv = ["coldstream", *sys.argv[1:]]
sys.exit(main())
"""
_DRAWING = _CHAT % "send()"
_IN_A_CALLBACK = _CHAT % "asyncio.get_running_loop().call_soon(send)"
_IN_A_LOOP_THAT_HANGS = _CHAT % "interrupts.GRACE_S = 0.01; send(); signal.pause()"


# Chats, and sends itself Ctrl-C when an answer has ended, but is still shown.
_AS_IT_ENDS = """
import os, signal, sys
from coldstream.__main__ import main
from coldstream.cli.answer import AnswerWriter
end_line = AnswerWriter.end_line
def end_line_and_send(writer):
    os.kill(os.getpid(), signal.SIGINT)
    end_line(writer)
AnswerWriter.end_line = end_line_and_send
sys.argv = ["coldstream", *sys.argv[1:]]
sys.exit(main())
"""


def _until(is_so: Callable[[], object]) -> None:
    deadline = time.monotonic() + TIMEOUT_S
    while not is_so():
        assert time.monotonic() < deadline
        os.sched_yield()


def _deliver(pid: int, number: signal.Signals) -> None:
    """Send a signal and wait until it has arrived, so that the next one is another."""
    os.kill(pid, number)
    bit = 1 << number - 1

    def has_arrived() -> bool:
        try:
            lines = Path(f"/proc/{pid}/status").read_text().splitlines()
        except OSError:
            return True
        if "State:\tZ (zombie)" in lines:
            return True
        pending = [int(line.split()[1], 16) for line in lines if line.startswith(("SigPnd", "ShdPnd"))]
        return not any(mask & bit for mask in pending)

    _until(has_arrived)


def _children(process: subprocess.Popen[str]) -> list[int]:
    text = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text()
    return [int(number) for number in text.split()]


def _start(*command: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


@pytest.mark.sharded(9)
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize(
    "module",
    [
        *("coldstream.cli", "coldstream.cli.main", "click", "click.core", "coldstream.errors"),
        *("coldstream.cli.interrupts", "coldstream.cli.ls", "coldstream.cli.options", "numpy"),
        "huggingface_hub",
    ],
)
def test_a_signal_in_the_first_moments_ends_it_quietly(module: str, number: signal.Signals) -> None:
    command = [sys.executable, "-c", _AT_IMPORT, module, str(int(number))]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 128 + number
    assert (done.stdout, done.stderr.strip()) == ("", "")


def test_the_second_ctrl_c_ends_a_computation_outside_of_python() -> None:
    with _start(sys.executable, "-c", _ENDLESS_COMPUTATION) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "computing\n"
        _deliver(process.pid, signal.SIGINT)
        assert process.poll() is None
        _deliver(process.pid, signal.SIGINT)
        _, notes = process.communicate(timeout=TIMEOUT_S)
    assert (process.returncode, notes) == (130, "")


def test_sigterm_ends_a_computation_outside_of_python() -> None:
    with _start(sys.executable, "-c", _ENDLESS_COMPUTATION) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "computing\n"
        _deliver(process.pid, signal.SIGTERM)
        _, notes = process.communicate(timeout=TIMEOUT_S)
    assert (process.returncode, notes) == (143, "")


@pytest.mark.sharded(6)
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("alarm", ["later", "at once", "lost"])
def test_a_signal_in_a_finalizer_is_not_lost(alarm: str, number: signal.Signals) -> None:
    """Lost: an alarm that comes after the main thread's last look at signals, and before it falls asleep."""
    command = [sys.executable, "-c", _IN_A_FINALIZER, alarm, str(int(number))]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=TIMEOUT_S)
    assert (done.returncode, done.stdout) == (128 + number, "")
    assert "Traceback" not in done.stderr


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_gguf(tmp_path_factory.mktemp("signals") / "tiny.gguf")[0])


@pytest.mark.sharded(of="processes")
@pytest.mark.parametrize("numbers", [[signal.SIGTERM], [signal.SIGINT, signal.SIGINT]])
def test_an_answer_ends_with_its_template_process(model: str, numbers: list[signal.Signals]) -> None:
    with _start(*COLDSTREAM, "run", model, "-p", "def", *ENDLESS) as process:
        assert process.stdout is not None
        assert process.stdout.read(1)
        workers = [os.pidfd_open(child) for child in _children(process)]
        assert workers
        for number in numbers:
            _deliver(process.pid, number)
        _, notes = process.communicate(timeout=TIMEOUT_S)
    assert process.returncode == 128 + numbers[0]
    assert "Traceback" not in notes
    for worker in workers:
        assert select.select([worker], [], [], TIMEOUT_S)[0]
        os.close(worker)


@pytest.mark.sharded(of="processes")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_template_that_takes_long_ends_with_the_program(tmp_path: Path, number: signal.Signals) -> None:
    slow = make_model()
    loops = "{% for a in range(99999) %}" * 3 + "{% endfor %}" * 3
    slow.metadata["tokenizer.chat_template"] = loops
    path, *_ = write_model(tmp_path / "slow.gguf", slow)
    with _start(*COLDSTREAM, "run", str(path), "-p", "def", *ENDLESS) as process:
        _until(lambda: _children(process))
        (worker,) = (os.pidfd_open(child) for child in _children(process))
        _deliver(process.pid, number)
        shown, notes = process.communicate(timeout=TIMEOUT_S)
    assert (process.returncode, shown, notes.strip()) == (128 + number, "", "")
    assert select.select([worker], [], [], TIMEOUT_S)[0]
    os.close(worker)


@pytest.mark.sharded(of="processes")
def test_two_quick_ctrl_c_end_a_long_prompt_and_show_the_cursor_again(tmp_path: Path) -> None:
    prompt = "def add(a, b):\n    return a + b\n\n" * 300
    command = [*COLDSTREAM, "run", "-p", prompt, *ENDLESS, "--tier", "generic", "--device", "cpu"]
    with Terminal(command, home=str(tmp_path)) as terminal:
        terminal.read_until("reading the prompt")
        _deliver(terminal.pid, signal.SIGINT)
        _deliver(terminal.pid, signal.SIGINT)
        terminal.read_to_the_end()
        assert terminal.wait() == 130
    assert terminal.screen.rindex("\x1b[?25h") > terminal.screen.rindex("\x1b[?25l")
    assert "Traceback" not in terminal.screen


def test_ctrl_c_as_an_answer_ends_leads_to_the_next_prompt(model: str, tmp_path: Path) -> None:
    """Each is a first one: the second of two in an answer would end the program."""
    command = [sys.executable, "-c", _AS_IT_ENDS, "run", model, "-n", "2", *ENDLESS]
    with Terminal(command, home=str(tmp_path)) as terminal:
        start = terminal.read_until(">>>")
        for _ in range(3):
            terminal.type("def\r")
            start = terminal.read_until("length", start)
            start = terminal.read_until("/exit or Ctrl-D leaves", start)
            start = terminal.read_until(">>>", start)
        terminal.type("\x04")
        terminal.read_to_the_end()
        assert terminal.wait() == 0
    assert "Traceback" not in terminal.screen


@pytest.mark.sharded(of="processes")
@pytest.mark.parametrize("keys", ["", "def\r"])
def test_sigterm_leaves_a_chat_and_the_terminal_as_it_was(model: str, tmp_path: Path, keys: str) -> None:
    with Terminal([*COLDSTREAM, "run", model, *ENDLESS], home=str(tmp_path)) as terminal:
        start = terminal.read_until(">>>")
        assert not terminal.reads_lines()
        if keys:
            terminal.type(keys)
            start = terminal.read_until("\n", start)
        os.kill(terminal.pid, signal.SIGTERM)
        terminal.read_to_the_end()
        assert terminal.wait() == 143
        assert terminal.reads_lines()
    assert "Traceback" not in terminal.screen


@pytest.mark.sharded
@pytest.mark.parametrize("program", [_DRAWING, _IN_A_CALLBACK, _IN_A_LOOP_THAT_HANGS])
def test_sigterm_ends_a_chat_where_its_line_editor_would_not_let_it(
    model: str, tmp_path: Path, program: str
) -> None:
    with Terminal([sys.executable, "-c", program, "run", model, *ENDLESS], home=str(tmp_path)) as terminal:
        terminal.read_to_the_end()
        assert terminal.wait() == 143
        assert terminal.reads_lines()
    assert "Traceback" not in terminal.screen
