"""The parts of a block, as functions over `Ops`. Knows nothing of requests or text."""

from coldstream.layers.attention import AttentionWeights, attention, project_attention
from coldstream.layers.gated_delta_net import (
    GatedDeltaNetWeights,
    gated_delta_net,
    project_gated_delta_net,
)
from coldstream.layers.moe import MoeWeights, moe

__all__ = [
    "AttentionWeights",
    "GatedDeltaNetWeights",
    "MoeWeights",
    "attention",
    "gated_delta_net",
    "moe",
    "project_attention",
    "project_gated_delta_net",
]
