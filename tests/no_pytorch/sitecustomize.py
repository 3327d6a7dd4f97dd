"""For Python with this folder in its path, the packages of the extra `cuda` are not installed."""

import sys

for name in ("torch", "cuda", "nvidia"):
    sys.modules[name] = None  # type: ignore[assignment]  # importing raises, and find_spec finds nothing
