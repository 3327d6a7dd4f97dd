"""Steps of several rows with experts in the host's memory: what their figures are made of."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from bench.engine import gpu_cold_rows
from bench.engine.gpu_cold_rows import Steps, check_logits
from bench.runners import open_model_file, partial_plan
from builders import Dims, write_gguf
from coldstream.kvcache import CacheSize
from coldstream.models.cuda.runner import CudaRunner
from host_device import HostDevice
from host_gpu import gpu_on

LAYERS, EXPERTS, CHOSEN = 3, 12, 3
SIZES = (100, 200, 300)


@pytest.fixture
def runner(tmp_path: Path, host: HostDevice) -> Iterator[CudaRunner]:
    path = tmp_path / "small.gguf"
    dims = Dims(layers=LAYERS, hidden=64, experts=EXPERTS, experts_used=CHOSEN, expert_ffn=32, shared_ffn=32)
    write_gguf(path, dims=dims)
    file, spec = open_model_file(path)
    sizes = {"context_length": 256, "chunk_size": 512, "ring_bytes": 2**20}
    plan = partial_plan(file, spec, 0, **sizes, threads=1, streamed=0.5)
    with gpu_on(host):
        runner = CudaRunner.load(file, spec, plan, cache_size=CacheSize.of(1, 256))
        yield runner
        runner.close()


@pytest.mark.sharded(of="measurements")
def test_floors_are_of_each_expert_once_and_rows_change_no_logits(
    runner: CudaRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {"DEPTH": 3, "WARM_STEPS": 2, "TIMED_STEPS": 2, "COMPARED": 4, "FIRST_ID": 2}.items():
        monkeypatch.setattr(gpu_cold_rows, name, value)
    steps = Steps(runner, SIZES, both_bytes_per_s=1e3)
    one, two = steps.of(1), steps.of(2)
    assert one["experts_of_a_layer"] == CHOSEN
    assert one["floor_ms"] == pytest.approx(CHOSEN * sum(SIZES)), "no expert has a slot"
    assert CHOSEN < two["experts_of_a_layer"] <= 2 * CHOSEN
    assert two["floor_ms"] <= 2 * CHOSEN * sum(SIZES)
    assert one["logits"] == two["logits"] != ""
    check_logits([one, two, {"logits": ""}])
    with pytest.raises(RuntimeError, match="logits depend on rows"):
        check_logits([one, {**two, "logits": "0"}])
