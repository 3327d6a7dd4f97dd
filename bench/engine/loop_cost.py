"""CPU time of a token without its model: the loop, the choice and the text of a stream.

    python -m bench.engine.loop_cost
    python -m bench.engine.loop_cost --old CHECKOUT --pairs 15

Prints microseconds of CPU time a token, on one thread. The runner's layers are left out, and its logits are
always the same. --old is a checkout of another commit with its extension. That runs in interleaved pairs with
this one, and the ratio is printed too. `measure` runs with the sources of either commit, so it imports only
what both have.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, Final

NEW_TOKENS: Final = 2000
TEXTS: Final = 6  # in one process; the first ones warm it up
PROMPT: Final = list(range(16))


def measure(tokens: int, temperature: float) -> float:
    """Microseconds of CPU time a token, the least of some texts."""
    import numpy as np

    from coldstream import LLM, SamplingParams
    from coldstream.assets import demo_model_path

    with LLM(demo_model_path(), device="cpu", threads=1, ctx_size=4096) as llm:
        runner: Any = llm._opened.runner
        logits = np.random.default_rng(0).normal(size=(1, runner.spec.vocab_size)).astype(np.float32)
        runner._launch = lambda segments: runner._sequences.reserve([each.demand for each in segments])
        runner._logits_of = lambda rows: logits
        params = SamplingParams(temperature=temperature, seed=1, max_tokens=tokens, ignore_eos=True)
        found = []
        for number in range(TEXTS):
            start = time.process_time()
            count = sum(len(piece.token_ids) for piece in llm.stream([number, *PROMPT], params))
            found.append((time.process_time() - start) / count * 1e6)
    return min(found)


def measured_by(python: Path, folder: str, temperature: float) -> float:
    """What an interpreter's commit measures, in a process of its own."""
    command = [str(python), str(Path(__file__)), "--temperature", str(temperature)]
    found = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True)
    microseconds: float = json.loads(found.stdout)["us_per_token"]
    return microseconds


def compare(old: Path, pairs: int, temperature: float) -> dict[str, Any]:
    from bench.engine.versus_commit import median_interval
    from tools.checkouts import make_environment

    with tempfile.TemporaryDirectory() as folder:
        commits = {
            "old": make_environment(Path(folder) / "venv", old.resolve() / "src"),
            "new": Path(sys.executable),
        }
        found: dict[str, list[float]] = {name: [] for name in commits}
        for number in range(pairs):
            for name in sorted(commits, reverse=bool(number % 2)):
                found[name].append(measured_by(commits[name], folder, temperature))
    ratios = [new / before for new, before in zip(found["new"], found["old"], strict=True)]
    medians = {f"{name}_us_per_token": statistics.median(values) for name, values in found.items()}
    return medians | {"ratio": statistics.median(ratios), "interval": median_interval(ratios)}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--old", type=Path)
    parser.add_argument("--pairs", type=int, default=15)
    parser.add_argument("--temperature", type=float, default=0.8)
    parser.add_argument("--tokens", type=int, default=NEW_TOKENS)
    options = parser.parse_args()
    if options.old:
        print(json.dumps(compare(options.old, options.pairs, options.temperature)))
    else:
        print(json.dumps({"us_per_token": measure(options.tokens, options.temperature)}))


if __name__ == "__main__":
    main()
