"""Shares of missing experts follow what was stamped."""

from pathlib import Path

import numpy as np
import pytest
from cuda_runner_cases import open_partly
from runner_cases import token_ids, write_mixed_layers

from coldstream.experts import miss_shares
from coldstream.experts.prefetch import Prefetching
from coldstream.kernels.cuda.contents import read
from coldstream.placement.control import MOST_TIMES
from coldstream.placement.controls import Controls, Moves
from coldstream.placement.cost import GUESSED

TOKENS = 24


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_mixed_layers(tmp_path_factory.mktemp("models"), "qwen35moe")


@pytest.mark.usefixtures("gpu")
def test_shares_follow_stamps_only_where_they_are_asked_to(path: Path) -> None:
    with open_partly(path, 0.0, streamed=0.5) as runner:
        for token in token_ids(TOKENS):
            runner.decode(token)
        assert runner.gpu_experts is not None
        assert runner.gpu_experts.shares is None
        assert runner.runner.observed is None
        runner.runner.control(Controls(Moves.ALWAYS))
        for token in token_ids(TOKENS):
            runner.decode(token)
        shares = runner.gpu_experts.shares
        assert shares is not None
        assert shares.updates == (TOKENS - 1) // miss_shares.STEPS_OF_AN_UPDATE
        assert len(shares.by_bus) == runner.spec.num_experts_per_tok
        assert (shares.cpu_factor, shares.bus_factor) != (1.0, 1.0)
        observed = runner.runner.observed
        assert observed is not None
        assert observed.steps == shares.updates * miss_shares.STEPS_OF_AN_UPDATE
        assert observed.seconds > 0
        assert observed.cpu_factor is not None
        assert 1 / MOST_TIMES <= shares.cpu_factor <= MOST_TIMES


@pytest.mark.usefixtures("gpu")
def test_what_the_cpu_takes_for_prompts_is_learned_unless_another_step_ran_beside_them(path: Path) -> None:
    with open_partly(path, 0.0, streamed=0.5, ring_bytes=8 * 2**20) as runner:
        runner.runner.control(Controls(Moves.IF_CONTRADICTED))
        partial = runner.runner._partial
        assert partial is not None
        assert partial._shares is not None
        paces = partial._shares._shares._prompts._paces
        for token in token_ids(3):
            runner.decode(token)
        assert not paces
        runner.prefill(token_ids(70))
        assert [1 / MOST_TIMES < each.factor < MOST_TIMES for each in paces.values()] == [True]
        table = read(partial._executor.decode.times)
        assert np.array_equal(table, partial._shares._shares.words()[0])
        before = {rows: each.factor for rows, each in paces.items()}
        runner.reset()
        shares, starting, launched = partial._shares, partial._shares.starting, partial._shares.launched

        def launched_with_another(rows: int) -> object:
            step = launched(rows)
            launched(rows)
            return step

        shares.starting = lambda rows, is_alone: starting(rows, is_alone=False)
        runner.prefill(token_ids(70))
        shares.starting, shares.launched = starting, launched_with_another
        runner.prefill(token_ids(70))
        assert {rows: each.factor for rows, each in paces.items()} == before
        shares.launched = launched
        runner.reset()
        runner.prefill(token_ids(70))
        assert {rows: each.factor for rows, each in paces.items()} != before


@pytest.mark.usefixtures("gpu")
def test_copies_ahead_follow_the_recall_of_guesses_at_missing_experts(path: Path) -> None:
    with open_partly(path, 0.3, streamed=0.5, prefetching=Prefetching(1, 2)) as runner:
        runner.runner.control(Controls(Moves.NEVER, Moves.ALWAYS))
        partial = runner.runner._partial
        assert partial is not None
        assert partial._shares is not None
        recall = partial._shares._shares._recall
        assert recall is not None
        assert recall.share == GUESSED
        for token in token_ids(TOKENS):
            runner.decode(token)
        assert partial._guesses is not None
        guessed, right = partial._guesses.missing
        assert 0 < right < guessed < int(partial._guesses.guessed.sum())
        assert recall.share == pytest.approx(right / guessed, abs=0.25)
        assert recall.share != GUESSED


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize("from_start", [True, False])
def test_copies_ahead_may_begin_and_end_between_any_two_tokens(path: Path, from_start: bool) -> None:
    """The step's launches are others then. No token changes, and nothing is copied while none may be."""
    tokens = token_ids(TOKENS)
    with open_partly(path, 0.3, streamed=0.5) as plain:
        expected = [plain.decode(token) for token in tokens]
    prefetching = Prefetching(1, 2, from_start=from_start)
    with open_partly(path, 0.3, streamed=0.5, prefetching=prefetching) as runner:
        runner.runner.control(Controls(ahead=Moves.ALWAYS))
        partial, fetched = runner.runner._partial, [0]
        assert partial is not None
        assert partial._shares is not None
        ahead = partial._shares._shares._ahead
        assert ahead is not None
        assert (ahead.count > 0) == from_start
        ahead.learn = lambda *_, **__: None
        for number, token in enumerate(tokens):
            ahead.count = 2 if number // 4 % 2 == from_start else 0
            assert np.array_equal(runner.decode(token), expected[number]), number
            assert runner.gpu_experts is not None
            assert runner.gpu_experts.prefetch is not None
            fetched.append(sum(runner.gpu_experts.prefetch.fetched))
        copied = np.diff(fetched).reshape(-1, 4).sum(axis=1) > 0
        # What a step has copied is counted when the next one empties the places.
        ends = np.flatnonzero([number % 2 == from_start for number in range(len(copied))])
        assert not copied[[each for each in range(len(copied)) if each not in {*ends, *(ends + 1)}]].any()
        assert copied.any()
        forms = {key[1] for key in runner.runner._steps._graphs}
        assert len(forms) == 2
