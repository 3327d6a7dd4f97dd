"""The plain loop on a model that is a hash of its sequence: engine logic only, no arithmetic of interest."""

from collections.abc import Callable, Collection, Generator, Sequence
from functools import partial

import numpy as np
import pytest

from coldstream.decoding.autoregressive import generate_tokens
from coldstream.decoding.device_logits import AnyLogits
from coldstream.decoding.sampling import random_bits, sample_token
from coldstream.decoding.sampling_params import Logits, SamplingParams
from coldstream.errors import GenerationFault

VOCAB = 50


class HashModel:
    """Logits are a pure function of all tokens so far."""

    def __init__(self) -> None:
        self.token_ids: list[int] = []

    def append(self, token_ids: Sequence[int]) -> Logits:
        self.token_ids += token_ids
        rng = np.random.default_rng(self.token_ids)
        return rng.normal(size=VOCAB).astype(np.float32)


Choose = Callable[[AnyLogits, Sequence[int]], int]


def _generate(
    model: HashModel, prompt: list[int], choose: Choose, max_tokens: int, end_ids: Collection[int] = ()
) -> Generator[int, None, None]:
    logits = model.append(prompt)
    yield from generate_tokens(model.append, logits, prompt, choose, end_ids=end_ids, max_tokens=max_tokens)


def _choose(params: SamplingParams, seed: int) -> "partial[int]":
    return partial(sample_token, params=params, seed=seed)


def test_each_token_is_chosen_from_all_tokens_before_it() -> None:
    model, params = HashModel(), SamplingParams(temperature=1.0)
    tokens = list(_generate(model, [1, 2, 3], _choose(params, 9), 12))
    assert len(tokens) == 12
    sequence = [1, 2, 3, *tokens]
    for length in range(3, 15):
        logits = HashModel().append(sequence[:length])
        assert sample_token(logits, sequence[:length], params, seed=9) == sequence[length]
    assert model.token_ids == sequence[:-1]


def test_it_ends_with_the_end_token() -> None:
    greedy = _choose(SamplingParams(temperature=0.0), 0)
    free = list(_generate(HashModel(), [4], greedy, 20))
    first = free.index(free[7])
    assert list(_generate(HashModel(), [4], greedy, 20, {free[7]})) == free[: first + 1]


def test_closing_early_leaves_the_model_one_token_behind() -> None:
    model = HashModel()
    tokens = _generate(model, [5, 6], _choose(SamplingParams(), 1), 20)
    drawn = [next(tokens) for _ in range(4)]
    tokens.close()
    assert model.token_ids == [5, 6, *drawn[:3]]


@pytest.mark.parametrize("token_id", [-1, VOCAB, 2**31])
def test_trap_49_a_token_outside_the_vocabulary_is_a_fault(token_id: int) -> None:
    tokens = _generate(HashModel(), [1], lambda logits, context: token_id, 3)
    with pytest.raises(GenerationFault, match=f"token {token_id} was chosen from a vocabulary of 50"):
        next(iter(tokens))


def test_trap_50_damaged_logits_end_the_loop_with_a_fault() -> None:
    class DyingModel(HashModel):
        def append(self, token_ids: Sequence[int]) -> Logits:
            logits = super().append(token_ids)
            return logits if len(self.token_ids) == 1 else np.full(VOCAB, np.nan, dtype=np.float32)

    tokens = _generate(DyingModel(), [1], _choose(SamplingParams(), 1), 5)
    assert 0 <= next(tokens) < VOCAB
    with pytest.raises(GenerationFault, match="50 of 50 logits at position 2 are not finite"):
        next(tokens)


def test_the_same_seed_gives_the_same_tokens_and_another_seed_others() -> None:
    def run(seed: int) -> list[int]:
        return list(_generate(HashModel(), [1], _choose(SamplingParams(), seed), 16))

    assert run(1) == run(1)
    assert run(1) != run(2)
    assert random_bits(1, 1) != random_bits(2, 1)
