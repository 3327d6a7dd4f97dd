"""Models whose layers of attention differ from each other: the same bits everywhere, and another text."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import NamedTuple

import numpy as np
import pytest
from cuda_runner_cases import check_chains, open_cuda
from one_sequence import OneSequence, open_cpu
from runner_cases import MIX, reference_logits, token_ids
from tree_cases import CONTEXT, Oracle, Prompts, check_batch_of_trees

from builders import Dims, MixedAttention, make_model, write_gguf, write_model
from coldstream.kernels import _csrc
from coldstream.kvcache import CacheSize

SIZE = CacheSize.of(80, CONTEXT, num_trees=8)
SEEDS = range(3)


class Model(NamedTuple):
    path: Path
    kv_type: str
    cpu: OneSequence


def random_attention(random: Random, num_layers: int) -> MixedAttention:
    """No two neighbouring layers are alike."""
    heads = [random.choice((2, 4, 6, 8))]
    while len(heads) < num_layers:
        heads.append(random.choice([count for count in (2, 4, 6, 8) if count != heads[-1]]))
    first = random.random() < 0.5
    return MixedAttention(
        head_counts=tuple(heads),
        windowed=tuple(bool(layer % 2) == first for layer in range(num_layers)),
        window=random.choice((1, 3, 64, 100, 290)),
        rope_dims=random.choice((2, 30, 64)),
    )


@pytest.fixture(scope="module", params=[*SEEDS, "gemma4"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Model]:
    path = tmp_path_factory.mktemp("models") / "mixed.gguf"
    if request.param == "gemma4":  # heads of 256 with a window, of 512 without
        write_gguf(path, "gemma4", types=MIX, dims=Dims(layers=3, head_dim=256))
        kv_type = "i16"
    else:
        random = Random(request.param)
        mixed = random_attention(random, 3)
        write_gguf(path, "qwen3moe", types=MIX, dims=Dims(layers=3), mixed=mixed)
        kv_type = random.choice(("i16", "i8", "i4"))
    with open_cpu(path, threads=1, context_length=CONTEXT, cache_size=SIZE, kv_type=kv_type) as runner:
        yield Model(path, kv_type, runner)


@pytest.mark.sharded
def test_every_tier_computes_what_the_reference_defines(model: Model) -> None:
    ids = token_ids(70)
    expected = reference_logits(model.path, ids, model.kv_type).numpy()
    for tier in _csrc.supported_tiers():
        with open_cpu(model.path, threads=2, tier=tier, context_length=70, kv_type=model.kv_type) as runner:
            assert np.array_equal(runner.logits(ids), expected), tier
            runner.reset()
            for start, end in ((0, 1), (1, 3), (3, 20), (20, 70)):
                last = runner.prefill(ids[start:end])
            assert np.array_equal(last, expected[-1]), tier


@pytest.mark.sharded
def test_trees(model: Model) -> None:
    options = {"context_length": CONTEXT, "cache_size": SIZE, "kv_type": model.kv_type}
    with open_cpu(model.path, threads=2, **options) as runner:
        prompts, oracle, random = Prompts(runner), Oracle(model.cpu), Random(model.kv_type)
        for _ in range(3):
            check_batch_of_trees(prompts, oracle, random)


@pytest.mark.sharded
@pytest.mark.usefixtures("gpu")
def test_a_gpu_computes_what_the_cpu_computes(model: Model) -> None:
    with open_cuda(model.path, context_length=CONTEXT, kv_type=model.kv_type, cache_size=SIZE) as runner:
        check_chains(runner, model.cpu, (1, 5, 130))
        prompts, oracle = Prompts(runner), Oracle(model.cpu)
        lengths = (0, 5, 130, 257)
        check_batch_of_trees(prompts, oracle, Random(5), num_trees=3, lengths_of_prompts=lengths, num_next=4)


@pytest.mark.gpu
def test_a_real_gpu_computes_what_the_cpu_computes(model: Model) -> None:
    with open_cuda(model.path, context_length=CONTEXT, kv_type=model.kv_type, cache_size=SIZE) as runner:
        check_chains(runner, model.cpu, (1, 5, 20, 130, 500))
        prompts, oracle, random = Prompts(runner), Oracle(model.cpu), Random(5)
        for _ in range(3):
            check_batch_of_trees(prompts, oracle, random)


def test_each_property_of_a_layer_changes_the_text(tmp_path: Path) -> None:
    """The weights are the same; only what the keys say of layers differs."""
    mixed = MixedAttention()
    model = make_model("qwen3moe", quant="F32", tokenizer=False, mixed=mixed)
    others = {
        "windows": replace(mixed, windowed=(False, True, False, False)),
        "window": replace(mixed, window=6),
        "rotated": replace(mixed, rope_dims=64),
    }
    ids, found = token_ids(40), {}
    for name, attention in {"mixed": mixed, **others}.items():
        model.metadata |= {f"qwen3moe.{key}": value for key, value in attention.keys.items()}
        (path,) = write_model(tmp_path / f"{name}.gguf", model)
        with open_cpu(path, threads=1, context_length=64, kv_type="f32") as runner:
            found[name] = runner.logits(ids)
    for name in others:
        assert np.abs(found[name] - found["mixed"]).max() > 0.01, name
