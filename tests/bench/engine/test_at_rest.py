"""Programs that nobody asks anything: their threads wait, and one that looks for something is found."""

import subprocess
import sys
import time

from bench.engine.at_rest import Thread, Times, at_rest, library, spent, times_of

LIMIT_S = 60.0  # only for a program whose threads never wait
# A thread that looks for something, in a child of the program.
LOOKING = """
import subprocess, sys
child = subprocess.Popen([sys.executable, "-c", "print('looking', flush=True)\\nwhile True: pass"])
try:
    sys.stdin.read()
finally:
    child.kill()
"""


def test_threads_of_a_model_wait_after_an_answer() -> None:
    """In all of a window no thread has run. A thread that looks for something would run in each."""
    deadline = time.monotonic() + LIMIT_S
    with library() as process:
        while (found := at_rest(process, 0.1))["wakes_per_s"] or found["share_of_core"]:
            assert time.monotonic() < deadline, found
        assert len(times_of(process)) == found["threads"]


def test_a_thread_that_looks_is_seen_in_a_child_too() -> None:
    pipe = subprocess.PIPE
    with subprocess.Popen([sys.executable, "-c", LOOKING], stdin=pipe, stdout=pipe) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"looking\n"
        before, deadline = times_of(process.pid), time.monotonic() + LIMIT_S
        assert len({thread.process for thread in before}) == 2
        while not any(times.cpu_s for times in spent(before, times_of(process.pid)).values()):
            assert time.monotonic() < deadline


def test_what_was_spent_is_of_the_window_and_new_threads_begin_with_nothing() -> None:
    old, new = Thread(1, 2), Thread(1, 3)
    before = {old: Times("a", 5.0, 7)}
    after = {old: Times("a", 5.5, 9), new: Times("b", 0.25, 1)}
    assert spent(before, after) == {old: Times("a", 0.5, 2), new: Times("b", 0.25, 1)}
