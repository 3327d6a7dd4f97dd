"""A model that is dropped without `close`, and one that a forked child has from its parent."""

import gc
import os
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from coldstream import LLM, SamplingParams
from coldstream.assets import demo_drafter_path, demo_model_path
from coldstream.gguf.reader import GGUFFile
from ram_budgets import least_ram

GREEDY = SamplingParams(temperature=0, max_tokens=4)
CONTEXT = 256
# A child that hangs is ended by this; nothing waits that long.
PATIENCE_S = 60


def children() -> list[str]:
    return Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()


def in_use() -> dict[str, Any]:
    """What a model holds of this process: descriptors by the file that they lead to, threads and children."""
    descriptors: Counter[str] = Counter()
    for entry in os.listdir("/proc/self/fd"):
        try:
            descriptors[os.readlink(f"/proc/self/fd/{entry}")] += 1
        except FileNotFoundError:
            continue  # that of the listing
    threads = len(os.listdir("/proc/self/task"))
    return {"descriptors": descriptors, "threads": threads, "children": children()}


@pytest.mark.sharded
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"ram": least_ram(demo_model_path(), context_length=CONTEXT) + (8 << 20)},
        {"model_draft": str(demo_drafter_path())},
        {"spec_type": "ngram"},
    ],
    ids=["mapped", "ram", "dflash", "ngram"],
)
def test_a_dropped_model_leaves_nothing_open(options: dict[str, Any]) -> None:
    """Also with a stream that has not ended, and a template's process that runs."""
    gc.collect()
    before = in_use()
    llm = LLM(demo_model_path(), device="cpu", threads=3, ctx_size=CONTEXT, offline=True, **options)
    llm.generate("def f", GREEDY)
    llm.opened.chat_template.check()
    stream = llm.stream("def f", GREEDY)
    next(stream)
    during = in_use()
    assert during["descriptors"].total() > before["descriptors"].total()
    assert during["threads"] > before["threads"]
    assert len(during["children"]) == len(before["children"]) + 1
    del llm, stream
    gc.collect()
    # The system lists threads for a moment after they have ended, also at `before` those of an earlier model.
    deadline = time.monotonic() + PATIENCE_S
    while (after := in_use())["threads"] > before["threads"] and time.monotonic() < deadline:
        pass
    assert after["threads"] <= before["threads"]
    assert after["descriptors"] == before["descriptors"]
    assert after["children"] == before["children"]


def test_a_dropped_file_is_closed() -> None:
    before = in_use()["descriptors"]
    file = GGUFFile.open(demo_model_path())
    assert in_use()["descriptors"] != before
    del file
    assert in_use()["descriptors"] == before


FORKED = """
import os, sys, threading
from coldstream import LLM, SamplingParams
from coldstream.assets import demo_model_path
from coldstream.errors import GenerationFault

llm = LLM(demo_model_path(), device="cpu", threads=2, ctx_size=2048, offline=True)
params = SamplingParams(temperature=0, max_tokens=1500, ignore_eos=True)
llm.opened.chat_template.check()
worker = llm.opened.chat_template._process._process
shared = llm.stream("class A", params)  # another thread takes its pieces when the process forks
computing, stop = threading.Event(), threading.Event()

def compute():
    for piece in shared:
        computing.set()
        if stop.is_set():
            break

thread = threading.Thread(target=compute)
thread.start()
computing.wait()
waiting = llm.stream("def g", params)
child = os.fork()
if child == 0:
    message = [{"role": "user", "content": "x"}]
    for use in (
        lambda: llm.generate("def g", params),
        lambda: llm.generate(["def g", "def h"], params),
        lambda: llm.logits([1, 2]),
        lambda: next(llm.stream("def g", params)),
        lambda: llm.chat(message, params),
        lambda: next(llm.stream_chat(message, params)),
        lambda: next(shared),
        lambda: next(waiting),
        lambda: llm.forget(),
        lambda: llm.opened.chat_template._process.render({}),
        lambda: llm.opened.chat_template.check(),
    ):
        try:
            use()
        except GenerationFault as error:
            assert "before fork()" in str(error) and "open the model in the child process" in str(error)
        else:
            os._exit(2)
    shared.cancel()
    waiting.close()
    llm.close()
    del shared, waiting, llm
    own = LLM(demo_model_path(), device="cpu", threads=2, ctx_size=64, offline=True)
    own.generate("def g", SamplingParams(temperature=0, max_tokens=2))
    own.close()
    sys.exit(0)  # with all that runs at the end of a process
status = os.waitpid(child, 0)[1]
assert status == 0, f"the child ended with {status}"
assert worker.poll() is None, "the child ended its parent's process for templates"
stop.set()
thread.join()
shared.close()
few = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True)
assert len(llm.generate("def f", few)[0].token_ids) == 3
llm.close()
"""


def test_a_child_forked_while_a_thread_generates() -> None:
    """It gets errors and can open the model itself; nothing hangs, and the parent goes on."""
    done = subprocess.run(
        [sys.executable, "-c", FORKED], timeout=PATIENCE_S, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
