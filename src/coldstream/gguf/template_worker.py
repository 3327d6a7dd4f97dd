"""The process that runs a model file's chat template: a script, started by `template_process.py`.

A template is a program written by whoever made the file. It runs here, where there is nothing to take: no
model, no request but its own, no environment. Four walls stand one behind the other: Jinja's immutable
sandbox, in which no attribute leads out of the data; an audit hook, which fails whatever got out at its first
file, socket, import or command; no file descriptor to be had beyond the three pipes; and limits on memory and
on processor time per rendering, after which the kernel ends the process.

Protocol: one JSON object per line on standard input, one back on standard output. The first, which has no
answer, is `{"paths", "memory_bytes", "cpu_s"}`, the second `{"source"}`, all others `{"variables", "now",
"max_chars"}`. Answers are `{"text"}` or `{"error"}`; after one with `fatal` the process ends.
"""

import json
import resource
import signal
import sys
from collections.abc import Callable
from datetime import datetime
from typing import Any

# What compiling and rendering raise by themselves; everything else is a template that got out of the sandbox.
HARMLESS_EVENTS = frozenset(
    {
        *("compile", "exec", "builtins.id", "object.__getattr__"),
        *("sys._getframe", "code.__new__", "sys.unraisablehook"),
    }
)


class Refusal(Exception):
    """`raise_exception` was called: the template doesn't accept these messages."""


def build_environment() -> Any:
    """A sandbox with the names that Hugging Face gives to chat templates, and nothing else."""
    from jinja2 import nodes
    from jinja2.ext import Extension, loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class GenerationBlock(Extension):
        """`{% generation %}` marks text for training; for rendering it is its body."""

        tags = {"generation"}  # noqa: RUF012  Jinja's own class attribute

        def parse(self, parser: Any) -> Any:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return nodes.Scope(body, lineno=line)

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

    def raise_exception(message: object) -> None:
        raise Refusal(str(message))

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[GenerationBlock, loopcontrols]
    )
    environment.filters["tojson"] = tojson
    environment.globals["raise_exception"] = raise_exception
    return environment


def import_what_rendering_imports_late() -> None:
    """After `confine` nothing can be imported, and Jinja leaves these until they are first used."""
    import codecs
    import pprint
    import textwrap
    import time

    import jinja2.debug

    codecs.lookup("unicode-escape")
    assert all((pprint, textwrap, time, jinja2.debug))


def confine(memory_bytes: int) -> None:
    """Give up, for good, everything that rendering does not need."""
    resource.setrlimit(resource.RLIMIT_AS, (memory_bytes, memory_bytes))
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, 3))
    resource.setrlimit(resource.RLIMIT_NPROC, (0, 0))
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))

    def deny(event: str, arguments: tuple[Any, ...]) -> None:
        if event not in HARMLESS_EVENTS:
            raise PermissionError(f"the template tried {event}")

    sys.addaudithook(deny)


def render(template: Any, request: dict[str, Any]) -> dict[str, Any]:
    """Render once; output that exceeds `max_chars` is not even joined."""
    now = datetime.fromisoformat(request["now"])
    pieces: list[str] = []
    room = request["max_chars"]
    for piece in template.generate(request["variables"], strftime_now=now.strftime):
        room -= len(piece)
        if room < 0:
            return {"error": f"it wrote more than {request['max_chars']} characters"}
        pieces.append(piece)
    return {"text": "".join(pieces)}


def attempt(work: Callable[[dict[str, Any]], dict[str, Any]], line: bytes, cpu_s: float) -> dict[str, Any]:
    """Do `work` within `cpu_s` seconds of processor time; by default SIGPROF ends a process."""
    signal.setitimer(signal.ITIMER_PROF, cpu_s)
    try:
        return work(json.loads(line))
    except Refusal as refusal:
        return {"error": f"it refused: {refusal}"[:400]}
    except MemoryError:
        return {"error": "it needed more memory than it may have", "fatal": True}
    except RecursionError:
        return {"error": "it is nested too deeply"}
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}"[:400]}
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)


def main() -> None:
    settings = json.loads(sys.stdin.buffer.readline())
    sys.path += settings["paths"]
    environment = build_environment()
    import_what_rendering_imports_late()
    confine(settings["memory_bytes"])
    templates: list[Any] = []

    def compile_source(request: dict[str, Any]) -> dict[str, Any]:
        templates.append(environment.from_string(request["source"]))
        return {"text": ""}

    def render_template(request: dict[str, Any]) -> dict[str, Any]:
        return render(templates[0], request)

    for line in sys.stdin.buffer:
        answer = attempt(render_template if templates else compile_source, line, settings["cpu_s"])
        sys.stdout.buffer.write(json.dumps(answer).encode() + b"\n")
        sys.stdout.buffer.flush()
        if "fatal" in answer:
            return


if __name__ == "__main__":
    main()
