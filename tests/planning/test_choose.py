"""What is chosen: how `auto` becomes concrete, and that a choice follows from its arguments alone."""

import json
import re
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from builders import Dims, make_model, write_model
from coldstream.errors import ConfigError, OutOfMemoryError
from coldstream.gguf.reader import GGUFFile
from coldstream.kvcache.cache import context_bytes, kv_token_bytes
from coldstream.models.read_spec import read_spec
from coldstream.models.spec.layer_specs import AttentionSpec
from coldstream.models.spec.model_spec import ModelSpec
from coldstream.placement.hardware import GpuHardware, Hardware
from coldstream.placement.plan import FixedPart, PlanOptions
from coldstream.planning.advice import advised
from coldstream.planning.choose import (
    DEFAULT_CTX_SIZE,
    PARALLEL_SHARE,
    TooSmall,
    choose,
    concrete_config,
    is_sure_to_map,
    place,
    resolve,
    tree_rows_of,
    with_contexts,
)
from coldstream.planning.config import MAX_PARALLEL, EngineConfig
from coldstream.planning.facts import Facts, ModelFacts, with_kv_type
from coldstream.planning.gather import model_facts
from coldstream.planning.memory import estimated
from coldstream.planning.unknowns import GpuShape, MachineRates, Missing, WorkspaceShape
from specs import with_layers

CORES, FREE = 4, 16 * 2**30


@pytest.fixture(scope="module")
def spec(tmp_path_factory: pytest.TempPathFactory) -> ModelSpec:
    dims = Dims(layers=4, hidden=32, experts=2, expert_ffn=32, shared_ffn=32, state=32, context=65536)
    (path,) = write_model(tmp_path_factory.mktemp("spec") / "tiny.gguf", make_model(dims=dims))
    with GGUFFile.open(Path(path)) as file:
        return read_spec(file.metadata, file.tensors)


def test_resolving_makes_auto_concrete_and_leaves_the_rest(spec: ModelSpec) -> None:
    config = EngineConfig("m.gguf", seed=3, tier="generic")
    resolved = resolve(config, spec, CORES, FREE)
    assert resolved == replace(config, threads=4, ctx_size=DEFAULT_CTX_SIZE, spec_type="none")
    assert resolve(resolved, spec, CORES, FREE) == resolved
    assert json.loads(json.dumps(asdict(resolved)))["threads"] == 4
    assert resolve(replace(config, threads=7, ctx_size=0), spec, CORES, FREE).threads == 7


def test_the_default_context_fits_model_and_memory(spec: ModelSpec) -> None:
    config = EngineConfig("m.gguf")
    small_model = replace(spec, context_length=100)
    assert resolve(config, small_model, CORES, FREE).ctx_size == 100
    token_bytes = kv_token_bytes(spec, config.cache_type_k)
    assert resolve(config, spec, CORES, 4 * 1000 * token_bytes).ctx_size == 1000
    assert resolve(config, spec, CORES, 0).ctx_size == 1


def test_the_default_context_follows_what_is_free_beside_all_weights(spec: ModelSpec) -> None:
    long = replace(spec, context_length=8 * DEFAULT_CTX_SIZE)
    config = EngineConfig("m.gguf")
    token_bytes = kv_token_bytes(spec, config.cache_type_k)
    scarce = 4 * 1000 * token_bytes

    def default(spare_tokens: int, free: int = FREE) -> int | None:
        return resolve(config, long, CORES, free, spare_tokens * token_bytes).ctx_size

    assert default(-1) == default(0) == default(2 * DEFAULT_CTX_SIZE) == DEFAULT_CTX_SIZE
    assert default(2 * DEFAULT_CTX_SIZE + 2) == DEFAULT_CTX_SIZE + 1
    assert default(100 * DEFAULT_CTX_SIZE) == long.context_length
    assert (default(0, scarce), default(1000, scarce), default(2002, scarce)) == (1000, 1000, 1001)
    assert resolve(replace(config, ctx_size=7), long, CORES, FREE, FREE).ctx_size == 7


@given(st.integers(0, 2**40), st.integers(0, 2**17))
def test_a_resolved_context_is_never_beyond_model_or_memory(
    spec: ModelSpec, available: int, wanted: int
) -> None:
    config = EngineConfig("m.gguf", ctx_size=wanted)
    try:
        resolved = resolve(config, spec, CORES, available)
    except (ConfigError, OutOfMemoryError):
        assert wanted > spec.context_length or wanted * kv_token_bytes(spec, config.cache_type_k) > available
        return
    assert resolved.ctx_size is not None
    assert 1 <= resolved.ctx_size <= spec.context_length
    assert wanted in (0, resolved.ctx_size)


def test_an_impossible_context_says_what_is_possible(spec: ModelSpec) -> None:
    longest = r"65537 is beyond the 65536 tokens .*: give at most --ctx-size 65536"
    with pytest.raises(ConfigError, match=longest):
        resolve(EngineConfig("m.gguf", ctx_size=65537), spec, CORES, FREE)
    with pytest.raises(
        OutOfMemoryError, match=r"needs .* GiB of the RAM, .* GiB are free: try --ctx-size \d+"
    ):
        resolve(EngineConfig("m.gguf", ctx_size=60000), spec, CORES, 2**20)


def test_the_cache_counts_attention_layers_only(spec: ModelSpec) -> None:
    # One attention layer of 2 key and value heads of 64 elements.
    assert kv_token_bytes(spec, "i16") == 1 * 2 * 2 * (2 * 64 + 16)


def test_types_of_caches_are_for_both_devices_and_for_heads_of_whole_blocks(spec: ModelSpec) -> None:
    on_gpu = EngineConfig("m.gguf", device="cuda")
    for kv_type, row_bytes in (("i16", 2 * 64 + 16), ("i8", 64 + 16)):
        integers = replace(on_gpu, cache_type_k=kv_type, cache_type_v=kv_type)
        assert kv_token_bytes(spec, integers.cache_type_k) == 1 * 2 * 2 * row_bytes
        for device in ("cpu", "cuda"):
            assert resolve(replace(integers, device=device), spec, CORES, FREE).cache_type_k == kv_type
    smallest = replace(on_gpu, cache_type_k="i3", cache_type_v="i3")
    # 24 bytes and a float32 scale, in pieces of 16.
    assert kv_token_bytes(spec, smallest.cache_type_k) == 1 * 2 * (32 + 32)
    with pytest.raises(
        ConfigError, match="i16 caches hold heads of multiples of 16 values up to 512, not 40"
    ):
        resolve(
            EngineConfig("m.gguf", device="cpu"), with_layers(spec, AttentionSpec, head_dim=40), CORES, FREE
        )


@pytest.mark.parametrize("budget", [2**20, 2**26, 2**28, 2**40])
def test_contexts_side_by_side_take_a_share_of_the_budget(spec: ModelSpec, budget: int) -> None:
    config = resolve(EngineConfig("m.gguf", ctx_size=1024, parallel="auto"), spec, 2, 2**50)
    found = with_contexts(config, spec, budget).parallel
    each = context_bytes(spec, 1024, "i16")
    assert isinstance(found, int)
    assert found == 1 or found * each <= budget * PARALLEL_SHARE
    assert found == MAX_PARALLEL or 2 * found * each > budget * PARALLEL_SHARE
    assert found & (found - 1) == 0
    asked = replace(config, parallel=3)
    assert with_contexts(asked, spec, budget) == asked


@pytest.mark.parametrize(
    ("device", "spec_type", "tree_budget", "num_contexts", "rows"),
    [
        ("cpu", "none", 3, 4, 0),
        ("cpu", "mtp", 3, 1, 4),
        ("cpu", "mtp", 3, 4, 16),
        ("cuda", "ngram", 3, 4, 16),
        ("cuda", "mtp", 3, 4, 4),  # drafts for one sequence at a time
        ("cpu", "ngram", 15, 8, 64),
        ("cpu", "ngram", "auto", 1, 64),
    ],
)
def test_each_context_has_room_for_a_tree(
    device: Any, spec_type: Any, tree_budget: Any, num_contexts: int, rows: int
) -> None:
    config = EngineConfig("m.gguf", device=device, spec_type=spec_type, tree_budget=tree_budget)
    assert tree_rows_of(config, num_contexts) == rows


GPU = GpuHardware("a GPU", "1.0", 2**35, 2**34, 1e12, 2e14, 2.5e10, 2e10, 3e10, 7e-6)
MACHINE = Hardware("a CPU", ("avx2",), 4, 4, 2**35, 2**33, 5e10, GPU)
UNMEASURED = replace(MACHINE, read_bytes_per_s=None, gpu=GpuHardware("a GPU", "1.0", 2**35, 2**34))
MIB = 2**20


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> ModelFacts:
    """Of a file that is closed, and gone."""
    dims = Dims(experts=64, experts_used=3)
    (path,) = write_model(tmp_path_factory.mktemp("facts") / "tiny.gguf", make_model(nextn=True, dims=dims))
    with GGUFFile.open(path) as file:
        facts = model_facts(file, read_spec(file.metadata, file.tensors))
    path.unlink()
    return facts


def learn(facts: Facts, missing: Missing) -> Facts:
    """`facts` with an answer that is made up, but larger where more is asked for."""
    what, counts = missing.what, facts.counts
    if isinstance(what, MachineRates):
        return replace(facts, hardware=MACHINE, has_rates=True)
    if isinstance(what, WorkspaceShape):
        size = MIB + 1000 * what.threads * what.num_rows
        return replace(facts, counts=replace(counts, workspaces={**counts.workspaces, what: size}))
    if isinstance(what, GpuShape):
        sizes = with_kv_type(facts.model.on_gpu, facts.model.spec, what.capacity.kv_type)
        part = estimated(facts.model.spec, sizes, facts.model.nextn_bytes, what.capacity, what.chunk_size)
        return replace(facts, counts=replace(counts, on_gpu={**counts.on_gpu, what: part}))
    caches = what.ctx_size * what.num_contexts * kv_token_bytes(facts.model.spec, what.kv_type)
    mapped = FixedPart(
        what.ctx_size,
        what.kv_type,
        512,
        MIB,
        caches,
        what.threads * MIB,
        num_contexts=what.num_contexts,
        num_tree_rows=what.draft.num_tree_rows,
    )
    parts = (mapped, replace(mapped, workspace=2 * mapped.workspace))
    return replace(facts, counts=replace(counts, in_ram={**counts.in_ram, what: parts}))


Asked = tuple[EngineConfig, Facts, PlanOptions, int]


@st.composite
def asked(draw: st.DrawFn, model: ModelFacts) -> Asked:
    """Settings, facts that nothing was counted for, options, and kept prefixes."""
    device = draw(st.sampled_from(["cpu", "cuda"]))
    budgets: dict[str, Any] = {"ram": draw(st.one_of(st.just("auto"), st.integers(0, 1500 * MIB)))}
    if device == "cuda":
        budgets["vram"] = draw(st.one_of(st.just("auto"), st.integers(440 * MIB, 560 * MIB)))
        budgets["prefetch"] = draw(st.sampled_from(["auto", 0]))
    config = EngineConfig(
        "m",
        device=device,
        ctx_size=draw(st.sampled_from([None, 64, 4096])),
        parallel=draw(st.sampled_from([1, 3, "auto"])),
        spec_type=draw(st.sampled_from(["auto", "none", "mtp"])),
        threads=draw(st.sampled_from(["auto", 3])),
        **budgets,
    )
    facts = Facts(model, UNMEASURED, has_rates=False, is_estimated=draw(st.booleans()))
    options = PlanOptions(num_pinned_layers=draw(st.integers(0, 1)))
    return config, facts, options, draw(st.sampled_from([0, 5 * MIB]))


@pytest.mark.sharded(of="plans")
@settings(max_examples=150)
@given(data=st.data())
def test_a_choice_follows_from_its_arguments_alone(model: ModelFacts, data: st.DataObject) -> None:
    """It names what it misses, once each, and then gives the same answer each time."""
    config, facts, options, kept = data.draw(asked(model))
    missed: list[object] = []
    while isinstance(answer := choose(config, facts, options, kept), Missing):
        assert answer.what not in missed
        missed.append(answer.what)
        facts = learn(facts, answer)
    assert choose(config, facts, options, kept) == answer
    if isinstance(answer, TooSmall):
        assert answer.budget_bytes < answer.least_bytes == sum(answer.made_of.values())
        return
    placement = answer.placement
    assert placement.total_bytes <= placement.budget_bytes
    assert answer.prompt_cache_bytes == kept
    lacks_experts = placement.tier == "vram" and not placement.is_all_resident
    assert (MachineRates() in missed) == lacks_experts
    assert any(isinstance(what, GpuShape) for what in missed) == (
        config.device == "cuda" and not facts.is_estimated
    )
    concrete = concrete_config(config, answer, CORES)
    assert "auto" not in (concrete.threads, concrete.prefetch, concrete.spec_type, concrete.parallel)
    assert place(concrete, facts, options, kept) == placement, "a choice that is made is not made again"


@pytest.mark.parametrize(
    ("is_sure", "changed"),
    [
        (True, {}),
        (True, {"vram": "auto"}),  # 16 GiB are free
        (False, {"vram": 20 * 2**30}),
        (False, {"ram": 23 * 2**30}),  # 4 GiB less than with what a runner takes beside
        (True, {"ram": 24 * 2**30}),
        (False, {"device": "cpu", "vram": "auto"}),
        (False, {"plan": "p.json", "vram": "auto", "ram": "auto"}),
    ],
)
def test_a_file_is_locked_early_where_a_gpu_lacks_a_part_of_it(
    is_sure: bool, changed: dict[str, Any]
) -> None:
    """And RAM has room for it."""
    config = EngineConfig("m", **{"device": "cuda", "vram": 2**30, "ram": 30 * 2**30, **changed})
    assert is_sure_to_map(config, MACHINE, 20 * 2**30, 18 * 2**30) == is_sure
    assert not is_sure_to_map(config, replace(MACHINE, gpu=None), 20 * 2**30, 18 * 2**30)


@pytest.mark.sharded(of="plans")
@settings(max_examples=60)
@given(data=st.data())
def test_a_budget_that_is_advised_is_enough(model: ModelFacts, data: st.DataObject) -> None:
    """And a MiB less is not, where the context does not follow from the budget."""
    config, facts, options, kept = data.draw(asked(model))
    while isinstance(answer := choose(config, facts, options, kept), Missing):
        facts = learn(facts, answer)
    if not isinstance(answer, TooSmall) or not isinstance(getattr(config, answer.tier), int):
        return
    while isinstance(error := advised(answer, config, facts, options, kept), Missing):
        facts = learn(facts, error)
    found = re.search(rf"; try --{answer.tier} (\d+)M", str(error))
    assert found, error
    for num_mib, is_enough in ((int(found[1]), True), (int(found[1]) - 1, False)):
        other = config.with_budget(answer.tier, num_mib * MIB)
        while isinstance(again := choose(other, facts, options, kept), Missing):
            facts = learn(facts, again)
        if is_enough:
            assert not isinstance(again, TooSmall) or again.tier != answer.tier
        elif config.ctx_size:
            assert isinstance(again, TooSmall)
