"""What rounding activations costs, for types of weights, beside llama.cpp (`xllamacpp`, test extra).

    python bench/activation_scales.py --out docs/results/activation_scales.json

The demo model's matrices are quantised to one type; beside that file lies its twin, with the same values as
float32. What a file's logits are away from the twin's, as KL divergence from the twin's over the start of
Python's own `argparse.py`, comes from the rounding of activations alone. Then some channels of each norm are
made greater by a factor, and the columns of the weights that read them smaller by it, before they are
quantised: outliers as they are in large models. Keys and values are float32 on both sides.
"""

import argparse
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

import numpy as np

sys.path.insert(0, str(Path(__file__).parent.parent))

from gguf.constants import Keys

import gguf
from coldstream.assets import demo_model_path
from coldstream.gguf.quant_types import QuantType
from coldstream.gguf.reader import GGUFFile
from coldstream.gguf.tokenizer import Tokenizer
from coldstream.kernels.dequantize.reference import FLOAT_DTYPES
from coldstream.kernels.linear.reference import BLOCK_TYPES, INTEGER_TYPES
from coldstream.models.cpu_runner import CpuRunner
from results import write_result
from tools import llama_cpp as oracle

POSITIONS = 512
OUTLIER_CHANNELS = (17, 100, 180)  # in three blocks of 32 of a row of 256
FACTORS = (1, 20, 100)
NORMS = {
    "attn_norm": ("attn_q.", "attn_k.", "attn_v.", "attn_qkv.", "attn_gate.", "ssm_alpha.", "ssm_beta."),
    "post_attention_norm": (
        "ffn_gate_exps.", "ffn_up_exps.", "ffn_gate_shexp.", "ffn_up_shexp.",
        "ffn_gate_inp.", "ffn_gate_inp_shexp.",
    ),
    "output_norm": ("output.",),
}  # fmt: skip


class Tensor(NamedTuple):
    """Values [..., columns], and whether the model's products are with them quantised."""

    values: np.ndarray
    is_matrix: bool


def read_tensors(reader: gguf.GGUFReader) -> dict[str, Tensor]:
    """All but those of layers that predict further tokens, dequantised; embeddings are no product."""
    found = {}
    for tensor in reader.tensors:
        is_float = tensor.tensor_type in (gguf.GGMLQuantizationType.F32, gguf.GGMLQuantizationType.F16)
        values = gguf.quants.dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
        found[tensor.name] = Tensor(values, not is_float and tensor.name != "token_embd.weight")
    return found


def with_outliers(tensors: dict[str, Tensor], factor: float) -> dict[str, Tensor]:
    """Some channels of each norm times `factor`, what reads them divided by it."""
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


def quantised(tensors: dict[str, Tensor], quant_type: QuantType) -> dict[str, np.ndarray]:
    """The blocks of all matrices whose rows are whole blocks."""
    return {
        name: oracle.quantize(tensor.values, int(quant_type))
        for name, tensor in tensors.items()
        if tensor.is_matrix and tensor.values.shape[-1] % quant_type.block_elements == 0
    }


def write_file(
    path: Path,
    reader: gguf.GGUFReader,
    tensors: dict[str, Tensor],
    blocks: dict[str, np.ndarray],
    quant_type: QuantType,
    *,
    twin: bool,
) -> None:
    """The model with these blocks, or with the float32 values that they stand for."""
    qtype = gguf.GGMLQuantizationType(int(quant_type))
    arch = reader.fields[Keys.General.ARCHITECTURE].contents()
    out = gguf.GGUFWriter(path, arch)
    for name, field in reader.fields.items():
        if not name.startswith("GGUF.") and name != Keys.General.ARCHITECTURE:
            kind, inner = field.types[0], field.types[-1] if len(field.types) > 1 else None
            out.add_key_value(name, field.contents(), kind, inner)
    for name, tensor in tensors.items():
        if name not in blocks:
            out.add_tensor(name, tensor.values)
        elif twin:
            out.add_tensor(name, gguf.quants.dequantize(blocks[name], qtype).astype(np.float32))
        else:
            out.add_tensor(name, blocks[name], raw_dtype=qtype)
    out.write_header_to_file()
    out.write_kv_data_to_file()
    out.write_tensors_to_file()
    out.close()


def our_logits(path: Path, ids: list[int], threads: int) -> np.ndarray:
    """float32 [T, vocab]."""
    runner = CpuRunner.open(path, threads=threads, context_length=POSITIONS, kv_type="f32")
    return runner.logits(ids)


def divergence(exact: np.ndarray, logits: np.ndarray) -> float:
    """KL of the distributions of `logits` from those of `exact` [T, vocab], in nats, the mean over rows."""
    p, q = (values.astype(np.float64) for values in (exact, logits))
    p = p - np.logaddexp.reduce(p, axis=-1, keepdims=True)
    q = q - np.logaddexp.reduce(q, axis=-1, keepdims=True)
    return float((np.exp(p) * (p - q)).sum(-1).mean())


def measure(types: Sequence[QuantType], threads: int) -> dict[str, object]:
    """All figures; see the module docstring."""
    model = demo_model_path()
    with GGUFFile.open(model) as file:
        tokenizer = Tokenizer.from_metadata(file.metadata)
    module: ModuleType = argparse
    ids = tokenizer.encode(Path(str(module.__file__)).read_text())[:POSITIONS]
    reader = gguf.GGUFReader(model)
    rows, floats = [], 0.0
    with tempfile.TemporaryDirectory() as folder:
        path, twin = Path(folder) / "model.gguf", Path(folder) / "twin.gguf"
        for factor in FACTORS:
            tensors = with_outliers(read_tensors(reader), factor)
            for quant_type in types:
                blocks = quantised(tensors, quant_type)
                write_file(path, reader, tensors, blocks, quant_type, twin=False)
                write_file(twin, reader, tensors, blocks, quant_type, twin=True)
                exact = oracle.logits(twin, ids)
                floats = floats or divergence(exact, our_logits(twin, ids, threads))
                ours = divergence(exact, our_logits(path, ids, threads))
                theirs = divergence(exact, oracle.logits(path, ids))
                rows.append(
                    {
                        "type": quant_type.name,
                        "outliers": factor,
                        "scale_inputs": scale_inputs(quant_type),
                        "ours": ours,
                        "llama_cpp": theirs,
                        "ratio": ours / theirs,
                    }
                )
                print(rows[-1], file=sys.stderr, flush=True)
    return {
        "model": model.name,
        "command": "python bench/activation_scales.py",
        "positions": len(ids),
        "channels": len(OUTLIER_CHANNELS),
        "between_floats": floats,
        "rows": rows,
    }


def scale_inputs(quant_type: QuantType) -> int | None:
    """How many inputs share an activation scale; None where activations stay float32."""
    if quant_type not in INTEGER_TYPES:
        return None
    return 32 if quant_type in BLOCK_TYPES else 256


def main() -> None:
    names = [kind.name for kind in QuantType if kind not in FLOAT_DTYPES]
    rounded = [kind.name for kind in sorted(INTEGER_TYPES)]
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--types", nargs="+", choices=names, default=rounded)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    write_result(measure([QuantType[name] for name in options.types], options.threads), options.out)


if __name__ == "__main__":
    main()
