"""A model in three tiers, on the host: slots of a GPU, a pool in RAM, the disk. The bits are the CPU's."""

import os
import shutil
from pathlib import Path

import numpy as np
import pytest
from cuda_runner_cases import check_chains, open_partly
from one_sequence import open_cpu
from runner_cases import token_ids, write_mixed_layers
from tree_cases import CONTEXT

from builders import Dims, write_gguf
from coldstream.errors import ModelChangedError
from coldstream.experts.prefetch import Prefetching
from coldstream.kernels.cuda.host_memory import RegisteredMemory
from random_residency import RandomResidency


@pytest.fixture(scope="module", params=["qwen35moe", "qwen3moe", "qwen3next", "qwen4exp"])
def path(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_mixed_layers(tmp_path_factory.mktemp("models"), request.param)


@pytest.fixture(scope="module")
def unused_experts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of two sizes, in a file of three parts, gate and up in one tensor."""
    types = {"*_exps.weight": "Q4_K", "blk.1.ffn_down_exps.weight": "Q6_K"}
    dims = Dims(layers=2, interval=2, experts=32, experts_used=3)
    path = tmp_path_factory.mktemp("models") / "many.gguf"
    return write_gguf(path, types=types, dims=dims, num_shards=3, fused_experts=True)[0]


@pytest.mark.sharded(6)
@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize(("share", "in_ram"), [(0.0, 0.0), (0.25, 0.25), (0.5, 0.5)], ids=str)
def test_wherever_experts_are(path: Path, share: float, in_ram: float) -> None:
    with (
        open_cpu(path, threads=1, context_length=CONTEXT) as plain,
        open_partly(path, share, in_ram=in_ram, context_length=CONTEXT) as runner,
    ):
        check_chains(runner, plain, (1, 20, 90))
        assert runner.disk is not None
        assert runner.disk.bytes_read > 0


@pytest.mark.sharded(of="models on a GPU")
@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize("pinned", [(), (1,)], ids=["", "pinned"])
def test_ex07_experts_move_between_all_tiers_and_change_no_bit(
    unused_experts: Path, pinned: tuple[int, ...]
) -> None:
    options = {"policy": RandomResidency(seed=3), "pinned": pinned, "context_length": CONTEXT}
    with (
        open_cpu(unused_experts, threads=1, context_length=CONTEXT) as plain,
        open_partly(unused_experts, 0.25, in_ram=0.25, **options) as runner,  # type: ignore[arg-type]
    ):
        for token in token_ids(40):
            assert np.array_equal(runner.decode(token), plain.decode(token))
        check_chains(runner, plain, (90,))
        counters, disk = runner.expert_cache.counters, runner.disk
        assert disk is not None
        assert counters.evictions.sum() > 20
        assert counters.copies.sum() > counters.evictions.sum()
        assert min(disk.hits, disk.misses) > 20
        assert disk.num_slots == 8 * (2 - len(pinned))


@pytest.mark.sharded(of="models on a GPU")
@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize(
    ("pinned", "streamed", "prefetching"),
    [((), 1.0, None), ((1,), 0.6, None), ((), 0.6, Prefetching(1, 2)), ((), 1.0, Prefetching(1, 3))],
    ids=["in place", "shared", "ahead", "all ahead"],
)
def test_ex07_the_gpu_reads_a_pool_whose_experts_move(
    unused_experts: Path, pinned: tuple[int, ...], streamed: float, prefetching: Prefetching | None
) -> None:
    options = {
        "policy": RandomResidency(seed=4),
        "pinned": pinned,
        "prefetching": prefetching,
        "context_length": CONTEXT,
    }
    with (
        open_cpu(unused_experts, threads=1, context_length=CONTEXT) as plain,
        open_partly(unused_experts, 0.25, in_ram=0.4, streamed=streamed, **options) as runner,  # type: ignore[arg-type]
    ):
        for token in token_ids(40):
            assert np.array_equal(runner.decode(token), plain.decode(token))
        check_chains(runner, plain, (3, 90))
        statistics, disk = runner.gpu_experts, runner.disk
        assert statistics is not None
        assert disk is not None
        assert sum(statistics.evictions) > 20
        assert disk.misses > 20
        if prefetching is None:
            assert sum(statistics.step_times.bus_pairs) > 5
        else:
            assert statistics.prefetch is not None
            assert sum(statistics.prefetch.used) > 5


@pytest.mark.sharded(of="models on a GPU")
@pytest.mark.usefixtures("gpu")
def test_what_the_gpu_and_the_pool_hold_together_is_not_read_again(unused_experts: Path) -> None:
    with open_partly(unused_experts, 0.5, in_ram=0.5, context_length=CONTEXT) as runner:
        assert runner.disk is not None
        before = runner.disk.bytes_read
        first = runner.decode(5)
        assert (runner.disk.misses, runner.disk.bytes_read) == (0, before)
        runner.reset()
        assert np.array_equal(runner.decode(5), first)


@pytest.mark.sharded(of="models on a GPU")
@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize("length", [1, 90])
def test_fl01_a_file_that_shrinks_is_an_error(tmp_path: Path, length: int) -> None:
    write_gguf(tmp_path / "tiny.gguf", types={"*_exps.weight": "Q4_K"}, dims=Dims(layers=2, interval=2))
    path = tmp_path / "tiny.gguf"
    with open_partly(path, 0.0, in_ram=0.0, context_length=CONTEXT) as runner:
        runner.prefill(token_ids(3))
        os.truncate(path, path.stat().st_size // 8)
        with pytest.raises(ModelChangedError, match=r"tiny\.gguf"):
            runner.prefill(token_ids(length))
        with pytest.raises(ModelChangedError):
            runner.decode(1)


@pytest.mark.sharded(6)
@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize("share", [0.0, 0.5])
def test_a_file_that_shrinks_while_it_is_opened_leaves_no_memory_locked(
    path: Path, share: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copy = Path(shutil.copy(path, tmp_path / "copy.gguf"))
    locked: list[int] = []
    register, close = RegisteredMemory.register, RegisteredMemory.close

    def registered(
        address: int, num_bytes: int, *, is_read_only: bool = True, **_: object
    ) -> RegisteredMemory | None:
        assert not is_read_only, "the file is not locked"
        os.truncate(copy, copy.stat().st_size // 8)  # what is read after this is gone
        locked.append(address)
        return register(address, num_bytes, is_read_only=is_read_only)

    def closed(memory: RegisteredMemory) -> None:
        locked.remove(memory._pieces[0])
        close(memory)

    monkeypatch.setattr(RegisteredMemory, "register", registered)
    monkeypatch.setattr(RegisteredMemory, "close", closed)
    with pytest.raises(ModelChangedError, match=r"copy\.gguf changed while in use"):
        open_partly(copy, share, in_ram=0.5, context_length=CONTEXT)
    assert not locked
