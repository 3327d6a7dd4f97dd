"""A held schema of an object as forms: its names, their order, and which schemas hold of each value.

A format that writes an object's names in tags of its own needs them as a list; a schema may say them in
several parts, and in alternatives. Each form is one way to write the object.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from itertools import product
from typing import Any, Final

from coldstream.engine.json_schema import HeldSchema
from coldstream.engine.regular_languages import ANYTHING, is_empty, literal, occurs, term

MAX_FORMS: Final = 64
_MAX_DEPTH: Final = 32  # of parts in parts

Schemas = tuple[Any, ...]  # that all hold; none: any value fits


class FormsError(Exception):
    """A schema cannot be written as forms; the message says why."""


@dataclass(frozen=True)
class FreeNames:
    """Names that are not listed, as a language, and what holds of their values."""

    language: str
    schemas: Schemas


@dataclass(frozen=True)
class ObjectForm:
    """One way to write an object."""

    properties: Mapping[str, Schemas] = field(default_factory=dict)  # in the order of writing
    required: frozenset[str] = frozenset()
    patterns: Mapping[str, Schemas] = field(default_factory=dict)  # patterns exclude each other
    rest: Schemas | None = None  # for names without a pattern; None: they are allowed, and not offered
    is_closed: bool = False  # whether there are no other names
    least: int = 0
    most: int | None = None

    def of_name(self, name: str) -> Schemas | None:
        """What holds of the value of a name; None if it is not allowed."""
        if name in self.properties:
            return self.properties[name]
        for pattern, schemas in self.patterns.items():
            if occurs(pattern, name):
                return schemas
        return None if self.is_closed else self.rest or ()

    @property
    def free_names(self) -> list[FreeNames]:
        """The names that may be written beside the listed ones."""
        listed = "".join(f" & ~{literal(name)}" for name in self.properties)
        found = [FreeNames(f"{term(pattern)}{listed}", schemas) for pattern, schemas in self.patterns.items()]
        if self.rest is not None and not self.is_closed:
            others = "".join(f" & ~{term(pattern)}" for pattern in self.patterns)
            found.append(FreeNames(f"/{ANYTHING}/{listed}{others}", self.rest))
        return [names for names in found if not is_empty(names.language)]


def object_forms(schema: HeldSchema) -> list[ObjectForm]:
    """The forms of a schema that describes an object, none if no object satisfies it. Raises FormsError."""
    return [
        listed for form in _forms(schema.root, schema, 0) if (listed := _listing_required(form)) is not None
    ]


def _forms(part: Any, schema: HeldSchema, depth: int) -> list[ObjectForm]:
    if part is False:
        return []
    if part is True:
        return [ObjectForm()]
    if depth > _MAX_DEPTH:
        raise FormsError("its parts refer to each other without end")
    if "enum" in part:
        return [_fixed(value) for value in part["enum"] if isinstance(value, dict)]
    names = part.get("type", "object")
    if "object" not in ([names] if isinstance(names, str) else names):
        return []
    found = [_own_form(part)]
    groups = [_forms(each, schema, depth + 1) for each in part.get("allOf", ())]
    if "$ref" in part:
        groups.insert(0, _forms(schema.target(part), schema, depth + 1))
    if "anyOf" in part:
        groups.append([form for each in part["anyOf"] for form in _forms(each, schema, depth + 1)])
    for group in groups:
        if len(found) * len(group) > MAX_FORMS:
            raise FormsError(f"its parts combine to more than {MAX_FORMS} alternatives")
        found = [form for one, other in product(found, group) if (form := _merged(one, other)) is not None]
    return found


def _own_form(part: Mapping[str, Any]) -> ObjectForm:
    """The form of what a schema says itself, without its parts."""
    rest = part.get("additionalProperties")
    return ObjectForm(
        properties={name: _schemas(each) for name, each in part.get("properties", {}).items()},
        required=frozenset(part.get("required", ())),
        patterns={pattern: _schemas(each) for pattern, each in part.get("patternProperties", {}).items()},
        rest=None if rest is None else _schemas(rest),
        is_closed=rest is False,
        least=part.get("minProperties", 0),
        most=part.get("maxProperties"),
    )


def _fixed(value: Mapping[str, Any]) -> ObjectForm:
    """The form of one value."""
    properties = {name: ({"enum": [each]},) for name, each in value.items()}
    return ObjectForm(properties, frozenset(value), is_closed=True)


def _schemas(schema: Any) -> Schemas:
    return () if schema is True else (schema,)


def _merged(one: ObjectForm, other: ObjectForm) -> ObjectForm | None:
    """What both forms allow; None for nothing."""
    names = list(dict.fromkeys([*one.properties, *other.properties]))
    properties: dict[str, Schemas] = {}
    for name in names:
        of_both = one.of_name(name), other.of_name(name)
        forbids = of_both[0] is None or of_both[1] is None
        properties[name] = (False,) if forbids else (*(of_both[0] or ()), *(of_both[1] or ()))
    mosts = [most for most in (one.most, other.most) if most is not None]
    rest_sets = [form.rest for form in (one, other) if form.rest is not None]
    return ObjectForm(
        properties,
        one.required | other.required,
        _merged_patterns(one, other),
        tuple(each for rest in rest_sets for each in rest) if rest_sets else None,
        one.is_closed or other.is_closed,
        max(one.least, other.least),
        min(mosts, default=None),
    )


def _merged_patterns(one: ObjectForm, other: ObjectForm) -> dict[str, Schemas]:
    """Patterns of names in both forms. Patterns of a form that the other one closes are gone, and those that
    both have hold together. Others that meet cannot be written as patterns that exclude each other.
    """
    patterns: dict[str, Schemas] = {}
    for form, beside in ((one, other), (other, one)):
        for pattern, schemas in form.patterns.items():
            if pattern in beside.patterns:
                patterns[pattern] = (*one.patterns[pattern], *other.patterns[pattern])
                continue
            meets = any(not is_empty(f"{term(pattern)} & {term(each)}") for each in beside.patterns)
            if meets or (beside.patterns and beside.is_closed):
                raise FormsError("patternProperties of several parts meet")
            if not beside.is_closed:
                patterns[pattern] = (*schemas, *(beside.rest or ()))
    return patterns


def _listing_required(form: ObjectForm) -> ObjectForm | None:
    """The form with all required names listed; None if one of them is not allowed."""
    properties = dict(form.properties)
    for name in sorted(form.required - properties.keys()):
        of_name = form.of_name(name)
        if of_name is None:
            return None
        properties[name] = of_name
    return replace(form, properties=properties)
