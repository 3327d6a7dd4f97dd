"""What importing the room costs: nothing that only some verbs need."""

import subprocess
import sys


def test_importing_the_room_imports_no_heavy_library() -> None:
    code = "import sys, coldstream.gguf; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert not {"torch", "jinja2", "huggingface_hub", "transformers"} & set(done.stdout.split())
