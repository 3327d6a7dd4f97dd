"""DiskTier: the memory of its slots, and the experts in them."""

from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from builders import Dims, write_gguf
from coldstream.experts.cpu.disk_tier import DECODE_TOKENS, DiskTier
from coldstream.gguf.reader import GGUFFile
from coldstream.kernels import _csrc
from coldstream.models.expert_stacks import expert_stacks
from coldstream.models.read_spec import read_spec
from coldstream.placement.policies import DecayedFrequency, Lru, Policy

NUM_EXPERTS, PER_TOKEN = 16, 2


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Iterator[GGUFFile]:
    """Four layers, one of larger experts."""
    path = tmp_path_factory.mktemp("models") / "tiny.gguf"
    types = {"*_exps.weight": "Q4_K", "blk.1.ffn_down_exps.weight": "Q6_K"}
    write_gguf(path, types=types, dims=Dims(experts=NUM_EXPERTS, experts_used=PER_TOKEN))
    with GGUFFile.open(path) as opened:
        yield opened


def make_tier(file: GGUFFile, policy: Policy | None = None) -> DiskTier:
    stacks = expert_stacks(file, read_spec(file.metadata, file.tensors))
    return DiskTier(file, stacks, PER_TOKEN, policy or Lru())


@settings(max_examples=50, deadline=None)
@given(num_small=st.integers(PER_TOKEN, 3 * NUM_EXPERTS), num_large=st.integers(PER_TOKEN, NUM_EXPERTS))
def test_slots_are_those_of_the_plan(file: GGUFFile, num_small: int, num_large: int) -> None:
    tier = make_tier(file)
    small, large = tier.expert_bytes[0], tier.expert_bytes[1]
    assert tier.expert_bytes == (small, large, small, small)
    tier.allocate({small: num_small, large: num_large})
    statistics = tier.statistics()
    assert statistics.slot_bytes == num_small * small + num_large * large
    assert (statistics.num_slots, statistics.num_experts) == (num_small + num_large, 4 * NUM_EXPERTS)
    assert [len(tier.pool.owners(tier.pool.class_of(layer))) for layer in (0, 1)] == [num_small, num_large]


def test_what_a_plan_expects_is_loaded_and_scored_and_no_miss(file: GGUFFile) -> None:
    tier = make_tier(file, DecayedFrequency())
    small, large = tier.expert_bytes[0], tier.expert_bytes[1]
    uses = np.random.default_rng(0).random((4, NUM_EXPERTS))
    tier.allocate({small: 9, large: 3}, uses)
    done: list[tuple[int, int]] = []
    tier.load([[0, 3], [5], [15], []], lambda *progress: done.append(progress))
    assert done == [(2, 4), (3, 4), (4, 4)]
    held = [set(tier.pool.owners(tier.pool.class_of(layer)).tolist()) - {-1} for layer in (0, 1)]
    assert held == [{0, 3, 2 * NUM_EXPERTS + 15}, {NUM_EXPERTS + 5}]
    assert np.array_equal(np.argsort(tier._policy.scores), np.argsort(uses.ravel()))
    statistics = tier.statistics()
    assert (statistics.hits, statistics.misses) == (0, 0)
    assert statistics.bytes_read > 0


def test_decoding_teaches_the_policy_and_prompts_do_not(file: GGUFFile) -> None:
    tier = make_tier(file)
    tier.allocate(dict.fromkeys(tier.expert_bytes, PER_TOKEN))
    runtime = _csrc.Runtime(1)
    info = file.tensors["blk.2.ffn_gate_exps.weight"]
    gate = _csrc.Weight.from_pool(tier.pool, 2, 0, int(info.quant_type), *info.shape[1:])

    def step(num_tokens: int, *ids: int) -> None:
        tier.begin_step(num_tokens)
        _csrc.request_experts(runtime, tier.pool, gate, np.array([ids], np.int32))
        tier.end_step()

    scores = tier._policy.scores
    step(DECODE_TOKENS + 1, 1, 2)
    assert scores.max() < 0
    step(1, 3, 4)
    assert sorted(np.flatnonzero(scores >= 0)) == [2 * NUM_EXPERTS + 3, 2 * NUM_EXPERTS + 4]
    assert tier.statistics().misses == 4
    assert tier.statistics().hit_rate == 0.0
