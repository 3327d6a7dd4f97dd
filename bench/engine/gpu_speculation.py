"""Drafts of the full-size model on a GPU: tokens per second, by size of the draft and memory for experts.

    python -m bench.engine.gpu_speculation full-nextn.gguf  writes the file first if it isn't there (22 GB)
    python -m bench.engine.gpu_speculation alike.gguf --like-neighbours    where neighbours share more experts
    python -m bench.engine.gpu_speculation full.gguf --drafter dflash --model-draft drafter.gguf     and this

The file's weights are random, and so is what its block for multi-token prediction or a drafter predicts. They
run as in the product, with all that it costs; their tokens are then replaced: by the right ones, which are
known as the greedy text walks through the vocabulary, as often as published for each depth, otherwise by
wrong ones.
"""

import argparse
import os
import shlex
import statistics
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from bench.device import describe
from bench.engine.gpu import numbers
from bench.engine.stated_drafts import ACCEPTED, FIRST_ID, MAX_DEPTH, Acceptance, StatedDflash, StatedMtp
from bench.full_size_model import APART, FULL_SHAPE, LIKE_NEIGHBOURS, FullSizeWriter
from bench.random_drafter import write as write_drafter
from bench.results import ROOT, add_result_options, write_result
from coldstream.decoding import FixedSizes, SamplingParams, SizesByCost, Speculation, uses_between
from coldstream.engine import LLM, OpenedModel
from coldstream.kernels.cuda.contents import CudaArray
from coldstream.models.dflash.file import DflashFile

SHORT_PROMPT, WARM_TOKENS, TIMED_TOKENS = 64, 512, 384
TEXT_STEP = 20_011  # between the first generated ids of texts
# The host reads what was chosen before it drafts again; or the device, where it holds all experts, goes on by
# itself in fused steps.
BY = ("host", "device")


def write_script(script: CudaArray, first_id: int, acceptance: Acceptance) -> None:
    """The drafts of fused steps in the text from `first_id` on."""
    first, depths = first_id - SHORT_PROMPT, script.shape[1]  # first: the token at position 0
    rows = [
        [
            first + position + 1 + depth if depth < acceptance.right_depths(position) else FIRST_ID + depth
            for depth in range(depths)
        ]
        for position in range(len(script))
    ]
    script[:] = np.array(rows, np.int32)


def text(
    opened: OpenedModel, speculation: Speculation | None, first_id: int, warm: int, timed: int
) -> dict[str, Any]:
    """Seconds of a token, and what the drafts brought. Raises RuntimeError if the text leaves the walk."""
    llm, before = LLM.from_opened(replace(opened, speculation=speculation)), opened.runner.expert_uses
    prompt = [first_id - SHORT_PROMPT + i for i in range(SHORT_PROMPT)]
    params = SamplingParams(temperature=0, ignore_eos=True, max_tokens=warm + timed)
    stream, token_ids, times = llm.stream(prompt, params), [], []
    for piece in stream:
        token_ids += piece.token_ids
        times.append((len(token_ids), time.perf_counter()))
    last = piece.statistics
    llm.forget()
    if token_ids != [first_id + i for i in range(warm + timed)]:
        raise RuntimeError(f"not a figure of this model: text from {first_id} left the walk")
    count, start = next(each for each in times if each[0] >= warm)
    seconds = (times[-1][1] - start) / (len(token_ids) - count)
    found = None if last is None else last.speculation
    uses = uses_between(before, opened.runner.expert_uses)
    # Of all tokens of the text, over all layers; an expert that several rows of a step use counts once.
    experts = {} if uses is None else {"missing_per_token": uses[1] / len(token_ids)}
    if found is None:
        return {"seconds": seconds, **experts}
    return {
        "seconds": seconds,
        **experts,
        "tokens_per_step": found.tokens_per_step,
        "nodes_per_step": found.drafted / found.steps,
        "draft_ms": 1e3 * found.draft_s / found.steps,
        "verify_ms": 1e3 * found.verify_s / found.steps,
        "accepted_by_depth": list(found.accepted_by_depth),
        "steps": found.steps,
        "fused_steps": found.fused_steps,
    }


class Cell:
    """One size of drafts, by one of `BY`; what it learned of a text it knows in the next."""

    def __init__(self, opened: OpenedModel, budget: int | str, blocks: "Blocks", by: str = "host") -> None:
        """budget: nodes, or "auto"; 0: without drafts, as the product generates then."""
        self.budget, self.by = budget, by if budget else None
        self._opened, self._blocks = opened, blocks
        self._speculation: Speculation | None = None
        if self.by is not None:
            drafter = blocks.drafter(self.by)
            # What captures cost is left out, as fixed sizes have made them.
            by_cost = SizesByCost(drafter.name, misses=opened.runner.expert_uses is not None)
            sizes = by_cost if budget == "auto" else FixedSizes(int(budget))
            self._speculation = Speculation(drafter, sizes)
        self.texts: list[dict[str, Any]] = []

    def run(self, first_id: int, warm: int, timed: int = TIMED_TOKENS) -> None:
        """Adds a text."""
        if self.by == "device":
            write_script(self._blocks.script, first_id, self._blocks.acceptance)
        found = text(self._opened, self._speculation, first_id, warm, timed)
        self.texts.append(found)
        print(self.budget, self.by, f"{1 / found['seconds']:.1f} tok/s", flush=True)

    def result(self) -> dict[str, Any]:
        """For the file."""
        tok_s = 1 / statistics.median(each["seconds"] for each in self.texts)
        return {"budget": self.budget, "by": self.by, "tok_s": tok_s, "texts": self.texts}


class Blocks:
    """What drafts, by who accepts: the model's block, or a drafter of a file."""

    def __init__(self, opened: OpenedModel, acceptance: Acceptance, draft: Path | None) -> None:
        """draft: the drafter's file; None for the block."""
        self._opened, self.acceptance, self._draft = opened, acceptance, draft
        self._blocks: dict[str, Any] = {}
        self.script: CudaArray | None = None  # of the one whose device drafts by itself

    def drafter(self, by: str) -> StatedMtp | StatedDflash:
        """For texts. What computes is loaded when it is first asked for."""
        if by not in self._blocks:
            self._blocks[by] = self._loaded(by)
        rows = self._blocks[by].new_sequence()
        drafter = StatedMtp(rows, max_steps=MAX_DEPTH) if self._draft is None else StatedDflash(rows)
        drafter.acceptance = self.acceptance
        return drafter

    def _loaded(self, by: str) -> Any:
        runner = self._opened.runner
        if self._draft is None:
            block, depths = runner.load_mtp(), MAX_DEPTH
        else:
            with DflashFile.open(self._draft) as file:
                block, depths = runner.load_dflash(file), file.spec.block_size - 1
        if by == "device":
            from bench.engine.scripted_fused_steps import script_fused_steps  # it needs a GPU's packages

            self.script = script_fused_steps(block, runner.context_length, depths)
        elif runner.tier == "cuda":
            block.fused = None
        return block


def measure(options: argparse.Namespace, vram: str) -> dict[str, Any]:
    """All sizes with so much memory, interleaved; each text begins with another size, as texts differ.

    What is not timed of a text is so long that its experts are in as far as they go, and the first ones are
    gone again at its end.
    """
    ctx_size = SHORT_PROMPT + WARM_TOKENS + options.tokens + 80
    settings = {"device": "cuda", "vram": vram, "ctx_size": ctx_size, "spec_type": options.drafter}
    if options.model_draft is not None:
        settings["model_draft"] = str(options.model_draft)
    with LLM(options.model, **settings) as llm:
        opened = llm.opened
        placement = opened.planned.run.placement
        is_resident = placement.is_all_resident
        warm = 64 if is_resident else WARM_TOKENS
        acceptance = Acceptance(tuple(options.accepted))
        blocks = Blocks(opened, acceptance, options.model_draft)
        ways = options.by if is_resident else ["host"]
        sizes = [(budget, by) for budget in (*options.budgets, "auto") for by in ways]
        cells = [Cell(opened, budget, blocks, by) for budget, by in ((0, ""), *sizes, (0, ""))]
        for turn in range(options.texts):
            first_id = FIRST_ID + turn * TEXT_STEP % (FULL_SHAPE.vocab - 100_000)
            for each in cells[turn % len(cells) :] + cells[: turn % len(cells)]:
                each.run(first_id, warm, options.tokens)
        rows, resident_bytes = [each.result() for each in cells], placement.resident_bytes
    return {
        "vram": vram,
        "experts_gib": None if is_resident else resident_bytes / 2**30,
        "rows": rows,
    }


def shares(text: str) -> list[float]:
    """Of an option: numbers with commas between them."""
    return [float(each) for each in text.split(",")]


def command_of(options: argparse.Namespace) -> list[str]:
    """The words that give these figures again."""
    words = ["python", "-m", "bench.engine.gpu_speculation", options.model.name, "--vram", *options.vram]
    if options.model_draft is not None:
        words += ["--drafter", options.drafter, "--model-draft", options.model_draft.name]
    if options.accepted is not None:
        words += ["--accepted", ",".join(map(str, options.accepted))]
    if options.like_neighbours:
        words += ["--like-neighbours"]
    if options.tokens != TIMED_TOKENS:
        words += ["--tokens", str(options.tokens)]
    words += ["--by", *options.by]
    return [*words, "--budgets", ",".join(map(str, options.budgets)), "--texts", str(options.texts)]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", type=Path)
    add_result_options(parser, ROOT / "docs" / "results" / "gpu" / "speculation.json")
    parser.add_argument("--vram", nargs="+", default=["auto", "7G", "4G"], help="memory, one after the other")
    parser.add_argument("--budgets", type=numbers, default=[1, 2, 3, 4, 8, 16])
    parser.add_argument("--by", nargs="+", choices=BY, default=list(BY), help="what accepts drafts")
    parser.add_argument("--texts", type=int, default=2)
    parser.add_argument("--drafter", choices=ACCEPTED, default="mtp")
    parser.add_argument("--model-draft", type=Path, help="file of the drafter, for dflash")
    parser.add_argument("--accepted", type=shares, help="of drafted tokens by depth; by default as published")
    parser.add_argument("--like-neighbours", action="store_true", help="of a file that is written")
    parser.add_argument("--tokens", type=int, default=TIMED_TOKENS, help="of a text that are timed")
    options = parser.parse_args()
    if (options.drafter == "dflash") != (options.model_draft is not None):
        parser.error("--drafter dflash has a file, --model-draft, and mtp has none")
    words = command_of(options)
    options.accepted = options.accepted or list(ACCEPTED[options.drafter])
    if not options.model.exists():
        shape = replace(FULL_SHAPE, has_nextn=options.drafter == "mtp")
        threads, kind = len(os.sched_getaffinity(0)), LIKE_NEIGHBOURS if options.like_neighbours else APART
        FullSizeWriter(options.model, shape, 0, threads, shares=kind).write()
    if options.model_draft is not None and not options.model_draft.exists():
        write_drafter(options.model_draft)
    result = {
        "command": shlex.join(words),
        "machine": describe("cuda"),
        "drafter": options.drafter,
        "accepted": options.accepted,
        "like_neighbours": options.like_neighbours,
        "timed_tokens": options.tokens,
        "cells": [measure(options, vram) for vram in options.vram],
    }
    write_result(result, options.out, options.commit)
    return 0


if __name__ == "__main__":
    sys.exit(main())
