"""What drafts if nothing is asked for: a model's own block, where a GPU has room for it beside everything."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from test_gather import MACHINE

from builders import make_model, write_gguf, write_model
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


def test_a_gpu_with_room_for_everything_drafts_by_the_models_own_block(plan: Plan) -> None:
    found, without = plan(device="cuda"), plan(device="cuda", spec_type="none")
    assert (found.run.spec_type, without.run.spec_type) == ("mtp", "none")
    assert found.config.spec_type == "mtp"
    assert found.plan.is_all_resident
    assert found.plan.fixed.num_tree_rows > 0
    assert found.plan.fixed.ctx_size == without.plan.fixed.ctx_size
    assert found.warnings == ()


def test_a_cpu_drafts_nothing(plan: Plan) -> None:
    assert plan(device="cpu").run.spec_type == "none"


def test_a_model_without_a_block_drafts_nothing(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "a.gguf")[0]
    assert planner(path)(device="cuda").run.spec_type == "none"


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
