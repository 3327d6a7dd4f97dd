"""Sets each key of metadata that is known to an unusual value, and compares logits with llama.cpp's.

    python -m bench.peers.key_sweep --out docs/results/key_sweep.json

The keys are those of the `gguf` package and those that llama.cpp's library names, in small models of random
float32 weights, with float32 keys and values in both programs. A key that changes llama.cpp's logits must
change ours in the same way, or the file must be refused with a message that names the key. llama.cpp runs in
a process of its own, since some values end it.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[2] / "tests"))

import gguf
from bench.results import write_result
from bench.runners import open_cpu_runner
from builders import Dims, make_model, write_model
from coldstream.errors import ColdstreamError
from tools import llama_cpp

ARCHITECTURES = ("qwen3moe", "qwen35moe")
NUM_TOKENS = 40
# Logits have a deviation of 4. The two programs differ by some 1e-5, and what a key changes is far more.
TOLERANCE = 2e-4
DIMS = Dims(
    layers=2, interval=2, hidden=64, heads=2, kv_heads=1, head_dim=64, rope_dims=32, key_heads=1,
    value_heads=2, state=32, expert_ffn=32, shared_ffn=32, experts=4, experts_used=2, context=512,
)  # fmt: skip
# An original context that is short enough for all three kinds of frequencies of YaRN.
YARN = {
    "rope.scaling.type": "yarn",
    "rope.scaling.factor": 4.0,
    "rope.scaling.original_context_length": 16,
}
# One of each type, for keys whose type is unknown: programs that read a key refuse the others.
VALUES: tuple[Any, ...] = (3, 0.37, True, "other")
MORE_VALUES: Mapping[str, tuple[Any, ...]] = {
    "rope.scaling.type": ("none", "linear", "yarn", "longrope"),
    "rope.scaling.factor": (4.0, 0.5, 0.0, 1.0),
    "rope.scale_linear": (4.0, 0.0),
    "rope.scaling.original_context_length": (64, 0),
    "rope.freq_base": (100.0,),
    "rope.dimension_count": (16,),
    "rope.dimension_sections": ([16, 0, 0, 0], [5, 5, 6, 0], [11, 11, 10, 0], [6, 5, 5, 8]),
    "attention.causal": (False,),
    "attention.scale": (0.0, 0.125),
    "attention.layer_norm_rms_epsilon": (0.05,),
    "attention.sliding_window": (8, 0),
    "attention.sliding_window_pattern": (2, [True, False]),
    "attention.recurrent_layers": ([True, False], [False, True]),
    "attention.head_count_kv": (1, [0, 1], [1, 1]),
    "attention.head_count": (1, [2, 2]),
    "expert_gating_func": (1, 2, 4),
    "expert_weights_norm": (False,),
    "expert_weights_scale": (2.5, 0.0),
    "expert_used_count": (1, 4),
    "expert_group_count": (1, 2),
    "full_attention_interval": (1, 2),
    "final_logit_softcapping": (5.0,),
    "swiglu_clamp_exp": ([0.1, 0.1],),
    "swiglu_clamp_shexp": ([0.1, 0.1],),
}
OUTCOMES = {
    "alike": "logits are llama.cpp's",
    "refused": "refused with a message that names the key",
    "llama.cpp refuses": "llama.cpp does not run the file",
    "different": "logits differ, or a refusal that does not name the key",
}


@dataclass(frozen=True)
class Setting:
    """A key with a value, and the keys beside it. Names lack the architecture that may precede them."""

    key: str
    value: Any
    beside: str = ""  # "yarn" for YARN

    def changes(self, arch: str) -> dict[str, Any]:
        values = {**(YARN if self.beside else {}), self.key: self.value}
        return {full_name(arch, name): value for name, value in values.items()}


@dataclass(frozen=True)
class Result:
    """What became of a setting; `effect` and `difference` are largest differences of a logit."""

    key: str
    value: Any
    beside: str
    outcome: str
    effect: float | None  # of the setting on llama.cpp's logits
    difference: float | None  # of ours from llama.cpp's
    message: str = ""  # of a refusal


def known_keys() -> tuple[str, ...]:
    """Names of the `gguf` package and of llama.cpp's library; `{arch}.` stands for that of the family."""
    tables = (table for table in vars(gguf.constants.Keys).values() if isinstance(table, type))
    names = {
        name.replace("{id}", "0").replace("{name}", "x").replace("{dense}", "dense_2")
        for table in tables
        for constant, name in vars(table).items()
        if isinstance(name, str) and not constant.startswith("_")
    }
    (library,) = Path(llama_cpp.xllamacpp.__file__).parent.glob("*.abi3.so")
    formats = re.findall(rb"%s\.([a-z][a-z0-9_.]+)\0", library.read_bytes())
    names |= {"{arch}." + name.decode() for name in formats}
    return tuple(sorted(names))


def full_name(arch: str, key: str) -> str:
    """The name in a file of a key as `settings_of` has it."""
    prefixes = ("general.", "tokenizer.", "split.", "adapter.", "imatrix.", "clip.", "diffusion.", "xielu.")
    return key if key.startswith(prefixes) else f"{arch}.{key}"


def settings_of(name: str) -> Iterator[Setting]:
    """All settings of a name of `known_keys`."""
    key = name.removeprefix("{arch}.")
    values = [*MORE_VALUES.get(key, ()), *VALUES]
    for value in values:
        yield Setting(key, value)
        if key.startswith("rope.scal"):
            yield Setting(key, value, "yarn")


def write_tiny(path: Path, arch: str, changes: Mapping[str, Any]) -> None:
    """The model with some keys set."""
    model = make_model(arch, dims=DIMS, quant="F32")
    model.metadata[f"{arch}.rope.freq_base"] = 1e4
    model.metadata |= changes
    write_model(path, model)


def token_ids() -> list[int]:
    return [int(i) for i in np.random.default_rng(0).integers(0, DIMS.vocab - 20, NUM_TOKENS)]


class LlamaCpp:
    """llama.cpp in a process of its own, which is started again when a file has ended it."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[str] | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end()

    def logits(self, path: Path) -> np.ndarray | str:
        """Those of the model at `path`, or why there are none."""
        if self._process is None:
            command = [sys.executable, "-m", "bench.peers.key_sweep", "--worker"]
            self._process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
            )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(f"{path}\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        if not line:
            self._end()
            return "the process ended"
        reason = json.loads(line)
        return reason or np.load(path.with_suffix(".npy"))

    def _end(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.communicate()
            self._process = None


def work() -> None:
    """The process of `LlamaCpp`: takes a path a line, writes logits beside it, answers null or a reason."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # llama.cpp prints some values of metadata
    for line in sys.stdin:
        path = Path(line.rstrip("\n"))
        reason = None
        try:
            with llama_cpp.open_session(path, NUM_TOKENS, num_threads=1) as session:
                np.save(path.with_suffix(".npy"), session.feed(token_ids()))
        except RuntimeError as error:
            reason = str(error)
        answers.write(json.dumps(reason) + "\n")
        answers.flush()


def own_logits(path: Path) -> np.ndarray | ColdstreamError:
    """Ours, or the error that refuses the file."""
    try:
        with open_cpu_runner(path, threads=1, context_length=NUM_TOKENS, kv_type="f32") as runner:
            return np.array(runner.logits(token_ids()))
    except ColdstreamError as error:
        return error


def largest_difference(first: np.ndarray, second: np.ndarray) -> float:
    """Of two arrays of logits; infinite where one is not finite."""
    if not (np.isfinite(first).all() and np.isfinite(second).all()):
        return float("inf")
    return float(np.abs(first.astype(np.float64) - second).max())


class Sweep:
    """Tries settings of one architecture."""

    def __init__(self, arch: str, folder: Path, oracle: LlamaCpp) -> None:
        self.arch = arch
        self._path = folder / f"{arch}.gguf"
        self._oracle = oracle
        # llama.cpp's logits of the model without a setting, by the keys beside it.
        self._without = {"": self._checked({}), "yarn": self._checked(YARN)}

    def _checked(self, values: Mapping[str, Any]) -> np.ndarray:
        """llama.cpp's logits of a model whose logits are alike."""
        write_tiny(self._path, self.arch, {full_name(self.arch, key): values[key] for key in values})
        theirs, ours = self._oracle.logits(self._path), own_logits(self._path)
        assert isinstance(theirs, np.ndarray), theirs
        assert isinstance(ours, np.ndarray), ours
        assert largest_difference(theirs, ours) < TOLERANCE
        return theirs

    def result(self, setting: Setting) -> Result:
        """What both programs make of a setting."""
        write_tiny(self._path, self.arch, setting.changes(self.arch))
        theirs, ours = self._oracle.logits(self._path), own_logits(self._path)
        without = self._without[setting.beside]
        effect = None if isinstance(theirs, str) else largest_difference(theirs, without)
        difference = None
        message = str(ours) if isinstance(ours, ColdstreamError) else ""
        if isinstance(theirs, str):
            outcome = "llama.cpp refuses"
        elif isinstance(ours, ColdstreamError):
            outcome = "refused" if full_name(self.arch, setting.key) in message else "different"
        else:
            difference = largest_difference(theirs, ours)
            outcome = "alike" if difference < TOLERANCE else "different"
        message = message.replace(f"{self._path}: ", "")
        return Result(setting.key, setting.value, setting.beside, outcome, effect, difference, message)


def has_effect(result: Result) -> bool:
    """Whether a setting matters to one of the two programs."""
    changes = result.effect is not None and result.effect > TOLERANCE
    return changes or result.outcome in ("refused", "different")


def table(results: Sequence[Result]) -> dict[str, Any]:
    """The figures of an architecture: counts, and the results that matter, keys in alphabetical order."""
    return {
        "settings": len(results),
        "outcomes": dict(Counter(result.outcome for result in results)),
        "largest_difference_alike": max(r.difference or 0.0 for r in results if r.outcome == "alike"),
        "effects": [asdict(result) for result in results if has_effect(result)],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path)
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        work()
        return
    keys = known_keys()
    architectures = {}
    with tempfile.TemporaryDirectory() as folder, LlamaCpp() as oracle:
        for arch in ARCHITECTURES:
            sweep = Sweep(arch, Path(folder), oracle)
            settings = [setting for key in keys for setting in settings_of(key)]
            architectures[arch] = table([sweep.result(setting) for setting in settings])
            print(arch, architectures[arch]["outcomes"], file=sys.stderr)
    result = {
        "command": "python -m bench.peers.key_sweep",
        "xllamacpp": version("xllamacpp"),
        "gguf": version("gguf"),
        "tolerance": TOLERANCE,
        "keys": list(keys),
        "architectures": architectures,
    }
    write_result(result, options.out)


if __name__ == "__main__":
    main()
