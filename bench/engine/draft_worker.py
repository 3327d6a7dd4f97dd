"""One commit of a comparison of drafts: times a DFlash drafter's blocks, and texts with its drafts.

    python draft_worker.py '{"model": "model.gguf", "model_draft": "drafter.gguf", "device": "cuda"}'

The argument has the fields of `EngineConfig`. A line of JSON in gives one out. `{"rows": n, "repeats": r}`
times drafts behind n committed rows, before each of which three more rows are observed. `{"prompt": text,
"new_tokens": n}` generates a text. Imports nothing of `bench`, as it runs with the sources of another commit.
"""

import json
import sys
import time
from dataclasses import replace
from typing import Any

import numpy as np

from coldstream import LLM, SamplingParams
from coldstream.decoding import FixedSizes, Speculation
from coldstream.decoding.drafters import DflashDrafter
from coldstream.engine.opened_model import open_model
from coldstream.models.dflash.file import DflashFile
from coldstream.planning.config import EngineConfig

OBSERVED, ANCHOR, NUM_CANDIDATES, WARM = 3, 3, 8, 3


def draft_seconds(drafting: Any, num_rows: int, repeats: int) -> list[float]:
    """Of each draft of a whole block, with the rows that are observed before it."""
    context = drafting.new_sequence()
    spec, random, seconds = context.spec, np.random.default_rng(num_rows), []

    def features(count: int) -> Any:
        rows = random.standard_normal((count, spec.feature_size), dtype=np.float32)
        return on_device(drafting, rows)

    context.append(features(num_rows))
    context.draft(ANCHOR, spec.block_size, NUM_CANDIDATES)
    for _ in range(WARM + repeats):
        rows = features(OBSERVED)
        start = time.perf_counter()
        context.append(rows)
        context.draft(ANCHOR, spec.block_size, NUM_CANDIDATES)
        seconds.append(time.perf_counter() - start)
    return seconds[WARM:]


def on_device(drafting: Any, rows: Any) -> Any:
    """Where a runner has them; commits before the package's own arrays had tensors."""
    if not hasattr(drafting, "block"):
        return rows
    import torch

    values = torch.from_numpy(rows).bfloat16()
    if hasattr(drafting, "device"):
        return values.to(drafting.device)
    from coldstream.kernels.cuda.contents import new, write

    found = new(tuple(values.shape), "bfloat16")
    write(found, values.view(torch.uint16).numpy())
    return found


def text(llm: LLM, prompt: str, new_tokens: int) -> dict[str, Any]:
    params = SamplingParams(temperature=0, max_tokens=new_tokens, ignore_eos=True)
    (output,) = llm.generate([prompt], params)
    drafts = output.statistics.speculation
    assert drafts is not None, "the model drafts"
    return {
        "tokens": list(output.token_ids),
        "seconds": output.statistics.generation_s,
        "steps": drafts.steps,
        "accepted": drafts.accepted,
    }


def main() -> None:
    config = EngineConfig(**json.loads(sys.argv[1]), spec_type="dflash")
    opened = open_model(config)
    with DflashFile.open(str(config.model_draft)) as file:
        drafting: Any = opened.runner.load_dflash(file)  # type: ignore[attr-defined]
    # Each step drafts a whole block: which sizes pay is another question.
    context = drafting.new_sequence()
    speculation = Speculation(DflashDrafter(context), FixedSizes(context.spec.block_size - 1))
    with LLM.from_opened(replace(opened, speculation=speculation)) as llm:
        print(json.dumps({"ready": True}), flush=True)
        for line in sys.stdin:
            request = json.loads(line)
            if "prompt" in request:
                answer = text(llm, request["prompt"], request["new_tokens"])
            else:
                answer = {"seconds": draft_seconds(drafting, request["rows"], request["repeats"])}
            print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
