"""The shape of a small cache that tests of several folders use."""

from dataclasses import dataclass

from coldstream.kvcache.cache import NgramShape


@dataclass(frozen=True)
class Shape:
    layer_kinds: tuple[str, ...] = ("delta_net", "attention", "delta_net")
    kv_heads: tuple[tuple[int, int], ...] = ((2, 8),)
    kv_windows: tuple[int | None, ...] = (None,)
    index_dim: int = 0
    conv_kernel: int = 4
    conv_dim: int = 24
    num_value_heads: int = 3
    ssm_state_size: int = 4
    ngram_shape: NgramShape | None = None
