"""A GPU for which the system page-locks little RAM: text and speed, by how many bytes may be locked.

    python -m bench.full_size_model full.gguf                                     20 GB
    python -m bench.engine.locked_memory full.gguf --vram 6G --locked all 8G 1G 0 --out FILE

The registration of memory is refused beyond those bytes, as some systems do, and nothing else is. The text
must be that of the first run. Each run opens the model, computes a prompt, and generates behind it.
"""

import argparse
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final
from unittest.mock import patch

import numpy as np
from cuda.bindings import driver

from bench.device import describe
from bench.peers.peer_tokens import random_tokens
from bench.results import add_result_options, write_result
from coldstream.engine import EngineConfig, open_model
from coldstream.engine.opened_model import OpenedModel
from coldstream.planning.config import parse_size

ALL: Final = "all"
WARM: Final = 16  # tokens that are not timed


@contextmanager
def locks_at_most(num_bytes: int) -> Iterator[dict[int, int]]:
    """Refuses registrations of host memory that would make it more; bytes that are registered, by address."""
    register, unregister = driver.cuMemHostRegister, driver.cuMemHostUnregister
    registered: dict[int, int] = {}

    def limited(address: int, size: int, flags: int) -> Any:
        if sum(registered.values()) + size > num_bytes:
            return (driver.CUresult.CUDA_ERROR_OUT_OF_MEMORY,)
        (status,) = register(address, size, flags)
        if status == driver.CUresult.CUDA_SUCCESS:
            registered[int(address)] = size
        return (status,)

    def freed(address: int) -> Any:
        registered.pop(int(address), None)
        return unregister(address)

    with (
        patch.object(driver, "cuMemHostRegister", limited),
        patch.object(driver, "cuMemHostUnregister", freed),
    ):
        yield registered


def answered(opened: OpenedModel, prompt: Sequence[int], count: int) -> dict[str, Any]:
    """Tokens behind a prompt, and the rates of both."""
    runner, tokens = opened.runner, list[int]()
    warm = runner.new_sequence()
    runner.extend(warm, prompt)  # captures what the timed prompt needs
    runner.release(warm)
    sequence = runner.new_sequence()
    began = time.perf_counter()
    token = int(np.array(runner.extend(sequence, prompt)).argmax())
    prompt_s, began = time.perf_counter() - began, 0.0
    for number in range(WARM + count):
        if number == WARM:
            began = time.perf_counter()
        tokens.append(token)
        token = int(np.array(runner.extend(sequence, (token,))).argmax())
    decode_s = time.perf_counter() - began
    return {"tokens": tokens, "prompt_rate": len(prompt) / prompt_s, "decode_rate": count / decode_s}


def measure(options: argparse.Namespace, locked: str) -> dict[str, Any]:
    """One run with so many bytes that may be locked."""
    most = 2**62 if locked == ALL else parse_size(locked)
    config = EngineConfig(str(options.model), device="cuda", ctx_size=options.ctx_size, vram=options.vram)
    with locks_at_most(most) as registered:
        began = time.perf_counter()
        opened = open_model(config)
        try:
            load_s, kept = time.perf_counter() - began, sum(registered.values())
            prompt = random_tokens(options.prompt, 1)
            found = answered(opened, prompt, options.generate)
            warnings = [each for each in opened.warnings if "page-locked" in each]
        finally:
            opened.close()
        if registered:
            raise RuntimeError(f"{sum(registered.values())} bytes are locked behind the model's end")
    return {"most_locked": locked, "locked_bytes": kept, "load_s": load_s, "warnings": warnings, **found}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("--vram", default="auto")
    parser.add_argument("--locked", nargs="+", default=[ALL, "1G", "0"], help="sizes, or all")
    parser.add_argument("--prompt", type=int, default=512, help="tokens")
    parser.add_argument("--generate", type=int, default=128, help="tokens")
    parser.add_argument("--ctx-size", type=int, default=4096)
    add_result_options(parser)
    options = parser.parse_args()
    runs = [measure(options, locked) for locked in options.locked]
    texts = [run.pop("tokens") for run in runs]
    if any(text != texts[0] for text in texts):
        raise SystemExit(f"the texts differ: {texts}")
    sizes = " ".join(options.locked)
    command = (
        f"python -m bench.engine.locked_memory {options.model.name} --vram {options.vram} --locked {sizes}"
    )
    result = {"command": command, "machine": describe("cuda"), "prompt": options.prompt, "runs": runs}
    write_result(result, options.out, options.commit)


if __name__ == "__main__":
    main()
