"""The loss of activations quantised with one scale per 256 inputs and per 32, beside llama.cpp.

    python -m bench.kernels.scale_sizes --out docs/results/scale_sizes.json

It chooses the size of a type's activation groups before a kernel has it. Files and passages are those of
`bench.kernels.activation_scales`. Ours is the reference in PyTorch with float32 weights of the file's values,
whose products take activations quantised as docs/arithmetic.md has it. Against the exact product, only the
order of float32 additions differs.
"""

import argparse
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

import gguf
from bench.float_twin import read_tensors, twin_of, write_file
from bench.kernels.activation_scales import (
    POSITIONS,
    Divergences,
    divergence,
    passages,
    quantised,
    with_outliers,
)
from bench.results import write_result
from coldstream.assets import demo_model_path
from coldstream.gguf.quant_types import QuantType
from coldstream.gguf.reader import GGUFFile, TensorInfo
from coldstream.kernels.arithmetic.quantised import BLOCK_SIZE, GROUP_SIZE
from coldstream.kernels.arithmetic.reference import quantize_activations
from coldstream.kernels.linear.integer_types import INTEGER_TYPES
from coldstream.kernels.linear.reference import linear
from coldstream.kernels.ops import Rows, Weight
from coldstream.kernels.reference_ops import ReferenceOps
from coldstream.kvcache import ModelCache
from coldstream.models.causal_lm import CausalLM
from coldstream.models.read_spec import read_spec
from tools import llama_cpp as oracle

FACTORS = (1, 20, 100)  # of the outlier channels
SIZES = (GROUP_SIZE, BLOCK_SIZE)


class RoundingOps(ReferenceOps):
    """Float32 products that round the activations of weights of integer types, with a scale per `size`."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self._size = size
        self._rounding: set[int] = set()  # addresses of the storages of such weights
        self._multiply = self._rounded_product

    def load_weight(self, file: GGUFFile, info: TensorInfo) -> Weight:
        weight = super().load_weight(file, info)
        if info.quant_type in INTEGER_TYPES:
            self._rounding.add(weight.untyped_storage().data_ptr())
        return weight

    def _rounded_product(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        if weight.untyped_storage().data_ptr() in self._rounding:
            x = rounded(x, self._size)
        return linear(x, weight)


def rounded(x: torch.Tensor, size: int) -> torch.Tensor:
    """float32 x [T, K] as its codes and scales have it."""
    activations = quantize_activations(x, size)
    return activations.q * activations.scales.repeat_interleave(size, dim=-1)[:, : x.shape[-1]]


class Model:
    """A file over `RoundingOps`."""

    def __init__(self, path: Path, size: int) -> None:
        self._ops = RoundingOps(size)
        with GGUFFile.open(path) as file:
            self._model = CausalLM.load(file, read_spec(file.metadata, file.tensors), self._ops)

    @torch.no_grad()
    def logits(self, ids: Sequence[int]) -> np.ndarray:
        """float32 [T, vocab] of a sequence."""
        cache = ModelCache(self._model.spec, self._ops, 1, len(ids), "f32")
        positions = torch.arange(len(ids), dtype=torch.int32)
        rows = Rows(positions, torch.zeros(len(ids), dtype=torch.int32))
        hidden = self._model.forward(torch.tensor(ids, dtype=torch.int32), rows, cache)
        logits: np.ndarray = self._model.logits(hidden).numpy()
        return logits


def compare(path: Path, twin: Path, texts: Sequence[list[int]], threads: int) -> dict[str, dict[str, float]]:
    """Figures by the size of groups; all read the same passages."""
    models = {size: Model(path, size) for size in SIZES}
    ours: dict[int, list[float]] = {size: [] for size in SIZES}
    theirs = []
    with (
        oracle.open_session(twin, POSITIONS, threads) as twin_session,
        oracle.open_session(path, POSITIONS, threads) as session,
    ):
        for ids in texts:
            twin_session.clear()
            session.clear()
            exact = twin_session.feed(ids)
            theirs.append(divergence(exact, session.feed(ids)))
            for size, model in models.items():
                ours[size].append(divergence(exact, model.logits(ids)))
    return {
        str(size): Divergences(np.array(found), np.array(theirs)).figures() for size, found in ours.items()
    }


def measure(
    types: Sequence[QuantType], factors: Sequence[int], num_passages: int, threads: int
) -> dict[str, object]:
    """All figures; see the module docstring."""
    model = demo_model_path()
    reader = gguf.GGUFReader(model)
    texts = passages(num_passages)
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        path, twin = Path(folder) / "model.gguf", Path(folder) / "twin.gguf"
        for factor in factors:
            tensors = with_outliers(read_tensors(reader), factor)
            for quant_type in types:
                blocks = quantised(tensors, quant_type)
                write_file(path, reader, tensors, blocks)
                write_file(twin, reader, twin_of(tensors, blocks))
                case = {"type": quant_type.name, "outliers": factor, "passages": num_passages}
                rows.append(case | {"by_size": compare(path, twin, texts, threads)})
                print(rows[-1], file=sys.stderr, flush=True)
    return {
        "model": model.name,
        "command": "python -m bench.kernels.scale_sizes",
        "positions": POSITIONS,
        "rows": rows,
    }


def main() -> None:
    names = [kind.name for kind in sorted(INTEGER_TYPES)]
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--types", nargs="+", choices=names, default=names)
    parser.add_argument("--factors", nargs="+", type=int, default=list(FACTORS))
    parser.add_argument("--passages", type=int, default=8)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    types = [QuantType[name] for name in options.types]
    write_result(measure(types, options.factors, options.passages, options.threads), options.out)


if __name__ == "__main__":
    main()
