"""DflashSpec: the numbers of a DFlash drafter, and what a draft of one says.

A drafter of the first kind is a small bidirectional transformer over a block of mask tokens that reads some
residual streams of its target. One of the second kind (DFlash 2) has short dynamic convolutions around every
sublayer and a selector that scores pairs of neighbouring tokens as well. Laguna's drafters are of the first
kind, with gates and further norms. Knows nothing of files and weights.
"""

import math
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from coldstream.errors import ConfigError
from coldstream.kernels.draft_block import HEAD_SIZES, MAX_CANDIDATES
from coldstream.kernels.ops import RopeSpec
from coldstream.kernels.quantize import COLS_MULTIPLE
from coldstream.kernels.rope.scaling import Yarn
from coldstream.models.spec.model_spec import ModelSpec

MAX_DFLASH_LAYERS: Final = 64
MAX_WIDTH: Final = 1 << 16  # of the residual stream
MAX_HEAD_DIM: Final = 1 << 10
MAX_FFN_SIZE: Final = 1 << 20
MAX_VOCAB_SIZE: Final = 1 << 24
MAX_POSITIONS: Final = 1 << 24
MAX_BLOCK_SIZE: Final = 256
MAX_AUX_LAYERS: Final = 64  # of the target that are read
MAX_TARGET_LAYERS: Final = 1 << 10
MAX_CONV_KERNEL: Final = 16
MAX_SELECTOR_RANK: Final = 1 << 12
MAX_SELECTOR_TOP_K: Final = 256
FIRST_CONTEXT_ROWS: Final = 1024  # of a layer that take memory at once


@dataclass(frozen=True)
class DflashRope:
    """The rotary embedding of all layers, over all of a head, its halves rotated against each other."""

    theta: float
    yarn: Yarn | None = None
    magnitude: float = 1.0  # of cosines and sines
    divisor: float = 1.0  # of all frequencies

    def inverse_frequencies(self, head_dim: int) -> NDArray[np.float64]:
        """Radians per position, [head_dim / 2]."""
        plain: NDArray[np.float64] = self.theta ** (-np.arange(0, head_dim, 2, dtype=np.float64) / head_dim)
        if self.yarn is None:
            return plain / self.divisor
        factors: NDArray[np.float64] = np.array(self.yarn.frequency_factors(RopeSpec(head_dim, self.theta)))
        return plain * factors

    def cos_sin(
        self, positions: NDArray[np.integer], head_dim: int
    ) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        """Cosines and sines, times the magnitude, of positions [n]: both [n, head_dim / 2]."""
        angles = positions[:, None].astype(np.float64) * self.inverse_frequencies(head_dim)
        cos, sin = self.magnitude * np.cos(angles), self.magnitude * np.sin(angles)
        return cos.astype(np.float32), sin.astype(np.float32)


@dataclass(frozen=True)
class DflashLayer:
    """What a row of the block may attend to, within the committed rows and its own block."""

    window: int | None  # rows nearer than this; on both sides, unless the layer is causal. None: all
    is_causal: bool  # no rows behind its own


def layers_of(
    windows: tuple[int | None, ...], is_causal: bool | None, *, is_laguna: bool = False
) -> tuple[DflashLayer, ...]:
    """The layers with these windows, all causal or none if the file says so.

    If the file does not say (None), all layers of Laguna's drafters are causal. Of others, layers with a
    window are, and those without one are not: such drafters were trained so.
    """
    if is_causal is None and is_laguna:
        is_causal = True
    return tuple(
        DflashLayer(window, window is not None if is_causal is None else is_causal) for window in windows
    )


@dataclass(frozen=True)
class Dflash2Spec:
    """What the second kind has beside the first."""

    conv_kernel: int  # rows of the block that a convolution reads: a row and those before it
    conv_group: int  # neighbouring channels with one dynamic weight
    selector_rank: int
    selector_top_k: int  # candidates of every position


@dataclass(frozen=True)
class DflashSpec:
    """Sizes are in elements. A spec that exists has every number in a sane range."""

    hidden_size: int  # E, of the target too
    vocab_size: int  # of the target
    num_heads: int
    num_kv_heads: int  # divides num_heads
    head_dim: int  # even
    ffn_size: int
    rms_norm_eps: float
    rope: DflashRope
    block_size: int  # rows of the longest block, the anchor included
    mask_id: int  # the token of all other rows, below vocab_size
    aux_layers: tuple[int, ...]  # ascending: layers of the target after which its residual stream is read
    num_target_layers: int | None  # None: the file does not say
    layers: tuple[DflashLayer, ...]
    second: Dflash2Spec | None = None  # None: a drafter of the first kind
    # Of the target's logits, from which candidates are taken; 0: none is stated. The embedding is scaled as
    # the target scales it, which files do not say.
    logit_softcap: float = 0.0
    # Whether it is Laguna's: every auxiliary layer has a norm before `fc`, committed rows pass through each
    # layer's first norm, and every head of attention has a gate, the softplus of a product.
    is_laguna: bool = False
    has_attention_bias: bool = False  # of queries, keys, values and the output: those of gpt-oss have

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    def rows_of_draft(self, num_nodes: int, most_rows: int) -> int:
        """Rows of a block that drafts so many tokens.

        These are `most_rows`, as a shorter block drafts other tokens. If no row sees later ones, they are as
        many as are needed.
        """
        is_causal = all(layer.is_causal for layer in self.layers)
        return min(most_rows, 1 + num_nodes) if is_causal else most_rows

    @property
    def feature_size(self) -> int:
        """Width of the features of a row: the residual streams after the auxiliary layers, side by side."""
        return len(self.aux_layers) * self.hidden_size

    @property
    def query_dim(self) -> int:
        """Width of all query heads together."""
        return self.num_heads * self.head_dim

    @property
    def kv_dim(self) -> int:
        """Width of all key heads together, and of all value heads."""
        return self.num_kv_heads * self.head_dim

    def context_rows(self, context_length: int) -> int:
        """The most rows of keys and values for which all layers together take memory in such a context.

        A row is 2 · kv_dim values. Room is doubled whenever it is too small, and never kept for more than
        twice the rows of a window or for a window and a block.
        """
        room = max(FIRST_CONTEXT_ROWS, 2 * (context_length + self.block_size))
        windows = (layer.window for layer in self.layers)
        return sum(
            room if window is None else min(room, window + max(window, self.block_size)) for window in windows
        )


@dataclass(frozen=True)
class DraftLattice:
    """K candidates of each of L positions, and how likely they are.

    token_ids: int64 [L, K], the likeliest first by the target's head alone.

    log_probs: float64. [L, K] if a position does not depend on the token before it: over the whole
    vocabulary. [L, K, K] if it does: log_probs[d, a, b] of candidate b after candidate a of the position
    before, over the candidates. At the first position a has no meaning, since the anchor is before it.
    """

    token_ids: NDArray[np.int64]
    log_probs: NDArray[np.float64]

    @property
    def is_conditional(self) -> bool:
        return self.log_probs.ndim == 3

    @property
    def is_finite(self) -> bool:
        """Whether every position has a likeliest candidate, and none is not a number.

        −infinity is a candidate that the head excludes.
        """
        return bool(np.isfinite(self.log_probs.max(axis=-1)).all())  # of a row with NaN, that is NaN


def visible_rows(
    layer: DflashLayer, queries: NDArray[np.int64], keys: NDArray[np.int64]
) -> NDArray[np.bool_] | None:
    """Which rows at positions `keys` [L] the rows at `queries` [B] attend to: [B, L]; None for all."""
    ahead = keys[None] - queries[:, None]
    if layer.window is None:
        return ahead <= 0 if layer.is_causal else None
    near = ahead > -layer.window
    return near & (ahead <= 0 if layer.is_causal else ahead < layer.window)


def tensor_shapes(spec: DflashSpec) -> dict[str, tuple[int, ...]]:
    """Every tensor of a drafter by its name in mainline GGUF, with its shape in numpy order."""
    width, kv_dim = spec.hidden_size, spec.kv_dim
    shapes: dict[str, tuple[int, ...]] = {
        "fc.weight": (width, spec.feature_size),
        "enc.output_norm.weight": (width,),
        "output_norm.weight": (width,),
    }
    if spec.is_laguna:
        shapes["enc.aux_norm.weight"] = (len(spec.aux_layers), width)
    for index in range(spec.num_layers):
        layer: dict[str, tuple[int, ...]] = {
            "attn_norm.weight": (width,),
            "attn_q.weight": (spec.query_dim, width),
            "attn_k.weight": (kv_dim, width),
            "attn_v.weight": (kv_dim, width),
            "attn_output.weight": (width, spec.query_dim),
            "attn_q_norm.weight": (spec.head_dim,),
            "attn_k_norm.weight": (spec.head_dim,),
            "ffn_norm.weight": (width,),
            "ffn_gate.weight": (spec.ffn_size, width),
            "ffn_up.weight": (spec.ffn_size, width),
            "ffn_down.weight": (width, spec.ffn_size),
        }
        if spec.is_laguna:
            layer["attn_gate.weight"] = (spec.num_heads, width)
        if spec.has_attention_bias:
            widths = {"q": spec.query_dim, "k": kv_dim, "v": kv_dim, "output": width}
            layer |= {f"attn_{name}.bias": (size,) for name, size in widths.items()}
        if spec.second is not None:
            kernel = spec.second.conv_kernel
            dynamic = 2 * kernel * (width // spec.second.conv_group)
            for name in ("attn_conv", "ffn_conv"):
                layer[f"{name}_base"] = (2, kernel, width)
                layer[f"{name}_proj.weight"] = (dynamic, width)
        shapes |= {f"blk.{index}.{name}": shape for name, shape in layer.items()}
    if spec.second is not None:
        rank = spec.second.selector_rank
        shapes["selector_predecessor.weight"] = (spec.vocab_size, rank)
        shapes["selector_successor.weight"] = (spec.vocab_size, rank)
        shapes["selector_hidden.weight"] = (rank, width)
    return shapes


def is_matrix(name: str, shape: tuple[int, ...]) -> bool:
    """Whether a tensor of `tensor_shapes` is multiplied or gathered, in the type that it has in the file."""
    return len(shape) == 2 and not name.endswith("_norm.weight")


def check_gpu(spec: DflashSpec) -> None:
    """Raises ConfigError if a GPU has no kernels for a drafter of these sizes."""
    if spec.head_dim not in HEAD_SIZES:
        raise ConfigError(
            f"the drafter has attention heads of {spec.head_dim}, and GPUs draft with heads of "
            f"{', '.join(map(str, HEAD_SIZES))}: use --device cpu, or draft in another way"
        )
    if spec.second is not None and spec.second.selector_top_k > MAX_CANDIDATES:
        raise ConfigError(
            f"the drafter selects of {spec.second.selector_top_k} tokens at a position, and GPUs of at most "
            f"{MAX_CANDIDATES}: use --device cpu, or draft in another way"
        )
    if spec.hidden_size % COLS_MULTIPLE or spec.ffn_size % COLS_MULTIPLE:
        raise ConfigError(
            f"the drafter has rows of {spec.hidden_size} and {spec.ffn_size} values, and GPUs draft with "
            f"multiples of {COLS_MULTIPLE}: use --device cpu, or draft in another way"
        )


def check_target(spec: DflashSpec, target: ModelSpec) -> None:
    """Raises ConfigError, with the reason, unless the drafter is one of models with the target's shape.

    The mask token, which is in the drafter's vocabulary, then is in the target's.
    """
    advice = "give the drafter that was trained for this model, or draft in another way"
    for what, drafter_has, target_has in (
        ("a vocabulary of {} tokens", spec.vocab_size, target.vocab_size),
        ("a hidden size of {}", spec.hidden_size, target.hidden_size),
        ("{} layers", spec.num_target_layers, target.num_layers),
    ):
        if drafter_has is not None and drafter_has != target_has:
            raise ConfigError(
                f"the drafter is for a model with {what.format(drafter_has)}, and the model has "
                f"{target_has}: {advice}"
            )
    if spec.logit_softcap and not math.isclose(spec.logit_softcap, target.logit_softcap, rel_tol=1e-6):
        has = f"at {target.logit_softcap:g}" if target.logit_softcap else "nowhere"
        raise ConfigError(
            f"the drafter is for a model that caps logits at {spec.logit_softcap:g}, and the model caps them "
            f"{has}: {advice}"
        )
    if spec.is_laguna and target.architecture != "laguna":
        raise ConfigError(f"the drafter is for Laguna, and the model is {target.architecture}: {advice}")
    if target.hyper_connections is not None:
        raise ConfigError(
            f"a drafter reads one residual stream, and {target.architecture} has "
            f"{target.hyper_connections.num_streams}: give a sidecar with its MTP block, or draft in "
            "another way"
        )
    if spec.aux_layers[-1] >= target.num_layers:
        raise ConfigError(
            f"the drafter reads the state after layer {spec.aux_layers[-1]}, and the last layer of the model "
            f"is {target.num_layers - 1}: {advice}"
        )
