"""Options of llama.cpp and vLLM that have no counterpart of the same name, and what to do instead of each."""

from collections.abc import Callable
from typing import Any, Final, TypeVar

import click

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
    ("--served-model-name",): "use --alias NAME with `coldstream serve`",
    ("--tensor-parallel-size", "-tp"): "one GPU computes, with the CPU beside it; leave it out",
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
