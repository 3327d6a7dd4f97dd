"""The one sequence whose state the model holds, and when a prompt may continue it.

A recurrent state can't be rolled back, so a prompt reuses it only by extending it: all live tokens must be a
prefix of the prompt, with at least one token left to compute. Any other prompt starts from an empty state.

A NaN in a state shows only in its logits, which on a GPU may not be computed yet. So a later prompt extends a
state only if a token was chosen from its last logits, which fails unless all of them are finite.
"""

from collections.abc import Sequence

import numpy as np

from coldstream import kvcache
from coldstream.decoding import AnyLogits, Chosen, Drafter, Speculation, StartedChoices
from coldstream.engine.drafting import told_states
from coldstream.engine.rounds import SequenceRounds, begin_rounds
from coldstream.kernels.rounds.reference import RoundText
from coldstream.kvcache import Batch, ChosenToken, Segment
from coldstream.models.runner import ModelRunner, Progress


class LiveSequence:
    """One sequence of a runner, and which tokens it holds; implements decoding's `AheadModel`, `TreeModel`.

    After an exception while computing, or without a call of `trust` or `trust_after` after it, the state
    counts as unknown and the next prompt starts from an empty one.
    """

    def __init__(self, runner: ModelRunner, speculation: Speculation | None = None) -> None:
        """speculation: its drafter is told of the tokens that the sequence holds."""
        self._runner = runner
        self.speculation = speculation
        self._drafter = speculation.drafter if speculation else None
        self._states = None if self._drafter is None else told_states(runner, self._drafter)
        self._is_behind = False  # whether the drafter was not told of the last tokens
        self._sequence = runner.new_sequence()
        self._token_ids: list[int] | None = None  # None: unknown
        self._unsettled: list[int] = []  # those before the token of `append_chosen` or the tree of `verify`
        self._tree_ids: Sequence[int] = ()
        self._proof: StartedChoices | None = None  # whose success shows that the last logits are finite
        self._is_trusted = False
        self._num_reused = 0

    @property
    def expert_uses(self) -> tuple[int, int] | None:
        """See `ModelRunner`."""
        return self._runner.expert_uses

    @property
    def takes_chosen(self) -> bool:
        """Whether `append_chosen` may be called."""
        return self._runner.takes_chosen

    @property
    def num_reused(self) -> int:
        """Tokens of the last prompt that were already in the state."""
        return self._num_reused

    def trust(self) -> None:
        """Declares the last logits, and so the state, to be finite: a prompt may extend it."""
        self._is_trusted = True

    def trust_after(self, proof: StartedChoices) -> None:
        """As `trust`, if the choices from the last logits turn out to be tokens."""
        self._proof = proof

    def forget(self) -> None:
        """Free the sequence's memory; the next prompt starts from an empty state."""
        self._token_ids = None
        self._runner.clear(self._sequence)
        self._cut_draft(0)

    def hand_over(self) -> tuple[list[int], kvcache.Sequence]:
        """Passes the live tokens, none if no prompt may extend them, and their sequence to the caller.

        The live sequence is a new, empty one until `hold`.
        """
        live, sequence = self._extendable(), self._sequence
        self._sequence = self._runner.new_sequence()
        return live, sequence

    def hold(self, token_ids: list[int], sequence: kvcache.Sequence) -> None:
        """Make `sequence`, which has `token_ids` and from whose logits a token was chosen, the live one."""
        self._runner.release(self._sequence)
        self._sequence = sequence
        self._token_ids = token_ids
        self._is_trusted = True
        self._cut_draft(0)

    def start(self, prompt_ids: Sequence[int]) -> int:
        """How many tokens of the prompt the sequence holds, all of its own or none.

        `append` is to compute the others, before anything else.
        """
        live = self._extendable()
        self._num_reused = num_live_prefix(live, prompt_ids)
        if self._num_reused == 0:
            self._runner.clear(self._sequence)
        self._token_ids = list(prompt_ids[: self._num_reused])
        self._cut_draft(self._num_reused)
        return self._num_reused

    def append(self, token_ids: Sequence[int], progress: Progress | None = None) -> AnyLogits:
        """Append tokens, of a prompt those that `start` did not find; logits [vocab] after the last."""
        live = self._taken()
        drafter, states = self._listener(len(live)), self._states
        if drafter is None or states is None:
            logits: AnyLogits = self._runner.extend(self._sequence, token_ids, progress)
            if drafter is not None:
                drafter.extend(token_ids, None)
        else:
            logits = self._runner.extend(self._sequence, token_ids, progress, drafter.extend, states)
        live += token_ids
        self._token_ids = live
        return logits

    def append_chosen(self, token: ChosenToken) -> AnyLogits:
        """Append a token that the device has begun to choose; logits [vocab] after it."""
        live = self._taken()
        (rows,) = self._runner.step(Batch((Segment(self._sequence, token),)))
        self._unsettled = live
        logits: AnyLogits = rows[0]
        return logits

    def settle(self, token_id: int | None) -> None:
        """Say which token `append_chosen` had. Its row is that of the last step.

        None: an end token, so that the state is that of before, from whose logits it was chosen.
        """
        live = self._unsettled
        if token_id is None:
            self._runner.take_back(self._sequence)
            self._proof, self._is_trusted = None, True
        else:
            drafter, states = self._listener(len(live)), self._states
            if drafter is not None:
                drafter.extend([token_id], None if states is None else states(range(1)))
            live.append(token_id)
        self._token_ids = live

    def verify(self, token_ids: Sequence[int], parents: Sequence[int]) -> Sequence[AnyLogits]:
        """Compute a draft tree, see `Segment`; logits [vocab] after each row. `commit` has to follow."""
        live = self._taken()
        (rows,) = self._runner.step(Batch((Segment(self._sequence, token_ids, parents),)))
        self._unsettled, self._tree_ids = live, token_ids
        logits: Sequence[AnyLogits] = rows
        return logits

    def commit(self, rows: Sequence[int]) -> None:
        """Hold a path of the tree, after each of whose rows a token was chosen."""
        drafter, live = self._drafter, self._unsettled
        token_ids = [self._tree_ids[row] for row in rows]
        states = self._states
        told = states(np.array(rows)) if states is not None and rows else None
        self._runner.commit(self._sequence, rows)
        live += token_ids
        self._token_ids, self._is_trusted = live, True
        if drafter is not None and rows:
            drafter.extend(token_ids, told)

    def begin_rounds(self, context: Sequence[int], text: RoundText) -> SequenceRounds | None:
        """Rounds after `context`, as `rounds.begin_rounds` has them."""
        live, speculation = self._token_ids, self.speculation
        assert live is not None, "tokens follow those of a known sequence"
        assert speculation is not None, "rounds are of drafts"

        def hold(token_ids: Sequence[int]) -> None:
            self._token_ids, self._is_trusted = [*live, *token_ids], True

        rounds = begin_rounds(self._runner, self._sequence, speculation, text, context, hold)
        if rounds is not None:
            self._forget_tokens()
        return rounds

    def _listener(self, length: int) -> Drafter | None:
        """The drafter, if it is told of the tokens after the first `length`, from which it then goes on."""
        speculation, drafter = self.speculation, self._drafter
        if speculation is None or drafter is None or self._states is None:
            return drafter
        if speculation.is_idle:
            self._is_behind = True
            return None
        if self._is_behind:
            self._cut_draft(length)
        return drafter

    def _extendable(self) -> list[int]:
        """The live tokens, if a prompt may extend them; none otherwise."""
        proof, is_trusted = self._proof, self._is_trusted
        live = self._token_ids
        self._forget_tokens()
        if live is None or self._sequence.length != len(live):  # the runner empties what failed
            return []
        if proof is not None:
            is_trusted = all(isinstance(outcome, Chosen) for outcome in proof.outcomes())
        return live if is_trusted else []

    def _cut_draft(self, length: int) -> None:
        if self._drafter is not None:
            self._drafter.cut(length)
            self._is_behind = False

    def _taken(self) -> list[int]:
        """The live tokens, which are unknown until what follows has succeeded."""
        live = self._token_ids
        assert live is not None, "tokens follow those of a known sequence"
        self._forget_tokens()
        return live

    def _forget_tokens(self) -> None:
        self._token_ids = self._proof = None
        self._is_trusted = False


def num_live_prefix(live_ids: Sequence[int], prompt_ids: Sequence[int]) -> int:
    """How many tokens of the prompt the state already holds: all live ones or none."""
    num_live = len(live_ids)
    return num_live if num_live < len(prompt_ids) and list(prompt_ids[:num_live]) == list(live_ids) else 0
