"""Plans of a dense model on a GPU whose memory does not hold all of its layers."""

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from builders import Dims, write_gguf
from coldstream.errors import ConfigError, OutOfMemoryError
from coldstream.gguf.reader import GGUFFile
from coldstream.models.read_spec import read_spec
from coldstream.placement.hardware import GpuHardware, Hardware
from coldstream.placement.plan_file import save_plan
from coldstream.planning.config import EngineConfig
from coldstream.planning.gather import Sources, plan_model
from coldstream.planning.planned import Planned

GPU = GpuHardware("a GPU", "1.0", 2**35, 2**34, 1e12, 2e14, 2.5e10, 2e10, 3e10, 7e-6)
MACHINE = Hardware("a CPU", ("avx2",), 4, 4, 2**35, 2**33, 5e10, GPU)
LAYERS = 8

Make = Callable[..., Planned]


@pytest.fixture(scope="module")
def make(tmp_path_factory: pytest.TempPathFactory) -> Make:
    dims = Dims(layers=LAYERS, ffn=8192)
    folder = tmp_path_factory.mktemp("model")
    (path,) = write_gguf(folder / "dense.gguf", "qwen35", quant="Q4_K", dims=dims)

    def make(**options: object) -> Planned:
        with GGUFFile.open(path) as file:
            spec = read_spec(file.metadata, file.tensors)
            context = {} if "plan" in options else {"ctx_size": 256}
            config = EngineConfig("m", **context, **options)  # type: ignore[arg-type]
            return plan_model(config, Sources(file, spec, MACHINE))

    return make


def partly(make: Make, num_missing: int, **options: object) -> Planned:
    """With the memory for the ring and all layers but so many."""
    with pytest.raises(OutOfMemoryError) as caught:
        make(device="cuda", vram=2**20)
    (advised,) = re.findall(r"try --vram (\d+)M", str(caught.value))
    least = make(device="cuda", vram=int(advised) * 2**20).plan
    vram = least.total_bytes + (LAYERS - num_missing) * least.expert_bytes[0]
    return make(device="cuda", vram=vram, **options)


def missing_of(planned: Planned) -> int:
    return planned.plan.num_all - planned.plan.num_resident


@pytest.mark.sharded(of="plans")
def test_a_gpu_with_room_for_all_layers_holds_them(make: Make) -> None:
    planned = make(device="cuda")
    assert planned.plan.is_all_resident
    assert planned.run.threads == 0
    assert planned.run.miss_times is None


@pytest.mark.sharded(of="plans")
@pytest.mark.parametrize("num_missing", [3, 7])
def test_what_does_not_fit_is_missing_and_the_cpu_and_the_bus_share_it(make: Make, num_missing: int) -> None:
    planned = partly(make, num_missing)
    plan = planned.plan
    assert missing_of(planned) == num_missing
    assert plan.ring_bytes == 2 * max(plan.expert_bytes)
    assert plan.total_bytes <= plan.budget_bytes
    assert len(plan.pinned_layers) == LAYERS - num_missing
    assert planned.run.threads == 3
    assert planned.run.miss_times is not None
    assert (planned.run.prefetch, planned.run.max_cpu_rows, planned.config.prefetch) == (0, 0, 0)
    assert planned.known.model.is_dense


@pytest.mark.sharded(of="plans")
def test_a_plan_is_given_back(make: Make, tmp_path: Path) -> None:
    for first in (partly(make, 4), make(device="cpu")):
        save_plan(first.run, tmp_path / "plan.json")
        device = "cuda" if first.plan.tier == "vram" else "cpu"
        again = make(device=device, plan=str(tmp_path / "plan.json"))
        assert again.run == first.run
        assert again.known.model == first.known.model


def test_too_little_memory_is_refused_with_what_suffices(make: Make) -> None:
    with pytest.raises(OutOfMemoryError, match=r"ring .*try --vram \d+M"):
        make(device="cuda", vram=2**20)


def test_missing_layers_need_the_file_in_ram(make: Make) -> None:
    with pytest.raises(OutOfMemoryError, match=r"the mapped file .*try --ram \d+M"):
        partly(make, 3, ram=2**20)


@pytest.mark.sharded(of="plans")
def test_there_is_nothing_to_fetch_ahead(make: Make) -> None:
    with pytest.raises(ConfigError, match="no experts to fetch ahead"):
        partly(make, 3, prefetch=2)


def test_a_larger_plan_has_more_layers(make: Make) -> None:
    planned = partly(make, 5)
    vram = planned.plan.budget_bytes + 2 * planned.plan.expert_bytes[0]
    assert missing_of(make(device="cuda", vram=vram)) < 5
