"""CpuRunner with experts from the disk: the bits of the mapped run, whatever fits into memory."""

import os
import shutil
from base64 import b64decode
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from one_sequence import open_cpu
from runner_cases import MIX, VARIANTS, token_ids

from builders import Dims, write_gguf
from coldstream.assets import demo_model_path
from coldstream.errors import GenerationFault, ModelChangedError, OutOfMemoryError
from coldstream.experts.cpu.disk_tier import DiskStatistics
from coldstream.models.cpu.runner import CpuRunner
from coldstream.models.runner import Array
from coldstream.placement.plan import BudgetTooSmallError
from coldstream.placement.policies import DecayedFrequency, Lru, Policy
from ram_budgets import least_ram

CONTEXT = CpuRunner.chunk_size + 64
SHARES = (0.0, 0.1, 0.25, 0.5, 0.75, 0.9)


class RandomPolicy(Policy):
    """Other experts are worth keeping after every step."""

    def start(self, profile: Array) -> None:
        self._rng = np.random.default_rng(1)
        self.scores = profile.copy()

    def observe(self, used: Array) -> None:
        self.scores[:] = self._rng.random(self.scores.size)


def expert_bytes(path: Path) -> int:
    with open_cpu(path, threads=1, context_length=16) as runner:
        return sum(info.num_bytes for name, info in runner.file.tensors.items() if "_exps." in name)


def statistics(runner: CpuRunner) -> DiskStatistics:
    """Of a runner that has experts on the disk."""
    assert runner.disk is not None
    return runner.disk


@pytest.fixture(scope="module", params=["qwen35moe", "qwen3moe", "qwen3next", "qwen4exp"])
def moe_path(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny mixture of experts in two sizes: large enough for experts to matter beside activations."""
    path = tmp_path_factory.mktemp("models") / "moe.gguf"
    types = {**MIX, "blk.1.ffn_down_exps.weight": "Q4_K", "blk.2.ffn_down_exps.weight": "Q4_K"}
    write_gguf(path, request.param, types=types, dims=Dims(experts=64, experts_used=4))
    return path


@pytest.fixture(scope="module")
def mapped(moe_path: Path) -> tuple[Array, list[Array]]:
    """Logits after each token of a prompt of two chunks, and those of tokens decoded after it."""
    with open_cpu(moe_path, threads=2, context_length=CONTEXT) as runner:
        logits = runner.logits(token_ids(CONTEXT - 40))
        return logits, [runner.decode(token) for token in token_ids(40)]


# One thread or several, alternately, share out experts alike wherever these come from.
@pytest.mark.sharded(9)
@pytest.mark.parametrize(
    ("share", "threads"),
    [(share, 1 + (i + j) % 3) for i, share in enumerate(SHARES) for j in range(1 + (i == 0))],
)
def test_ex07_logits_do_not_depend_on_the_budget(
    moe_path: Path, mapped: tuple[Array, list[Array]], share: float, threads: int
) -> None:
    budget = least_ram(moe_path, context_length=CONTEXT, threads=threads) + int(
        share * expert_bytes(moe_path)
    )
    with open_cpu(moe_path, threads=threads, context_length=CONTEXT, ram_bytes=budget) as runner:
        assert np.array_equal(runner.logits(token_ids(CONTEXT - 40)), mapped[0])
        for token, expected in zip(token_ids(40), mapped[1], strict=True):
            assert np.array_equal(runner.decode(token), expected)
        disk = statistics(runner)
        assert disk.num_slots < disk.num_experts
        assert disk.slot_bytes <= budget
        assert disk.bytes_read > 0


@pytest.mark.sharded(6)
@pytest.mark.parametrize("variant", [name for name, (arch, _) in VARIANTS.items() if arch != "qwen35"])
def test_models_of_every_kind(tmp_path: Path, variant: str) -> None:
    path = tmp_path / "tiny.gguf"
    arch, options = VARIANTS[variant]
    write_gguf(path, arch, **options)  # type: ignore[arg-type]
    ids = token_ids(40)
    with open_cpu(path, threads=2, context_length=64) as runner:
        expected = runner.logits(ids)
    budget = least_ram(path, context_length=64)
    with open_cpu(path, threads=2, context_length=64, ram_bytes=budget) as runner:
        assert runner.disk is not None
        assert np.array_equal(runner.logits(ids), expected)
        runner.reset()
        assert np.array_equal(np.stack([runner.decode(token) for token in ids]), expected)


def test_the_parts_of_a_split_file_are_read(tmp_path: Path) -> None:
    paths = write_gguf(tmp_path / "split.gguf", types=MIX, num_shards=3)
    with open_cpu(paths[0], threads=2, context_length=64) as runner:
        expected = runner.logits(token_ids(20))
    budget = least_ram(paths[0], context_length=64)
    with open_cpu(paths[0], threads=2, context_length=64, ram_bytes=budget) as runner:
        assert np.array_equal(runner.logits(token_ids(20)), expected)


@pytest.mark.sharded
@pytest.mark.parametrize("make_policy", [RandomPolicy, Lru, DecayedFrequency])
def test_ex07_generation_of_the_demo_model_is_the_mapped_one(make_policy: type[Policy]) -> None:
    def generate(runner: CpuRunner) -> Iterator[Array]:
        logits = runner.prefill(prompt)
        for step, other in enumerate(token_ids(300)):  # now and then an expert that is not expected
            yield logits
            logits = runner.decode(int(logits.argmax()) if step % 4 else other)

    path, prompt = demo_model_path(), token_ids(30)
    with open_cpu(path, threads=2, context_length=512) as runner:
        expected = list(generate(runner))
    budget = least_ram(path, context_length=512) + (3 << 20)
    with open_cpu(path, threads=2, context_length=512, ram_bytes=budget, policy=make_policy()) as runner:
        for actual, wanted in zip(generate(runner), expected, strict=True):
            assert np.array_equal(actual, wanted)
        assert statistics(runner).misses > 1000


@pytest.mark.sharded(of="models on the CPU")
def test_twenty_requests_answer_like_the_first(moe_path: Path) -> None:
    budget = least_ram(moe_path, context_length=CONTEXT) + (2 << 20)
    with open_cpu(moe_path, threads=2, context_length=CONTEXT, ram_bytes=budget) as runner:
        expected = runner.prefill(token_ids(33))
        runner.prefill(token_ids(CpuRunner.chunk_size))
        for request in range(1, 25):
            runner.reset()
            runner.prefill(token_ids(7 * request))
            runner.reset()
            assert np.array_equal(runner.prefill(token_ids(33)), expected)


def test_ex05_a_prompt_leaves_what_decoding_needs(moe_path: Path) -> None:
    def misses_of_a_request() -> int:
        runner.reset()
        before = statistics(runner).misses
        for token in (3, 4, 5):
            runner.decode(token)
        return statistics(runner).misses - before

    budget = least_ram(moe_path, context_length=CONTEXT) + expert_bytes(moe_path) // 3
    with open_cpu(moe_path, threads=2, context_length=CONTEXT, ram_bytes=budget) as runner:
        assert misses_of_a_request() > 0
        for _ in range(20):
            assert misses_of_a_request() == 0
        before = statistics(runner).misses
        runner.prefill(token_ids(CpuRunner.chunk_size))
        assert statistics(runner).misses - before > statistics(runner).num_slots
        assert misses_of_a_request() == 0


@pytest.mark.sharded(of="models on the CPU")
def test_what_fits_is_mapped_and_what_cannot_says_the_minimum(moe_path: Path, tmp_path: Path) -> None:
    with open_cpu(moe_path, threads=2, context_length=16, ram_bytes=1 << 32) as runner:
        assert runner.disk is None
    parts = r"weights of every token .*, caches of 16 tokens .*, workspace .*, experts that must be resident"
    with pytest.raises(OutOfMemoryError, match=parts):
        open_cpu(moe_path, threads=2, context_length=16, ram_bytes=1 << 20)
    need = least_ram(moe_path, context_length=16)
    open_cpu(moe_path, threads=2, context_length=16, ram_bytes=need).close()
    with pytest.raises(BudgetTooSmallError, match=r"--ram: .* MiB of RAM are below the minimum of"):
        open_cpu(moe_path, threads=2, context_length=16, ram_bytes=need - (1 << 20))
    dense = tmp_path / "dense.gguf"
    write_gguf(dense, "qwen35")
    with pytest.raises(OutOfMemoryError, match="--ram"):
        open_cpu(dense, threads=2, context_length=16, ram_bytes=1 << 20)


@pytest.fixture
def own_copy(moe_path: Path, tmp_path: Path) -> Path:
    """A copy of the model, to be damaged."""
    return Path(shutil.copy2(moe_path, tmp_path / "copy.gguf"))


@pytest.mark.sharded
def test_fl01_a_file_that_shrinks_fails_the_request_and_those_after_it(own_copy: Path) -> None:
    content, times = own_copy.read_bytes(), own_copy.stat()
    ids = token_ids(CONTEXT - 40)

    def shrink(done: int, total: int) -> None:
        os.truncate(own_copy, len(content) // 2)

    with open_cpu(
        own_copy, threads=2, context_length=CONTEXT, ram_bytes=least_ram(own_copy, context_length=CONTEXT)
    ) as runner:
        with pytest.raises(ModelChangedError, match=r"copy\.gguf changed while in use: byte \d+"):
            runner.prefill(ids, shrink)
        assert runner.position == 0
        own_copy.write_bytes(content)
        os.utime(own_copy, ns=(times.st_atime_ns, times.st_mtime_ns))
        with pytest.raises(ModelChangedError, match="load the model again"):
            runner.prefill(ids)
    with open_cpu(own_copy, threads=2, context_length=CONTEXT) as runner:
        runner.prefill(ids)


@pytest.mark.sharded(of="models on the CPU")
def test_fl02_a_file_that_is_replaced_or_unlinked_stays_the_one_that_was_opened(
    own_copy: Path, tmp_path: Path, mapped: tuple[Array, list[Array]]
) -> None:
    ids = token_ids(CONTEXT - 40)
    with open_cpu(
        own_copy, threads=2, context_length=CONTEXT, ram_bytes=least_ram(own_copy, context_length=CONTEXT)
    ) as runner:
        write_gguf(tmp_path / "other.gguf", types=MIX, seed=5)
        (tmp_path / "other.gguf").replace(own_copy)
        assert np.array_equal(runner.logits(ids), mapped[0])
        own_copy.unlink()
        assert np.array_equal(runner.logits(ids), mapped[0])


@pytest.mark.sharded
def test_pr04_a_forked_child_gets_an_error_and_the_parent_goes_on(
    moe_path: Path, mapped: tuple[Array, list[Array]]
) -> None:
    ids = token_ids(CONTEXT - 40)
    budget = least_ram(moe_path, context_length=CONTEXT)
    with open_cpu(moe_path, threads=2, context_length=CONTEXT, ram_bytes=budget) as runner:
        runner.prefill(ids[:3])
        child = os.fork()
        if child == 0:
            status = 1
            try:
                runner.prefill(ids[3:5])
            except GenerationFault as error:
                status = 0 if "before fork()" in str(error) else 2
            finally:
                os._exit(status)
        assert os.waitpid(child, 0)[1] == 0
        assert np.array_equal(runner.logits(ids), mapped[0])


@pytest.mark.sharded(of="models on the CPU")
def test_the_picture_of_experts_has_their_uses_and_those_in_ram(moe_path: Path) -> None:
    ram = least_ram(moe_path, context_length=CONTEXT, threads=2) + int(0.25 * expert_bytes(moe_path))
    with open_cpu(moe_path, threads=2, context_length=CONTEXT, ram_bytes=ram) as runner:
        runner.prefill(token_ids(20))
        runner.decode(3)
        picture = runner.expert_map()
        there = statistics(runner).num_slots
    assert picture is not None
    assert picture.resident is not None
    uses = np.frombuffer(b64decode(picture.uses), np.uint8)
    resident = np.frombuffer(b64decode(picture.resident), np.uint8)
    assert resident.sum() == there
    assert 0 < np.count_nonzero(uses) <= len(picture.layers) * runner.spec.num_experts_per_tok
    assert resident[uses > 0].all(), "what the last step used is there"
