"""Kinds of drafts that must leave an answer as it is: right, wrong, empty, endless, and without numbers."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from coldstream.decoding import TokenTree


def chain(token_ids: Sequence[int]) -> TokenTree:
    """Each token after the one before, with falling log-probabilities."""
    count = len(token_ids)
    return TokenTree(tuple(token_ids), tuple(range(-1, count - 1)), tuple(-0.1 * i for i in range(count)))


@dataclass(frozen=True)
class Drafting:
    """What the kinds draft from: `following`, the plain answer's next tokens, and the model's vocabulary."""

    context: Sequence[int]
    following: Sequence[int]
    vocab_size: int
    end_id: int


def right(at: Drafting, budget: int) -> TokenTree:
    return chain(at.following[:budget])


def mostly_right(at: Drafting, budget: int) -> TokenTree:
    tokens = list(at.following[:budget])
    first_wrong = len(at.context) % 3
    tokens[first_wrong:] = [at.vocab_size - 1] * len(tokens[first_wrong:])
    return chain(tokens)


def random(at: Drafting, budget: int) -> TokenTree:
    """A tree of any shape, of right tokens and others."""
    rng = np.random.default_rng(list(at.context))
    token_ids, parents = [], []
    while len(parents) < budget:
        parents.append(int(rng.integers(-1, len(parents))))
        token_ids.append(int(rng.choice([*at.following[:budget], rng.integers(at.vocab_size)])))
    return TokenTree(tuple(token_ids), tuple(parents), (0.0,) * budget)


def wrong(at: Drafting, budget: int) -> TokenTree:
    return chain([at.vocab_size - 1 - len(at.context) % 7] * budget)


def empty(at: Drafting, budget: int) -> TokenTree:
    return TokenTree()


def repeating(at: Drafting, budget: int) -> TokenTree:
    return chain([at.context[-1]] * budget)


def ending(at: Drafting, budget: int) -> TokenTree:
    return chain([at.end_id] * budget)


def not_a_number(at: Drafting, budget: int) -> TokenTree:
    tree = right(at, budget)
    return replace(tree, log_probs=(float("nan"),) * len(tree))


DRAFTS: dict[str, Callable[[Drafting, int], TokenTree]] = {
    kind.__name__: kind
    for kind in (right, mostly_right, random, wrong, empty, repeating, ending, not_a_number)
}
