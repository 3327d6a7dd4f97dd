"""Drafters of stated acceptance: how often they are right, and that the text is what it is without them."""

from dataclasses import replace
from itertools import accumulate
from operator import mul
from pathlib import Path

import pytest

import gpu_speculation
from coldstream.engine import LLM
from full_size_model import FullSizeWriter
from gpu_speculation import ACCEPTED, FIRST_ID, Blocks, Cell, chances
from random_model import Shape

SHAPE = Shape(
    hidden=512,
    layers=4,
    experts=16,
    experts_per_token=4,
    expert_ffn=256,
    heads=4,
    kv_heads=2,
    head_dim=64,
    key_heads=2,
    value_heads=4,
    state_dim=64,
    vocab=FIRST_ID + 600,
    context=1024,
    has_nextn=True,
)


def test_chances_are_those_published() -> None:
    assert [round(chance, 9) for chance in accumulate(chances(), mul)][:3] == list(ACCEPTED)


@pytest.mark.parametrize("budget", [0, 1, 4, "auto"])
def test_tokens_are_accepted_as_often_as_stated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, budget: int | str
) -> None:
    monkeypatch.setattr(gpu_speculation, "TIMED_TOKENS", 450)
    path = tmp_path / "small.gguf"
    FullSizeWriter(path, replace(SHAPE, layers=4), seed=3, threads=2).write()
    with LLM(path, device="cpu", threads=1, ctx_size=700, spec_type="mtp") as llm:
        each = Cell(llm.opened, budget, Blocks(llm.opened))
        each.run(FIRST_ID + 20, warm=8)
    (text,) = each.result()["texts"]
    if budget in (1, 4):
        assert text["nodes_per_step"] == pytest.approx(budget, rel=0.05)
        expected = 1 + sum(accumulate(chances()[:budget], mul))
        assert text["tokens_per_step"] == pytest.approx(expected, rel=0.1)
