"""Carries out what a request demands of its answer: which tokens may follow each prefix of it.

An answer has a thought or not, a gap of a few blanks behind the thought, and then the text that a grammar is
for. The state after a prefix is a pure function of its tokens, at a node of a draft tree as in the plain
loop. A call with a prefix of another fork starts from the prefix that both share.
"""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from enum import Enum, auto
from functools import cached_property
from typing import Protocol, Self

import numpy as np

from coldstream.decoding import Thought
from coldstream.gguf.tokenizer import Tokenizer
from coldstream.kernels.sample.settings import MASK_BITS, Bitmask, bitmask_of

MAX_GAP_BYTES = 8
_LONGEST_CHARACTER = 4  # bytes of UTF-8

TokenBytes = Callable[[int], bytes]


class Matcher(Protocol):
    """A grammar at some point of an answer."""

    whitespace: Bitmask

    def fresh(self) -> Self:
        """The same grammar at the beginning."""

    def accepts(self, token_id: int) -> bool:
        """Whether `token_id` may follow."""

    def append(self, token_id: int) -> None:
        """Takes a token that may follow."""

    def mask(self) -> Bitmask:
        """Which tokens may follow, in memory of the caller's own. End tokens are among them exactly if the
        answer may end. None may follow where the grammar has a dead end.
        """


class _ThoughtPhase(Enum):
    HEAD = auto()  # not decided yet: the answer may begin with a thought
    THOUGHT = auto()
    FORCED = auto()  # the end of a thought that has used up its budget
    GAP = auto()
    TEXT = auto()


@dataclass(frozen=True)
class _GrammarPlace:
    """Where an answer stands after some of its tokens."""

    phase: _ThoughtPhase
    count: int = 0  # tokens of the thought, or forced ones
    tail: bytes = b""  # the last bytes, as many as a tag that has begun can have
    num_matched: int = 0  # tokens that the grammar has taken


@dataclass(frozen=True)
class ThoughtTokens:
    """A `Thought` over a vocabulary."""

    opening: bytes
    closing: bytes
    tool_call: bytes
    is_open: bool
    budget: int | None
    forced_ids: tuple[int, ...]
    opening_id: int | None  # None: the opening is more than one token
    tool_call_id: int | None
    # By bytes of the closing tag that are there already: tokens that end it and go on with more than blanks.
    overrunning: tuple[tuple[int, ...], ...]

    @classmethod
    def of(cls, thought: Thought, tokenizer: Tokenizer, overrunning: tuple[tuple[int, ...], ...]) -> Self:
        """overrunning: see `overrunning_tokens`."""
        forced = tokenizer.encode(thought.forced, parse_special=True)
        return cls(
            thought.opening.encode(),
            thought.closing.encode(),
            thought.tool_call.encode(),
            thought.is_open,
            thought.budget,
            tuple(forced[1:] if tokenizer.vocabulary.add_bos else forced),
            tokenizer.special_ids.get(thought.opening),
            tokenizer.special_ids.get(thought.tool_call),
            overrunning,
        )

    @property
    def num_kept(self) -> int:
        """Bytes of an answer that a tag which has begun can have."""
        return max(len(self.closing), len(self.tool_call)) - 1


def overrunning_tokens(closing: str, tokenizer: Tokenizer) -> tuple[tuple[int, ...], ...]:
    """`ThoughtTokens.overrunning`; reads the whole vocabulary."""
    tag = closing.encode()
    texts = ((index, tokenizer.token_bytes(index)) for index in range(tokenizer.vocab_size))
    able = [(index, text) for index, text in texts if tag[-1:] in text]

    def overruns(text: bytes, num_there: int) -> bool:
        end = (tag[:num_there] + text).find(tag)
        return end >= 0 and bool(text[end + len(tag) - num_there :].strip())

    return tuple(
        tuple(index for index, text in able if overruns(text, num_there)) for num_there in range(len(tag))
    )


class AnswerConstraint:
    """Which tokens may follow in one answer. A pure function of its prefix; keeps where it was last.

    Implements decoding's `Constraint`.
    """

    def __init__(
        self,
        matcher: Matcher | None,
        thought: ThoughtTokens | None,
        num_prompt_tokens: int,
        end_ids: Collection[int],
        token_bytes: TokenBytes,
        vocab_size: int,
    ) -> None:
        """end_ids: tokens that end the answer, which a thought before a grammar does not hold."""
        self._matcher, self._thought = matcher, thought
        self._num_prompt_tokens = num_prompt_tokens
        self._end_ids, self._vocab_size = list(end_ids), vocab_size
        self._token_bytes = token_bytes
        first = (
            _ThoughtPhase.TEXT
            if thought is None
            else _ThoughtPhase.THOUGHT
            if thought.is_open
            else _ThoughtPhase.HEAD
        )
        self._ids: list[int] = []
        self._places = [_GrammarPlace(first)]  # one more than ids

    def allowed(self, context: Sequence[int]) -> Bitmask | None:
        """See decoding's `Constraint`."""
        self._follow(context[self._num_prompt_tokens :])
        place = self._places[-1]
        forced = self._forced(place)
        if forced is not None:
            return self._bits_of([forced])
        if self._matcher is None:
            return None
        if place.phase is _ThoughtPhase.THOUGHT:
            unwanted = self._bits_of(self._end_ids + self._unwanted_in_thought(place))
            return self._all_tokens & ~unwanted
        mask = self._mask(place, self._matcher)
        return mask if mask.any() else self._bits_of(self._end_ids)

    def is_dead_end(self, answer: Sequence[int]) -> bool:
        """Whether nothing may follow an answer so far that does not match yet: it can only be ended."""
        self._follow(answer)
        place = self._places[-1]
        is_in_text = self._forced(place) is None and place.phase is not _ThoughtPhase.THOUGHT
        return is_in_text and self._matcher is not None and not self._mask(place, self._matcher).any()

    def _forced(self, place: _GrammarPlace) -> int | None:
        """The token that a budget forces, if it does."""
        thought = self._thought
        if thought is None or thought.budget is None:
            return None
        if place.phase is _ThoughtPhase.FORCED:
            return thought.forced_ids[place.count]
        num_over = place.count - thought.budget
        if place.phase is not _ThoughtPhase.THOUGHT or num_over < 0:
            return None
        is_due = num_over >= _LONGEST_CHARACTER or _ends_with_whole_character(place.tail)
        return thought.forced_ids[0] if is_due else None

    def _unwanted_in_thought(self, place: _GrammarPlace) -> list[int]:
        """Tokens after which the grammar would begin inside a token, or a call inside of the thought."""
        thought = self._thought
        assert thought is not None
        unwanted = [] if thought.tool_call_id is None else [thought.tool_call_id]
        for num_there, ids in enumerate(thought.overrunning):
            if place.tail.endswith(thought.closing[:num_there]):
                unwanted += ids
        return unwanted

    @cached_property
    def _all_tokens(self) -> Bitmask:
        return self._bits_of(range(self._vocab_size))

    def _bits_of(self, token_ids: Collection[int]) -> Bitmask:
        return bitmask_of(token_ids, self._vocab_size)

    def _mask(self, place: _GrammarPlace, matcher: Matcher) -> Bitmask:
        mask = matcher.mask()
        if place.phase is _ThoughtPhase.GAP and place.count < MAX_GAP_BYTES:
            mask |= matcher.whitespace
        if place.phase is _ThoughtPhase.HEAD and self._thought and self._thought.opening_id is not None:
            word, bit = divmod(self._thought.opening_id, MASK_BITS)
            mask[word] |= np.uint32(1 << bit)
        return mask

    def _follow(self, answer: Sequence[int]) -> None:
        """Moves to the end of `answer`, from the prefix that the last one shares with it."""
        answer = list(answer)
        if answer[: len(self._ids)] != self._ids:
            num_shared = next(
                (i for i, (old, new) in enumerate(zip(self._ids, answer, strict=False)) if old != new),
                min(len(self._ids), len(answer)),
            )
            self._go_back(num_shared)
        for token_id in answer[len(self._ids) :]:
            self._places.append(self._after(self._places[-1], token_id))
            self._ids.append(token_id)

    def _go_back(self, num_ids: int) -> None:
        del self._ids[num_ids:]
        num_before = self._places[-1].num_matched
        del self._places[num_ids + 1 :]
        num_matched = self._places[-1].num_matched
        if self._matcher is not None and num_matched < num_before:
            self._matcher = self._matcher.fresh()
            for token_id in self._ids[len(self._ids) - num_matched :]:
                self._matcher.append(token_id)

    def _after(self, place: _GrammarPlace, token_id: int) -> _GrammarPlace:
        """Where the answer stands with one more token, which the matcher takes if it is the grammar's."""
        thought = self._thought
        if thought is None or place.phase is _ThoughtPhase.TEXT:
            return self._matched(place, token_id)
        text = self._token_bytes(token_id)
        if place.phase is _ThoughtPhase.GAP:
            is_blank = not text.strip() and place.count < MAX_GAP_BYTES
            if is_blank and not (self._matcher and self._matcher.accepts(token_id)):
                return replace(place, count=place.count + len(text))
            return self._matched(place, token_id)
        if place.phase is _ThoughtPhase.HEAD:
            return self._after_head(place, token_id, text, thought)
        if self._forced(place) == token_id:
            count = place.count + 1 if place.phase is _ThoughtPhase.FORCED else 1
            is_over = count == len(thought.forced_ids)
            return _GrammarPlace(_ThoughtPhase.GAP) if is_over else _GrammarPlace(_ThoughtPhase.FORCED, count)
        seen = place.tail + text
        if thought.closing in seen:
            return _GrammarPlace(_ThoughtPhase.GAP)
        if thought.tool_call and thought.tool_call in seen and self._matcher is None:
            return _GrammarPlace(_ThoughtPhase.TEXT)
        return _GrammarPlace(_ThoughtPhase.THOUGHT, place.count + 1, seen[-thought.num_kept :])

    def _after_head(
        self, place: _GrammarPlace, token_id: int, text: bytes, thought: ThoughtTokens
    ) -> _GrammarPlace:
        head = (place.tail + text).lstrip()
        if self._matcher is not None:
            is_opened = token_id == thought.opening_id and not place.tail
            return _GrammarPlace(_ThoughtPhase.THOUGHT) if is_opened else self._matched(place, token_id)
        if head.startswith(thought.opening):
            return _GrammarPlace(
                _ThoughtPhase.THOUGHT, tail=head[len(thought.opening) :][-thought.num_kept :]
            )
        return (
            _GrammarPlace(_ThoughtPhase.HEAD, tail=head)
            if thought.opening.startswith(head)
            else _GrammarPlace(_ThoughtPhase.TEXT)
        )

    def _matched(self, place: _GrammarPlace, token_id: int) -> _GrammarPlace:
        if self._matcher is not None:
            self._matcher.append(token_id)
        return _GrammarPlace(_ThoughtPhase.TEXT, num_matched=place.num_matched + 1)


def _ends_with_whole_character(tail: bytes) -> bool:
    """Whether bytes of UTF-8 text end with its last character; true for what never becomes one."""
    for num_last in range(1, min(len(tail), _LONGEST_CHARACTER) + 1):
        byte = tail[-num_last]
        if byte & 0xC0 != 0x80:
            wanted = 1 if byte < 0xC0 else 2 if byte < 0xE0 else 3 if byte < 0xF0 else 4
            return num_last >= wanted
    return True
