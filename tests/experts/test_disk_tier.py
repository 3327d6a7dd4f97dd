"""DiskTier: what its slots take, and whom they are given to."""

from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from builders import Dims, write_gguf
from coldstream.experts.disk_tier import DECODE_TOKENS, DiskTier
from coldstream.gguf.reader import GGUFFile
from coldstream.kernels import _csrc
from coldstream.models.ram_budget import expert_stacks
from coldstream.models.spec import ModelSpec
from coldstream.placement.policies import Lru

NUM_EXPERTS, PER_TOKEN = 16, 2


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Iterator[GGUFFile]:
    """Four layers, one of larger experts."""
    path = tmp_path_factory.mktemp("models") / "tiny.gguf"
    types = {"*_exps.weight": "Q4_K", "blk.1.ffn_down_exps.weight": "Q6_K"}
    write_gguf(path, types=types, dims=Dims(experts=NUM_EXPERTS, experts_used=PER_TOKEN))
    with GGUFFile.open(path) as opened:
        yield opened


def make_tier(file: GGUFFile) -> DiskTier:
    return DiskTier(
        file, expert_stacks(file, ModelSpec.from_gguf(file.metadata, file.tensors)), PER_TOKEN, Lru()
    )


@settings(max_examples=50, deadline=None)
@given(data=st.data())
def test_slots_take_no_more_than_they_may_and_at_least_a_token_fits(
    file: GGUFFile, data: st.DataObject
) -> None:
    tier = make_tier(file)
    assert tier.num_experts == 4 * NUM_EXPERTS
    budget = data.draw(st.integers(tier.min_bytes, 2 * tier.max_bytes))
    tier.allocate(budget)
    statistics = tier.statistics()
    assert tier.min_bytes <= statistics.slot_bytes <= min(budget, tier.max_bytes)
    assert min(len(tier.pool.owners(c)) for c in range(2)) >= PER_TOKEN
    if budget >= tier.max_bytes:
        assert statistics.num_slots == tier.num_experts


def test_all_sizes_get_the_same_share(file: GGUFFile) -> None:
    tier = make_tier(file)
    tier.allocate(tier.max_bytes // 2)
    many, few = sorted((len(tier.pool.owners(c)) for c in range(2)), reverse=True)
    assert abs(many - 3 * few) <= 3 * PER_TOKEN


def test_decoding_teaches_the_policy_and_prompts_do_not(file: GGUFFile) -> None:
    tier = make_tier(file)
    tier.allocate(tier.min_bytes)
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
