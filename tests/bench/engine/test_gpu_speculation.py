"""Drafters of stated acceptance: how often they are right, and that the text is what it is without them."""

from dataclasses import replace
from itertools import accumulate
from operator import mul
from pathlib import Path

import pytest

from bench.engine.gpu_speculation import Blocks, Cell
from bench.engine.stated_drafts import ACCEPTED, FIRST_ID, MAX_DEPTH, Acceptance
from bench.full_size_model import FullSizeWriter
from bench.random_drafter import PUBLISHED, write
from bench.random_model import Shape
from coldstream.engine import LLM, OpenedModel
from coldstream.models.dflash.spec import Dflash2Spec, DflashLayer

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


DRAFTER = replace(
    PUBLISHED,
    hidden_size=512,
    vocab_size=SHAPE.vocab,
    num_heads=4,
    num_kv_heads=2,
    head_dim=64,
    ffn_size=256,
    mask_id=SHAPE.vocab - 1,
    aux_layers=(0, 2),
    num_target_layers=4,
    layers=(DflashLayer(64, is_causal=False),) * 2,
    second=Dflash2Spec(conv_kernel=2, conv_group=16, selector_rank=8, selector_top_k=4),
)


@pytest.mark.parametrize("accepted", [*ACCEPTED.values(), (0.0,)])
def test_chances_are_those_stated(accepted: tuple[float, ...]) -> None:
    chances = Acceptance(accepted).chances()
    assert len(chances) == MAX_DEPTH
    assert list(accumulate(chances, mul))[: len(accepted)] == pytest.approx(list(accepted))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model") / "small.gguf"
    FullSizeWriter(path, SHAPE, seed=3, threads=2).write()
    return path


def measured(opened: OpenedModel, kind: str, budget: int | str, draft: Path | None) -> None:
    acceptance = Acceptance(ACCEPTED[kind])
    each = Cell(opened, budget, Blocks(opened, acceptance, draft))
    each.run(FIRST_ID + 20, warm=8, timed=450)
    (text,) = each.result()["texts"]
    if budget in (1, 4):
        assert text["nodes_per_step"] == pytest.approx(budget, rel=0.05)
        expected = 1 + sum(accumulate(acceptance.chances()[:budget], mul))
        assert text["tokens_per_step"] == pytest.approx(expected, rel=0.1)


@pytest.mark.sharded(of="measurements")
@pytest.mark.parametrize("budget", [0, 1, 4, "auto"])
def test_tokens_are_accepted_as_often_as_stated(model: Path, budget: int | str) -> None:
    with LLM(model, device="cpu", threads=1, ctx_size=700, spec_type="mtp") as llm:
        measured(llm.opened, "mtp", budget, None)


@pytest.mark.sharded(of="measurements")
def test_those_of_a_drafter_too(model: Path, tmp_path: Path) -> None:
    draft = tmp_path / "drafter.gguf"
    write(draft, DRAFTER)
    options = {"spec_type": "dflash", "model_draft": str(draft)}
    with LLM(model, device="cpu", threads=1, ctx_size=700, **options) as llm:
        measured(llm.opened, "dflash", 4, draft)
