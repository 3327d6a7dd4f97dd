"""Drafters that propose what a test wants, right or wrong, and check what they are told."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from coldstream.decoding import TokenTree

BUDGETS = [1, 2, 3, 7, 8, 15, 16, 22, 63]


@dataclass
class Scripted:
    """A drafter that proposes what `draft` makes of the context, and checks what it is told."""

    kind: str
    answers: dict[tuple[int, ...], tuple[int, ...]] = field(default_factory=dict)  # of the plain model
    vocab_size: int = 6144
    end_id: int = 0
    token_ids: list[int] = field(default_factory=list)
    wants_hidden: bool = True
    taps: tuple[int, ...] = ()
    name: str = "scripted"

    def cut(self, length: int) -> None:
        assert length in (0, len(self.token_ids))
        del self.token_ids[length:]

    def extend(self, token_ids: Sequence[int], hidden: Any) -> None:
        assert (hidden is not None) == self.wants_hidden
        assert hidden is None or len(hidden) == len(token_ids)
        self.token_ids += token_ids

    def propose(self, context: Sequence[int], budget: int) -> TokenTree:
        assert self.token_ids == list(context[:-1])
        return getattr(self, self.kind)(list(context), budget)

    def right(self, context: list[int], budget: int) -> TokenTree:
        for prompt, answer in self.answers.items():
            if tuple(context[: len(prompt)]) == prompt:
                return chain(answer[len(context) - len(prompt) :][:budget])
        return TokenTree()

    def mostly_right(self, context: list[int], budget: int) -> TokenTree:
        tokens = list(self.right(context, budget).token_ids)
        tokens[len(context) % 3 :] = [self.vocab_size - 1] * len(tokens[len(context) % 3 :])
        return chain(tokens)

    def random(self, context: list[int], budget: int) -> TokenTree:
        rng = np.random.default_rng(context)
        right, token_ids, parents = list(self.right(context, budget).token_ids), [], []
        while len(parents) < budget:
            parents.append(int(rng.integers(-1, len(parents))))
            token_ids.append(int(rng.choice([*right, rng.integers(self.vocab_size)])))
        return TokenTree(tuple(token_ids), tuple(parents), (0.0,) * budget)

    def wrong(self, context: list[int], budget: int) -> TokenTree:
        return chain([self.vocab_size - 1 - len(context) % 7] * budget)

    def empty(self, context: list[int], budget: int) -> TokenTree:
        return TokenTree()

    def repeating(self, context: list[int], budget: int) -> TokenTree:
        return chain(context[-1:] * budget)

    def ending(self, context: list[int], budget: int) -> TokenTree:
        return chain([self.end_id] * budget)

    def not_a_number(self, context: list[int], budget: int) -> TokenTree:
        tree = self.right(context, budget)
        return replace(tree, log_probs=(float("nan"),) * len(tree))


def chain(token_ids: Sequence[int]) -> TokenTree:
    count = len(token_ids)
    return TokenTree(tuple(token_ids), tuple(range(-1, count - 1)), tuple(-0.1 * i for i in range(count)))


KINDS = ["right", "mostly_right", "random", "wrong", "empty", "repeating", "ending", "not_a_number"]


def check_same(plain: Any, drafted: Any) -> None:
    assert drafted.token_ids == plain.token_ids
    assert drafted.text == plain.text
    assert drafted.outputs[0].logprobs == plain.outputs[0].logprobs
    assert (drafted.finish_reason, drafted.outputs[0].stop_reason) == (
        plain.finish_reason,
        plain.outputs[0].stop_reason,
    )
    assert drafted.statistics.generated_tokens == plain.statistics.generated_tokens
