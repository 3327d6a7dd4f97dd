"""Where a chat template is rendered: Jinja as Hugging Face sets it up, which also notes who wrote each
character.

A rendered prompt is plain text, in which a template's `<|im_end|>` and a user's look the same. So the text of
a template's source carries an origin for each of its characters (`TracedText`); all other text is plain `str`
and counts as given by the caller. A `TracedText` *is* its text: comparisons, searches, lengths, hashes and
JSON see nothing but the characters, so that a template decides as it would without.

What keeps origins: concatenation (`+`, `~`, output, macros, blocks), `join`, slices, loops over characters,
splitting, trimming, `replace`, `format`, repetition and changes of case. Every other operation returns plain
text, which can only make a template's own token count as given, never the reverse.

Unit of work: one template. Knows neither messages nor tokens. `template_worker.py` imports it by its bare
name, in a process without the package, so it imports nothing of the package.
"""

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import count
from typing import Any, SupportsIndex

from jinja2 import nodes
from jinja2.compiler import CodeGenerator, Frame
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.filters import sync_do_join
from jinja2.nodes import EvalContext
from jinja2.parser import Parser
from jinja2.runtime import Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment, SandboxedFormatter
from jinja2.utils import Namespace, pass_eval_context
from markupsafe import Markup, escape

GIVEN, WRITTEN = "0", "1"  # the origins of a character: the caller, the template


class Refusal(Exception):
    """`raise_exception` was called: the template doesn't accept these messages."""


class TracedText(str):
    """Text with the origin of each character, by default `GIVEN`."""

    __slots__ = ("_origin",)
    _origin: str

    def __new__(cls, text: str, origin: str | None = None) -> "TracedText":
        traced = super().__new__(cls, text)
        traced._origin = GIVEN * len(text) if origin is None else origin
        assert len(traced._origin) == len(text)
        return traced

    def __str__(self) -> str:
        return self

    def __format__(self, spec: str) -> str:
        return str.__format__(self, spec) if spec else self

    def __add__(self, other: str) -> str:
        if isinstance(other, Markup):
            return TracedMarkup(other).__radd__(self)
        return joined((self, other)) if isinstance(other, str) else NotImplemented

    def __radd__(self, other: str) -> str:
        return joined((other, self)) if type(other) is str else NotImplemented

    def __mul__(self, times: SupportsIndex) -> str:
        return _traced(str.__mul__(self, times), self._origin * times)

    __rmul__ = __mul__

    def __getitem__(self, key: SupportsIndex | slice) -> str:
        return _traced(str.__getitem__(self, key), self._origin[key])

    def __iter__(self) -> Iterator[str]:
        return iter([self[index] for index in range(len(self))])

    def join(self, texts: Iterable[str]) -> str:
        return joined(texts, self)

    def split(self, sep: str | None = None, maxsplit: SupportsIndex = -1) -> list[str]:
        return self._pieces(str.split(self, sep, maxsplit), len(sep or ""))

    def rsplit(self, sep: str | None = None, maxsplit: SupportsIndex = -1) -> list[str]:
        return self._pieces(str.rsplit(self, sep, maxsplit), len(sep or ""))

    def splitlines(self, keepends: bool = False) -> list[str]:
        return self._pieces(str.splitlines(self, keepends), 0)

    def partition(self, sep: str) -> tuple[str, str, str]:
        before, middle, after = self._pieces(str.partition(self, sep), 0)
        return before, middle, after

    def rpartition(self, sep: str) -> tuple[str, str, str]:
        before, middle, after = self._pieces(str.rpartition(self, sep), 0)
        return before, middle, after

    def lstrip(self, chars: str | None = None) -> str:
        return self[len(self) - len(str.lstrip(self, chars)) :]

    def rstrip(self, chars: str | None = None) -> str:
        return self[: len(str.rstrip(self, chars))]

    def strip(self, chars: str | None = None) -> str:
        return self.rstrip(chars).lstrip(chars)

    def removeprefix(self, prefix: str) -> str:
        return self[len(self) - len(str.removeprefix(self, prefix)) :]

    def removesuffix(self, suffix: str) -> str:
        return self[: len(str.removesuffix(self, suffix))]

    def replace(self, old: str, new: str, count: SupportsIndex = -1) -> str:
        if not old:
            return str.replace(self, old, new, count)
        return joined(self.split(old, count), new)

    def lower(self) -> str:
        return self._with_case(str.lower(self))

    def upper(self) -> str:
        return self._with_case(str.upper(self))

    def capitalize(self) -> str:
        return self._with_case(str.capitalize(self))

    def title(self) -> str:
        return self._with_case(str.title(self))

    def _with_case(self, text: str) -> str:
        """No letter gets shorter with its case, so with equal lengths each one stands where it stood."""
        return _traced(text, self._origin) if len(text) == len(self) else text

    def _pieces(self, texts: Iterable[str], gap: int) -> list[str]:
        """`texts`, which lie in this order in the text: `gap` characters apart, or blanks if it is 0."""
        pieces, end = [], -gap
        for text in texts:
            start = end + gap if gap else str.find(self, text, end)
            end = start + len(text)
            pieces.append(self[start:end])
        return pieces


class TracedMarkup(Markup):
    """Text that the filter `safe` has marked: what it is added to is escaped, here as in Jinja."""

    __slots__ = ("_origin",)
    _origin: str

    def __new__(cls, value: Any, origin: str | None = None) -> "TracedMarkup":
        marked = super().__new__(cls, value)
        if origin is None:
            origin = origin_of(value if isinstance(value, str) else str.__str__(marked))
        marked._origin = origin
        assert len(origin) == len(marked)
        return marked

    def __str__(self) -> str:
        return _traced(str.__str__(self), self._origin)

    def __repr__(self) -> str:
        return f"Markup({str.__repr__(self)})"

    def __add__(self, other: Any, /) -> "TracedMarkup":
        text = Markup.__add__(self, other)
        return text if text is NotImplemented else TracedMarkup(text, self._origin + _escaped_origin(other))

    def __radd__(self, other: Any, /) -> "TracedMarkup":
        text = Markup.__radd__(self, other)
        return text if text is NotImplemented else TracedMarkup(text, _escaped_origin(other) + self._origin)


def _escaped_origin(text: str) -> str:
    if hasattr(text, "__html__"):
        return origin_of(text)
    return "".join(
        len(escape(char)) * origin for char, origin in zip(str.__str__(text), origin_of(text), strict=True)
    )


def _traced(text: str, origin: str) -> str:
    return TracedText(text, origin) if WRITTEN in origin else text


def origin_of(text: str) -> str:
    """`GIVEN` or `WRITTEN` for each character."""
    return text._origin if isinstance(text, TracedText | TracedMarkup) else GIVEN * len(text)


def written(text: str) -> TracedText:
    """`text` as the template's own."""
    return TracedText(text, WRITTEN * len(text))


def joined(texts: Iterable[str], separator: str = "") -> str:
    """`separator.join(texts)`, which keeps the origins of all. Raises as `str.join` does."""
    texts = [separator, *texts]
    text = str.join(separator, texts[1:])
    if not any(isinstance(part, TracedText) for part in texts):
        return text
    return _traced(text, origin_of(separator).join(map(origin_of, texts[1:])))


def runs(text: str) -> list[int]:
    """Lengths of the stretches of one origin in turn, the first of them, perhaps 0, of given characters."""
    lengths = [len(run) for run in re.findall(f"{GIVEN}+|{WRITTEN}+", origin_of(text))]
    return [0, *lengths] if origin_of(text).startswith(WRITTEN) else lengths


class TracingGenerator(CodeGenerator):
    """Compiles a template so that its literals are `written` and its own concatenations keep origins."""

    def visit_Const(self, node: nodes.Const, frame: Frame) -> None:  # noqa: N802  Jinja's name
        self.write(self._source(node.as_const(frame.eval_ctx)))

    def visit_TemplateData(self, node: nodes.TemplateData, frame: Frame) -> None:  # noqa: N802
        if frame.eval_ctx.volatile or frame.eval_ctx.autoescape:
            super().visit_TemplateData(node, frame)
        else:
            self.write(self._source(node.data))

    def visit_Concat(self, node: nodes.Concat, frame: Frame) -> None:  # noqa: N802
        if frame.eval_ctx.volatile or frame.eval_ctx.autoescape:
            super().visit_Concat(node, frame)
            return
        self.write("concat(map(str, (")
        for part in node.nodes:
            self.visit(part, frame)
            self.write(", ")
        self.write(")))")

    def _output_const_repr(self, group: Iterable[Any]) -> str:
        return self._source("".join(group))

    def _source(self, value: Any) -> str:
        """Python source of a constant; those that the optimizer folded may be containers."""
        if type(value) is str:
            self.environment.literals[value] = written(value)  # type: ignore[attr-defined]
            return f"environment.literals[{value!r}]"
        if type(value) is list:
            return f"[{', '.join(map(self._source, value))}]"
        if type(value) is tuple:
            return f"({''.join(f'{self._source(item)}, ' for item in value)})"
        if type(value) is dict:
            items = (f"{self._source(key)}: {self._source(item)}" for key, item in value.items())
            return f"{{{', '.join(items)}}}"
        return repr(value)


class GenerationBlock(Extension):
    """`{% generation %}` marks text for training; rendered, it is its body, in a scope like a macro's."""

    tags = {"generation"}  # noqa: RUF012  Jinja's own class attribute

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_body"), [], [], body).set_lineno(line)

    def _body(self, caller: Macro) -> str:
        return caller()


class PublicNamespace(Namespace):
    """Jinja's `namespace` without names that begin with an underscore."""

    def __init__(*args: Any, **attributes: Any) -> None:  # `self` stays free as an attribute's name
        self, *rest = args
        Namespace.__init__(self)
        for name, value in dict(*rest, **attributes).items():
            self[name] = value

    def __setitem__(self, name: str, value: Any) -> None:
        if isinstance(name, str) and name.startswith("_"):
            raise SecurityError(f"a namespace holds no name like {name!r}: it begins with an underscore")
        super().__setitem__(name, value)


class PublicDict:
    """`dict` in a template: a call and `fromkeys`, not the type itself."""

    def __call__(self, *args: Any, **items: Any) -> dict[Any, Any]:
        return dict(*args, **items)

    def fromkeys(self, keys: Iterable[Any], value: Any = None) -> dict[Any, Any]:
        return dict.fromkeys(keys, value)


class TracingEnvironment(ImmutableSandboxedEnvironment):
    """A sandbox with the names that Hugging Face gives to chat templates, and nothing else."""

    code_generator_class = TracingGenerator
    concat = staticmethod(joined)

    def __init__(self) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=[GenerationBlock, loopcontrols])
        self.literals: dict[str, TracedText] = {}  # literals of the template by their text
        self.filters |= {"tojson": tojson, "join": traced_join, "safe": safe}
        self.globals |= {
            "raise_exception": raise_exception,
            "dict": PublicDict(),
            "namespace": PublicNamespace,
        }

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        """The sandbox's stand-in for `str.format`, which keeps the origins if the template wrote the text."""
        wrapped = super().wrap_str_format(value)
        if wrapped is None or GIVEN in origin_of(value.__self__):
            return wrapped

        def format_traced(*args: Any, **kwargs: Any) -> str:
            text = str(wrapped(*args, **kwargs))
            fields = args[0] if value.__name__ == "format_map" else kwargs
            traced = _formatted(SandboxedFormatter(self), value.__self__, args, fields)
            return traced if traced == text else text

        return format_traced


def _formatted(
    formatter: SandboxedFormatter, pattern: str, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> str:
    """A valid `pattern`, all written, with its fields filled in; another text if they nest."""
    pieces: list[str] = []
    numbers = count()
    for literal, field, spec, conversion in formatter.parse(pattern):
        pieces.append(written(literal))
        if field is not None and "{" not in (spec or ""):
            name = f"{next(numbers)}{field}" if field[:1] in ("", ".", "[") else field
            value, _ = formatter.get_field(name, args, kwargs)
            pieces.append(formatter.format_field(formatter.convert_field(value, conversion), spec or ""))
    return joined(pieces)


def tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Plain JSON: no HTML escapes, characters as they are unless the template asks for ASCII."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


@pass_eval_context
def traced_join(context: EvalContext, value: Iterable[Any], d: str = "", attribute: Any = None) -> str:
    """Jinja's `join`, through the one of `TracedText`."""
    separator = d if context.autoescape or isinstance(d, TracedText) else TracedText(str(d))
    return sync_do_join(context, value, separator, attribute)


def safe(value: Any) -> TracedMarkup:
    """Jinja's `safe`."""
    return TracedMarkup(value)


def raise_exception(message: object) -> None:
    raise Refusal(str(message))
