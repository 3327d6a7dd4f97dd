"""Verification: real models opened anew for each part, what it compares, and how it keeps to its time."""

import math
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from builders import Dims, write_gguf
from coldstream.assets import demo_model_path, verification_text
from coldstream.engine import LLM, EngineConfig, verification
from coldstream.engine.verification import AMOUNTS, Amount, Measured, Part, amount_for, difference, verify
from coldstream.planning.draft_file import open_target
from host_device import HostDevice
from host_gpu import opened_on

LITTLE = Amount(32, 6, 1)


@pytest.fixture(autouse=True)
def _little(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verification, "amount_for", lambda *given: LITTLE)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> EngineConfig:
    types = {"*_exps.weight": "Q4_K"}
    (path,) = write_gguf(tmp_path_factory.mktemp("models") / "tiny.gguf", types=types)
    return EngineConfig(str(path), threads=2)


def test_all_parts_of_the_bundled_model_give_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    opened = []
    open_model = verification.open_model
    monkeypatch.setattr(
        verification, "open_model", lambda config, progress: opened.append(config) or open_model(config)
    )
    found = verify(EngineConfig(str(demo_model_path()), threads=2), math.inf)
    assert found.has_passed
    reference, middle, smallest, drafts, gpu, one_thread = found.outcomes
    assert [outcome.is_reference for outcome in found.outcomes] == [True, *[False] * 5]
    ran = [outcome for outcome in found.outcomes if outcome.measured]
    assert [outcome.part.config for outcome in ran] == opened
    for outcome in ran:
        assert outcome.measured is not None
        assert outcome.measured.num_tokens == LITTLE.tokens_generated
        assert outcome.measured.nats == ran[0].measured.nats
    shares = [outcome.part.planned.plan.num_resident for outcome in (smallest, middle, reference)]
    assert shares == sorted(set(shares))
    assert drafts.measured.tokens_per_step >= 1
    assert drafts.part.config.spec_type == "mtp"
    assert one_thread.part.config.threads == 1
    assert drafts.part.expected is one_thread.part.expected is None
    assert gpu.measured or "device cuda" in gpu.part.reason


def test_perplexity_is_that_of_the_logits() -> None:
    found = verify(EngineConfig(str(demo_model_path()), threads=2), 1e-9)
    with LLM(demo_model_path(), threads=1, ctx_size=256) as llm:
        ids = llm.get_tokenizer().encode(verification_text())[:256]
        logits = llm.logits(ids).astype(np.longdouble)
    logits -= logits.max(axis=1, keepdims=True)
    likely = np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True)
    expected = np.exp(-np.log(likely[np.arange(255), ids[1:]]).mean())
    assert found.outcomes[0].measured.perplexity == pytest.approx(float(expected), rel=1e-9)


def test_a_part_that_computes_otherwise_is_found(tiny: EngineConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    """One part attends to fewer positions, which changes what the model says."""
    parts_of = verification.parts_of

    def planted(config: EngineConfig, *others: object) -> list[Part]:
        first, *rest = parts_of(config, *others)
        changed = verification._planned_part("planted", replace(rest[-1].config, attention_window=4), None)
        return [first, *rest, changed]

    monkeypatch.setattr(verification, "parts_of", planted)
    found = verify(tiny, math.inf)
    assert not found.has_passed
    *others, last = found.outcomes
    assert all(outcome.difference is None for outcome in others)
    assert last.difference


@pytest.mark.sharded(of="models on the CPU")
def test_a_model_that_changes_between_two_parts_is_found(
    tiny: EngineConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Weights of the smallest budget's file are others: its experts come from the disk."""
    (other,) = write_gguf(tmp_path / "other.gguf", types={"*_exps.weight": "Q4_K"}, seed=99)
    open_model = verification.open_model

    def opened(config: EngineConfig, progress: object) -> object:
        is_first = config.ram == "auto" and config.threads != 1
        return open_model(config if is_first else replace(config, model=str(other), ram="auto"))

    monkeypatch.setattr(verification, "open_model", opened)
    found = verify(tiny, math.inf)
    assert not found.has_passed


def test_a_dense_model_on_the_cpu_has_one_budget(tmp_path: Path) -> None:
    (path,) = write_gguf(tmp_path / "dense.gguf", "qwen35")
    found = verify(EngineConfig(str(path), threads=2), math.inf)
    _, middle, smallest, drafts, *_ = found.outcomes
    assert middle.measured is smallest.measured is None
    assert middle.part.reason == smallest.part.reason == "all of the model has to be in fast memory"
    assert drafts.measured is not None
    assert drafts.part.config.spec_type == "ngram"


@pytest.mark.sharded(of="models on the CPU")
def test_budgets_that_are_too_small_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verification, "_FRACTIONS", (-0.6, -0.5))
    found = verify(EngineConfig(str(demo_model_path()), threads=2), math.inf)
    for outcome in found.outcomes[1:3]:
        assert outcome.measured is None
        assert re.search(r"below the minimum of .* try --ram \d+M", outcome.part.reason), outcome.part.reason


def test_without_time_only_the_first_part_runs(tiny: EngineConfig) -> None:
    found = verify(tiny, 1e-9)
    first, *others = found.outcomes
    assert first.measured is not None
    assert first.measured.num_tokens == LITTLE.tokens_generated
    assert all(outcome.measured is None and outcome.part.reason for outcome in others)
    assert found.has_passed


def test_a_deadline_ends_a_part_and_what_there_is_is_compared(tiny: EngineConfig) -> None:
    target = open_target(Path(tiny.model), tiny)
    with target.file:
        (reference, *_) = verification.parts_of(target)
    with verification._Session(reference, None) as session:
        whole = session.measure(LITTLE, math.inf)
        part = session.measure(LITTLE, 0.0)
    assert [len(answer) for answer in part.answers] == [1]
    assert part.nats == ()
    assert part.perplexity is None
    assert difference(whole, part) is None


@given(seconds=st.floats(1e-3, 1e5), prefill=st.floats(1, 1e5), decode=st.floats(0.1, 1e4))
def test_the_amount_is_the_largest_that_fits(seconds: float, prefill: float, decode: float) -> None:
    def taken(amount: Amount) -> float:
        return amount.tokens_read / prefill + amount.tokens_generated / decode

    chosen = amount_for(seconds, prefill, decode)
    assert chosen == AMOUNTS[-1] or taken(chosen) <= seconds
    larger = AMOUNTS[: AMOUNTS.index(chosen)]
    assert all(taken(amount) > seconds for amount in larger)


MEASURED = Measured(((1, 2, 3), (4, 5)), (10.0, 20.0), 510, 32, 1.0, 1.0, None)


@pytest.mark.parametrize(
    ("changed", "found"),
    [
        ({}, None),
        ({"answers": ((1, 2), (4,))}, None),
        ({"answers": ((1, 2, 3),), "nats": ()}, None),
        ({"answers": ((1, 2, 4), (4, 5))}, "answer 1 has token 4 in place 3, not 3"),
        ({"answers": ((1, 2, 3), (9, 5))}, "answer 2 has token 9 in place 1, not 4"),
        ({"nats": (10.0, 20.000000000000004)}, "window 2 of the text has 20.000000000000004 nats, not 20.0"),
    ],
)
def test_a_difference_names_its_place(changed: dict[str, object], found: str | None) -> None:
    assert difference(MEASURED, replace(MEASURED, **changed)) == found


@pytest.mark.sharded(of="models on a GPU")
def test_a_gpu_and_the_cpu_give_the_same(
    tmp_path: Path, compiled_for_the_host: HostDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On the model of a GPU, with experts that it holds in three numbers."""
    (path,) = write_gguf(tmp_path / "small.gguf", dims=Dims(layers=4, hidden=128, experts=16, experts_used=3))
    monkeypatch.setattr(verification, "amount_for", lambda *given: Amount(16, 3, 1, 32))
    with opened_on(compiled_for_the_host):
        found = verify(EngineConfig(str(path), threads=1, vram="465408K"), math.inf)
    assert [outcome.part.name for outcome in found.outcomes] == [
        "GPU, largest budget",
        "GPU, middle budget",
        "GPU, smallest budget",
        "GPU, drafts",
        "CPU, all threads",
        "CPU, one thread",
    ]
    assert [outcome.part.reason for outcome in found.outcomes[:5]] == [""] * 5
    assert found.has_passed
    assert {outcome.part.config.device for outcome in found.outcomes[:4]} == {"cuda"}
    assert found.outcomes[4].part.config.device == "cpu"
    largest, middle, smallest = (outcome.part.planned.plan.num_resident for outcome in found.outcomes[:3])
    assert largest > middle > smallest
