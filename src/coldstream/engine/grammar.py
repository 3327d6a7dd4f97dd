"""Grammars of requests over a model's tokens, compiled by llguidance within fixed limits.

Unit of work: one `Grammar` → a matcher that says which tokens may follow. Knows nothing of logits, to which
`constraint.py` applies what it says. Which schemas can be held is decided by `json_schema.py`; what a regular
expression or Lark text may hold is said by llguidance's documentation. The cost of compiling is bounded by
the size of the text, by the limits on schemas, and by limits on states, symbols and steps.
"""

import threading
from collections import OrderedDict
from collections.abc import Callable
from functools import cached_property, partial
from typing import TYPE_CHECKING

import numpy as np

from coldstream.decoding import Grammar, SamplingParams, Thought
from coldstream.engine.answer import Request
from coldstream.engine.constraint import AnswerConstraint, ThoughtTokens, overrunning_tokens
from coldstream.engine.grammar_source import check_ends, grammar_source, is_dead_end
from coldstream.engine.regular_languages import one_line
from coldstream.errors import InvalidRequestError
from coldstream.gguf.tokenizer import Tokenizer
from coldstream.kernels.sample.settings import Bitmask, bitmask_of

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLParserLimits, LLTokenizer

MAX_COMPILED = 32  # grammars that are kept, the least recently used go first
MAX_LEXER_STATES = 50_000  # about 2 kB each
MAX_GRAMMAR_SYMBOLS = 200_000


class Grammars:
    """The grammars of requests to one model. May be shared between threads.

    Nothing is loaded before the first grammar. Raises ConfigError if llguidance is not installed.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._lock = threading.Lock()
        self._compiled: OrderedDict[Grammar, LLMatcher] = OrderedDict()
        self._overrunning: tuple[str, tuple[tuple[int, ...], ...]] | None = None  # of the last closing tag

    def prepare(self) -> None:
        """Reads the vocabulary now, about 2 s for 250,000 tokens, which the first grammar would wait for."""
        if self._tokenizer.eos_ids:
            with self._lock:
                _ = self._token_table, self._whitespace

    def check(self, params: SamplingParams) -> None:
        """Raises InvalidRequestError if the grammar of `params` is wrong, too large, or matches no answer."""
        if params.grammar is not None:
            self._prototype(params.grammar)

    def constraint(self, request: Request) -> AnswerConstraint | None:
        """What carries out the grammar and the thought's budget of one answer; None if it has neither.

        It is for that answer alone. Raises as `check`.
        """
        params = request.params
        if not params.is_constrained:
            return None
        grammar = None if params.grammar is None else self.matcher(params.grammar)
        thought = (
            None if params.thought is None else self._thought_tokens(params.thought, grammar is not None)
        )
        tokenizer = self._tokenizer
        return AnswerConstraint(
            grammar,
            thought,
            len(request.prompt_token_ids),
            request.all_end_ids,
            tokenizer.token_bytes,
            tokenizer.vocab_size,
        )

    def matcher(self, grammar: Grammar) -> "TokenMatcher":
        """A matcher at the beginning of an answer. Raises as `check`."""
        prototype = self._prototype(grammar)
        anew = partial(self._compiled_anew, grammar)
        return TokenMatcher(prototype, anew, self._all_tokens, self._whitespace)

    def _thought_tokens(self, thought: Thought, is_before_grammar: bool) -> ThoughtTokens:
        overrunning: tuple[tuple[int, ...], ...] = ()
        if is_before_grammar:
            with self._lock:
                if self._overrunning is None or self._overrunning[0] != thought.closing:
                    ids = overrunning_tokens(thought.closing, self._tokenizer)
                    self._overrunning = thought.closing, ids
                overrunning = self._overrunning[1]
        return ThoughtTokens.of(thought, self._tokenizer, overrunning)

    def _prototype(self, grammar: Grammar) -> "LLMatcher":
        with self._lock:
            if grammar in self._compiled:
                self._compiled.move_to_end(grammar)
                return self._compiled[grammar]
            compiled = _compiled(grammar, self._token_table)
            self._compiled[grammar] = compiled
            if len(self._compiled) > MAX_COMPILED:
                self._compiled.popitem(last=False)
            return compiled

    def _compiled_anew(self, grammar: Grammar) -> "LLMatcher":
        """Copies of a matcher share what was computed for them, and it is not forgotten: at a limit of that a
        grammar begins anew.
        """
        matcher = _matcher_of(grammar, grammar_source(grammar), self._token_table)
        with self._lock:
            if grammar in self._compiled:
                self._compiled[grammar] = matcher
        return matcher

    @cached_property
    def _token_table(self) -> "LLTokenizer":
        """llguidance's view of the vocabulary: control tokens are no text, all end tokens end an answer."""
        from llguidance import LLTokenizer, TokenizerWrapper

        ends = sorted(self._tokenizer.eos_ids)
        if not ends:
            raise InvalidRequestError(
                "grammar: the model's vocabulary has no end token, so no grammar can end its answers"
            )
        return LLTokenizer(
            TokenizerWrapper(_GuidanceVocabulary(self._tokenizer, ends[0])), self._tokenizer.vocab_size, ends
        )

    @cached_property
    def _all_tokens(self) -> Bitmask:
        count = self._tokenizer.vocab_size
        return bitmask_of(range(count), count)

    @cached_property
    def _whitespace(self) -> Bitmask:
        """The tokens that are blanks and new lines, a few at most."""
        count = self._tokenizer.vocab_size
        texts = ((index, self._tokenizer.token_bytes(index)) for index in range(count))
        return bitmask_of([index for index, text in texts if 0 < len(text) <= 8 and not text.strip()], count)


class TokenMatcher:
    """A grammar at some point of an answer. Belongs to one answer.

    Its result depends on its tokens alone. Other answers with the same grammar may have brought llguidance to
    a limit; then it is tried again with nothing but these tokens.
    """

    def __init__(
        self, prototype: "LLMatcher", anew: Callable[[], "LLMatcher"], tokens: Bitmask, whitespace: Bitmask
    ) -> None:
        """anew: compiles the grammar again, into a matcher that shares nothing. tokens: all of them."""
        self._prototype, self._anew, self._tokens = prototype, anew, tokens
        self._matcher = prototype.deep_copy()
        self._ids: list[int] = []
        self.whitespace = whitespace

    def fresh(self) -> "TokenMatcher":
        """The same grammar at the beginning."""
        return TokenMatcher(self._prototype, self._anew, self._tokens, self.whitespace)

    def accepts(self, token_id: int) -> bool:
        """Whether `token_id` may follow."""
        num_valid = self._matcher.validate_tokens([token_id])
        if self._is_at_limit and self._begin_anew():
            num_valid = self._matcher.validate_tokens([token_id])
        return num_valid == 1

    def append(self, token_id: int) -> None:
        """Takes a token. Raises InvalidRequestError if it may not follow, or at a limit of llguidance."""
        is_taken = self._matcher.consume_token(token_id)
        if self._is_at_limit and self._begin_anew():
            is_taken = self._matcher.consume_token(token_id)
        self._ids.append(token_id)
        if not is_taken:
            reason = one_line(self._matcher.get_error()) or "it may not follow"
            raise InvalidRequestError(f"grammar: token {token_id} of the answer cannot be matched: {reason}")

    def mask(self) -> Bitmask:
        """Which tokens may follow, end tokens among them exactly if the answer may end here.

        None may at a dead end of the grammar that `check_ends` has not found, or at a limit of llguidance.
        """
        bitmask = self._matcher.compute_bitmask()
        if self._is_at_limit and self._begin_anew():
            bitmask = self._matcher.compute_bitmask()
        if self._matcher.is_error():  # its mask says that the answer may end
            return np.zeros_like(self.whitespace)
        # It has bits for more tokens than there are.
        return np.frombuffer(bitmask, np.uint32)[: len(self._tokens)] & self._tokens

    @property
    def _is_at_limit(self) -> bool:
        return self._matcher.is_error() and not is_dead_end(self._matcher.get_error())

    def _begin_anew(self) -> bool:
        """Compiles the grammar again and takes the tokens so far. Whether that is below the limits."""
        self._prototype = self._anew()
        self._matcher = self._prototype.deep_copy()
        return self._matcher.consume_tokens(self._ids) and not self._matcher.is_error()


class _GuidanceVocabulary:
    """The attributes that llguidance reads of a tokenizer."""

    def __init__(self, tokenizer: Tokenizer, end_id: int) -> None:
        self._tokenizer = tokenizer
        self.eos_token_id = end_id
        self.bos_token_id = tokenizer.bos_id
        self.tokens = [tokenizer.token_bytes(index) for index in range(tokenizer.vocab_size)]
        self.special_token_ids = sorted(tokenizer.vocabulary.control_ids.values())

    def __call__(self, text: bytes) -> list[int]:
        ids = self._tokenizer.encode(text.decode("utf-8", "replace"))
        return ids[1:] if self._tokenizer.vocabulary.add_bos else ids


def _compiled(grammar: Grammar, tokens: "LLTokenizer") -> "LLMatcher":
    """A matcher at the beginning. Raises InvalidRequestError."""
    source = grammar_source(grammar)
    matcher = _matcher_of(grammar, source, tokens)
    _check_not_empty(grammar, matcher)
    has_control_tokens = any("⟦" in text for text in (grammar.text, grammar.calls, grammar.frame))
    check_ends(grammar, grammar_source(grammar, is_of_bytes=True) if has_control_tokens else source)
    return matcher


def _matcher_of(grammar: Grammar, source: str, tokens: "LLTokenizer") -> "LLMatcher":
    """Raises InvalidRequestError. llguidance says of most grammars what is wrong with them, and breaks off at
    some texts that no request should hold.
    """
    from llguidance import LLMatcher

    try:
        matcher = LLMatcher(tokens, source, log_level=0, limits=_limits())
        reason = one_line(matcher.get_error()) if matcher.is_error() else ""
    except Exception as error:
        reason = one_line(str(error))
    if reason:
        raise InvalidRequestError(f"grammar ({grammar.kind}): {reason}")
    return matcher


def _limits() -> "LLParserLimits":
    from llguidance import LLParserLimits

    return LLParserLimits(
        max_lexer_states=MAX_LEXER_STATES, max_grammar_size=MAX_GRAMMAR_SYMBOLS, verbose_errors=False
    )


def _check_not_empty(grammar: Grammar, matcher: "LLMatcher") -> None:
    """Raises InvalidRequestError if no token can begin an answer."""
    trial = matcher.deep_copy()
    trial.compute_bitmask()
    if trial.is_error() or (trial.is_stopped() and not trial.is_accepting()):
        raise InvalidRequestError(f"grammar ({grammar.kind}): no answer can match it")
