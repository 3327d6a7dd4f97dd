"""What an answer is made to match, under the names of OpenAI's API and of other servers.

Unit of work: the fields of one body → a `Grammar`, or none. Every field here is obeyed or refused, never left
aside: a client that sends one relies on it.
"""

import json
from typing import Annotated, Any, Final, Literal

from pydantic import Field

from coldstream.decoding import Grammar
from coldstream.server.http.fields import Body, Flag, Name, Text
from coldstream.server.http.problems import refused

MAX_CHOICES: Final = 4096

Schema = dict[str, Any] | bool | Text  # the text of a schema is JSON
Choices = Annotated[list[Text], Field(min_length=1, max_length=MAX_CHOICES)]


class JsonSchema(Body):
    """A schema that the answer has to satisfy."""

    name: Name | None = None
    json_schema: dict[str, Any] | bool | None = Field(None, alias="schema")
    strict: Flag | None = None


class ResponseFormat(Body):
    """The shape of the answer. `schema` beside `json_object` is llama.cpp's; `regex` and `grammar` are types
    of other servers.
    """

    type: Literal["text", "json_object", "json_schema", "regex", "grammar", "structural_tag"]
    json_schema: JsonSchema | None = None
    plain_schema: dict[str, Any] | bool | None = Field(None, alias="schema")
    regex: Text | None = None
    pattern: Text | None = None
    grammar: Text | None = None

    @property
    def constraint(self) -> Grammar | None:
        """The grammar of this format; None for text. Raises ProblemError."""
        name = "response_format"
        match self.type:
            case "text":
                return None
            case "json_object" if self.plain_schema is None:
                return Grammar("json_object")
            case "json_object" if self.plain_schema is not None:
                return Grammar("json_schema", _text_of(self.plain_schema), is_lenient=True)
            case "json_schema":
                if self.json_schema is None or self.json_schema.json_schema is None:
                    raise refused(f"{name}: json_schema needs a schema", name)
                is_lenient = not self.json_schema.strict
                return Grammar("json_schema", _text_of(self.json_schema.json_schema), is_lenient=is_lenient)
            case "regex":
                return _regex(self.regex or self.pattern)
            case "grammar":
                return _ebnf(self.grammar)
            case _:
                raise refused(f"{name}: structural_tag is not served: give tools, or a grammar", name)


class StructuredOutputs(Body):
    """vLLM's `structured_outputs`."""

    json_value: Schema | None = Field(None, alias="json")
    json_object: Flag | None = None
    regex: Text | None = None
    choice: Choices | None = None
    grammar: Text | None = None
    structural_tag: Any = None
    whitespace_pattern: Text | None = None

    @property
    def constraint(self) -> Grammar | None:
        """The grammar of these; None if there is none. Raises ProblemError."""
        name = "structured_outputs"
        if self.structural_tag is not None:
            raise refused(f"{name}: structural_tag is not served: give tools, or a grammar", name)
        return _only_one(
            {
                f"{name}.json": _schema(self.json_value, self.whitespace_pattern),
                f"{name}.json_object": Grammar("json_object") if self.json_object else None,
                f"{name}.regex": _regex(self.regex),
                f"{name}.choice": _choice(self.choice),
                f"{name}.grammar": _ebnf(self.grammar),
            }
        )


class ConstraintFields(Body):
    """Fields that say what an answer is made to match: those of OpenAI, llama.cpp, vLLM and SGLang."""

    response_format: ResponseFormat | None = None
    grammar: Text | None = None
    grammar_lazy: Flag | None = None
    json_schema: Schema | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: Schema | None = None
    guided_regex: Text | None = None
    guided_choice: Choices | None = None
    guided_grammar: Text | None = None
    guided_whitespace_pattern: Text | None = None
    regex: Text | None = None
    ebnf: Text | None = None
    structural_tag: Any = None

    @property
    def constraint(self) -> Grammar | None:
        """What the answer is made to match; None for any text. Raises ProblemError."""
        if self.grammar_lazy:
            raise refused(
                "grammar_lazy: a grammar holds from the first token of an answer on: give tools for calls",
                "grammar_lazy",
            )
        if self.structural_tag is not None:
            message = "structural_tag: not served: give tools, or a grammar"
            raise refused(message, "structural_tag")
        formatted, structured = self.response_format, self.structured_outputs
        return _only_one(
            {
                "response_format": None if formatted is None else formatted.constraint,
                "structured_outputs": None if structured is None else structured.constraint,
                "grammar": _ebnf(self.grammar),
                "json_schema": _schema(self.json_schema, None),
                "guided_json": _schema(self.guided_json, self.guided_whitespace_pattern),
                "guided_regex": _regex(self.guided_regex),
                "guided_choice": _choice(self.guided_choice),
                "guided_grammar": _ebnf(self.guided_grammar),
                "regex": _regex(self.regex),
                "ebnf": _ebnf(self.ebnf),
            }
        )


def _only_one(found: dict[str, Grammar | None]) -> Grammar | None:
    given = {name: grammar for name, grammar in found.items() if grammar is not None}
    if len(given) > 1:
        first, second = list(given)[:2]
        raise refused(f"{second}: not together with {first}: an answer matches one of them, send one", second)
    return next(iter(given.values()), None)


def _schema(schema: Schema | None, whitespace: str | None) -> Grammar | None:
    """A schema as an object or as JSON text. What of it cannot be held is refused."""
    if schema is None or schema == "":
        return None
    text = schema if isinstance(schema, str) else _text_of(schema)
    return Grammar("json_schema", text, whitespace=whitespace or "")


def _text_of(schema: dict[str, Any] | bool) -> str:
    try:
        return json.dumps(schema)
    except RecursionError:
        raise refused("a schema is nested too deeply") from None


def _regex(pattern: str | None) -> Grammar | None:
    return Grammar("regex", pattern) if pattern else None


def _choice(choices: list[str] | None) -> Grammar | None:
    if not choices:
        return None
    texts = (json.dumps(choice) if choice else "/()/" for choice in choices)
    return Grammar("lark", f"start: {' | '.join(texts)}")


def _ebnf(text: str | None) -> Grammar | None:
    """GBNF, or Lark, which is recognised by its rule `start:` or by `%llguidance`."""
    if not text:
        return None
    is_lark = any(
        line.lstrip().startswith(("start:", "start :", "%llguidance")) for line in text.splitlines()
    )
    return Grammar("lark" if is_lark else "gbnf", text)
