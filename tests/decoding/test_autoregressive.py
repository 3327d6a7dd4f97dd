"""The plain loop on a model that is a hash of its sequence: engine logic only, no arithmetic of interest."""

from collections.abc import Sequence
from functools import partial

import numpy as np
import pytest

from coldstream.decoding.autoregressive import Progress, generate_tokens
from coldstream.decoding.sampling import random_bits, sample_token
from coldstream.decoding.sampling_params import Logits, SamplingParams
from coldstream.errors import GenerationFault

VOCAB = 50


class HashModel:
    """Logits are a pure function of all tokens so far."""

    def __init__(self) -> None:
        self.token_ids: list[int] = []

    def prefill(self, token_ids: Sequence[int], progress: Progress | None) -> Logits:
        self.token_ids = list(token_ids)
        if progress is not None:
            progress(len(token_ids), len(token_ids))
        return self._logits()

    def decode(self, token_id: int) -> Logits:
        self.token_ids.append(token_id)
        return self._logits()

    def _logits(self) -> Logits:
        rng = np.random.default_rng(self.token_ids)
        return rng.normal(size=VOCAB).astype(np.float32)


def _choose(params: SamplingParams, seed: int) -> "partial[int]":
    return partial(sample_token, params=params, seed=seed)


def test_each_token_is_chosen_from_all_tokens_before_it() -> None:
    model, params = HashModel(), SamplingParams(temperature=1.0)
    tokens = list(generate_tokens(model, [1, 2, 3], _choose(params, 9), end_ids=(), max_tokens=12))
    assert len(tokens) == 12
    sequence = [1, 2, 3, *tokens]
    for length in range(3, 15):
        logits = HashModel().prefill(sequence[:length], None)
        assert sample_token(logits, sequence[:length], params, seed=9) == sequence[length]
    assert model.token_ids == sequence[:-1]


def test_it_ends_with_the_end_token() -> None:
    greedy = _choose(SamplingParams(temperature=0.0), 0)
    free = list(generate_tokens(HashModel(), [4], greedy, end_ids=(), max_tokens=20))
    first = free.index(free[7])
    assert (
        list(generate_tokens(HashModel(), [4], greedy, end_ids={free[7]}, max_tokens=20)) == free[: first + 1]
    )


def test_closing_early_leaves_the_model_one_token_behind() -> None:
    model = HashModel()
    tokens = generate_tokens(model, [5, 6], _choose(SamplingParams(), 1), end_ids=(), max_tokens=20)
    drawn = [next(tokens) for _ in range(4)]
    tokens.close()  # type: ignore[attr-defined]
    assert model.token_ids == [5, 6, *drawn[:3]]


def test_prefill_reports_progress() -> None:
    calls: list[tuple[int, int]] = []
    tokens = generate_tokens(
        HashModel(), [1] * 7, _choose(SamplingParams(), 1), end_ids=(), max_tokens=1,
        progress=lambda done, total: calls.append((done, total)),
    )  # fmt: skip
    assert len(list(tokens)) == 1
    assert calls == [(7, 7)]


@pytest.mark.parametrize("token_id", [-1, VOCAB, 2**31])
def test_trap_49_a_token_outside_the_vocabulary_is_a_fault(token_id: int) -> None:
    tokens = generate_tokens(HashModel(), [1], lambda logits, context: token_id, end_ids=(), max_tokens=3)
    with pytest.raises(GenerationFault, match=f"token {token_id} was chosen from a vocabulary of 50"):
        next(iter(tokens))


def test_trap_50_damaged_logits_end_the_loop_with_a_fault() -> None:
    class DyingModel(HashModel):
        def decode(self, token_id: int) -> Logits:
            return np.full(VOCAB, np.nan, dtype=np.float32)

    tokens = generate_tokens(DyingModel(), [1], _choose(SamplingParams(), 1), end_ids=(), max_tokens=5)
    assert 0 <= next(tokens) < VOCAB
    with pytest.raises(GenerationFault, match="50 of 50 logits at position 2 are not finite"):
        next(tokens)


def test_the_same_seed_gives_the_same_tokens_and_another_seed_others() -> None:
    def run(seed: int) -> list[int]:
        return list(
            generate_tokens(HashModel(), [1], _choose(SamplingParams(), seed), end_ids=(), max_tokens=16)
        )

    assert run(1) == run(1)
    assert run(1) != run(2)
    assert random_bits(1, 1) != random_bits(2, 1)
