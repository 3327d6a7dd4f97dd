"""Choices of other families' models beside llama.cpp's, over a quantised file of a middle size.

    python -m bench.peers.family_agreement --out docs/results/agreement_families.json

Both programs round activations to 8 bits, each in its own way. In a file of random weights that alone changes
which experts a token takes, and so the text. Here routers read channels that nothing but the embedding
writes, as in family_models.py, so that both programs choose the same experts. All else is random, and the
head reads every other channel. The most likely tokens are compared where llama.cpp's two best logits are
further apart than CLEAR_GAP of their deviation.

Whether such a figure would show a fault is measured, too: our logits of the same file with a part taken out,
beside llama.cpp's of the whole file.
"""

import argparse
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

import numpy as np

from bench.device import describe
from bench.family_models import FAMILIES, Gemma4Writer, GptOssWriter, Qwen4ExpWriter
from bench.full_size_model import CODE, FullSizeWriter
from bench.laguna_model import LagunaWriter
from bench.peers.agreement import compared
from bench.results import write_result
from bench.runners import open_cpu_runner
from coldstream.gguf.quant_types import QuantType
from tools import llama_cpp as oracle

CLEAR_GAP = 0.1  # between the two best logits, in deviations of all
POSITIONS = 1024
EMBEDDING_STEP = 0.25  # between levels of the code: its channels are about as large as others
BIAS, ROUTER_BIAS, SELECTION_BIAS = 0.5, 1.0, 0.1
NO_SINK = -1e4
COMMON = {"layers": 6, "experts": 32, "vocab": 4096, "context": 4096}


class FreeWriter(FullSizeWriter):
    """Random text in place of one that walks: embedding and head are random, but for the code."""

    gain = 1.0  # of the matrix that is being planned
    without = ""  # a part of names: tensors that are left out, so that they are 0

    def plan(self) -> None:
        self.table("token_embd.weight", self.levels, EMBEDDING_STEP, 1.0)
        self.last_norm()
        self.matrix("output.weight", self.shape.vocab, self.shape.hidden)
        for layer in range(self.shape.layers):
            self.block(layer)

    def floats(self, name: str, values: np.ndarray) -> None:
        """With biases that matter and attention that looks closer, and without what is left out."""
        for end, factor in FACTORS.items():
            if name.endswith(end):
                values = factor * values
        for end, deviation in VECTORS.items():
            if name.endswith(end):
                values = deviation * self.rng.standard_normal(values.shape)
                if end in OF_STREAM:
                    values[..., :CODE] = 0
        if self.without and self.without in name:
            values = np.full(values.shape, NO_SINK if "sinks" in name else 0.0)
        super().floats(name, values)

    def pool(self, qtype: QuantType, deviation: float) -> np.ndarray:
        return super().pool(qtype, deviation * self.gain)

    def matrix(self, name: str, *dims: int, adds_to_stream: bool = False) -> None:
        self.gain = next((gain for part, gain in GAINS.items() if part in name), 1.0)
        super().matrix(name, *dims, adds_to_stream=adds_to_stream)
        self.gain = 1.0
        if self.without and self.without in name:
            self.tensors[-1] = replace(self.tensors[-1], is_hole=True)


VECTORS: Mapping[str, float] = MappingProxyType(
    {
        "ffn_gate_inp.bias": ROUTER_BIAS,
        "exp_probs_b.bias": SELECTION_BIAS,
        **dict.fromkeys(("attn_q.bias", "attn_k.bias", "attn_v.bias", "attn_output.bias"), BIAS),
        **dict.fromkeys(("ffn_gate_exps.bias", "ffn_up_exps.bias", "ffn_down_exps.bias"), BIAS),
    }
)
# Random scores are nearly alike, and means of many random values nearly nothing.
FACTORS: Mapping[str, float] = MappingProxyType(
    {".attn_norm.weight": 2.0, "attn_q_norm.weight": 3.0, "output_norm.weight": 6.0}
)
# Of matrices by a part of their names: gates of streams would all be near one half.
GAINS: Mapping[str, float] = MappingProxyType(
    {"hc_attn_up": 40.0, "hc_ffn_up": 40.0, "hc_attn_inject": 8.0, "hc_ffn_inject": 8.0}
)
SOFTCAP: Final = 30.0  # of gemma-4
OF_STREAM = ("attn_output.bias", "ffn_down_exps.bias")


class FreeGptOss(FreeWriter, GptOssWriter):
    """Without YaRN, of which llama.cpp and the checkpoint take other dimensions."""

    def keys(self) -> dict[str, Any]:
        return {key: value for key, value in super().keys().items() if ".scaling." not in key}


class FreeLaguna(FreeWriter, LagunaWriter):
    pass


class FreeFlashNext(FreeWriter, Qwen4ExpWriter):
    ngram = replace(Qwen4ExpWriter.ngram, rows=20_000)


class FreeGemma(FreeWriter, Gemma4Writer):
    pass


@dataclass(frozen=True)
class Case:
    """A family: its writer, what its shape has in place of the published one, and the parts to leave out.

    parts: what is left out → a part of the names of tensors, which are 0 then.
    """

    writer: type[FreeWriter]
    shape: Mapping[str, int]
    parts: Mapping[str, str]


CASES: Mapping[str, Case] = MappingProxyType(
    {
        "gpt-oss-20b": Case(
            FreeGptOss,
            {"hidden": 1088, "expert_ffn": 544, "heads": 16, "kv_heads": 4, "experts_per_token": 4},
            {
                "sinks": "attn_sinks",
                "biases of queries": "attn_q.bias",
                "bias of attention's output": "attn_output.bias",
                "bias of routers": "ffn_gate_inp.bias",
                "biases of experts' gates": "ffn_gate_exps.bias",
                "biases of experts' outputs": "ffn_down_exps.bias",
            },
        ),
        "Laguna-XS-2.1": Case(
            FreeLaguna,
            {"hidden": 1024, "expert_ffn": 256, "layers": 5},
            {
                "selection bias": "exp_probs_b.bias",
                "shared expert": "ffn_down_shexp",
                "gates of attention": "attn_gate",
            },
        ),
        "Qwen3.8-Flash-Next": Case(
            FreeFlashNext,
            {"hidden": 1024, "expert_ffn": 320, "heads": 8, "key_heads": 8, "value_heads": 24, "layers": 8},
            {
                "n-grams": "ple_value",
                "convolution of n-grams": "ple_conv1d",
                "gate of n-grams": "ple_norm_key",
                "what decides how outputs enter streams": "_inject",
                "gates of streams": "hc_ffn_up",
            },
        ),
        "gemma-4-26B-A4B": Case(
            FreeGemma,
            {"hidden": 1024, "expert_ffn": 352, "heads": 8, "kv_heads": 4, "head_dim": 128},
            {"network beside the experts": "post_ffw_norm_1", "experts": "post_ffw_norm_2"},
        ),
    }
)


def write_free(path: Path, name: str, without: str = "", seed: int = 0) -> None:
    """The file of a family, or the same without a part."""
    case, family = CASES[name], FAMILIES[name]
    shape = replace(family.shape, **{**COMMON, **case.shape})
    writer = case.writer(path, shape, seed, 2, mix=family.mix)
    writer.without = without
    writer.write()


def our_logits(path: Path, ids: list[int]) -> np.ndarray:
    with open_cpu_runner(path, threads=2, context_length=len(ids)) as runner:
        return runner.logits(ids)


def measure_family(name: str, positions: int) -> dict[str, Any]:
    """Figures of one family; see the module docstring."""
    case = CASES[name]
    ids = np.random.default_rng(0).integers(0, COMMON["vocab"] - 1, positions).tolist()
    with tempfile.TemporaryDirectory() as folder:
        path, changed = Path(folder) / "free.gguf", Path(folder) / "changed.gguf"
        write_free(path, name)
        theirs, ours = oracle.logits(path, ids), our_logits(path, ids)
        second, first = np.sort(theirs, axis=-1)[:, -2:].T
        is_clear = first - second > CLEAR_GAP * theirs.std()
        names = ("coldstream", "llama.cpp")
        found = compared(names, ours, theirs, is_clear)
        without = []
        for part, pattern in case.parts.items():
            write_free(changed, name, pattern)
            row = compared(names, our_logits(changed, ids), theirs, is_clear)
            without.append({"part": part, **row})
            print(part, row, file=sys.stderr, flush=True)
        if name.startswith("gemma"):
            uncapped = SOFTCAP * np.arctanh(ours / SOFTCAP)
            without.append({"part": "softcap", **compared(names, uncapped, theirs, is_clear)})
    return {
        "mix": FAMILIES[name].mix.name,
        "shape": {**COMMON, **case.shape},
        "positions": positions,
        "clear_positions": int(is_clear.sum()),
        "logit_deviation": float(theirs.std()),
        **found,
        "without": without,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--families", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--positions", type=int, default=POSITIONS)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    result: dict[str, Any] = {
        "command": f"python -m bench.peers.family_agreement --families {' '.join(options.families)}",
        "machine": describe("cpu"),
        "xllamacpp": version("xllamacpp"),
        "clear_gap_deviations": CLEAR_GAP,
        "models": {},
    }
    for name in options.families:
        result["models"][name] = found = measure_family(name, options.positions)
        print(name, {k: v for k, v in found.items() if k != "without"}, file=sys.stderr, flush=True)
        write_result(result, options.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
