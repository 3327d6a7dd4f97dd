"""The bundled model: the same next tokens as llama.cpp, and text that looks like Python."""

import argparse
import io
import math
import tokenize
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from bench.peers.agreement import NEAR_TIE, first_gap, greedy
from bench.runners import open_cpu_runner
from coldstream import LLM, SamplingParams
from coldstream.assets import demo_model_path
from coldstream.gguf import GGUFFile, Tokenizer
from coldstream.models.cpu.runner import CpuRunner
from tools import llama_cpp as oracle

POSITIONS = 512
DEMO_LIMIT_BYTES = 32_000_000


@pytest.fixture(scope="module")
def runner() -> Iterator[CpuRunner]:
    with open_cpu_runner(demo_model_path(), threads=2, context_length=1024) as opened:
        yield opened


@pytest.fixture(scope="module")
def source_ids() -> list[int]:
    with GGUFFile.open(demo_model_path()) as file:
        tokenizer = Tokenizer.from_metadata(file.metadata)
    return tokenizer.encode(Path(argparse.__file__).read_text())[:POSITIONS]


def test_it_leaves_room_for_a_drafter() -> None:
    assert demo_model_path().stat().st_size <= DEMO_LIMIT_BYTES


@pytest.mark.sharded(of="models on the CPU")
def test_most_likely_tokens_are_those_of_llama_cpp(runner: CpuRunner, source_ids: list[int]) -> None:
    ours = runner.logits(source_ids)
    theirs = oracle.logits(demo_model_path(), source_ids)
    different = np.flatnonzero(ours.argmax(axis=1) != theirs.argmax(axis=1))
    gaps = [theirs[i].max() - theirs[i, ours[i].argmax()] for i in different]
    assert len(different) <= 0.02 * POSITIONS
    assert all(gap <= NEAR_TIE for gap in gaps), gaps


def test_it_knows_python_better_than_chance(runner: CpuRunner, source_ids: list[int]) -> None:
    logits = runner.logits(source_ids).astype(np.float64)
    log_sums = np.log(np.exp(logits - logits.max(axis=1, keepdims=True)).sum(axis=1)) + logits.max(axis=1)
    losses = log_sums[:-1] - logits[np.arange(POSITIONS - 1), source_ids[1:]]
    assert losses.mean() < 0.4 * math.log(runner.spec.vocab_size)


def test_greedy_text_is_that_of_llama_cpp(runner: CpuRunner, source_ids: list[int]) -> None:
    prompt = source_ids[:64]
    ours, theirs = greedy(runner, prompt, 48), oracle.greedy(demo_model_path(), prompt, 48)
    gap = first_gap(demo_model_path(), prompt, ours, theirs)
    assert gap is None or gap <= NEAR_TIE


def test_completions_are_made_of_python_tokens() -> None:
    with LLM(demo_model_path()) as llm:
        (output,) = llm.generate("import os\nimport sys\n\n", SamplingParams(temperature=0, max_tokens=64))
    lines = output.text.splitlines()[:-1]
    assert len(lines) >= 2
    tokens = tokenize.generate_tokens(io.StringIO("\n".join(lines[:2]) + "\n").readline)
    assert sum(token.type == tokenize.NAME for token in tokens) >= 2
