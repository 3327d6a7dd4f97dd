"""When nobody asks anything, no thread of the CPU looks for what a GPU may ask it.

Experts that a step lacks are computed by threads that look for requests while a step runs. A step that is
launched before its token is known may be left when an answer ends.
"""

from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("cuda.bindings")

from test_ahead_on_gpu import GREEDY, SEEDED, on_partial_gpu, path

from coldstream.engine import LLM, SamplingParams
from coldstream.engine.engine import Engine
from coldstream.engine.events import Delta
from coldstream.engine.model_steps import LaunchedStep
from coldstream.engine.submission import Submission
from host_device import HostDevice
from host_gpu import ServerOnDemand, gpu_on

__all__ = ["path"]

ENDS_EARLY = replace(SEEDED, max_tokens=30, temperature=1.5, top_k=0, stop_token_ids=range(0, 300, 3))
ANSWERS = {"as long as may be": GREEDY, "with an end token": ENDS_EARLY}


@pytest.fixture
def looking(monkeypatch: pytest.MonkeyPatch) -> set[ServerOnDemand]:
    """The servers that would look for requests."""
    found: set[ServerOnDemand] = set()
    begin, end = ServerOnDemand.begin, ServerOnDemand.end

    def begun(own: ServerOnDemand) -> None:
        found.add(own)
        begin(own)

    def ended(own: ServerOnDemand) -> None:
        found.discard(own)
        end(own)

    monkeypatch.setattr(ServerOnDemand, "begin", begun)
    monkeypatch.setattr(ServerOnDemand, "end", ended)
    return found


@pytest.fixture
def llm(path: Path, compiled_for_the_host: HostDevice) -> Iterator[LLM]:
    with gpu_on(compiled_for_the_host), on_partial_gpu(path) as llm:
        yield llm


def test_nothing_looks_for_requests_after_an_answer(llm: LLM, looking: set[ServerOnDemand]) -> None:
    looked = False
    for params in ANSWERS.values():
        for _ in llm.stream([1, 2, 3], params):
            looked |= bool(looking)
        assert not looking
        llm.generate([[1, 2, 3], [4, 5]], params)
        assert not looking
    assert looked, "while answers are computed"


@pytest.mark.sharded(of="models on a GPU")
@pytest.mark.parametrize("num_taken", [1, 2, 3])
def test_nor_after_one_that_is_left_early(llm: LLM, looking: set[ServerOnDemand], num_taken: int) -> None:
    with closing(llm.stream([1, 2, 3], GREEDY)) as stream:
        for _ in range(num_taken):
            next(stream)
        assert looking
    assert not looking


@pytest.mark.sharded(of="models on a GPU")
@pytest.mark.parametrize("params", ANSWERS.values(), ids=ANSWERS)
def test_nor_once_an_engine_says_that_it_is_idle(
    llm: LLM, looking: set[ServerOnDemand], params: SamplingParams
) -> None:
    with llm._engine.exclusively() as engine:
        engine.add(Submission(0, llm._reader.of_prompt([1, 2, 3], "prompt", params)))
        while not engine.is_idle:
            engine.step()
        assert not looking


@pytest.mark.parametrize("at", range(4))
def test_nor_after_an_interrupt_that_drops_steps(
    llm: LLM, looking: set[ServerOnDemand], monkeypatch: pytest.MonkeyPatch, at: int
) -> None:
    """While a step is ended, with the next one in flight or without."""
    with llm._engine.exclusively() as engine:
        engine.add(Submission(0, llm._reader.of_prompt([1, 2, 3], "prompt", GREEDY)))
        for _ in range(at):
            engine.step()
        with monkeypatch.context() as patched:
            patched.setattr(LaunchedStep, "outcomes", interrupted)
            with pytest.raises(KeyboardInterrupt):
                take_steps(engine)
        assert not looking
        texts = []
        while not engine.is_idle:
            texts += [each.piece.text for each in engine.step() if isinstance(each, Delta)]
        assert texts, "the answer goes on"
        assert not looking


def take_steps(engine: Engine) -> None:
    while not engine.is_idle:
        engine.step()


def interrupted(step: LaunchedStep) -> None:
    raise KeyboardInterrupt
