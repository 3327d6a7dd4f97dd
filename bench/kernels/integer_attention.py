"""The accuracy of attention over integers, by definition, beside a cache of floats.

    python -m bench.kernels.integer_attention --out docs/results/integer_attention.json

Queries, softmax weights, keys and values become integers with a float32 scale; products of integers are
exact, so that a definition costs what its roundings cost. Each is tried on the demo model's held-out text
(the RMS distance of its logits from those of float32 attention) and on single heads of random data, plain and
with outlier channels in keys and values (the RMS error of the output over its RMS size, against float64).
"""

import argparse
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from bench.kernels.attention_heads import HEAD_DIMS, OUTLIERS, float_attend, random_head, relative_error
from bench.kernels.kv_types import WINDOW, Loss, held_out_stream
from bench.results import write_result
from coldstream.assets import demo_model_path
from coldstream.gguf.reader import GGUFFile
from coldstream.gguf.tokenizer import Tokenizer
from coldstream.kernels.attention.cache_types import CACHE_TYPES
from coldstream.kernels.ops import AttentionHeads, AttentionInputs, Caches, Rows
from coldstream.kernels.reference_ops import ReferenceOps
from coldstream.kernels.rms_norm.reference import rms_norm
from coldstream.kernels.rope.reference import rotate
from coldstream.kvcache.cache import ModelCache
from coldstream.models.causal_lm import CausalLM
from coldstream.models.read_spec import read_spec
from tools.train_demo.data import load_corpus
from tools.train_demo.held_out import scoring_windows

BLOCK = 64  # positions whose softmax weights share a scale
PLANE = 127  # the greatest magnitude of one int8 plane
TWO_PLANES = 256 * PLANE + PLANE  # of high · 256 + low

Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class Definition:
    """One way to compute attention over integers."""

    planes: int  # of int8, in which keys and values are kept
    scale_values: int | None = None  # consecutive values of a head that share a scale; None: all
    rotates: bool = False  # queries, keys and values by a Hadamard matrix of the head's size
    low_products: bool = True  # whether low · low is computed

    def attend(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, positions: torch.Tensor
    ) -> torch.Tensor:
        """Rows [L, H, D] at `positions` [L], over keys and values [P, G, D]: [L, H, D]."""
        head_dim, group = query.shape[-1], query.shape[1] // key.shape[1]
        query = query.double() * head_dim**-0.5
        key, value = key.double(), value.double()
        if self.rotates:
            query, key, value = (hadamard(x) for x in (query, key, value))
        size = self.scale_values or head_dim
        limit = PLANE if self.planes == 1 else TWO_PLANES
        q, q_scale = rounded(query.unsqueeze(-2), TWO_PLANES)  # [L, H, 1, D]
        k, k_scale = rounded(key.unflatten(-1, (-1, size)), limit)  # [P, G, D / size, size]
        v, v_scale = rounded(value.unflatten(-1, (-1, size)), limit)
        q = q.flatten(-2).unflatten(-1, (-1, size))
        k, v, k_scale, v_scale = (x.repeat_interleave(group, dim=1) for x in (k, v, k_scale, v_scale))
        sums = self.product("lhsd,phsd->hlps", q, k)
        scores = torch.einsum("hlps,phs->hlp", sums, k_scale) * q_scale.squeeze(-1).T.unsqueeze(-1)
        outside = torch.arange(key.shape[0]) > positions.unsqueeze(-1)
        weights = scores.masked_fill(outside, -torch.inf)
        weights = torch.exp(weights - weights.amax(dim=-1, keepdim=True))
        scaled = torch.einsum("hlp,phs->hslp", weights, v_scale)
        scaled = torch.nn.functional.pad(scaled, (0, -scaled.shape[-1] % BLOCK)).unflatten(-1, (-1, BLOCK))
        w, w_scale = rounded(scaled, TWO_PLANES)  # [H, D / size, L, blocks, BLOCK]
        v = torch.nn.functional.pad(v, (0, 0, 0, 0, 0, 0, 0, -v.shape[0] % BLOCK)).unflatten(0, (-1, BLOCK))
        output = torch.einsum("hslb,lhsbd->lhsd", w_scale, self.product("hslbp,bphsd->lhsbd", w, v))
        output = output.flatten(-2) / weights.sum(dim=-1).T.unsqueeze(-1)
        return hadamard(output) if self.rotates else output

    def product(self, equation: str, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """einsum of integers, as far as the definition computes it."""
        product = torch.einsum(equation, x, y)
        if self.low_products or self.planes == 1:
            return product
        return product - torch.einsum(equation, low_plane(x), low_plane(y))


@dataclass(frozen=True)
class Cached:
    """Float32 attention over a cache of a float type."""

    kv_type: str

    def attend(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, positions: torch.Tensor
    ) -> torch.Tensor:
        """See `Definition.attend`."""
        cache_type, head_dim = CACHE_TYPES[self.kv_type], query.shape[-1]
        key, value = (cache_type.decode(cache_type.encode(x.float()), head_dim) for x in (key, value))
        return float_attend(query, key, value, positions)


def rounded(x: torch.Tensor, limit: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Integers of magnitudes up to `limit` as float64, and the scale of each last dimension."""
    scale = x.abs().amax(dim=-1) / limit
    codes = torch.round(x / torch.where(scale == 0, 1, scale).unsqueeze(-1))
    return codes, scale


def low_plane(codes: torch.Tensor) -> torch.Tensor:
    """What is left of each integer beside the multiple of 256 that is nearest to it."""
    return codes - 256 * torch.floor((codes + 128) / 256)


def hadamard(x: torch.Tensor) -> torch.Tensor:
    """The last dimension times the symmetric, orthogonal Walsh–Hadamard matrix of its size."""
    size = x.shape[-1]
    stride = 1
    while stride < size:
        first, second = x.unflatten(-1, (-1, 2, stride)).unbind(-2)
        x = torch.stack((first + second, first - second), dim=-2).flatten(-3)
        stride *= 2
    return x / math.sqrt(size)


DEFINITIONS: dict[str, Definition | Cached] = {
    "f16 cache": Cached("f16"),
    "two planes": Definition(planes=2),
    "two planes, no low · low": Definition(planes=2, low_products=False),
    "two planes, rotated": Definition(planes=2, rotates=True),
    "two planes, rotated, no low · low": Definition(planes=2, rotates=True, low_products=False),
    "one plane": Definition(planes=1),
    "one plane, rotated": Definition(planes=1, rotates=True),
    "one plane, a scale for 32": Definition(planes=1, scale_values=32),
    "one plane, a scale for 32, rotated": Definition(planes=1, scale_values=32, rotates=True),
}


class TriedOps(ReferenceOps):
    """The reference operations with attention by `attend`, over one whole sequence."""

    attend: Attend = staticmethod(float_attend)

    def attention(
        self, inputs: AttentionInputs, heads: AttentionHeads, caches: Caches, rows: Rows
    ) -> torch.Tensor:
        """See `Ops.attention`; the caches are left alone. Raises ValueError for heads that the demo model's
        are not like.
        """
        if heads != AttentionHeads(heads.q_norm, heads.k_norm, heads.eps):
            raise ValueError("these definitions are of heads as the demo model's: a gate of each query")
        num_kv_heads = caches.k.shape[-2]
        head_dim = inputs.key.shape[-1] // num_kv_heads
        query, gate = inputs.query_gate.unflatten(-1, (-1, 2, head_dim)).unbind(-2)
        query = rotate(rms_norm(query, heads.q_norm, heads.eps), inputs.angles)
        key = inputs.key.unflatten(-1, (num_kv_heads, head_dim))
        key = rotate(rms_norm(key, heads.k_norm, heads.eps), inputs.angles)
        value = inputs.value.unflatten(-1, (num_kv_heads, head_dim))
        output = torch.cat(
            [
                self.attend(query[part], key, value, rows.positions[part])
                for part in torch.arange(len(query)).split(256)
            ]
        )
        return (output.float() * torch.sigmoid(gate)).flatten(-2)


@torch.no_grad()
def text_distances(num_windows: int) -> dict[str, dict[str, float]]:
    """By definition, how far the logits on held-out text are from those of float32 attention."""
    ops = TriedOps()
    with GGUFFile.open(demo_model_path()) as file:
        spec = read_spec(file.metadata, file.tensors)
        model = CausalLM.load(file, spec, ops)
        tokenizer = Tokenizer.from_metadata(file.metadata)
    ids = held_out_stream(tokenizer, load_corpus().held_out)
    every = list(scoring_windows(len(ids), WINDOW))
    losses = {name: Loss() for name in ("float", *DEFINITIONS)}
    for index in np.linspace(0, len(every) - 1, num_windows).round().astype(int):
        window = every[index]
        inputs, targets = (torch.from_numpy(ids[window.start + i : window.end + i]) for i in (0, 1))
        counted = slice(window.first - window.start - 1, None)
        exact = None
        for name, loss in losses.items():
            ops.attend = DEFINITIONS[name].attend if name in DEFINITIONS else float_attend
            logits = logits_of(model, inputs)[counted]
            exact = logits if exact is None else exact
            loss.add(logits, exact, targets[counted])
    return {name: losses[name].figures(losses["float"]) for name in DEFINITIONS}


def logits_of(model: CausalLM, token_ids: torch.Tensor) -> torch.Tensor:
    """Of one sequence from its start: [T, vocabulary]."""
    count = len(token_ids)
    cache = ModelCache(model.spec, model.ops, num_states=1, context_length=count, kv_type="f32")
    rows = Rows(torch.arange(count, dtype=torch.int32), torch.zeros(count, dtype=torch.int32))
    logits: torch.Tensor = model.logits(model.forward(token_ids, rows, cache))
    return logits


def head_errors(head_dim: int, outlier: float) -> dict[str, float]:
    """By definition, the relative error of one head's outputs over random data with two greater channels."""
    head = random_head(head_dim, outlier, seed=head_dim)
    exact = float_attend(*head, head.positions)

    def error(tried: Definition | Cached) -> float:
        return relative_error(tried.attend(*head, head.positions), exact)

    return {name: error(tried) for name, tried in DEFINITIONS.items()}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--windows", type=int, default=6, help="how many, evenly spaced over the text")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    result = {
        "command": "python -m bench.kernels.integer_attention",
        "model": demo_model_path().name,
        "windows": options.windows,
        "window_tokens": WINDOW,
        "text": text_distances(options.windows),
        "heads": [
            {"head_dim": head_dim, "outlier": outlier, "error": head_errors(head_dim, outlier)}
            for head_dim in HEAD_DIMS
            for outlier in OUTLIERS
        ],
    }
    write_result(result, options.out)


if __name__ == "__main__":
    main()
