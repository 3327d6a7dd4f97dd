"""Peak resident memory while generating, beside the size of the model file.

    python -m bench.engine.memory MODEL --out docs/results/memory_NAME.json

A fresh process loads the model, answers a 512-token prompt with 64 tokens, and reads its own high-water mark.
"""

import argparse
import subprocess
import sys
from pathlib import Path

from bench.results import ROOT, write_result

PROGRAM = """
import sys
from pathlib import Path
from bench.runners import open_cpu_runner
path, threads = sys.argv[1:]
runner = open_cpu_runner(Path(path), threads=int(threads), context_length=2048)
sequence = runner.new_sequence()
logits = runner.extend(sequence, [i % 200 for i in range(512)])
for _ in range(64):
    logits = runner.extend(sequence, (int(logits.argmax()),))
print(next(line.split()[1] for line in open("/proc/self/status") if line.startswith("VmHWM")))
"""


def measure(model: Path, threads: int) -> dict[str, object]:
    """Bytes: the file, the peak, and the difference."""
    command = [sys.executable, "-c", PROGRAM, str(model.resolve()), str(threads)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    peak = int(done.stdout) * 1024
    size = model.stat().st_size
    return {
        "model": model.name,
        "command": f"python -m bench.engine.memory {model.name}",
        "file_bytes": size,
        "peak_rss_bytes": peak,
        "above_file_bytes": peak - size,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    result = measure(options.model, options.threads)
    write_result(result, options.out)


if __name__ == "__main__":
    main()
