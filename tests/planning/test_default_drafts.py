"""What drafts if nothing is asked for: a model's own block, where there is room for it beside everything."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from test_gather import MACHINE

from builders import Dims, make_model, write_gguf, write_model
from coldstream.errors import OutOfMemoryError
from coldstream.gguf.reader import GGUFFile
from coldstream.models.read_spec import read_spec
from coldstream.planning.config import EngineConfig
from coldstream.planning.gather import Sources, plan_model
from coldstream.planning.planned import Planned

Plan = Callable[..., Planned]


def planner(path: Path) -> Plan:
    def plan(**options: object) -> Planned:
        with GGUFFile.open(path) as file:
            spec = read_spec(file.metadata, file.tensors)
            return plan_model(EngineConfig("m", **options), Sources(file, spec, MACHINE))  # type: ignore[arg-type]

    return plan


@pytest.fixture(scope="module")
def plan(tmp_path_factory: pytest.TempPathFactory) -> Plan:
    folder = tmp_path_factory.mktemp("default_drafts")
    return planner(write_gguf(folder / "a.gguf", nextn=True, types={"*_exps.weight": "Q4_K"})[0])


@pytest.fixture(scope="module")
def deep(tmp_path_factory: pytest.TempPathFactory) -> Plan:
    """Of a model of which the block is a small part."""
    path = tmp_path_factory.mktemp("deep") / "a.gguf"
    return planner(write_gguf(path, nextn=True, dims=Dims(layers=16, experts=4, vocab=300))[0])


def test_a_gpu_with_room_for_everything_drafts_by_the_models_own_block(plan: Plan) -> None:
    found, without = plan(device="cuda"), plan(device="cuda", spec_type="none")
    assert (found.run.spec_type, without.run.spec_type) == ("mtp", "none")
    assert found.config.spec_type == "mtp"
    assert found.plan.is_all_resident
    assert found.plan.fixed.num_tree_rows > 0
    assert found.plan.fixed.ctx_size == without.plan.fixed.ctx_size
    assert found.warnings == ()
    assert found.draft_reason.startswith("mtp")
    assert without.draft_reason == "none, as asked for"


def test_a_cpu_with_room_for_everything_may_draft_by_the_models_own_block(deep: Plan) -> None:
    found, without = (deep(device="cpu", **drafts) for drafts in ({}, {"spec_type": "none"}))
    assert (found.run.spec_type, without.run.spec_type) == ("mtp", "none")
    assert found.run == deep(device="cpu", spec_type="mtp").run
    assert found.plan.is_all_resident
    assert found.plan.fixed.ctx_size == without.plan.fixed.ctx_size
    assert found.config.parallel == without.config.parallel
    assert found.draft_reason.startswith("mtp, as far as they pay")


def test_a_cpu_drafts_nothing_where_a_drafted_token_reads_much(plan: Plan) -> None:
    found = plan(device="cpu")
    assert found.run.spec_type == "none"
    assert "pays on no CPU" in found.draft_reason
    assert plan(device="cpu", spec_type="mtp").run.spec_type == "mtp"  # which may be asked for


def test_drafts_on_a_cpu_cost_neither_experts_nor_context(deep: Plan) -> None:
    """With budgets from those where only some experts are in RAM to those of everything."""
    whole = deep(device="cpu", spec_type="mtp").plan
    most = whole.fixed.total + whole.resident_bytes
    kinds = []
    for ram in range(most * 3 // 4, most * 2, most // 16):
        found, without = (deep(device="cpu", ram=ram, **drafts) for drafts in ({}, {"spec_type": "none"}))
        kinds.append(found.run.spec_type)
        assert found.config.ctx_size == without.config.ctx_size
        assert found.config.parallel == without.config.parallel
        assert found.plan.is_all_resident == without.plan.is_all_resident
        assert kinds[-1] == "none" or found.plan.is_all_resident
        assert found.draft_reason.startswith(kinds[-1])
    assert {"none", "mtp"} == set(kinds)


def test_a_model_without_a_block_drafts_nothing(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "a.gguf")[0]
    for device in ("cuda", "cpu"):
        found = planner(path)(device=device)
        assert found.run.spec_type == "none"
        assert found.draft_reason == "none: the file has no block for multi-token prediction"


def test_drafts_cost_no_experts(plan: Plan) -> None:
    """With the least memory in which the block has room, and some more, up to that of everything."""
    kib, fits = 2**10, 2**30 // 2**10
    too_little = 0
    while fits - too_little > 1:
        middle = (fits + too_little) // 2
        try:
            plan(device="cuda", vram=middle * kib, ctx_size=64, spec_type="mtp")
            fits = middle
        except OutOfMemoryError:
            too_little = middle
    kinds = []
    for vram in range(fits - 256, fits + 6 * 1024, 512):
        options = {"device": "cuda", "vram": vram * kib, "ctx_size": 64}
        found = plan(**options)
        kinds.append(found.run.spec_type)
        assert found.run == plan(**options, spec_type=kinds[-1]).run
        assert kinds[-1] == "none" or found.plan.is_all_resident
    assert kinds == sorted(kinds, reverse=True)  # none, and from some memory on mtp
    assert {"none", "mtp"} == set(kinds)


def test_a_block_that_cannot_draft_is_left_out_with_a_warning(tmp_path: Path) -> None:
    model = make_model(nextn=True)
    model.tensors["blk.4.nextn.enorm.weight"][:] = np.inf
    path = write_model(tmp_path / "a.gguf", model)[0]
    found = planner(path)(device="cuda")
    assert found.run.spec_type == "none"
    (warning,) = found.warnings
    assert warning.startswith("nothing is drafted: ")
    assert "enorm" in warning
