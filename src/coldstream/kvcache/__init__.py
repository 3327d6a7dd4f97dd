"""Keys, values and recurrent states of the sequences in flight. Knows nothing of sampling."""

from coldstream.kvcache.cache import AttentionState, DeltaNetState, LayerState, ModelCache

__all__ = ["AttentionState", "DeltaNetState", "LayerState", "ModelCache"]
