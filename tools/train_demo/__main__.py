"""The command line: `python -m tools.train_demo {prepare,train,convert,evaluate,build}`."""

import argparse
import dataclasses
from pathlib import Path
from typing import Any

WORK = Path("build/train_demo")
ASSET = Path("src/coldstream/assets/demo.gguf")
RESULTS = Path("docs/results/demo_model.json")


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tools.train_demo", description=__doc__)
    parser.add_argument("step", choices=("prepare", "train", "convert", "evaluate", "build"))
    parser.add_argument("--work", type=Path, default=WORK, help="folder for tokens, tokenizer and weights")
    parser.add_argument("--out", type=Path, default=ASSET, help="the GGUF file")
    parser.add_argument("--results", type=Path, default=RESULTS, help="the figures")
    parser.add_argument(
        "--set", action="append", default=[], metavar="NAME=VALUE", help="a TrainConfig field"
    )
    return parser.parse_args()


def _training_settings(pairs: list[str]) -> dict[str, Any]:
    from tools.train_demo.train import TrainConfig

    kinds = {field.name: type(field.default) for field in dataclasses.fields(TrainConfig)}
    split = [pair.split("=", 1) for pair in pairs]
    return {name: kinds[name](value) for name, value in split}


def main() -> None:
    """Run the step that was asked for, or all of them for `build`.

    Modules are imported per step: the machine that trains need not have what conversion and evaluation need.
    """
    arguments = _parse()
    steps = ("prepare", "train", "convert", "evaluate") if arguments.step == "build" else (arguments.step,)
    work: Path = arguments.work
    for step in steps:
        if step == "prepare":
            from tools.train_demo.prepare import prepare

            prepare(work)
        elif step == "train":
            from tools.train_demo.model import DemoConfig
            from tools.train_demo.train import TrainConfig, train

            config = TrainConfig(**_training_settings(arguments.set))
            train(work / "tokens.npz", work / "weights", DemoConfig(), config)
        elif step == "convert":
            from tools.train_demo.convert import convert

            convert(work, arguments.out)
        else:
            from tools.train_demo.evaluate import evaluate

            evaluate(work, arguments.out, arguments.results)


if __name__ == "__main__":
    main()
