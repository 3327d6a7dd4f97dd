"""The strings of a held schema, as languages of plain text: for formats that write strings without quotes."""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from typing import Any, Final

from coldstream.engine.json_schema import LARK, HeldSchema
from coldstream.engine.regular_languages import is_empty, literal, of_length, term
from coldstream.server.output.object_forms import FormsError

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
