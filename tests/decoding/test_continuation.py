"""Where the tokens of an answer end."""

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coldstream.decoding import Continuation
from coldstream.errors import GenerationFault

VOCAB = 50
ids = st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=12)


@given(ids, ids, st.frozensets(st.integers(0, VOCAB - 1), max_size=4), st.integers(1, 12))
def test_it_ends_with_the_first_end_token_or_the_last_that_may_come(
    prompt: list[int], chosen: Sequence[int], end_ids: frozenset[int], max_tokens: int
) -> None:
    tokens, taken = Continuation(prompt, end_ids=end_ids, max_tokens=max_tokens), list[int]()
    for token_id in chosen:
        assert tokens.num_left == max_tokens - len(taken)
        tokens.append(token_id, VOCAB)
        taken.append(token_id)
        assert tokens.ids == [*prompt, *taken]
        assert tokens.has_ended == (token_id in end_ids or len(taken) == max_tokens)
        if tokens.has_ended:
            break


def test_an_end_token_of_the_prompt_ends_nothing() -> None:
    tokens = Continuation([7, 7], end_ids={7}, max_tokens=2)
    tokens.append(3, VOCAB)
    assert not tokens.has_ended


@pytest.mark.parametrize("token_id", [-1, VOCAB, 2**31])
def test_trap_49_a_token_outside_the_vocabulary_is_a_fault(token_id: int) -> None:
    tokens = Continuation([1], end_ids=(), max_tokens=3)
    with pytest.raises(GenerationFault, match=f"token {token_id} was chosen from a vocabulary of 50"):
        tokens.append(token_id, VOCAB)
    assert tokens.ids == [1]
