"""Where the bytes of routed experts lie, why they move, and what computes them.

The arithmetic, its launches and the layouts of memory shared with C++ and CUDA are in `kernels/`.
"""

from coldstream.experts.slots.cache import Copy, ExpertCache, StepStart

__all__ = ["Copy", "ExpertCache", "StepStart"]
