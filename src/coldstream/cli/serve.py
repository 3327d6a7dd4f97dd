"""`coldstream serve`: a model behind OpenAI's and Anthropic's interfaces."""

import asyncio
import logging
import math
import os
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click

from coldstream.cli.main import Session
from coldstream.cli.model_argument import complete_model, model_or_bundled
from coldstream.cli.options import (
    chat_template_options,
    common_options,
    engine_config,
    engine_options,
)
from coldstream.cli.terminal import ProgressLine, note
from coldstream.engine.limits import MAX_RUNNING, EngineLimits
from coldstream.errors import ConfigError
from coldstream.planning.config import parse_size

if TYPE_CHECKING:
    from coldstream.server.http.settings import ServerSettings
    from coldstream.server.log import LogFormat
    from coldstream.server.messages import PromptCache

MIN_IDLE_MINUTES: Final = 0.001
MAX_IDLE_MINUTES: Final = 525_600  # of a year
_STDERR: Final = 2
_SELDOM: Final = frozenset(
    ("tier", "attention_window", "prefetch", "tree_budget", "cache_type_v", "chat_template_kwargs")
)


class _Serve(click.Command):
    """Shows the options of `engine_options` but for that of tests and those that few want, so that what
    matters is found.
    """

    def get_params(self, ctx: click.Context) -> list[click.Parameter]:
        params = super().get_params(ctx)
        for param in params:
            if isinstance(param, click.Option) and param.name in _SELDOM:
                param.hidden = True
        return params


def parse_parallel(text: str) -> int:
    """How many answers run side by side. Raises click.BadParameter."""
    if not (text.isascii() and text.isdecimal() and 1 <= int(text[:9]) <= MAX_RUNNING):
        raise click.BadParameter(f"{text!r} is not a number from 1 to {MAX_RUNNING}")
    return int(text)


def parse_minutes(text: str) -> float:
    """Minutes without a request until the model is unloaded; 0: never. Raises click.BadParameter."""
    try:
        minutes = float(text)
    except ValueError:
        minutes = math.nan
    if minutes != 0 and not MIN_IDLE_MINUTES <= minutes <= MAX_IDLE_MINUTES:
        raise click.BadParameter(
            f"{text!r} is neither 0, for never, nor a number from {MIN_IDLE_MINUTES} to {MAX_IDLE_MINUTES}"
        )
    return minutes


@click.command("serve", cls=_Serve, short_help="Serve a model over HTTP.")
@click.argument("model", required=False, shell_complete=complete_model)
@click.option("--host", default="127.0.0.1", help="Address to listen on [default: 127.0.0.1, this machine].")
@click.option("--port", type=int, default=8080, help="Port to listen on; 0: any [default: 8080].")
@click.option(
    "--api-key",
    "api_keys",
    multiple=True,
    metavar="KEY",
    help="Ask clients for this key; may be given several times. Others on this machine can see it here.",
)
@click.option(
    "--api-key-file",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Ask clients for one of the keys in FILE, one a line.",
)
@click.option(
    "--allow",
    "allowed",
    multiple=True,
    metavar="NAME",
    help="A host name or, as https://..., an origin of web pages by which the server may be used too; may "
    "be given several times.",
)
@click.option("--alias", metavar="NAME", help="Name of the model for clients [default: the file's].")
@click.option(
    "--parallel",
    type=parse_parallel,
    metavar="N",
    help=f"Answers that are computed side by side, at most, and whole contexts that there is memory for "
    f"[default: {MAX_RUNNING}, and as many as an eighth of the memory holds].",
)
@click.option(
    "--prompt-cache",
    "kept",
    multiple=True,
    metavar="SIZE|FOLDER",
    help="Keep prefixes of prompts that have no room in the model's memory: in RAM up to SIZE, which counts "
    "towards --ram, or in FOLDER, from where they are used after a restart too; may be given once for each.",
)
@click.option(
    "--drop-volatile",
    is_flag=True,
    help="Leave lines out of system prompts that coding agents change with each request or day, so that kept "
    "prefixes still fit: docs/server.md lists them. The model does not see them.",
)
@click.option(
    "--restart-on-change",
    is_flag=True,
    help="When the model's file has changed under the server, load it anew and serve what it is then. "
    "Without this, all requests are refused from then on.",
)
@click.option(
    "--idle-unload",
    "idle_minutes",
    type=parse_minutes,
    metavar="MINUTES",
    help="Unload the model after so many minutes without a request, such as 0.5 or 10, and load it again for "
    "the next one. Its memory is free meanwhile; prefixes of prompts are lost, but those in a FOLDER of "
    "--prompt-cache [default: 0, never].",
)
@click.option(
    "--log-format",
    type=click.Choice(("text", "json")),
    default="text",
    help="What a line of the log is [default: text].",
)
@chat_template_options
@engine_options
@common_options
@click.pass_obj
def command(
    session: Session,
    /,
    model: str | None,
    host: str,
    port: int,
    api_keys: tuple[str, ...],
    api_key_file: Path | None,
    allowed: tuple[str, ...],
    alias: str | None,
    parallel: int | None,
    kept: tuple[str, ...],
    drop_volatile: bool,
    restart_on_change: bool,
    idle_minutes: float | None,
    log_format: "LogFormat",
    chat_template_kwargs: Mapping[str, Any] | None,
    **options: Any,
) -> int:
    """Serve MODEL, the bundled demo model by default, over OpenAI's and Anthropic's interfaces.

    \b
    coldstream serve model.gguf                       on http://127.0.0.1:8080/v1
    coldstream serve org/repo:Q4_K_M --vram 8G
    coldstream serve model.gguf --host 0.0.0.0 --api-key-file keys

    Ctrl-C or SIGTERM lets answers under way finish; the second one ends them.
    """
    from coldstream.server.http.settings import ServerSettings, check_exposure, read_api_keys

    settings = ServerSettings(
        host=host,
        port=port,
        api_keys=(*api_keys, *(read_api_keys(api_key_file) if api_key_file else ())),
        allowed_hosts=tuple(name for name in allowed if "://" not in name),
        allowed_origins=tuple(name for name in allowed if "://" in name),
        drop_volatile=drop_volatile,
        chat_template_kwargs=chat_template_kwargs or {},
        restart_on_change=restart_on_change,
    )
    check_exposure(settings)
    how = _How(alias, parallel, kept, idle_minutes or 0.0, log_format)
    return _serve(session, settings, model, how, options)


@dataclass(frozen=True)
class _How:
    """Options of this command that are neither the engine's nor of HTTP."""

    alias: str | None
    parallel: int | None
    kept: Sequence[str]
    idle_minutes: float
    log_format: "LogFormat"


def _serve(
    session: Session,
    settings: "ServerSettings",
    model: str | None,
    how: _How,
    options: Mapping[str, Any],
) -> int:
    from coldstream.gguf.hub import check_name
    from coldstream.server.log import Log, LogHandler
    from coldstream.server.model_name import name_of
    from coldstream.server.serving import Service, serve
    from coldstream.server.web_server import bind

    path = model_or_bundled(model)
    service = Service(
        name=how.alias or name_of(path),
        config=engine_config(path, {**options, **_contexts(how.parallel, options)}),
        limits=limits_of(how.parallel, len(settings.api_keys)),
        settings=settings,
        cache=prompt_cache(how.kept),
        idle_unload_s=60 * how.idle_minutes or None,
    )
    if session.verbose:
        note("\n".join(f"{name}: {value}" for name, value in asdict(service.config).items()))
    interrupts = session.interrupts
    check_name(path)  # before the log says that it is loaded
    with bind(settings.host, settings.port) as listener, Log(_STDERR, how.log_format) as log:
        logging.basicConfig(handlers=[LogHandler(log)], force=True)
        with ProgressLine() as line, interrupts.lent() if interrupts else nullcontext():
            stopped_by = asyncio.run(serve(service, listener, log, line.update))
        log.write("info", "stopped", "stopped")
    return 0 if stopped_by is None else 128 + stopped_by


def prompt_cache(places: Sequence[str]) -> "PromptCache":
    """Where prefixes are kept, of sizes of RAM and folders. Raises ConfigError for two of a kind."""
    from coldstream.server.messages import PromptCache

    sizes, folders = [], []
    for place in places:
        try:
            sizes.append(parse_size(place))
        except ValueError:
            folders.append(place)
    if len(sizes) > 1 or len(folders) > 1:
        raise ConfigError("--prompt-cache: give one size of RAM and one folder at most")
    return PromptCache(sizes[0] if sizes else 0, os.path.abspath(folders[0]) if folders else None)


def limits_of(parallel: int | None, num_keys: int) -> EngineLimits:
    """Those of the engine. Of several API keys none may fill more than half of the queue."""
    limits = EngineLimits() if parallel is None else EngineLimits(max_running=parallel)
    return limits if num_keys < 2 else replace(limits, max_waiting_of_owner=limits.max_waiting // 2)


def _contexts(parallel: int | None, options: Mapping[str, Any]) -> dict[str, Any]:
    """The setting of whole contexts, which a plan has of its own."""
    if options.get("plan") is not None:
        return {}
    return {"parallel": "auto" if parallel is None else parallel}
