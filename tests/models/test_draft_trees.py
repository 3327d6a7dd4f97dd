"""Rows of draft trees have the bits of plain decoding, and so has what follows a commit."""

from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import NamedTuple

import numpy as np
import pytest
import torch
from one_sequence import OneSequence, open_cpu
from runner_cases import VARIANTS, write_mixed_layers, write_variant
from tree_cases import CONTEXT, LENGTHS, Oracle, Prompts, Tree, check_batch_of_trees, prompt, random_tree

from bench.runners import open_cpu_runner
from coldstream.assets import demo_model_path
from coldstream.gguf.reader import GGUFFile
from coldstream.kernels import _csrc
from coldstream.kernels.attention.cache_layout import CACHE_LAYOUTS
from coldstream.kernels.ops import BatchRows, Rows
from coldstream.kernels.reference_ops import ReferenceOps
from coldstream.kvcache import Batch, CacheSize, Segment, Sequence, SequenceCache
from coldstream.kvcache.batch import BatchArrays, BatchLimits, BatchSize, PathArrays, check_batch
from coldstream.models.causal_lm import CausalLM
from coldstream.models.read_spec import read_spec

SIZE = CacheSize.of(len(LENGTHS) + 64, CONTEXT, num_trees=8)


def open_runner(path: Path, **options: object) -> OneSequence:
    return open_cpu(path, context_length=CONTEXT, cache_size=SIZE, **options)


class Model(NamedTuple):
    arch: str
    path: Path
    kv_type: str
    oracle: Oracle


# One layer of each kind, or two of attention, since many trees are to be computed.
ARCHITECTURES = ("qwen35moe", "qwen3moe", "qwen3next")
# Attention of the last is that of the first.
CACHES = [(arch, kv_type) for arch in ARCHITECTURES[:2] for kv_type in CACHE_LAYOUTS] + [("qwen3next", "i16")]


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("models")
    return {arch: write_mixed_layers(folder, arch) for arch in ARCHITECTURES}


@pytest.fixture(scope="module", params=ARCHITECTURES)
def small_path(request: pytest.FixtureRequest, paths: dict[str, Path]) -> Path:
    return paths[request.param]


@pytest.fixture(scope="module", params=CACHES, ids="-".join)
def model(request: pytest.FixtureRequest, paths: dict[str, Path]) -> Iterator[Model]:
    arch, kv_type = request.param
    with open_runner(paths[arch], threads=1, kv_type=kv_type) as runner:
        yield Model(arch, paths[arch], kv_type, Oracle(runner))


@pytest.mark.sharded(9)
@pytest.mark.parametrize("tier", _csrc.supported_tiers())
def test_sp03_trap_37_rows_of_trees_see_their_own_path_alone(model: Model, tier: str) -> None:
    """With one thread or two alternately, which share out rows alike whatever the tier and the cache."""
    turn = CACHES.index((model.arch, model.kv_type)) + _csrc.supported_tiers().index(tier)
    random = Random(f"{model.path.name} {model.kv_type}")  # the same trees for all, which the oracle knows
    with open_runner(model.path, threads=1 + turn % 2, tier=tier, kv_type=model.kv_type) as runner:
        prompts = Prompts(runner)
        for _ in range(1 if tier == "generic" else 8):
            check_batch_of_trees(prompts, model.oracle, random)


@pytest.mark.sharded(9)
@pytest.mark.parametrize("kv_type", ["f32", "i16"])
@pytest.mark.parametrize("window", [3, 40, 290])
def test_trap_37_trees_with_windows(small_path: Path, kv_type: str, window: int) -> None:
    """Rows of a tree lie at several depths, and so begin their windows at several positions."""
    options = {"kv_type": kv_type, "attention_window": window}
    with (
        open_runner(small_path, threads=2, **options) as runner,
        open_runner(small_path, threads=1, **options) as plain,
    ):
        prompts, oracle, random = Prompts(runner), Oracle(plain), Random(window)
        for _ in range(4):
            check_batch_of_trees(prompts, oracle, random)


@pytest.mark.sharded(9)
@pytest.mark.parametrize("name", VARIANTS)
def test_trees_of_every_kind_of_model(tmp_path: Path, name: str) -> None:
    path = write_variant(tmp_path, name)
    with open_runner(path, threads=2) as runner, open_runner(path, threads=1) as plain:
        prompts, oracle, random = Prompts(runner), Oracle(plain), Random(name)
        for _ in range(3):
            check_batch_of_trees(prompts, oracle, random)


@pytest.mark.sharded(9)
def test_trees_of_a_model_whose_experts_come_from_the_disk(model: Model) -> None:
    file_bytes = model.path.stat().st_size
    with open_runner(model.path, threads=2, kv_type=model.kv_type) as mapped:
        budget = mapped._sequences.tensors.num_bytes + mapped.activation_bytes + file_bytes - file_bytes // 8
    with open_runner(model.path, threads=2, kv_type=model.kv_type, ram_bytes=budget) as runner:
        assert runner.disk is not None
        prompts = Prompts(runner)
        for seed in range(2):
            check_batch_of_trees(prompts, model.oracle, Random(seed))
        assert runner.disk.misses > 0


@pytest.mark.sharded(of="models on the CPU")
def test_trees_of_the_demo_model() -> None:
    with (
        open_runner(demo_model_path(), threads=2) as runner,
        open_runner(demo_model_path(), threads=1) as plain,
    ):
        prompts, oracle = Prompts(runner), Oracle(plain)
        check_batch_of_trees(prompts, oracle, Random(0))


@pytest.mark.sharded(of="models on the CPU")
def test_the_oracle_is_plain_decoding(model: Model) -> None:
    tokens = [5, 6, 7, 8]
    with open_cpu(model.path, threads=1, context_length=CONTEXT, kv_type=model.kv_type) as runner:
        for length in LENGTHS:
            runner.reset()
            if length:
                runner.prefill(prompt(length))
            assert np.array_equal(
                model.oracle.logits(length, tokens)[0], np.stack([runner.decode(t) for t in tokens])
            )


def torch_rows(rows: Rows, count: int) -> Rows:
    """The first rows, over the same memory."""
    batch = rows.batch
    assert batch is not None
    segments, indices, parents, kept, positions, state_ids = (
        torch.from_numpy(values[:count])
        for values in (
            batch.segments,
            batch.indices,
            batch.parents,
            batch.kept,
            rows.positions,
            rows.state_ids,
        )
    )
    tables = torch.from_numpy(batch.tables)
    return Rows(positions, state_ids, BatchRows(segments, tables, indices, parents, kept))


class Reference:
    """Two sequences over the operations in PyTorch."""

    def __init__(self, path: Path, exact: bool, kv_type: str = "f32", window: int | None = None) -> None:
        ops = ReferenceOps(exact=exact)
        with GGUFFile.open(path) as file:
            spec = read_spec(file.metadata, file.tensors).with_window(window)
            self.model = CausalLM.load(file, spec, ops)
        self.limits = BatchLimits(spec.vocab_size, 300, 128, 128)
        self.cache = SequenceCache(spec, ops, CacheSize.of(2, 300, 1), kv_type)
        size = BatchSize(128, 128, 2)
        self.inputs = BatchArrays(np.zeros(size.num_values, np.int32), size)
        self.sequences = [self.cache.new() for _ in range(2)]

    def step(self, batch: Batch) -> np.ndarray:
        """Logits of all rows."""
        checked = check_batch(batch, self.cache, self.limits)
        self.cache.reserve([segment.demand for segment in checked])
        count = self.inputs.write(checked)
        ids = torch.from_numpy(self.inputs.token_ids[:count])
        hidden = self.model.forward(ids, torch_rows(self.inputs.rows, count), self.cache.tensors)
        for segment in checked:
            if segment.parents is None:
                self.cache.append(segment.sequence, len(segment.token_ids))
        return np.asarray(self.model.logits(hidden))

    def commit(self, sequence: Sequence, path: list[int]) -> None:
        memory = np.zeros(PathArrays.num_values(2), np.int32)
        PathArrays(memory, 2).write(self.cache.accept(sequence, path))
        self.model.commit(PathArrays(torch.from_numpy(memory), 2).path, self.cache.tensors)
        self.cache.settle(sequence, len(path))


def branching_tree(seed: int) -> Tree:
    random = Random(seed)
    return next(tree for tree in iter(lambda: random_tree(random), None) if 4 < len(set(tree.parents)) < 20)


@pytest.mark.sharded(9)
@pytest.mark.parametrize("kv_type", ["f32", "i16"])
@pytest.mark.parametrize("window", [None, 4])
def test_a_tree_means_what_the_reference_defines(small_path: Path, kv_type: str, window: int | None) -> None:
    """A chain and a tree in one step, a commit, and a step of both after it, to the last bit."""
    reference, tree = Reference(small_path, True, kv_type, window), branching_tree(3)
    path = tree.path(len(tree.parents) - 1)
    steps: list[list[tuple[list[int], list[int] | None]]] = [
        [(prompt(29), None), (prompt(3), None)],
        [(tree.token_ids, tree.parents), (prompt(4), None)],
        [([9], None), ([9], None)],
    ]
    with open_cpu_runner(
        small_path,
        threads=2,
        context_length=300,
        kv_type=kv_type,
        cache_size=CacheSize.of(2, 300, 1),
        attention_window=window,
    ) as runner:
        ours = [runner.new_sequence() for _ in range(2)]

        def batch(sequences: list[Sequence], rows: list[tuple[list[int], list[int] | None]]) -> Batch:
            pairs = zip(sequences, rows, strict=True)
            return Batch(
                tuple(Segment(each, ids, parents, range(len(ids))) for each, (ids, parents) in pairs)
            )

        for rows in steps:
            actual = np.concatenate(runner.step(batch(ours, rows)))
            assert np.array_equal(actual, reference.step(batch(reference.sequences, rows)))
            if rows[0][1] is not None:
                runner.commit(ours[0], path)
                reference.commit(reference.sequences[0], path)


def test_the_reference_with_pytorchs_rounding_knows_trees(small_path: Path) -> None:
    reference, tree = Reference(small_path, exact=False), branching_tree(4)
    first, second = reference.sequences
    reference.step(Batch((Segment(first, prompt(20)), Segment(second, prompt(20)))))
    path = tree.path(len(tree.parents) - 1)
    of_tree = reference.step(Batch((Segment(first, tree.token_ids, tree.parents),)))
    of_chain = reference.step(Batch((Segment(second, [tree.token_ids[row] for row in path]),)))
    assert np.allclose(of_tree[path], of_chain, rtol=0, atol=1e-3)
    reference.commit(first, path)
    after = reference.step(Batch((Segment(first, [5]), Segment(second, [5]))))
    assert np.allclose(after[0], after[1], rtol=0, atol=1e-3)
