"""The process that runs a model file's chat template: a script, started by `template_process.py`.

A template is a program by the author of the file. It runs here, where there is nothing to take: no model, no
request but its own, no environment. Four walls stand one behind the other. In Jinja's immutable sandbox no
attribute leads out of the data. An audit hook fails whatever got out at its first file, socket, import or
command. There is no file descriptor beyond the three pipes. Beyond limits on memory and on processor time per
rendering the kernel ends the process.

Protocol: one JSON object per line on standard input, one back on standard output. The first, which has no
answer, is `{"paths", "memory_bytes", "cpu_s"}`, the second `{"source"}`, all others `{"variables", "own",
"roles", "now", "max_chars"}`. `own` are variables whose text counts as the template's, `roles` those of
messages that do. Answers are `{"text", "runs"}` or `{"error"}`; after one with `fatal` the process ends.
`runs` are lengths: of text that the caller gave, that the template wrote, that the caller gave, and so on.
"""

import importlib
import json
import resource
import signal
import sys
from collections.abc import Callable
from datetime import datetime
from typing import Any

# Exceptions of compiling and rendering; any other one means that a template has left the sandbox.
HARMLESS_EVENTS = frozenset(
    {
        *("compile", "exec", "builtins.id", "object.__getattr__"),
        *("sys._getframe", "code.__new__", "sys.unraisablehook"),
    }
)


def import_what_rendering_imports_late() -> None:
    """After `confine` nothing can be imported, and Jinja leaves these until they are first used."""
    import codecs
    import html
    import pprint
    import random
    import textwrap
    import time

    import jinja2.constants
    import jinja2.debug

    codecs.lookup("unicode-escape")
    assert all((html, pprint, random, textwrap, time, jinja2.constants, jinja2.debug))


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


def render(tracing: Any, template: Any, request: dict[str, Any]) -> dict[str, Any]:
    """Render once; output that exceeds `max_chars` is not even joined."""
    variables = request["variables"]
    for message in variables["messages"] if request["roles"] else ():
        if message["role"] in request["roles"]:
            message["role"] = tracing.written(message["role"])
    own = {
        name: tracing.written(value) if isinstance(value, str) else value
        for name, value in request["own"].items()
    }
    now = datetime.fromisoformat(request["now"])
    pieces: list[str] = []
    room = request["max_chars"]
    for piece in template.generate({**variables, **own}, strftime_now=now.strftime):
        room -= len(piece)
        if room < 0:
            return {"error": f"it wrote more than {request['max_chars']} characters"}
        pieces.append(piece)
    text = tracing.joined(pieces)
    return {"text": text, "runs": tracing.runs(text)}


def attempt(work: Callable[[dict[str, Any]], dict[str, Any]], line: bytes, cpu_s: float) -> dict[str, Any]:
    """Do `work` within `cpu_s` seconds of processor time; by default SIGPROF ends a process."""
    signal.setitimer(signal.ITIMER_PROF, cpu_s)
    try:
        return work(json.loads(line))
    except MemoryError:
        return {"error": "it needed more memory than it may have", "fatal": True}
    except RecursionError:
        return {"error": "it is nested too deeply"}
    except Exception as error:
        refused = type(error).__name__ == "Refusal"
        return {"error": f"{'it refused' if refused else type(error).__name__}: {error}"[:400]}
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)


def main() -> None:
    settings = json.loads(sys.stdin.buffer.readline())
    sys.path += settings["paths"]
    tracing = importlib.import_module("template_environment")
    environment = tracing.TracingEnvironment()
    import_what_rendering_imports_late()
    confine(settings["memory_bytes"])
    templates: list[Any] = []

    def compile_source(request: dict[str, Any]) -> dict[str, Any]:
        templates.append(environment.from_string(request["source"]))
        return {"text": ""}

    def render_template(request: dict[str, Any]) -> dict[str, Any]:
        return render(tracing, templates[0], request)

    for line in sys.stdin.buffer:
        answer = attempt(render_template if templates else compile_source, line, settings["cpu_s"])
        sys.stdout.buffer.write(json.dumps(answer).encode() + b"\n")
        sys.stdout.buffer.flush()
        if "fatal" in answer:
            return


if __name__ == "__main__":
    main()
