"""Drafters that propose what a test wants, right or wrong, and check what they observe."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from coldstream.decoding import TokenTree
from tests.audits.draft_kinds import DRAFTS, Drafting

__all__ = ["BUDGETS", "KINDS", "Scripted", "check_same"]

KINDS = list(DRAFTS)
BUDGETS = [1, 2, 3, 7, 8, 15, 16, 22, 63]


@dataclass
class Scripted:
    """A drafter that proposes what `draft` makes of the context, and checks what it observes."""

    kind: str
    answers: dict[tuple[int, ...], tuple[int, ...]] = field(default_factory=dict)  # of the plain model
    vocab_size: int = 6144
    end_id: int = 0
    token_ids: list[int] = field(default_factory=list)
    wants_hidden: bool = True
    aux_layers: tuple[int, ...] = ()
    name: str = "scripted"

    def truncate(self, length: int) -> None:
        assert length in (0, len(self.token_ids))
        del self.token_ids[length:]

    def extend(self, token_ids: Sequence[int], hidden: Any) -> None:
        assert (hidden is not None) == self.wants_hidden
        assert hidden is None or len(hidden) == len(token_ids)
        self.token_ids += token_ids

    def propose(self, context: Sequence[int], budget: int) -> TokenTree:
        assert self.token_ids == list(context[:-1])
        return self.drafted(context, budget)

    def drafted(self, context: Sequence[int], budget: int) -> TokenTree:
        """What `propose` returns, whatever the drafter observed."""
        at = Drafting(context, self._following(context), self.vocab_size, self.end_id)
        return DRAFTS[self.kind](at, budget)

    def _following(self, context: Sequence[int]) -> tuple[int, ...]:
        """What the plain model answered after `context`; nothing for prompts that it was not asked."""
        for prompt, answer in self.answers.items():
            if tuple(context[: len(prompt)]) == prompt:
                return answer[len(context) - len(prompt) :]
        return ()


def check_same(plain: Any, drafted: Any) -> None:
    assert drafted.token_ids == plain.token_ids
    assert drafted.text == plain.text
    assert drafted.outputs[0].logprobs == plain.outputs[0].logprobs
    assert (drafted.finish_reason, drafted.outputs[0].stop_reason) == (
        plain.finish_reason,
        plain.outputs[0].stop_reason,
    )
    assert drafted.statistics.generated_tokens == plain.statistics.generated_tokens
