"""Options that several verbs share. Parameter names are those of `EngineConfig` and `SamplingParams`.

Every option defaults to None, which means: leave it to the configuration. Names follow llama.cpp where the
idea is the same. Options of llama.cpp and vLLM without a counterpart of the same name are refused, each with
what to do instead.
"""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, Final, TypeVar

import click
from click import option
from click.shell_completion import CompletionItem

from coldstream.cli.main import Session
from coldstream.decoding import SamplingParams
from coldstream.errors import ConfigError
from coldstream.kernels.attention.cache_layout import INTEGER_CACHE_TYPES
from coldstream.planning import config as settings
from coldstream.planning.config import DEVICES, SPEC_TYPES, TIERS, EngineConfig

Command = TypeVar("Command", bound=Callable[..., Any])

_MODEL = "the model is the first argument, without an option"
_LAYERS = (
    "use --vram SIZE (8G, for example) to say how much of the GPU's memory may be used, and leave it out for "
    "all that is free; --device cpu uses no GPU"
)
_EXPERTS = (
    "use --vram SIZE: the GPU holds the experts that fit into SIZE, the CPU computes the others; "
    "`coldstream plan` shows which SIZE holds how many"
)
_GRID = "prompts are computed on a fixed grid, so that results don't depend on it; leave it out"
_CONTEXT = "use --ctx-size N, or leave it out for as many tokens as the memory allows"
_IN_REQUESTS = (
    "each request to `coldstream serve` takes one (`coldstream help server`), and so does SamplingParams of "
    "the Python interface"
)
_MAPPED = "experts are read where the file is mapped, other weights are copied; --ram SIZE bounds the memory"

ANSWERS: Final = {
    ("-m", "--model"): _MODEL,
    ("-hf", "--hf-repo"): "the model is the first argument: org/repo or org/repo:QUANT",
    ("-ngl", "--gpu-layers", "--n-gpu-layers"): _LAYERS,
    ("-cmoe", "--cpu-moe"): _EXPERTS,
    ("-ncmoe", "--n-cpu-moe"): _EXPERTS,
    ("-ot", "--override-tensor"): _EXPERTS,
    ("-b", "--batch-size"): _GRID,
    ("-ub", "--ubatch-size"): _GRID,
    ("-fa", "--flash-attn"): "attention never stores its scores; leave it out",
    ("--mlock",): _MAPPED,
    ("--no-mmap",): _MAPPED,
    ("--jinja",): "chat templates are always Jinja's; leave it out",
    ("-cnv", "--conversation"): "a model with a chat template chats; leave it out",
    ("-no-cnv", "--no-conversation"): "use --raw",
    ("--max-model-len",): _CONTEXT,
    ("--gpu-memory-utilization",): _LAYERS,
    ("--cpu-offload-gb",): "use --ram SIZE (16G, for example), or leave it out for most of what is free",
    ("--kv-cache-dtype",): "use --cache-type-k, which sets the values' type, too",
    ("--max-num-seqs",): "use --parallel N with `coldstream serve`",
    ("-np",): "use --parallel N with `coldstream serve`",
    ("--grammar", "--grammar-file"): _IN_REQUESTS,
    ("-j", "-jf", "--json-schema", "--json-schema-file"): _IN_REQUESTS,
    ("--sleep-idle-seconds",): "use --idle-unload MINUTES with `coldstream serve`",
    ("--served-model-name",): "use --alias NAME with `coldstream serve`",
    ("--tensor-parallel-size", "-tp"): settings.ONE_GPU,
    ("--devices", "-ts", "--tensor-split", "-mg", "--main-gpu", "-sm", "--split-mode"): settings.ONE_GPU,
    ("--speculative-config",): "use --spec-type, and --model-draft for a drafter's file",
}


def foreign_options(command: Command) -> Command:
    """Hidden options that refuse with an answer, whether or not a value is given with them."""
    for number, (names, answer) in enumerate(ANSWERS.items()):
        command = click.option(
            *names,
            f"foreign_{number}",
            hidden=True,
            expose_value=False,
            is_flag=False,
            flag_value="given",
            callback=_refuse(names[0], answer),
        )(command)
    return command


def _refuse(name: str, answer: str) -> Callable[[click.Context, click.Parameter, Any], None]:
    def callback(ctx: click.Context, param: click.Parameter, value: Any) -> None:
        if value is not None:
            raise click.UsageError(f"{name}: {answer}", ctx)

    return callback


MAX_COUNTS = 32

_CACHE_HELP = "Type of cached keys and values; either option sets both [default: i16]."


def parse_size(text: str) -> int:
    """A whole number with an optional binary unit: 8192, 8k, 10G, 1.5GiB. Raises click.BadParameter."""
    try:
        return settings.parse_size(text)
    except ValueError as error:
        raise click.BadParameter(str(error)) from error


def parse_number_or_auto(text: str) -> int | str:
    """A number, or `auto`. Raises click.BadParameter."""
    if text == "auto":
        return text
    if not (text.isascii() and text.isdecimal()):
        raise click.BadParameter(f"{text!r} is neither a number nor auto")
    return int(text)


def parse_num_tokens(text: str) -> int:
    """A number of tokens to generate, −1 for all that the context has room for. Raises click.BadParameter."""
    if not re.fullmatch(r"-1|0*[1-9]\d{0,8}", text, re.ASCII):
        raise click.BadParameter(
            f"{text!r} is not a number of tokens: give one from 1 to 999999999, or -1 for all that the "
            "context has room for"
        )
    return int(text)


def parse_layer_weights(text: str) -> tuple[tuple[int, float], ...]:
    """Layers or ranges of layers with a weight each: 0-5=2,37-39=1.5. Raises click.BadParameter.

    Gives (layer, weight) for each layer that is named.
    """
    weights = []
    for part in text.split(","):
        found = re.fullmatch(r"(\d{1,4})(?:-(\d{1,4}))?=(\d{1,6}(?:\.\d{1,6})?)", part, re.ASCII)
        first, last = (int(found[1]), int(found[2] or found[1])) if found else (1, 0)
        weight = float(found[3]) if found else 0.0
        if first > last or weight == 0:
            raise click.BadParameter(
                f"{part!r} is not LAYER=WEIGHT or FIRST-LAST=WEIGHT with a weight above 0; separate several "
                "by commas, for example 0-5=2,37-39=2"
            )
        weights += [(layer, weight) for layer in range(first, last + 1)]
    return tuple(weights)


def parse_counts(text: str) -> tuple[int, ...]:
    """Numbers separated by commas, for example 128,512. Raises click.BadParameter."""
    if not re.fullmatch(rf"\d{{1,9}}(,\d{{1,9}}){{0,{MAX_COUNTS - 1}}}", text, re.ASCII):
        raise click.BadParameter(f"{text!r} is not a list of at most {MAX_COUNTS} numbers such as 128,512")
    return tuple(int(number) for number in text.split(","))


def parse_json_object(text: str) -> dict[str, Any]:
    """A JSON object. Raises click.BadParameter."""
    try:
        parsed = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise click.BadParameter(f"not JSON: {error}") from error
    if not isinstance(parsed, dict):
        raise click.BadParameter('not a JSON object such as {"enable_thinking": false}')
    return parsed


def common_options(command: Command) -> Command:
    """--verbose, and answers to other programs' options that have no counterpart."""
    show = option(
        "--verbose",
        is_flag=True,
        expose_value=False,
        callback=_set_verbose,
        help="Show the settings, the stages of the start, and tracebacks of errors.",
    )
    return show(foreign_options(command))


def chat_template_options(command: Command) -> Command:
    """The chat template, and what it is given."""
    return _apply(
        command,
        option(
            "--chat-template",
            type=click.Path(path_type=Path),
            metavar="FILE",
            help="Use the Jinja template in FILE instead of the model's own.",
        ),
        option(
            "--chat-template-kwargs",
            type=parse_json_object,
            metavar="JSON",
            help="Variables for the chat template, as JSON.",
        ),
    )


def _one_of(values: Sequence[str]) -> Callable[[click.Context, click.Parameter, str], list[CompletionItem]]:
    """Completes an option whose values the configuration checks."""
    return lambda ctx, param, incomplete: [CompletionItem(v) for v in values if v.startswith(incomplete)]


_CACHE_TYPES: Final = "|".join(INTEGER_CACHE_TYPES)

ENGINE_OPTIONS: Final = {
    "ctx-size": option(
        "--ctx-size",
        "-c",
        type=parse_size,
        metavar="SIZE",
        help="Tokens of context [default: the model's, or as many as memory allows].",
    ),
    "vram": option("--vram", metavar="SIZE|auto", help="GPU memory to use, e.g. 6G [default: what is free]."),
    "plan": option(
        "--plan", metavar="FILE", help="Place weights as FILE says, which `coldstream plan --out` wrote."
    ),
    "ram": option(
        "--ram",
        metavar="SIZE|auto",
        help="RAM to use, also beside a GPU, e.g. 8G; experts beyond it come from the disk [default: "
        "what is free].",
    ),
    "prefetch": option(
        "--prefetch",
        type=parse_number_or_auto,
        metavar="N|auto",
        help="How many experts of each layer the GPU fetches before they are chosen, at most [default: "
        "auto, where it should pay].",
    ),
    "threads": option(
        "--threads",
        "-t",
        type=parse_number_or_auto,
        metavar="N|auto",
        help="CPU threads [default: auto, one a core].",
    ),
    "device": option(
        "--device",
        metavar="NAME",
        shell_complete=_one_of(DEVICES),
        help="Where to compute: auto, cpu or cuda [default: auto].",
    ),
    "cache-type-k": option("--cache-type-k", "-ctk", metavar=_CACHE_TYPES, help=_CACHE_HELP),
    "cache-type-v": option("--cache-type-v", "-ctv", metavar=_CACHE_TYPES, help=_CACHE_HELP),
    "attention-window": option(
        "--attention-window",
        type=int,
        metavar="N",
        help="Attend to the last N positions alone, which changes the answers [default: all].",
    ),
    "tier": option(
        "--tier",
        type=click.Choice(TIERS),
        help="Instruction set of CPU kernels [default: auto, the best there is].",
    ),
    "spec-type": option(
        "--spec-type",
        metavar="|".join(SPEC_TYPES),
        shell_complete=_one_of(SPEC_TYPES),
        help="What drafts tokens for the model to verify, which changes none [default: auto, the "
        "drafter of --model-draft, the model's own block where a device holds all of the "
        "model and it may pay, or none].",
    ),
    "model-draft": option(
        "--model-draft",
        metavar="PATH",
        shell_complete=lambda *_: [CompletionItem("", type="file")],
        help="A drafter for the model: a GGUF file with its own block for multi-token prediction alone, or a "
        "DFlash drafter, a GGUF file or a folder with safetensors and config.json.",
    ),
    "tree-budget": option(
        "--tree-budget",
        type=parse_number_or_auto,
        metavar="N|auto",
        help="Tokens of a draft [default: auto, as many as pay].",
    ),
    "offline": option(
        "--offline", is_flag=True, default=None, help="Never ask the hub; use what is on this machine."
    ),
}


def engine_options(command: Command) -> Command:
    """The fields of `EngineConfig` other than the model."""
    return _apply(command, *ENGINE_OPTIONS.values())


def some_engine_options(*names: str) -> Callable[[Command], Command]:
    """Those of `ENGINE_OPTIONS` with these names alone."""
    return lambda command: _apply(command, *(ENGINE_OPTIONS[name] for name in names))


def sampling_options(command: Command) -> Command:
    """The fields of `SamplingParams`."""
    return _apply(
        command,
        option(
            "--n-predict",
            "--max-tokens",
            "-n",
            "max_tokens",
            type=parse_num_tokens,
            metavar="N",
            help="Tokens to generate at most; -1: until the context is full [default: -1].",
        ),
        option(
            "--temp",
            "temperature",
            type=float,
            help="Temperature: higher is more varied; 0 always takes the likeliest token.",
        ),
        option("--top-k", type=int, help="Keep the K likeliest tokens; 0: all."),
        option("--top-p", type=float, help="Keep the likeliest tokens that make up this probability."),
        option(
            "--min-p", type=float, help="Drop tokens below this share of the likeliest one's probability."
        ),
        option(
            "--repeat-penalty",
            "repetition_penalty",
            type=float,
            help="Above 1: make tokens that occurred less likely.",
        ),
        option("--repeat-last-n", type=int, help="How many tokens penalties look back on; -1: all."),
        option(
            "--presence-penalty", type=float, help="Subtract this from the logits of tokens that occurred."
        ),
        option("--frequency-penalty", type=float, help="Subtract this for each time that a token occurred."),
        option("--seed", "-s", type=int, help="The same seed gives the same tokens [default: a fresh one]."),
        option(
            "--stop", multiple=True, metavar="TEXT", help="End before this text; may be given several times."
        ),
        option("--ignore-eos", is_flag=True, default=None, help="Go on after end tokens."),
    )


def engine_config(model: str, options: Mapping[str, Any]) -> EngineConfig:
    """The configuration that the given options describe; others keep their defaults."""
    names = {field.name for field in fields(EngineConfig)} - {"model", "seed"}
    given = {name: options[name] for name in names if options.get(name) is not None}
    return EngineConfig.from_options({"model": model, **given})


def sampling_params(options: Mapping[str, Any], defaults: SamplingParams) -> SamplingParams:
    """`defaults` with the given options. As in llama.cpp, −1 lifts `max_tokens` and `repeat_last_n`."""
    names = {field.name for field in fields(SamplingParams)}
    given = {name: value for name, value in options.items() if name in names and value not in (None, ())}
    unlimited = {name: None for name in ("max_tokens", "repeat_last_n") if given.get(name) == -1}
    return replace(defaults, **{**given, **unlimited})


def check_writable(path: Path | None, option: str) -> None:
    """ConfigError unless a file can lie at `path`."""
    if path is not None and (path.is_dir() or not path.parent.is_dir()):
        raise ConfigError(f"{path} cannot be written: give a file in a folder that exists with {option}")


def _apply(command: Command, *decorators: Callable[[Command], Command]) -> Command:
    for decorate in reversed(decorators):
        command = decorate(command)
    return command


def _set_verbose(ctx: click.Context, param: click.Parameter, value: bool) -> None:
    if value:
        ctx.ensure_object(Session).verbose = True
