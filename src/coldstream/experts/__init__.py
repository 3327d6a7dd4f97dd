"""Where the bytes of routed experts are, and who computes them.

So far they have one place, the mapped file, which `Ops.experts` reads: the room is still empty.
"""
