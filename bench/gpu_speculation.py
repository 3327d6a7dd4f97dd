"""Drafts of the full-size model on a GPU: tokens per second, by size of the draft and memory for experts.

    python bench/gpu_speculation.py full-nextn.gguf      writes the model file first if it isn't there (22 GB)

The file's weights are random, and so is what its block for multi-token prediction predicts. The block runs
as in the product, with all that it costs; its tokens are then replaced: by the right ones, which are known as
the greedy text walks through the vocabulary, as often as published for each depth, otherwise by wrong ones.
"""

import argparse
import math
import os
import shlex
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import torch

from coldstream.decoding import FixedSizes, SamplingParams, SizesByCost, Speculation, TokenTree
from coldstream.decoding.drafters import MtpDrafter
from coldstream.engine import LLM, OpenedModel
from device import describe
from full_size_model import FULL_SHAPE, FullSizeWriter
from gpu import numbers
from results import ROOT, write_result

# The share of positions whose token is right, at depths 1, 2, 3: llama.cpp's of the 35B at temperature 0.6.
# Each further one is right as often as the third, given the one before.
ACCEPTED = (0.80, 0.70, 0.63)
SHORT_PROMPT, WARM_TOKENS, TIMED_TOKENS = 64, 512, 384
FIRST_ID, TEXT_STEP = 1000, 20_011  # of the first generated ids of texts
MAX_DEPTH = 16
# The host reads what was chosen before it drafts again; or the device goes on by itself, in rounds, where it
# holds all experts.
BY = ("host", "device")


def chances() -> list[float]:
    """Of the token at each depth to be right, given that those before it are."""
    given = [b / a for a, b in zip((1.0, *ACCEPTED), ACCEPTED, strict=False)]
    return given + [given[-1]] * (MAX_DEPTH - len(given))


def right_depths(position: int) -> int:
    """How many tokens of a draft after a root at `position` are right: of position alone."""
    random, count = Random(1 + position), 0
    for chance in chances():
        if random.random() >= chance:
            break
        count += 1
    return count


class StatedDrafter(MtpDrafter):
    """The block's own cost, and the acceptance of `ACCEPTED`."""

    def propose(self, context: Sequence[int], budget: int) -> TokenTree:
        """See `Drafter`."""
        super().propose(context, budget)
        given, count = chances(), min(budget, MAX_DEPTH)
        num_right = right_depths(len(context) - 1)
        token_ids = [(context[-1] + 1 if depth < num_right else FIRST_ID) + depth for depth in range(count)]
        log_probs = [sum(map(math.log, given[: depth + 1])) for depth in range(count)]
        return TokenTree(tuple(token_ids), tuple(range(-1, count - 1)), tuple(log_probs))


def write_script(script: torch.Tensor, first_id: int) -> None:
    """The drafts of rounds in the text from `first_id` on."""
    first = first_id - SHORT_PROMPT  # the token at position 0
    rows = [
        [
            first + position + 1 + depth if depth < right_depths(position) else FIRST_ID + depth
            for depth in range(MAX_DEPTH)
        ]
        for position in range(len(script))
    ]
    script.copy_(torch.tensor(rows, dtype=torch.int32))


def text(opened: OpenedModel, speculation: Speculation | None, first_id: int, warm: int) -> dict[str, Any]:
    """Seconds of a token, and what the drafts brought. Raises RuntimeError if the text leaves the walk."""
    llm = LLM.from_opened(replace(opened, speculation=speculation))
    prompt = [first_id - SHORT_PROMPT + i for i in range(SHORT_PROMPT)]
    params = SamplingParams(temperature=0, ignore_eos=True, max_tokens=warm + TIMED_TOKENS)
    stream, token_ids, times = llm.stream(prompt, params), [], []
    for piece in stream:
        token_ids += piece.token_ids
        times.append((len(token_ids), time.perf_counter()))
    last = piece.statistics
    llm.forget()
    if token_ids != [first_id + i for i in range(warm + TIMED_TOKENS)]:
        raise RuntimeError(f"not a figure of this model: text from {first_id} left the walk")
    count, start = next(each for each in times if each[0] >= warm)
    seconds = (times[-1][1] - start) / (len(token_ids) - count)
    found = None if last is None else last.speculation
    if found is None:
        return {"seconds": seconds}
    return {
        "seconds": seconds,
        "tokens_per_step": found.tokens_per_step,
        "nodes_per_step": found.drafted / found.steps,
        "draft_ms": 1e3 * found.draft_s / found.steps,
        "verify_ms": 1e3 * found.verify_s / found.steps,
        "accepted_by_depth": list(found.accepted_by_depth),
        "steps": found.steps,
        "rounds": found.rounds,
    }


class Cell:
    """One size of drafts, by one of `BY`; what it learned of a text it knows in the next."""

    def __init__(self, opened: OpenedModel, budget: int | str, blocks: "Blocks", by: str = "host") -> None:
        """budget: nodes, or "auto"; 0: without drafts, as the product generates then."""
        self.budget, self.by = budget, by if budget else None
        self._opened, self._blocks = opened, blocks
        self._speculation: Speculation | None = None
        if self.by is not None:
            drafter = StatedDrafter(blocks.block(self.by).new_sequence(), max_steps=MAX_DEPTH)
            sizes = SizesByCost("mtp") if budget == "auto" else FixedSizes(int(budget))
            runner = opened.runner
            self._speculation = Speculation(
                drafter, sizes, None, lambda: runner.expert_uses, lambda: runner.num_captured
            )
        self.texts: list[dict[str, Any]] = []

    def run(self, first_id: int, warm: int) -> None:
        """Adds a text."""
        if self.by == "device":
            write_script(self._blocks.script, first_id)
        found = text(self._opened, self._speculation, first_id, warm)
        self.texts.append(found)
        print(self.budget, self.by, f"{1 / found['seconds']:.1f} tok/s", flush=True)

    def result(self) -> dict[str, Any]:
        """For the file."""
        tok_s = 1 / statistics.median(each["seconds"] for each in self.texts)
        return {"budget": self.budget, "by": self.by, "tok_s": tok_s, "texts": self.texts}


class Blocks:
    """The model's block for multi-token prediction, by who drafts with it."""

    def __init__(self, opened: OpenedModel) -> None:
        self._opened = opened
        self._blocks: dict[str, Any] = {}
        self.script = torch.empty(0)  # of the one whose device drafts by itself

    def block(self, by: str) -> Any:
        """Loaded when it is first asked for."""
        if by not in self._blocks:
            runner = self._opened.runner
            block: Any = runner.load_mtp()
            if by == "device":
                from scripted_rounds import script_rounds  # it needs a GPU's packages

                self.script = script_rounds(block, runner.context_length, MAX_DEPTH)
            elif runner.tier == "cuda":
                block.rounds = None
            self._blocks[by] = block
        return self._blocks[by]


def measure(options: argparse.Namespace, vram: str) -> dict[str, Any]:
    """All sizes with so much memory, in turns that begin at another one for each text, as texts differ.

    What is not timed of a text is so long that its experts are in as far as they go, and the first ones are
    gone again at its end.
    """
    ctx_size = SHORT_PROMPT + WARM_TOKENS + TIMED_TOKENS + 80
    settings = {"device": "cuda", "vram": vram, "ctx_size": ctx_size, "spec_type": "mtp"}
    with LLM(options.model, **settings) as llm:
        opened = llm.opened
        placement = opened.planned.run.placement
        is_resident = placement.is_all_resident
        warm = 64 if is_resident else WARM_TOKENS
        blocks, ways = Blocks(opened), options.by if is_resident else ["host"]
        sizes = [(budget, by) for budget in (*options.budgets, "auto") for by in ways]
        cells = [Cell(opened, budget, blocks, by) for budget, by in ((0, ""), *sizes, (0, ""))]
        for turn in range(options.texts):
            first_id = FIRST_ID + turn * TEXT_STEP % (FULL_SHAPE.vocab - 100_000)
            for each in cells[turn % len(cells) :] + cells[: turn % len(cells)]:
                each.run(first_id, warm)
        rows, resident_bytes = [each.result() for each in cells], placement.resident_bytes
    return {
        "vram": vram,
        "experts_gib": None if is_resident else resident_bytes / 2**30,
        "rows": rows,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "results" / "gpu" / "speculation.json")
    parser.add_argument("--vram", nargs="+", default=["auto", "7G", "4G"], help="memory, one after the other")
    parser.add_argument("--budgets", type=numbers, default=[1, 2, 3, 4, 8, 16])
    parser.add_argument("--by", nargs="+", choices=BY, default=list(BY), help="what accepts drafts")
    parser.add_argument("--texts", type=int, default=2)
    parser.add_argument("--commit", help="of these sources, where they are without their repository")
    options = parser.parse_args()
    if not options.model.exists():
        shape = replace(FULL_SHAPE, has_nextn=True)
        FullSizeWriter(options.model, shape, 0, len(os.sched_getaffinity(0))).write()
    words = ["python", "bench/gpu_speculation.py", options.model.name, "--vram", *options.vram]
    words += ["--by", *options.by]
    words += ["--budgets", ",".join(map(str, options.budgets)), "--texts", str(options.texts)]
    result = {
        "command": shlex.join(words),
        "machine": describe("cuda"),
        "accepted": ACCEPTED,
        "timed_tokens": TIMED_TOKENS,
        "cells": [measure(options, vram) for vram in options.vram],
    }
    write_result(result, options.out, options.commit)
    return 0


if __name__ == "__main__":
    sys.exit(main())
