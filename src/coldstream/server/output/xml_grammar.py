"""The grammar of demanded calls that have a tag for each parameter, see `xml_calls.py` and `arg_calls.py`.

Parameters come in the order of the schema, those that it does not list behind them. Strings are plain text
up to the closing tag and hold nothing that the reader of calls would take for the end of the value; other
values are JSON. `TextForm` is a string of the schema as a language of plain text, without quotes.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from typing import Any, Final

from coldstream.decoding import Grammar
from coldstream.engine.json_schema import LARK, HeldSchema
from coldstream.engine.regular_languages import is_empty, literal, of_length, term
from coldstream.errors import InvalidRequestError
from coldstream.server.output.call_format import held_parameters, lark_calls, lark_json
from coldstream.server.output.object_forms import FormsError, ObjectForm, Schemas, object_forms
from coldstream.server.output.tools import ToolSignatures
from coldstream.server.output.typed_values import quoted

MAX_FORMS: Final = 64
_MAX_DEPTH: Final = 32  # of parts in parts
NO_STRING: Final = ("null", "boolean", "number", "array", "object")


@dataclass(frozen=True)
class TextForm:
    """Strings: those of a list, those of a Lark grammar, or those that match all patterns and have a length
    within bounds.
    """

    values: tuple[str, ...] | None = None
    patterns: tuple[str, ...] = ()
    least: int = 0
    most: int | None = None
    lark: str | None = None

    @property
    def is_anything(self) -> bool:
        """Whether every text is one of these strings."""
        return self == TextForm()

    def language(self, text: str) -> str:
        """The strings that are also in the language `text`."""
        found = [text, *map(term, self.patterns)]
        if self.least or self.most is not None:
            found.append(of_length(self.least, self.most))
        if self.values is not None:
            found.append(f"({' | '.join(map(literal, self.values))})")
        return " & ".join(found)


def text_forms(part: Any, schema: HeldSchema) -> list[TextForm]:
    """The forms of the strings that satisfy a part of a schema. Raises FormsError."""
    forms = _forms(part, schema, 0)
    return [TextForm()] if any(form.is_anything for form in forms) else list(dict.fromkeys(forms))


def without_strings(part: Any, schema: HeldSchema) -> Any:
    """A part of a schema without its strings; False if nothing is left."""
    if not any(_may_be_other(part, schema, 0)):
        return False
    return {"type": list(NO_STRING)} if part is True else {"allOf": [{"type": list(NO_STRING)}, part]}


def _forms(part: Any, schema: HeldSchema, depth: int) -> list[TextForm]:
    if isinstance(part, bool):
        return [TextForm()] if part else []
    if depth > _MAX_DEPTH:
        raise FormsError("its parts refer to each other without end")
    names = part.get("type", "string")
    if "string" not in ([names] if isinstance(names, str) else names):
        return []
    values = tuple(value for value in part["enum"] if isinstance(value, str)) if "enum" in part else None
    patterns = (part["pattern"],) if "pattern" in part else ()
    found = [TextForm(values, patterns, part.get("minLength", 0), part.get("maxLength"))]
    if LARK in part:
        found = [TextForm(lark=part[LARK])]
    groups = [_forms(each, schema, depth + 1) for each in part.get("allOf", ())]
    if "$ref" in part:
        groups.append(_forms(schema.target(part), schema, depth + 1))
    if "anyOf" in part:
        groups.append([form for each in part["anyOf"] for form in _forms(each, schema, depth + 1)])
    for group in groups:
        if len(found) * len(group) > MAX_FORMS:
            raise FormsError(f"its parts combine to more than {MAX_FORMS} alternatives")
        found = [_merged(one, other) for one, other in product(found, group)]
    return [form for form in found if form.values != () and not _is_empty(form)]


def _merged(one: TextForm, other: TextForm) -> TextForm:
    values = one.values if other.values is None else other.values
    if (one.lark or other.lark) and one != other and not (one.is_anything or other.is_anything):
        raise FormsError("a Lark grammar of a text is not combined with anything else")
    if one.values is not None and other.values is not None:
        values = tuple(value for value in one.values if value in other.values)
    mosts = [most for most in (one.most, other.most) if most is not None]
    patterns = tuple(dict.fromkeys((*one.patterns, *other.patterns)))
    least, most = max(one.least, other.least), min(mosts, default=None)
    return TextForm(values, patterns, least, most, one.lark or other.lark)


def _is_empty(form: TextForm) -> bool:
    if form.most is not None and form.least > form.most:
        return True
    return not form.is_anything and form.lark is None and is_empty(form.language("/(?s:.*)/"))


def _may_be_other(part: Any, schema: HeldSchema, depth: int) -> Iterator[bool]:
    """Yields True if something else than a string may satisfy a part."""
    if isinstance(part, bool) or depth > _MAX_DEPTH:
        yield part is not False
        return
    names = part.get("type", NO_STRING)
    may = any(name != "string" for name in ([names] if isinstance(names, str) else names))
    may &= "enum" not in part or any(not isinstance(value, str) for value in part["enum"])
    may &= all(any(_may_be_other(each, schema, depth + 1)) for each in part.get("allOf", ()))
    if may and "$ref" in part:
        may = any(_may_be_other(schema.target(part), schema, depth + 1))
    if may and "anyOf" in part:
        may = any(any(_may_be_other(each, schema, depth + 1)) for each in part["anyOf"])
    yield may


MAX_RULES_OF_COUNTS: Final = 4000  # for one tool with minProperties or maxProperties
_NAME: Final = r"/[^<>\n \t\r'\"]([^<>\n]{0,62}[^<>\n \t\r'\"])?/"


@dataclass(frozen=True)
class CallMarkup:
    """What stands around the names and values of a call.

    text: the language of a value without what ends one for the reader of calls.
    """

    before_name: str
    after_name: str
    before_key: str
    before_value: str
    after_value: str
    end: str
    between_calls: str
    text: str


def tagged_calls_grammar(tools: ToolSignatures, markup: CallMarkup, *, most_calls: int) -> Grammar:
    """What matches 1 to `most_calls` calls of `tools`, and nothing else.

    Raises InvalidRequestError for a tool whose schema cannot be held.
    """
    functions = [f"function_{i}" for i in range(len(tools.schemas))]
    rules = [
        lark_calls(most_calls, between=markup.between_calls),
        f"call: ({' | '.join(functions)}) {quoted(markup.end)}",
        f"TEXT: {markup.text}",
    ]
    for rule, name in zip(functions, tools.schemas, strict=True):
        held, is_strict = held_parameters(tools, name), name in tools.strict
        try:
            rules += _FunctionRules(rule, held, markup, is_strict=is_strict).of(name)
        except (FormsError, ValueError) as error:
            raise InvalidRequestError(f"tools: {name}: the schema cannot be held, as {error}") from None
    return Grammar("lark", "\n".join(rules))


@dataclass(frozen=True)
class _ParameterRule:
    """A parameter as a rule."""

    rule: str
    is_required: bool


class _FunctionRules:
    """The rules of one function."""

    def __init__(self, rule: str, schema: HeldSchema, markup: CallMarkup, *, is_strict: bool) -> None:
        self._rule, self._schema, self._is_strict = rule, schema, is_strict
        self._markup = markup
        self._rules: list[str] = []
        self._num_rules = 0

    def of(self, name: str) -> list[str]:
        """The rules of a call of the function `name`. Raises FormsError."""
        forms = [rule for form in object_forms(self._schema) if (rule := self._form(form)) is not None]
        if not forms:
            raise FormsError("no value satisfies it")
        head = quoted(f"{self._markup.before_name}{name}{self._markup.after_name}")
        return [f"{self._rule}: {head} ({' | '.join(forms)})", *self._rules]

    def _form(self, form: ObjectForm) -> str | None:
        """The rule of one form; None if nothing can be written by it."""
        parts: list[_ParameterRule] = []
        for name, schemas in form.properties.items():
            is_required = name in form.required
            value = self._value(schemas) if _is_readable(name) else None
            if value is not None:
                before = quoted(f"{self._markup.before_key}{name}{self._markup.before_value}")
                rule = self._add(f"{before} {value}")
                parts.append(_ParameterRule(rule, is_required))
            elif is_required:
                return None
        free = [self._free(names.language, names.schemas) for names in form.free_names]
        return self._sequence(parts, [rule for rule in free if rule is not None], form)

    def _free(self, language: str, schemas: Schemas) -> str | None:
        """The rule of a parameter with a name that is not listed."""
        value = self._value(schemas)
        language = f"{_NAME} & {language}"
        if value is None or is_empty(language):
            return None
        name = self._add(language, is_text=True)
        before, behind = quoted(self._markup.before_key), quoted(self._markup.before_value)
        return self._add(f"{before} {name} {behind} {value}")

    def _sequence(self, parts: list[_ParameterRule], free: list[str], form: ObjectForm) -> str | None:
        """The rule of parameters that follow each other, as many as a form allows."""
        num_required = sum(part.is_required for part in parts)
        if form.least <= num_required and form.most is None:
            written = [part.rule if part.is_required else f"{part.rule}?" for part in parts]
            others = f"({' | '.join(free)})*" if free else ""
            return self._add(" ".join([*written, others]) or '""')
        most = form.least if form.most is None else form.most
        if (len(parts) + 1) * (most + 1) > MAX_RULES_OF_COUNTS:
            raise FormsError("minProperties and maxProperties are too large for its properties")
        return self._counted(parts, free, form, most)

    def _counted(
        self, parts: list[_ParameterRule], free: list[str], form: ObjectForm, most: int
    ) -> str | None:
        """As `_sequence`, from the last parameter to the first: a rule for each number of those before."""
        rest: list[str | None] = []
        for count in range(most + 1):
            least = max(0, form.least - count)
            room = "" if form.most is None else str(form.most - count)
            if not free:
                rest.append('""' if least == 0 else None)
            else:
                rest.append(self._add(f"({' | '.join(free)}){{{least},{room}}}") if room != "0" else '""')
        for part in reversed(parts):
            before: list[str | None] = []
            for count in range(most + 1):
                more = min(count + 1, most) if form.most is None else count + 1
                then = rest[more] if more <= most else None
                options = [f"{part.rule} {then}"] if then is not None else []
                if not part.is_required and rest[count] is not None:
                    options.append(str(rest[count]))
                before.append(self._add(" | ".join(options)) if options else None)
            rest = before
        return rest[0]

    def _value(self, schemas: Schemas) -> str | None:
        """The rule of a value that satisfies schemas, with its closing tag; None if there is none."""
        schema = schemas[0] if len(schemas) == 1 else {"allOf": list(schemas)} if schemas else True
        texts = text_forms(schema, self._schema)
        if any(form.is_anything for form in texts):
            return self._text("TEXT")
        language = self._markup.text
        options = [
            self._text_rule(form) for form in texts if form.lark or not is_empty(form.language(language))
        ]
        other = without_strings(schema, self._schema) if texts else schema
        if other is not False:
            json = self._add(lark_json(self._schema.alone(other), is_strict=self._is_strict))
            options.append(self._add(f"{json} {quoted(self._markup.after_value)}"))
        return f"({' | '.join(options)})" if options else None

    def _text_rule(self, form: TextForm) -> str:
        if form.lark is None:
            return self._text(form.language("TEXT"))
        lark = self._add(f"%lark {{\n{form.lark}\n}}")
        return self._add(f"{lark} {quoted(self._markup.after_value)}")

    def _text(self, language: str) -> str:
        name = self._add(language, is_text=True) if language != "TEXT" else language
        return self._add(name, attributes=f"[suffix={quoted(self._markup.after_value)}]")

    def _add(self, body: str, *, is_text: bool = False, attributes: str = "") -> str:
        """A new rule, or a new terminal."""
        name = f"{self._rule}_{self._num_rules}"
        name = name.upper() if is_text else name
        self._num_rules += 1
        self._rules.append(f"{name}{attributes}: {body}")
        return name


def _is_readable(name: str) -> bool:
    """Whether a name is read as it is written in a tag."""
    return 0 < len(name) <= 256 and name == name.strip(" \t\r'\"") and not set(name) & set("<>\n")
