"""Makes the bundled profile of the demo model: which experts the standard library's source uses.

    python tools/demo_profile.py

The beginnings of evenly spaced files that the model was trained on, a few hundred tokens each. To be run
again whenever the demo model is trained again.
"""

import sys
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parent.parent))

from coldstream.assets import demo_model_path, demo_profile_path
from coldstream.engine.routing_profile import profile_text
from coldstream.planning.config import EngineConfig
from tools.train_demo.data import load_corpus

NUM_FILES = 32
CHARS_PER_FILE = 800


def profile_source() -> str:
    """The text."""
    files = [file for file in load_corpus().train if len(file.text) >= CHARS_PER_FILE]
    chosen = np.linspace(0, len(files) - 1, NUM_FILES).astype(int)
    return "".join(files[number].text[:CHARS_PER_FILE] for number in chosen)


def main() -> int:
    trace = profile_text(EngineConfig(str(demo_model_path()), device="cpu"), profile_source())
    path = demo_profile_path()
    trace.save(path)
    print(f"{path}: {trace.num_steps} tokens, {path.stat().st_size} bytes")
    return 0


if __name__ == "__main__":
    sys.exit(main())
