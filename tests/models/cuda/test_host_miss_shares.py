"""Shares of missing experts follow what was stamped."""

from pathlib import Path

import pytest
from cuda_runner_cases import open_partly
from runner_cases import token_ids, write_mixed_layers

from coldstream.experts import miss_shares
from coldstream.experts.prefetch import Prefetching
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
