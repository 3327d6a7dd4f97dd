"""One answer in the engine: its tokens so far, and its sequence in the model's memory."""

from collections.abc import Sequence
from functools import cached_property
from typing import Any, Final

import numpy as np

from coldstream import kvcache
from coldstream.decoding import AnyLogits, Continuation, DraftCounts, SampledToken, TokenChoice
from coldstream.engine.answer import AnswerState, Request
from coldstream.engine.opened_model import OpenedModel
from coldstream.engine.request import FinishReason, Piece
from coldstream.engine.submission import Submission
from coldstream.kernels.ops import BLOCK_POSITIONS, MIN_FORK_ROWS
from coldstream.models.runner import ModelRunner

MOST_WANTED_CHECKPOINTS: Final = 4  # for one prompt, beside those that the prefix cache chooses


class Job:
    """An answer from its submission to its last piece. It computes nothing by itself."""

    def __init__(
        self, key: int, submission: Submission, index: int, request: Request, first: "Job | None"
    ) -> None:
        """key: the scheduler's. index: of the answer. first: the first answer to the same prompt, if not this
        one.
        """
        self.key = key
        self.submission = submission
        self.request_id = submission.request_id
        self.index = index
        self.request = request
        self.num_prompt = len(request.prompt_token_ids)
        # The answer whose prefix this one begins with, and how long that prefix is. None: that of no other.
        self.follows: tuple[Job, int] | None = None if first is None else (first, first.num_prompt - 1)
        self._wanted_checkpoints: set[int] = set()  # positions where later prompts will part from this one
        if first is not None:
            first.leave_checkpoint(first.num_prompt - 1)
        self.sequence: kvcache.Sequence | None = None  # None: it has no memory
        self.shared: list[int] = []  # lengths of kept prefixes that the sequence shares memory with
        # Lengths of prefixes to be kept. A step crosses them, or ends there.
        self.checkpoints: tuple[int, ...] = ()
        self.num_reused = 0
        self.is_over = False
        self.drafts: DraftCounts | None = None  # None: no step could have had a draft
        self._answer: AnswerState | None = None  # from its first step on
        self.tokens = Continuation(
            request.prompt_token_ids, end_ids=request.all_end_ids, max_tokens=request.max_tokens
        )
        self.token_ids = self.tokens.ids  # the prompt and all tokens chosen so far

    @cached_property
    def prompt_array(self) -> np.ndarray[Any, np.dtype[np.int32]]:
        """The prompt as int32 [num_prompt]."""
        return np.asarray(self.request.prompt_token_ids, np.int32)

    @property
    def num_left(self) -> int:
        """The most tokens that may still be chosen."""
        return self.tokens.num_left

    @property
    def num_computed(self) -> int:
        return 0 if self.sequence is None else self.sequence.length

    @property
    def num_wanted(self) -> int:
        """Rows of the next step: up to the last token, or to a checkpoint that is too near to be crossed."""
        done = self.num_computed
        if len(self.token_ids) == done + 1:
            return 1
        near = (each for each in self.checkpoints if done < each < done + MIN_FORK_ROWS)
        return next(near, len(self.token_ids)) - done

    def fork_rows(self, count: int) -> tuple[int, ...]:
        """The numbers of its next `count` rows, ≤ `num_wanted`, behind which a fork is to be left."""
        if count == 1:
            return ()
        done = self.num_computed
        return tuple(each - done for each in self.checkpoints if done < each < done + count)

    @property
    def shared_with(self) -> list[int]:
        """Lengths of kept prefixes whose state or block the sequence cannot go on in without a copy."""
        done = self.num_computed
        whole = done // BLOCK_POSITIONS * BLOCK_POSITIONS
        return [length for length in self.shared if length == done or whole < length < done]

    @property
    def num_missing(self) -> int:
        """Tokens, those chosen included, that are not computed."""
        return len(self.token_ids) - self.num_computed

    @property
    def logits_checked(self) -> bool:
        """Whether a token was chosen after the last row, so that all its logits were finite."""
        return self.num_prompt <= self.num_computed == len(self.token_ids) - 1

    @property
    def goes_on(self) -> bool:
        """Whether all tokens are computed, and others follow."""
        return self.sequence is not None and not self.is_over and self.num_missing == 0

    @property
    def has_begun(self) -> bool:
        """Whether the job ever had memory."""
        return self._answer is not None

    @property
    def answer(self) -> AnswerState:
        assert self._answer is not None, "an answer begins with its first step"
        return self._answer

    def begin(self, prefix: kvcache.Prefix, opened: OpenedModel) -> bool:
        """Takes the sequence of a prefix. Whether it is the first of this answer.

        Raises as `Grammars.constraint`, with nothing changed.
        """
        has_begun = self.has_begun
        if self._answer is None:
            constraint = opened.grammars.constraint(self.request)
            self._answer = AnswerState(self.request, opened.tokenizer, opened.runner.expert_uses, constraint)
            self.num_reused = min(prefix.length, self.num_prompt)
        self.sequence, self.shared = prefix.sequence, [prefix.length] if prefix.length else []
        positions = {*prefix.checkpoints, *self._wanted_checkpoints}
        self.checkpoints = tuple(sorted(each for each in positions if each > prefix.length))
        return not has_begun

    def leave_checkpoint(self, position: int) -> bool:
        """Has the steps leave a prefix of so many tokens behind, if they have not come so far.

        False, with nothing changed, if they have, or if so many are left already that steps would be short.
        """
        if position in self._wanted_checkpoints:
            return self.num_computed < position
        if self.num_computed >= position or len(self._wanted_checkpoints) >= MOST_WANTED_CHECKPOINTS:
            return False
        self._wanted_checkpoints.add(position)
        if self.sequence is not None:
            self.checkpoints = tuple(sorted({*self.checkpoints, position}))
        return True

    def choice(self, logits: AnyLogits, unseen: int | None = None) -> TokenChoice:
        """The `TokenChoice` of the next token from the logits [vocab] after all tokens; see `TokenChoice`."""
        return self.answer.chooser.choice(logits, self.token_ids, unseen)

    def push(self, chosen: SampledToken) -> Piece | None:
        """The piece of a token that was appended to `tokens`; None if `last_piece` has it."""
        answer = self.answer
        piece = answer.push(chosen)
        return None if answer.has_stopped else piece

    @property
    def has_ended(self) -> bool:
        """Whether no token follows, so that `last_piece` does."""
        return self.answer.has_stopped or self.tokens.has_ended

    def last_piece(self, reason: FinishReason, runner: ModelRunner) -> Piece:
        """The end of the answer, for `reason` unless it has stopped by itself. The job is over then."""
        self.is_over = True
        drafts = self.drafts.statistics() if self.drafts else None
        return self.answer.last_piece(reason, self.num_reused, runner.expert_uses, drafts)

    def next_tokens(self, count: int) -> Sequence[int]:
        """The tokens of its next rows."""
        start = self.num_computed
        return self.token_ids[start : start + count]
