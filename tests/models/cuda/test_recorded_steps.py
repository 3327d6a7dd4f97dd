"""Long steps whose experts the host shares out, replayed in pieces: the bits of the CPU."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cuda_runner_cases import open_partly
from one_sequence import OneSequence, open_cpu
from runner_cases import token_ids, write_mixed_layers
from tree_cases import CONTEXT

from coldstream.errors import DeviceError
from coldstream.experts.cpu_part import CpuPart
from coldstream.experts.prefill import ExpertStream
from coldstream.kernels.cuda.activations import as_floats
from coldstream.kernels.cuda.array import DeviceArray
from coldstream.kernels.cuda.contents import read
from coldstream.kernels.cuda.runtime.graphs import Pieces
from coldstream.models.cuda.limits import padded_rows
from random_residency import RandomResidency

ROWS = 72  # of a step
LENGTHS = (70, 72, 66, 71)
assert {padded_rows(length) for length in LENGTHS} == {ROWS}


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_mixed_layers(tmp_path_factory.mktemp("models"), "qwen35moe")


@pytest.fixture(scope="module")
def plain(path: Path) -> Iterator[OneSequence]:
    with open_cpu(path, threads=1, context_length=CONTEXT) as runner:
        yield runner


@pytest.fixture
def replays(monkeypatch: pytest.MonkeyPatch) -> list[None]:
    """One for each."""
    launch, found = Pieces.launch, list[None]()

    def launched(pieces: Pieces) -> None:
        found.append(None)
        launch(pieces)

    monkeypatch.setattr(Pieces, "launch", launched)
    return found


def check(runner: OneSequence, plain: OneSequence, length: int, first: int = 0) -> None:
    """A prompt and a token behind it."""
    for each in (runner, plain):
        each.reset()
    tokens = token_ids(first + length)[first:]
    assert np.array_equal(runner.prefill(tokens), plain.prefill(tokens)), length
    assert np.array_equal(runner.decode(tokens[0]), plain.decode(tokens[0])), length


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize("share", [0.0, 0.5])
@pytest.mark.parametrize("with_cpu", [True, False])
def test_the_third_step_of_a_shape_is_a_replay(
    path: Path,
    plain: OneSequence,
    replays: list[None],
    share: float,
    with_cpu: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Also of other lengths, and of chunks far into a text."""
    monkeypatch.setattr(CpuPart, "choose", lambda self, rows: with_cpu)
    with open_partly(path, share, context_length=CONTEXT, chunk_size=ROWS) as runner:
        for number, length in enumerate(LENGTHS):
            check(runner, plain, length, first=number)
            assert len(replays) == max(0, number - 1)
        check(runner, plain, 4 * ROWS + 1)
        assert len(replays) > len(LENGTHS) - 2
        assert (runner.stream_counters.on_cpu.sum() > 0) == with_cpu


@pytest.mark.usefixtures("gpu")
def test_experts_that_move_between_steps_change_no_bit(
    path: Path, plain: OneSequence, replays: list[None]
) -> None:
    policy = RandomResidency(seed=3)
    with open_partly(path, 0.5, policy=policy, context_length=CONTEXT, chunk_size=ROWS) as runner:
        for number in range(10):
            check(runner, plain, LENGTHS[number % len(LENGTHS)], first=number)
        assert runner.expert_cache.counters.evictions.sum() > 0
        assert replays


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize("step", [1, 2])
def test_ex01_a_step_that_fails_while_it_is_recorded_or_replayed_leaves_the_next_ones_right(
    path: Path, plain: OneSequence, replays: list[None], step: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    share_out, fails = ExpertStream.share_out, [False]

    def shared_out(stream: ExpertStream, layer: int, *rest: object) -> None:
        if fails[0] and layer == 1:
            raise DeviceError("refused")
        share_out(stream, layer, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(ExpertStream, "share_out", shared_out)
    monkeypatch.setattr(CpuPart, "choose", lambda self, rows: True)
    with open_partly(path, 0.0, context_length=CONTEXT, chunk_size=ROWS) as runner:
        for number in range(6):
            fails[0] = number == step
            if fails[0]:
                with pytest.raises(DeviceError, match="refused"):
                    check(runner, plain, ROWS)
            else:
                check(runner, plain, ROWS, first=number)
        assert replays


@pytest.mark.usefixtures("gpu")
def test_the_first_step_of_a_way_and_the_one_that_is_recorded_are_not_compared_with_others(
    path: Path, plain: OneSequence, replays: list[None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """They take longer."""
    ways, learned = [True, True, True, True, False, False], list[tuple[bool, int]]()
    monkeypatch.setattr(CpuPart, "choose", lambda self, rows: ways[0])

    def learn(self: CpuPart, rows: int, *_: float, with_cpu: bool, is_usual: bool) -> None:
        if is_usual:
            learned.append((with_cpu, len(replays)))

    monkeypatch.setattr(CpuPart, "learn", learn)
    with open_partly(path, 0.0, context_length=CONTEXT, chunk_size=ROWS) as runner:
        for number in range(len(ways)):
            check(runner, plain, ROWS, first=number)
            ways.pop(0)
    assert learned == [(True, 1), (True, 2), (False, 3)]


@pytest.mark.usefixtures("gpu")
def test_what_is_guessed_is_what_the_next_router_chooses_for_this_layers_input(
    path: Path, plain: OneSequence, replays: list[None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In steps of any way, also where some experts have slots. The last layer has no next one."""
    ask, share_out, inputs, guesses = ExpertStream.ask, ExpertStream.share_out, [], []

    def asked(stream: ExpertStream, x: DeviceArray, ids: DeviceArray) -> None:
        ask(stream, x, ids)
        inputs.append(read(x))

    def shared_out(stream: ExpertStream, layer: int, tokens: int, *rest: Any) -> None:
        guesses.append(None if rest[-1] is None else read(rest[-1]))
        share_out(stream, layer, tokens, *rest)

    monkeypatch.setattr(ExpertStream, "ask", asked)
    monkeypatch.setattr(ExpertStream, "share_out", shared_out)
    with open_partly(path, 0.3, context_length=CONTEXT, chunk_size=ROWS) as runner:
        routers = [
            read(as_floats(each.gate)) for each in runner.runner._loaded.ops.model_executor.tables.routers
        ]
        for number in range(4):
            inputs.clear(), guesses.clear()
            check(runner, plain, ROWS, first=number)
            assert guesses[-1] is None
            assert len(guesses) == len(routers)
            for x, router, guess in zip(inputs, routers[1:], guesses, strict=False):
                logits = x.astype(np.float64) @ router.T
                chosen = np.argsort(-logits, axis=1)[:, : guess.shape[1]]
                assert np.array_equal(np.sort(guess, axis=1), np.sort(chosen, axis=1))
        assert replays
