"""What a request demands of its answer, as data: it crosses to another process and says everything.

This module knows neither tokens nor how a grammar is checked; `coldstream.engine.grammar` does.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, get_args

from coldstream.decoding.checks import MAX_COUNT, check_flag, check_integer
from coldstream.errors import InvalidRequestError, shown

GrammarKind = Literal["json_schema", "json_object", "regex", "lark", "gbnf"]

MAX_GRAMMAR_CHARS = 1 << 19
MAX_WHITESPACE_CHARS = 256
MAX_TAG_CHARS = 256
MAX_REPETITION_PERIOD = 4096


@dataclass(frozen=True)
class Grammar:
    """A language that an answer has to belong to.

    kind: json_schema (`text` is the schema as JSON), json_object (any object, `text` is empty), regex (Rust's
    syntax, to match the whole answer), lark (llguidance's variant of Lark) or gbnf (llama.cpp's). Creation
    raises InvalidRequestError for an unknown kind or a text that is too long; what it says is checked by
    `coldstream.engine.grammar`.
    """

    kind: GrammarKind
    text: str = ""
    is_lenient: bool = False  # whether keywords of a schema that cannot be enforced are ignored
    # A regular expression of the blanks between the tokens of JSON; empty: one blank at most, behind a comma
    # or a colon. One that allows blanks without a limit lets a model write nothing else.
    whitespace: str = ""
    calls: str = ""  # Lark of calls of tools, which the answer may be instead
    # Lark of the whole answer, in which `@own` is what the fields above say, and `@calls` the calls. Empty:
    # it is one or the other. A control token is ⟦<|name|>⟧ here, in `calls`, and in a `text` that is Lark.
    frame: str = ""

    def __post_init__(self) -> None:
        if self.kind not in get_args(GrammarKind):
            known = ", ".join(get_args(GrammarKind))
            raise InvalidRequestError(f"grammar.kind: {shown(self.kind)} is not one of {known}")
        if self.kind == "json_schema" and isinstance(self.text, Mapping):
            raise InvalidRequestError("grammar.text is a schema as JSON: give json.dumps(schema)")
        _check_text("grammar.text", self.text, MAX_GRAMMAR_CHARS, is_empty=self.kind == "json_object")
        check_flag("grammar.is_lenient", self.is_lenient)
        limits = {"whitespace": MAX_WHITESPACE_CHARS, "calls": MAX_GRAMMAR_CHARS, "frame": MAX_GRAMMAR_CHARS}
        for name, most in limits.items():
            _check_text(f"grammar.{name}", getattr(self, name), most, is_empty=not getattr(self, name))


@dataclass(frozen=True)
class Thought:
    """The thought that comes before an answer, in the words of the model's chat template.

    A grammar begins behind it. With `budget`, a thought that has taken so many tokens and goes on is made to
    end with `forced`, once: a later thought is left alone. What is forced counts as generated. Creation
    raises InvalidRequestError for values out of range.
    """

    is_open: bool  # whether the prompt ends inside the thought
    opening: str = "<think>"  # an answer that begins with it has a thought, too
    closing: str = "</think>"
    budget: int | None = None  # tokens
    forced: str = "\n</think>\n\n"  # must contain `closing`
    tool_call: str = "<tool_call>"  # begins a call, and so ends a thought; empty: nothing does

    def __post_init__(self) -> None:
        check_flag("thought.is_open", self.is_open)
        for name in ("opening", "closing", "forced", "tool_call"):
            text = getattr(self, name)
            _check_text(f"thought.{name}", text, MAX_TAG_CHARS, is_empty=name == "tool_call" and not text)
        check_integer("thought.budget", self.budget, 0, MAX_COUNT, optional=True)
        if self.closing not in self.forced:
            raise InvalidRequestError(f"thought.forced must hold {shown(self.closing)}, thought.closing")


@dataclass(frozen=True)
class RepetitionStop:
    """Ends an answer, for the reason `repetition`, at the first token after which its last tokens are one
    block of at most `max_period` tokens, `repeats` times or more, over at least `min_tokens` tokens.

    Creation raises InvalidRequestError for values out of range.
    """

    max_period: int = 512
    repeats: int = 6
    min_tokens: int = 192

    def __post_init__(self) -> None:
        check_integer("repetition.max_period", self.max_period, 1, MAX_REPETITION_PERIOD)
        check_integer("repetition.repeats", self.repeats, 2, MAX_COUNT)
        check_integer("repetition.min_tokens", self.min_tokens, 1, MAX_COUNT)


def _check_text(name: str, text: object, most: int, *, is_empty: bool) -> None:
    if not isinstance(text, str) or len(text) > most or (text == "") != is_empty:
        size = "an empty text" if is_empty else f"a text of 1 to {most} characters"
        given = f"{len(text)} characters" if isinstance(text, str) else shown(text)
        raise InvalidRequestError(f"{name} must be {size}, not {given}")
