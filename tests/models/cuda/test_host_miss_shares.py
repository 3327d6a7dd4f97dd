"""Shares of missing experts that move from step to step change no bit, and follow what was stamped."""

from pathlib import Path

import numpy as np
import pytest
from cuda_runner_cases import open_partly
from one_sequence import OneSequence, open_cpu
from runner_cases import token_ids, write_mixed_layers

from coldstream.experts import miss_shares
from coldstream.experts.miss_shares import MissShares
from coldstream.kernels.experts.shapes import MAX_RANKS
from coldstream.placement.controls import Controls

TOKENS = 24


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_mixed_layers(tmp_path_factory.mktemp("models"), "qwen35moe")


def check_tokens(runner: OneSequence, plain: OneSequence) -> None:
    """One after the other, with a step of several rows in between."""
    for token in token_ids(TOKENS):
        assert np.array_equal(runner.decode(token), plain.decode(token))
        if token == token_ids(TOKENS)[TOKENS // 2]:
            assert np.array_equal(runner.prefill([5, 6, 7]), plain.prefill([5, 6, 7]))


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize("share", [0.0, 0.5])
def test_shares_that_change_at_random_at_every_step_change_no_bit(
    path: Path, share: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng, words = np.random.default_rng(0), MissShares.words

    def at_random(shares: MissShares) -> tuple[np.ndarray, np.ndarray]:
        tables = words(shares)
        for table in tables:
            table[-(MAX_RANKS + 1) :] = rng.integers(0, np.arange(MAX_RANKS + 1) + 1)
        return tables

    monkeypatch.setattr(miss_shares, "STEPS_OF_AN_UPDATE", 1)
    monkeypatch.setattr(MissShares, "words", at_random)
    with open_cpu(path, threads=1) as plain, open_partly(path, share, streamed=0.5) as runner:
        runner.runner.control(Controls(shares=True))
        check_tokens(runner, plain)
        statistics = runner.gpu_experts
        assert statistics is not None
        assert statistics.shares is not None
        assert statistics.shares.updates > TOKENS // 2
        assert sum(statistics.cpu_pairs) > 0
        assert sum(statistics.step_times.bus_pairs) > 0


@pytest.mark.usefixtures("gpu")
def test_shares_follow_stamps_only_where_they_are_asked_to(path: Path) -> None:
    with open_partly(path, 0.0, streamed=0.5) as runner:
        for token in token_ids(TOKENS):
            runner.decode(token)
        assert runner.gpu_experts is not None
        assert runner.gpu_experts.shares is None
        runner.runner.control(Controls(shares=True))
        for token in token_ids(TOKENS):
            runner.decode(token)
        shares = runner.gpu_experts.shares
        assert shares is not None
        assert shares.updates == (TOKENS - 1) // miss_shares.STEPS_OF_AN_UPDATE
        assert len(shares.by_bus) == runner.spec.num_experts_per_tok
        assert (shares.cpu_factor, shares.bus_factor) != (1.0, 1.0)
