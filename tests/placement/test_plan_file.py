"""Plans as JSON: what is written is read, and nothing else is taken for a plan of this model."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from plan_cases import fixed, models, random_uses, sizes

from coldstream.errors import (
    InconsistentError,
    LimitError,
    ModelFormatError,
    ModelNotFoundError,
    OutOfMemoryError,
    StorageError,
    TruncatedError,
    UnsupportedError,
)
from coldstream.kernels.experts.shapes import MAX_MAILBOX_ROWS
from coldstream.kernels.experts.split import MissTimes
from coldstream.placement import plan_file
from coldstream.placement.plan import PlanOptions, plan_placement
from coldstream.placement.plan_file import load_plan, plan_from_json, plan_to_json, save_plan
from coldstream.placement.pool_plan import HostPart, plan_pool
from coldstream.placement.run_plan import RunPlan
from coldstream.placement.sizes import ModelSizes

MODEL = sizes(10, 30, 10)
OPTIONS = PlanOptions(num_pinned_layers=1, layer_weights=((2, 1.5),))
PLACEMENT = plan_placement(MODEL, fixed(weights=40, caches=5), 155, options=OPTIONS)
USES = tuple((0.5, 0.25, 0.0, 1 / 3) for _ in range(3))
TIMES = MissTimes(30, tuple(range(20, 20 + MAX_MAILBOX_ROWS)), 6, 900, 800)
PLAN = RunPlan(
    PLACEMENT,
    threads=3,
    uses=USES,
    miss_times=TIMES,
    prefetch=2,
    prefetch_bytes=18,
    layers_ahead=1,
    max_cpu_rows=7,
    copy_bytes_per_step=300,
    attention_window=5,
)
TIMES_OF = json.loads(plan_to_json(PLAN))["miss_times"]
POOL_SIZES = replace(MODEL, expert_bytes=(16, 48, 16))  # in slots in RAM
POOL = plan_pool(PLACEMENT, POOL_SIZES.expert_bytes, HostPart(3, 2, 1), 300)
ON_TWO_CARDS = replace(PLAN, prefetch=0, prefetch_bytes=0, layers_ahead=0, card=1)
POOLED = replace(PLAN, miss_times=None, prefetch=0, prefetch_bytes=0, layers_ahead=0, pool=POOL)


@given(models(), st.integers(0, 1000), st.integers(0, 9), st.integers(0, 3))
def test_what_is_written_is_read(model: ModelSizes, budget: int, seed: int, pinned: int) -> None:
    options = PlanOptions(num_pinned_layers=pinned, layer_weights=((pinned, 0.3),))
    try:
        uses = random_uses(model, seed)
        placement = plan_placement(model, fixed(weights=9), budget, uses=uses, options=options)
    except OutOfMemoryError:
        return
    for known in (None, tuple(map(tuple, uses.tolist()))):
        plan = RunPlan(placement, seed, known)
        text = plan_to_json(plan)
        assert "\n" not in text
        assert plan_from_json(text, [model]) == plan


def test_files(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    save_plan(PLAN, path)
    assert load_plan(path, [MODEL]) == PLAN
    save_plan(POOLED, path)
    assert load_plan(path, [MODEL, POOL_SIZES]) == POOLED
    save_plan(ON_TWO_CARDS, path)
    assert load_plan(path, [MODEL]) == ON_TWO_CARDS
    kept = replace(POOL, fixed=replace(POOL.fixed, prompt_cache=9))
    save_plan(replace(POOLED, pool=kept, prompt_cache_bytes=9), path)
    assert load_plan(path, [MODEL, POOL_SIZES]).prompt_cache_bytes == 9
    assert list(tmp_path.iterdir()) == [path]
    with pytest.raises(StorageError, match="No such file"):
        save_plan(PLAN, tmp_path / "no" / "plan.json")


def change(**fields: Any) -> Callable[[dict[str, Any]], None]:
    return lambda document: document.update(fields)


@pytest.mark.parametrize(
    ("spoil", "kind", "said"),
    [
        (change(format="other"), UnsupportedError, "format"),
        (change(version=1), UnsupportedError, "version: 1, this program knows 16"),
        (change(more=1), InconsistentError, "unknown: more"),
        (lambda document: document.pop("tier"), InconsistentError, "missing or unknown: tier"),
        (change(model=None), InconsistentError, "model"),
        (change(tier="tape"), InconsistentError, "tier is 'tape'"),
        (change(budget_bytes=100), InconsistentError, "of a budget of 100"),
        (change(budget_bytes=1.5), InconsistentError, "budget_bytes is 1.5"),
        (change(budget_bytes=True), InconsistentError, "budget_bytes is True"),
        (change(ring_bytes=-1), InconsistentError, "ring_bytes is -1"),
        (change(ring_bytes=2**63), InconsistentError, "ring_bytes"),
        (change(expert_bytes=[10, 10, 10]), InconsistentError, "expert_bytes: experts of other sizes"),
        (change(resident=None), InconsistentError, "plan"),
        (change(resident=[[0], [0]]), InconsistentError, "2 layers with residents"),
        (change(resident=[[0, 1, 2, 3], [], ["0"]]), InconsistentError, "a list of numbers is none"),
        (change(resident=[[0, 1, 2, 3], [], [4]]), InconsistentError, "experts of layer 2"),
        (change(resident=[[0, 1, 2], [], []]), InconsistentError, "pinned layer"),
        (change(pinned_layers={}), InconsistentError, "a list of numbers is none"),
        (change(layer_weights=[1.5]), InconsistentError, "1 weights of layers, 3 layers"),
        (change(layer_weights=[1.0, 0.0, 1.0]), InconsistentError, "no number above 0"),
        (change(layer_weights=[1.0, "2", 1.0]), InconsistentError, "weights of layers are no numbers"),
        (change(layer_weights=None), InconsistentError, "weights of layers are no numbers"),
        (change(fixed=[]), InconsistentError, "fixed has other fields"),
        (lambda document: document["fixed"].update(weights="1"), InconsistentError, "weights is '1'"),
        (lambda document: document["fixed"].update(kv_type=1), InconsistentError, "kv_type is 1"),
        (lambda document: document["fixed"].pop("caches"), InconsistentError, "fixed has other fields"),
        (change(threads=1.0), InconsistentError, "threads is 1.0"),
        (change(prefetch=-1), InconsistentError, "prefetch is -1"),
        (change(prefetch_bytes=1.0), InconsistentError, "prefetch_bytes is 1.0"),
        (change(prefetch_bytes=0), InconsistentError, "prefetch_bytes: none for 2 experts of a layer"),
        (change(prefetch_bytes=1000), InconsistentError, "prefetch_bytes: 1000 bytes of a ring of"),
        (change(card=1), InconsistentError, "prefetch: 2 experts of a layer, which card 1 has"),
        (change(card=0, prefetch=0), InconsistentError, "card: 0, and no other GPU"),
        (change(card=True), InconsistentError, "card is True"),
        (change(layers_ahead=0), InconsistentError, "layers_ahead: none for 2 experts of a layer"),
        (change(layers_ahead="2"), InconsistentError, "layers_ahead is '2'"),
        (
            change(max_cpu_rows=9999),
            InconsistentError,
            "max_cpu_rows: 9999, a step asks the CPU for at most 8",
        ),
        (change(copy_bytes_per_step=None), InconsistentError, "copy_bytes_per_step is None"),
        (change(prompt_cache_bytes=-1), InconsistentError, "prompt_cache_bytes is -1"),
        (
            lambda document: document.update(fixed=document["fixed"] | {"prompt_cache": 1}, budget_bytes=999),
            InconsistentError,
            "prompt_cache: 1 bytes are counted for 0",
        ),
        (change(attention_window=0), InconsistentError, "attention_window: 0 positions"),
        (change(attention_window=1.5), InconsistentError, "attention_window is 1.5"),
        (change(miss_times=[0, 2]), InconsistentError, "miss_times has other fields"),
        (change(miss_times=TIMES_OF | {"cpu": [1, 2]}), InconsistentError, "times of 2 numbers of rows"),
        (change(miss_times=TIMES_OF | {"bus": 0}), InconsistentError, "no number of nanoseconds"),
        (change(miss_times=TIMES_OF | {"bus": 0.5}), InconsistentError, "bus of miss_times is 0.5"),
        (change(miss_times=TIMES_OF | {"answer": 2**31}), InconsistentError, "no number of nanoseconds"),
        (change(miss_times=TIMES_OF | {"bus_left": 1025}), InconsistentError, "takes from 1 to 1024 1024ths"),
        (change(uses=0.5), InconsistentError, "plan"),
        (change(uses=[[0.5] * 4] * 2), InconsistentError, "not those of every expert"),
        (change(uses=[[0.5] * 3 + [True]] * 3), InconsistentError, "uses are not lists of numbers"),
        (change(uses=[[0.5] * 3 + [-0.5]] * 3), InconsistentError, "a use that is no number"),
        (change(uses=[[0.5] * 3 + [float("nan")]] * 3), InconsistentError, "a use that is no number"),
    ],
)
def test_a_plan_that_is_none_is_refused(
    spoil: Callable[[dict[str, Any]], None], kind: type[ModelFormatError], said: str
) -> None:
    document = json.loads(plan_to_json(PLAN))
    spoil(document)
    with pytest.raises(kind, match=said) as caught:
        plan_from_json(json.dumps(document), [MODEL], Path("my.json"))
    assert str(caught.value).startswith("my.json: ")
    assert str(caught.value).endswith("make it again with `coldstream plan --out`")


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (lambda pool: pool.pop("fixed"), "pool has other fields"),
        (change(fixed={"buffers": 1}), "fixed of the pool has other fields"),
        (lambda pool: pool["fixed"].update(workspace=1.5), "a size of the pool is 1.5"),
        (lambda pool: pool["fixed"].update(prompt_cache=-1), "a size of the pool is -1"),
        (lambda pool: pool["fixed"].update(prompt_cache=1), "prompt_cache: 1 bytes are counted for 0"),
        (change(budget_bytes="1"), "a size of the pool is '1'"),
        (change(budget_bytes=9), "bytes of a budget of 9 of RAM"),
        (change(expert_bytes=[0, 48, 17]), "pool: experts of other sizes than the model has"),
        (change(expert_bytes=[16, 48, 16]), "other layers than those that may miss an expert"),
        (change(expert_bytes=[0, 48]), "3 layers in RAM, 2 layers"),
        (change(loaded=None), "a list of numbers is none"),
        (change(loaded=[[], [1, 1], []]), "experts of layer 1 in RAM are not rising numbers"),
        (change(loaded=[[], [4], []]), "an expert in RAM from 4 on"),
        (change(loaded=[[0], [], []]), "experts of layer 0 in RAM, all of which the GPU holds"),
    ],
)
def test_a_pool_that_is_none_is_refused(spoil: Callable[[dict[str, Any]], None], said: str) -> None:
    document = json.loads(plan_to_json(POOLED))
    spoil(document["pool"])
    with pytest.raises(InconsistentError, match=said):
        plan_from_json(json.dumps(document), [MODEL, POOL_SIZES])


def test_a_plan_with_a_pool_lacks_an_expert() -> None:
    whole = plan_placement(MODEL, fixed(), 10**6)
    with pytest.raises(ValueError, match="no GPU that lacks an expert"):
        RunPlan(whole, threads=1, pool=POOL)
    with pytest.raises(ValueError, match="no GPU that lacks an expert"):
        RunPlan(replace(PLACEMENT, tier="ram"), threads=1, pool=POOL)


def test_trap_21_another_models_plan_is_refused() -> None:
    text = plan_to_json(PLAN)
    with pytest.raises(InconsistentError, match="the plan is another model's"):
        plan_from_json(text, [replace(MODEL, fingerprint="00" * 16)])
    with pytest.raises(InconsistentError, match="other numbers of layers or experts"):
        plan_from_json(text, [replace(MODEL, num_experts=5)])


def test_a_plan_that_was_truncated_is_refused() -> None:
    text = plan_to_json(PLAN)
    for length in range(0, len(text), 7):
        with pytest.raises((TruncatedError, UnsupportedError)):
            plan_from_json(text[:length], [MODEL])


@pytest.mark.parametrize("text", ["", "[]", "null", "1", "NaN", "{}", "[" * 100_000, "\0", "{}{}"])
def test_json_that_is_no_plan(text: str) -> None:
    with pytest.raises(ModelFormatError):
        plan_from_json(text, [MODEL])


def test_files_that_are_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for path in (tmp_path / "none.json", tmp_path, Path("\0")):
        with pytest.raises(ModelNotFoundError, match="Give the path of a plan"):
            load_plan(path, [MODEL])
    (tmp_path / "bytes").write_bytes(b"\xff\xfe")
    with pytest.raises(UnsupportedError, match="not text"):
        load_plan(tmp_path / "bytes", [MODEL])
    monkeypatch.setattr(plan_file, "MAX_BYTES", 100)
    save_plan(PLAN, tmp_path / "plan.json")
    with pytest.raises(LimitError, match="more than 100 bytes"):
        load_plan(tmp_path / "plan.json", [MODEL])
