"""The grammar of the arguments of a demanded call as gemma-4 writes them, see `gemma_calls.py`.

Names are bare and sorted, as the chat template writes them. Strings stand between control tokens, so that
nothing in them can end them. Numbers, booleans and null are JSON. Schemas may refer to themselves.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

from coldstream.engine.grammar_source import control_token
from coldstream.engine.json_schema import HeldSchema
from coldstream.engine.regular_languages import is_empty
from coldstream.server.output.call_format import lark_json
from coldstream.server.output.object_forms import FormsError, ObjectForm, Schemas, object_forms
from coldstream.server.output.typed_values import quoted
from coldstream.server.output.xml_grammar import TextForm, text_forms, without_strings

QUOTE: Final = control_token('<|"|>')
_SCALARS: Final = ("null", "boolean", "number")
_KINDS: Final = frozenset(("string", "scalar", "array", "object"))
_TEXT: Final = "/(?s:.*)/"
_NAME: Final = r'/[^{}\[\]<>,:"\s]{1,64}/'
_UNREADABLE: Final = frozenset('{}[]<>,:"\n')
_MAX_RULES: Final = 4000
_MAX_DEPTH: Final = 32  # of parts in parts


class GemmaGrammar:
    """The rules of one tool's arguments. `root` is the rule of the object. Creation raises FormsError."""

    def __init__(self, prefix: str, schema: HeldSchema, *, is_strict: bool) -> None:
        self._prefix, self._schema, self._is_strict = prefix, schema, is_strict
        self._known: dict[str, str] = {}  # rules of values by their schemas, which may refer to themselves
        self.rules: list[str] = []
        self.root = self._new("object")
        self._put(self.root, self._objects(schema.root, is_root=True))

    def _new(self, kind: str) -> str:
        """The name of a rule that `_put` gives a body."""
        if len(self._known) + len(self.rules) > _MAX_RULES:
            raise FormsError("it has too many parts")
        self._known[f"#{len(self._known)}"] = kind  # so that names differ
        return f"{self._prefix}_{kind}_{len(self._known)}"

    def _put(self, name: str, options: Sequence[str]) -> None:
        if not options:
            raise FormsError("no value satisfies it")
        self.rules.append(f"{name}: {' | '.join(options)}")

    def _add(self, kind: str, body: str) -> str:
        name = self._new(kind)
        self._put(name, [body])
        return name

    def _value(self, schemas: Schemas) -> str:
        """The rule of a value that satisfies all of some schemas."""
        part = schemas[0] if len(schemas) == 1 else {"allOf": list(schemas)} if schemas else True
        key = json.dumps(part, sort_keys=True)
        if key not in self._known:
            self._known[key] = name = self._new("value")
            self._put(name, self._options(part))
        return self._known[key]

    def _options(self, part: Any) -> list[str]:
        """What a value of a schema may be."""
        if isinstance(part, Mapping) and "enum" in part and not part.keys() - {"enum", "type"}:
            return [self._constant(value) for value in part["enum"]]
        kinds = _kinds(part, self._schema, 0)
        options = [self._text(form) for form in text_forms(part, self._schema)] if "string" in kinds else []
        other = without_strings(part, self._schema)
        if "scalar" in kinds and other is not False:
            scalars = {"allOf": [{"type": list(_SCALARS)}, other]}
            options.append(
                self._add("json", lark_json(self._schema.alone(scalars), is_strict=self._is_strict))
            )
        if "object" in kinds:
            options += self._objects(part, is_root=False)
        if "array" in kinds:
            options += self._arrays(part)
        return options

    def _constant(self, value: Any) -> str:
        if isinstance(value, str):
            return f"{QUOTE} {quoted(value)} {QUOTE}" if value else f"{QUOTE} {QUOTE}"
        if isinstance(value, list):
            return _between("[", [self._constant(each) for each in value], "]")
        if isinstance(value, dict):
            names = sorted(value, key=str.lower)
            if not all(map(_is_readable, names)):
                raise FormsError("a name in its enum has marks in it")
            return _between(
                "{", [f"{quoted(f'{name}:')} {self._constant(value[name])}" for name in names], "}"
            )
        return quoted(json.dumps(value))

    def _text(self, form: TextForm) -> str:
        if form.lark is not None:
            lark = self._add("lark", f"%lark {{\n{form.lark}\n}}")
            return f"{QUOTE} {lark} {QUOTE}"
        language = form.language(_TEXT)
        if is_empty(language):
            raise FormsError("no text satisfies it")
        name = self._new("text").upper()
        self._put(name, [language])
        return f"{QUOTE} {name} {QUOTE}"

    def _arrays(self, part: Any) -> list[str]:
        own = _own_array(part, self._schema, 0)
        if "prefixItems" in own:
            raise FormsError("prefixItems are not written by this model")
        least, most = own.get("minItems", 0), own.get("maxItems")
        items = own.get("items", True)
        if items is False or most == 0:
            return [] if least else [quoted("[]")]
        item = self._value((items,))
        more = "" if most is None else str(most - 1)
        written = f'"[" {item} ("," {item}){{{max(0, least - 1)},{more}}} "]"'
        return [written] if least else [quoted("[]"), written]

    def _objects(self, part: Any, *, is_root: bool) -> list[str]:
        forms = object_forms(replace(self._schema, root=part))
        return [written for form in forms if (written := self._object(form, is_root=is_root)) is not None]

    def _object(self, form: ObjectForm, *, is_root: bool) -> str | None:
        """The rule of one form; None if nothing can be written by it."""
        names = sorted(form.properties, key=str.lower)
        kept = [name for name in names if _is_readable(name) and False not in form.properties[name]]
        if form.required - set(kept):
            return None
        if form.least > len(form.required) or form.most is not None:
            raise FormsError("minProperties and maxProperties are not written by this model")
        pairs = {name: f"{quoted(f'{name}:')} {self._value(form.properties[name])}" for name in kept}
        free = [
            f'{self._name_rule(names.language)} ":" {self._value(names.schemas)}' for names in form.free_names
        ]
        if not (is_root or form.is_closed or form.properties or free or form.patterns):
            free = [f'{self._name_rule(_NAME)} ":" {self._value(())}']
        return self._add("members", f'"{{" {self._sequence(pairs, form.required, free)} "}}"')

    def _name_rule(self, language: str) -> str:
        name = self._new("name").upper()
        self._put(name, [f"{_NAME} & {language}" if language != _NAME else _NAME])
        return name

    def _sequence(self, pairs: Mapping[str, str], required: frozenset[str], free: Sequence[str]) -> str:
        """The rule of pairs with commas between, from the last one to the first: what follows a pair, and
        what comes where none has been written yet.
        """
        others = f"({' | '.join(free)})" if free else ""
        after = self._add("after", f'("," {others})*' if others else '""')
        first = self._add("first", f'({others} ("," {others})*)?' if others else '""')
        for name, pair in reversed(list(pairs.items())):
            is_left_out = name not in required
            next_after, next_first = self._new("after"), self._new("first")
            self._put(next_after, [f'"," {pair} {after}', *([after] if is_left_out else [])])
            self._put(next_first, [f"{pair} {after}", *([first] if is_left_out else [])])
            after, first = next_after, next_first
        return first


def _between(opening: str, parts: Sequence[str], closing: str) -> str:
    return " ".join([quoted(opening), ' "," '.join(parts), quoted(closing)])


def _is_readable(name: str) -> bool:
    """Whether a bare name is read as it is written."""
    return 0 < len(name) <= 256 and name == name.strip().strip("'") and not set(name) & _UNREADABLE


def _kinds(part: Any, schema: HeldSchema, depth: int) -> frozenset[str]:
    """What values of a schema may be, of `_KINDS`."""
    if isinstance(part, bool):
        return _KINDS if part else frozenset()
    if depth > _MAX_DEPTH:
        raise FormsError("its parts refer to each other without end")
    names = part.get("type")
    found = _KINDS if names is None else frozenset(map(_kind, [names] if isinstance(names, str) else names))
    if "enum" in part:
        found &= {_kind_of(value) for value in part["enum"]}
    for each in part.get("allOf", ()):
        found &= _kinds(each, schema, depth + 1)
    if "$ref" in part:
        found &= _kinds(schema.target(part), schema, depth + 1)
    if "anyOf" in part:
        found &= frozenset().union(*(_kinds(each, schema, depth + 1) for each in part["anyOf"]))
    return found


def _kind(type_name: str) -> str:
    return type_name if type_name in _KINDS else "scalar"


def _kind_of(value: Any) -> str:
    kinds = ((str, "string"), (list, "array"), (dict, "object"))
    return next((name for kind, name in kinds if isinstance(value, kind)), "scalar")


def _own_array(part: Any, schema: HeldSchema, depth: int) -> Mapping[str, Any]:
    """What a schema says of arrays, in one of its parts at most. Raises FormsError."""
    if isinstance(part, bool):
        return {}
    if depth > _MAX_DEPTH:
        raise FormsError("its parts refer to each other without end")
    parts = [*part.get("allOf", ())]
    if "$ref" in part:
        parts.append(schema.target(part))
    options = [each for each in part.get("anyOf", ()) if "array" in _kinds(each, schema, 0)]
    if len(options) > 1 or ("enum" in part and "array" in _kinds(part, schema, 0)):
        raise FormsError("it has several kinds of arrays")
    own = {key: part[key] for key in ("items", "prefixItems", "minItems", "maxItems") if key in part}
    found = [own, *(_own_array(each, schema, depth + 1) for each in (*parts, *options))]
    saying = [each for each in found if each]
    if len(saying) > 1:
        raise FormsError("several of its parts say what is in an array")
    return saying[0] if saying else {}
