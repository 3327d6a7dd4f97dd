"""Where the bytes of routed experts are, and who computes them."""

from coldstream.experts.cache import Copy, ExpertCache, StepStart

__all__ = ["Copy", "ExpertCache", "StepStart"]
