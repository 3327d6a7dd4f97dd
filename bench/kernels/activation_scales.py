"""The loss by rounding activations, by type of weights, beside llama.cpp (`xllamacpp`, test extra).

    python -m bench.kernels.activation_scales --out docs/results/activation_scales.json
    python -m bench.kernels.activation_scales --types IQ3_S --outliers 1 --out FILE

All types take over an hour. Each row is written as it is found, in the place of the file's row of the same
type and outliers, and names its commit.

The demo model's matrices are quantised to one type in one file, and stored with the same values as float32 in
a second one, its twin. The KL divergence of the file's logits from the twin's, over passages of the held-out
text, comes only from rounding activations. For outliers like those of large models, some channels of each
norm are multiplied by a factor, and the columns of the weights that read them divided by it, before
quantisation. Keys and values are float32 on both sides.

A few positions, where a router's choice flips, dominate a mean. So each ratio is given with its interval of
95 %, from drawing passages with replacement, the same ones for both sides, and with the range of ratios of
single passages.
"""

import argparse
import json
import tempfile
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

import gguf
from bench.float_twin import Blocks, Tensor, read_tensors, twin_of, write_file
from bench.kernels.kv_types import held_out_stream
from bench.quantise import NOT_IN_LLAMA_CPP, quantize
from bench.results import commit, write_result
from bench.runners import open_cpu_runner
from coldstream.assets import demo_model_path
from coldstream.gguf.quant_types import QuantType
from coldstream.gguf.reader import GGUFFile
from coldstream.gguf.tokenizer import Tokenizer
from coldstream.kernels.linear.integer_types import INTEGER_TYPES, activation_scale_size
from coldstream.models.cpu.runner import CpuRunner
from tools import llama_cpp as oracle
from tools.train_demo.data import load_corpus

Row = dict[str, Any]
POSITIONS = 512  # of a passage
DRAWS, INTERVAL = 10_000, (2.5, 97.5)  # bootstrap samples of passages; percentiles
OUTLIER_CHANNELS = (17, 100, 180)  # in three blocks of 32 of a row of 256
PASSAGES = {1: 64, 20: 16, 100: 16}  # by factor: among greater divergences single positions weigh less
NORMS = {
    "attn_norm": ("attn_q.", "attn_k.", "attn_v.", "attn_qkv.", "attn_gate.", "ssm_alpha.", "ssm_beta."),
    "post_attention_norm": (
        "ffn_gate_exps.", "ffn_up_exps.", "ffn_gate_shexp.", "ffn_up_shexp.",
        "ffn_gate_inp.", "ffn_gate_inp_shexp.",
    ),
    "output_norm": ("output.",),
}  # fmt: skip


def with_outliers(tensors: dict[str, Tensor], factor: float) -> dict[str, Tensor]:
    """Some channels of each norm times `factor`, and weights that read them divided by it."""
    changed = dict(tensors)
    for name, tensor in tensors.items():
        prefix, _, rest = name.rpartition(".")[0].rpartition(".")
        for norm, readers in NORMS.items():
            if rest == norm:
                scale = factor
            elif f"{rest}." in readers and f"{prefix}.{norm}.weight".removeprefix(".") in tensors:
                scale = 1 / factor
            else:
                continue
            values = tensor.values.copy()
            values[..., list(OUTLIER_CHANNELS)] *= np.float32(scale)
            changed[name] = tensor._replace(values=values)
    return changed


def quantised(tensors: dict[str, Tensor], quant_type: QuantType) -> Blocks:
    """All matrices whose rows are whole blocks."""
    matrices = {
        name: quantize(tensor.values, quant_type)
        for name, tensor in tensors.items()
        if tensor.is_matrix and tensor.values.shape[-1] % quant_type.block_elements == 0
    }
    return Blocks(quant_type, matrices)


def passages(count: int) -> list[list[int]]:
    """Token ids, evenly spaced over the held-out text."""
    with GGUFFile.open(demo_model_path()) as file:
        tokenizer = Tokenizer.from_metadata(file.metadata)
    ids = held_out_stream(tokenizer, load_corpus().held_out)
    starts = np.linspace(0, len(ids) - POSITIONS, count).astype(int)
    return [ids[start : start + POSITIONS].tolist() for start in starts]


class Divergences(NamedTuple):
    """From the twin in llama.cpp, in nats, each the mean over a passage: [passages]."""

    ours: np.ndarray
    theirs: np.ndarray | None  # None: of a type that llama.cpp lacks

    def figures(self) -> dict[str, float]:
        """Means, their ratio and its interval, and the interval of the ratios of single passages."""
        if self.theirs is None:
            return {"ours": float(self.ours.mean())}
        drawn = np.random.default_rng(0).integers(0, len(self.ours), (DRAWS, len(self.ours)))
        low, high = np.percentile(self.ours[drawn].mean(-1) / self.theirs[drawn].mean(-1), INTERVAL)
        passage_low, passage_high = np.percentile(self.ours / self.theirs, INTERVAL)
        return {
            "ours": float(self.ours.mean()),
            "llama_cpp": float(self.theirs.mean()),
            "ratio": float(self.ours.mean() / self.theirs.mean()),
            "ratio_low": float(low),
            "ratio_high": float(high),
            "passage_ratio_low": float(passage_low),
            "passage_ratio_high": float(passage_high),
        }


def compare(
    path: Path, twin: Path, texts: Sequence[list[int]], threads: int, *, has_peer: bool
) -> Divergences:
    """Both engines on the file at `path`, or ours alone, while the twin runs beside them."""
    runner = open_runner(path, threads)
    found: list[list[float]] = []
    with ExitStack() as stack:
        pool = stack.enter_context(ThreadPoolExecutor(1))
        twin_session = stack.enter_context(oracle.open_session(twin, POSITIONS, threads))
        sessions = [stack.enter_context(oracle.open_session(path, POSITIONS, threads))] if has_peer else []
        for ids in texts:
            for session in (twin_session, *sessions):
                session.clear()
            reference = pool.submit(twin_session.feed, ids)
            logits = [runner.logits(ids), *(session.feed(ids) for session in sessions)]
            exact = reference.result()
            found.append([divergence(exact, each) for each in logits])
    ours, *theirs = np.array(found).T
    return Divergences(ours, *(theirs or [None]))


def between_floats(twin: Path, ids: list[int], threads: int) -> float:
    """The divergence between the engines without rounding to int8."""
    return divergence(oracle.logits(twin, ids), open_runner(twin, threads).logits(ids))


def open_runner(path: Path, threads: int) -> CpuRunner:
    return open_cpu_runner(path, threads=threads, context_length=POSITIONS, kv_type="f32")


def divergence(exact: np.ndarray, logits: np.ndarray) -> float:
    """KL of the distributions of `logits` from those of `exact` [T, vocab], in nats, the mean over rows."""
    p, q = (log_softmax(values.astype(np.float64)) for values in (exact, logits))
    return float((np.exp(p) * (p - q)).sum(-1).mean())


def log_softmax(logits: np.ndarray) -> np.ndarray:
    """Over the last dimension."""
    logits = logits - logits.max(-1, keepdims=True)
    return logits - np.log(np.exp(logits).sum(-1, keepdims=True))


def measure(
    types: Sequence[QuantType],
    num_passages: Mapping[int, int],
    threads: int,
    found: Callable[[Row, float], None],
) -> None:
    """Calls `found` with each row, and the divergence between floats; see the module docstring.

    num_passages: by factor.
    """
    reader = gguf.GGUFReader(demo_model_path())
    floats = 0.0
    with tempfile.TemporaryDirectory() as folder:
        path, twin = Path(folder) / "model.gguf", Path(folder) / "twin.gguf"
        for factor, count in num_passages.items():
            texts = passages(count)
            tensors = with_outliers(read_tensors(reader), factor)
            for quant_type in types:
                blocks = quantised(tensors, quant_type)
                write_file(path, reader, tensors, blocks)
                write_file(twin, reader, twin_of(tensors, blocks))
                floats = floats or between_floats(twin, texts[0], threads)
                case = {
                    "type": quant_type.name,
                    "outliers": factor,
                    "scale_inputs": activation_scale_size(quant_type),
                    "passages": count,
                }
                has_peer = quant_type not in NOT_IN_LLAMA_CPP
                figures = compare(path, twin, texts, threads, has_peer=has_peer).figures()
                found(case | figures, floats)


def write_rows(path: Path | None, new: Sequence[Row], floats: float) -> None:
    """Writes rows, and those that the file has of other types or outliers, by outliers and type."""
    known = json.loads(path.read_text())["rows"] if path and path.exists() else []
    rows = {(row["outliers"], QuantType[row["type"]]): row for row in [*known, *new]}
    result = {
        "model": demo_model_path().name,
        "command": "python -m bench.kernels.activation_scales",
        "positions": POSITIONS,
        "channels": len(OUTLIER_CHANNELS),
        "between_floats": floats,
        "rows": [rows[key] for key in sorted(rows)],
    }
    write_result(result, path)


def main() -> None:
    names = [kind.name for kind in sorted(INTEGER_TYPES)]
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--types", nargs="+", choices=names, default=names)
    factors = [*PASSAGES]
    parser.add_argument("--outliers", nargs="+", type=int, choices=factors, default=factors, help="factors")
    parser.add_argument("--share", type=float, default=1.0, help="of the usual numbers of passages")
    parser.add_argument("--threads", type=int, default=1, help="of an engine; two run at a time")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    types = [QuantType[name] for name in options.types]
    counts = {factor: max(1, round(options.share * PASSAGES[factor])) for factor in options.outliers}
    name = commit()

    def found(row: Row, floats: float) -> None:
        write_rows(options.out, [row | {"commit": name}], floats)

    measure(types, counts, options.threads, found)


if __name__ == "__main__":
    main()
