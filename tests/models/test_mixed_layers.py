"""Dense layers among others, gated units, biases, ungated shared experts: tokens depend on no place."""

from collections.abc import Iterator
from itertools import product
from pathlib import Path
from random import Random

import numpy as np
import pytest
from cuda_runner_cases import check_chains, open_cuda, open_partly
from one_sequence import open_cpu
from runner_cases import reference_logits, token_ids

from builders import Dims, make_model, write_model
from coldstream.experts.prefetch import Prefetching
from coldstream.placement.plan import BudgetTooSmallError
from mixed_ffns import DENSE_KEY, UNIT_KEY, UNITS, mixed_families
from random_residency import RandomResidency

CONTEXT = 256
TYPES = {"*_exps.weight": "Q4_0", "*.ffn_down_exps.weight": "Q5_0", "blk.1.ffn_down_exps.weight": "Q8_0"}
ARCHS = ("qwen35moe", "qwen3moe")


@pytest.fixture(autouse=True, scope="module")
def families() -> Iterator[None]:
    with mixed_families():
        yield


def write_mixed(folder: Path, arch: str, dense: frozenset[int], num_layers: int, *, seed: int = 0) -> Path:
    """A model with dense layers and any gated unit; experts have biases, or a shared one without a gate."""
    dims = Dims(
        layers=num_layers, interval=2, hidden=128, ffn=192, experts=48, experts_used=3, expert_ffn=64,
        shared_ffn=96,
    )  # fmt: skip
    unit = list(UNITS)[seed % len(UNITS)]
    has_biases = arch == "qwen3moe" and unit != "swiglu"
    options = {"dense_layers": dense, "plain_shared": not has_biases, "expert_biases": has_biases}
    model = make_model(arch, dims=dims, types=TYPES, seed=seed, **options)
    model.metadata[f"{arch}.{UNIT_KEY}"] = unit
    model.metadata[f"{arch}.{DENSE_KEY}"] = dims.ffn
    model.metadata[f"{arch}.expert_shared_feed_forward_length"] = dims.shared_ffn
    return write_model(folder / f"{arch}-{'-'.join(map(str, sorted(dense)))}.gguf", model)[0]


def dense_layers(rng: Random, num_layers: int) -> frozenset[int]:
    """Some of the layers, but not all."""
    return frozenset(rng.sample(range(num_layers), rng.randint(1, num_layers - 1)))


@pytest.mark.parametrize("seed", range(6))
def test_any_layers_may_be_dense(tmp_path: Path, seed: int) -> None:
    rng = Random(seed)
    num_layers, arch = rng.randint(2, 5), rng.choice(ARCHS)
    dense = dense_layers(rng, num_layers)
    path = write_mixed(tmp_path, arch, dense, num_layers, seed=seed)
    ids, options = token_ids(5), {"context_length": CONTEXT, "kv_type": "f32"}
    expected = reference_logits(path, ids).numpy()
    for threads, is_whole in product((1, 2), (True, False)):
        with pytest.raises(BudgetTooSmallError) as caught:
            open_cpu(path, threads=threads, ram_bytes=1, **options)
        budget = None if is_whole else caught.value.least_bytes
        with open_cpu(path, threads=threads, ram_bytes=budget, **options) as runner:
            assert (runner.runner.disk is None) == is_whole
            assert np.array_equal(runner.runner.logits(ids), expected)
            picture = runner.runner.expert_map()
            assert picture is not None
            assert set(picture.layers) == set(range(num_layers)) - dense


@pytest.mark.sharded
@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize("seed", range(6))
def test_wherever_experts_are_on_a_gpu(tmp_path: Path, seed: int) -> None:
    """In slots, pinned, read over the bus, fetched ahead, in a pool, on the disk; slots change at random."""
    rng = Random(seed)
    num_layers = rng.randint(3, 5)
    dense = dense_layers(rng, num_layers) if seed else frozenset({0})
    path = write_mixed(tmp_path, ARCHS[seed % 2], dense, num_layers, seed=seed)
    num_mixtures = num_layers - len(dense)
    options = {
        "streamed": rng.choice((0.0, 0.5, 1.0)),
        "in_ram": rng.choice((None, 0.3)),
        "pinned": (0,) if num_mixtures > 1 and seed < 3 else (),
        "prefetching": Prefetching(1, 2) if rng.random() < 0.5 else None,
        "policy": RandomResidency(seed),
    }
    with (
        open_cpu(path, threads=1, context_length=CONTEXT) as plain,
        open_partly(path, rng.choice((0.0, 0.3)), context_length=CONTEXT, **options) as runner,
    ):
        check_chains(runner, plain, (1, 9, 40))
        picture = runner.runner.expert_map()
        assert picture is not None
        numbers = [layer for layer in range(num_layers) if layer not in dense]
        assert picture.layers == tuple(n for i, n in enumerate(numbers) if i not in options["pinned"])


@pytest.mark.usefixtures("gpu")
def test_a_gpu_that_holds_all(tmp_path: Path) -> None:
    path = write_mixed(tmp_path, "qwen35moe", frozenset({0}), 2)
    with open_cpu(path, threads=1, context_length=CONTEXT) as plain, open_cuda(path) as runner:
        check_chains(runner, plain, (1, 9, 40))
