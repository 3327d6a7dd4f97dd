"""A drafter's sequence is always that of the job that it drafts for."""

from collections.abc import Sequence
from typing import Any, cast

from hypothesis import given
from hypothesis import strategies as st

from coldstream.decoding import NO_DRAFT, TokenTree
from coldstream.engine.draft_follower import DraftFollower
from coldstream.models.runner import ModelRunner

texts = st.lists(st.lists(st.integers(0, 1), min_size=4, max_size=4), min_size=1, max_size=3)
follows = st.lists(st.tuples(st.integers(0, 2), st.integers(0, 4), st.booleans()), max_size=12)


class Listener:
    """Keeps what it observes; −1 where it did not observe."""

    name = "listener"
    wants_hidden = False
    aux_layers: tuple[int, ...] = ()

    def __init__(self) -> None:
        self.observed: list[int] = []

    def truncate(self, length: int) -> None:
        self.observed = [*self.observed, *[-1] * length][:length]

    def extend(self, token_ids: Sequence[int], hidden: Any) -> None:
        self.observed += token_ids

    def propose(self, context: Sequence[int], budget: int) -> TokenTree:
        return NO_DRAFT


class Runner:
    """Gives hidden states that are nothing."""

    def hidden(self, rows: Any) -> None: ...


@given(texts, follows, st.booleans())
def test_what_a_drafter_knows_is_of_the_sequence_that_it_follows(
    texts: list[list[int]], follows: list[tuple[int, int, bool]], wants_hidden: bool
) -> None:
    """Owners with the same tokens share what was observed; without hidden states nothing is left out."""
    drafter = Listener()
    drafter.wants_hidden = wants_hidden
    follower = DraftFollower(cast(ModelRunner, Runner()), drafter)
    owners = [object() for _ in texts]
    for number, length, goes_on in follows:
        owner, text = owners[number % len(texts)], texts[number % len(texts)]
        follower.follow(owner, text, length)
        if goes_on and length < len(text):
            follower.extend(text[length : length + 1], follower.states_of(range(1)))
            length += 1
        assert len(drafter.observed) == length
        assert all(observed in (-1, token) for observed, token in zip(drafter.observed, text, strict=False))
        assert wants_hidden or -1 not in drafter.observed
        assert follower.num_common(text) >= length
    follower.forget()
    assert not drafter.observed
    assert follower.num_common(texts[0]) == 0
