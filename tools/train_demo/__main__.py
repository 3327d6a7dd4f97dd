"""The command line: `python -m tools.train_demo STEP`.

`prepare`, `train`, `convert` and `evaluate` make the model, `build` does all four; `drafter`,
`drafter-convert` and `drafter-evaluate` make its drafter.
"""

import argparse
import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

WORK = Path("build/train_demo")
ASSET = Path("src/coldstream/assets/demo.gguf")
RESULTS = Path("docs/results/demo_model.json")
DRAFTER_ASSET = Path("src/coldstream/assets/demo-drafter.gguf")
DRAFTER_RESULTS = Path("docs/results/demo_drafter.json")


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tools.train_demo", description=__doc__)
    parser.add_argument("step", choices=(*STEPS, "build"))
    parser.add_argument("--work", type=Path, default=WORK, help="folder for tokens, tokenizer and weights")
    parser.add_argument("--out", type=Path, help="what is written: a GGUF file, or the drafter's folder")
    parser.add_argument("--results", type=Path, help="the figures")
    parser.add_argument("--model", type=Path, default=ASSET, help="the model whose drafter is made")
    parser.add_argument("--minutes", type=float, default=9.0, help="of a call of `drafter`, all included")
    parser.add_argument("--files", type=int, help="held-out files that `drafter-evaluate` continues; all")
    parser.add_argument(
        "--set", action="append", default=[], metavar="NAME=VALUE", help="a field of the step's configuration"
    )
    return parser.parse_args()


def with_settings(config: Any, pairs: list[str]) -> Any:
    """A frozen dataclass with fields replaced by NAME=VALUE; `NAME` may be that of a field of a field."""
    for pair in pairs:
        name, _, value = pair.partition("=")
        config = _with_setting(config, name, value)
    return config


def _with_setting(config: Any, name: str, value: str) -> Any:
    outer, dot, inner = name.partition(".")
    if outer not in {field.name for field in dataclasses.fields(config)}:
        raise SystemExit(f"{type(config).__name__} has no field {outer}")
    old = getattr(config, outer)
    if dot:
        return dataclasses.replace(config, **{outer: _with_setting(old, inner, value)})
    return dataclasses.replace(config, **{outer: _like(old, value)})


def _like(old: Any, value: str) -> Any:
    """`value` as the kind of setting that `old` is."""
    if isinstance(old, bool):
        return {"true": True, "false": False}[value.lower()]
    if isinstance(old, tuple):
        return tuple(int(each) for each in value.split(","))
    return type(old)(value)


# Modules are imported per step: the machine that trains need not have what conversion and evaluation need.
def _prepare(arguments: argparse.Namespace) -> None:
    from tools.train_demo.prepare import prepare

    prepare(arguments.work)


def _train(arguments: argparse.Namespace) -> None:
    from tools.train_demo.model import DemoConfig
    from tools.train_demo.train import TrainConfig, train

    work = arguments.work
    config = with_settings(TrainConfig(), arguments.set)
    train(work / "tokens.npz", work / "weights", DemoConfig(), config)


def _convert(arguments: argparse.Namespace) -> None:
    from tools.train_demo.convert import convert

    convert(arguments.work, arguments.out or ASSET)


def _evaluate(arguments: argparse.Namespace) -> None:
    from tools.train_demo.evaluate import evaluate

    evaluate(arguments.work, arguments.out or ASSET, arguments.results or RESULTS)


def _drafter(arguments: argparse.Namespace) -> None:
    from tools.train_demo.drafter_run import DrafterRun, train_drafter

    run = with_settings(DrafterRun(minutes=arguments.minutes), arguments.set)
    folder = arguments.out or arguments.work / "drafter"
    train_drafter(arguments.work / "tokens.npz", arguments.model, folder, run)


def _drafter_convert(arguments: argparse.Namespace) -> None:
    from tools.train_demo.drafter_convert import convert_drafter

    convert_drafter(arguments.work / "drafter", arguments.out or DRAFTER_ASSET)


def _drafter_evaluate(arguments: argparse.Namespace) -> None:
    from tools.train_demo.drafter_evaluate import NUM_FILES, evaluate_drafter

    asset, results = arguments.out or DRAFTER_ASSET, arguments.results or DRAFTER_RESULTS
    evaluate_drafter(arguments.model, asset, results, num_files=arguments.files or NUM_FILES)


STEPS: dict[str, Callable[[argparse.Namespace], None]] = {
    "prepare": _prepare,
    "train": _train,
    "convert": _convert,
    "evaluate": _evaluate,
    "drafter": _drafter,
    "drafter-convert": _drafter_convert,
    "drafter-evaluate": _drafter_evaluate,
}


def main() -> None:
    """Run the step that was asked for, or those of the model for `build`."""
    arguments = _parse()
    steps = ("prepare", "train", "convert", "evaluate") if arguments.step == "build" else (arguments.step,)
    for step in steps:
        STEPS[step](arguments)


if __name__ == "__main__":
    main()
