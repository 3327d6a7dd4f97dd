"""Which experts a full pool gives up between two steps: those of the lowest scores, in every size."""

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from builders import Dims, write_gguf
from coldstream.experts.cpu.disk_tier import DECODE_TOKENS, DiskTier
from coldstream.gguf.reader import GGUFFile
from coldstream.kernels import _csrc
from coldstream.models.expert_stacks import expert_stacks
from coldstream.models.read_spec import read_spec
from coldstream.placement.policies import Lru, Policy

NUM_EXPERTS, PER_TOKEN = 16, 2
LAYERS = (0, 1, 2)  # the middle one of larger experts
MATRICES = ("gate", "up", "down")


class Given(Policy):
    """Scores that the test sets."""

    def start(self, profile: np.ndarray) -> None:
        self.scores = profile.copy()

    def observe(self, used: np.ndarray) -> None:
        """Learns nothing."""


class Steps:
    """Steps of single layers over the experts of a file, of which `num_slots` of each size find room."""

    def __init__(self, file: GGUFFile, policy: Policy, num_slots: int) -> None:
        self.file, self.policy = file, policy
        stacks = expert_stacks(file, read_spec(file.metadata, file.tensors))
        self.tier = DiskTier(file, stacks, PER_TOKEN, policy)
        self.tier.stacks.allocate(dict.fromkeys(self.tier.pool.slot_bytes, num_slots), 2)
        self.runtime = _csrc.Runtime(1)

    def step(self, layer: int, ids: Sequence[int], num_tokens: int = 1) -> None:
        pool = self.tier.pool
        infos = [self.file.tensors[f"blk.{layer}.ffn_{name}_exps.weight"] for name in MATRICES]
        matrices = [
            _csrc.Weight.from_pool(pool, layer, part, int(info.quant_type), *info.shape[1:])
            for part, info in enumerate(infos)
        ]
        x = np.ones((1, infos[0].shape[2]), np.float32)
        out = np.empty((1, len(ids), infos[2].shape[1]), np.float32)
        table = np.array([ids], np.int32)
        self.tier.begin_step(num_tokens)
        _csrc.request_experts(self.runtime, pool, matrices[0], table)
        _csrc.pooled_experts(self.runtime, pool, x, table, *matrices, out)
        self.tier.end_step()

    def resident(self, layer: int) -> set[int]:
        """Numbers of the experts in slots of the layer's size."""
        owners = self.tier.pool.owners(self.tier.pool.class_of(layer))
        return {int(owner) for owner in owners if owner >= 0}


def write(path: Path) -> Path:
    types = {"*_exps.weight": "Q4_K", "blk.1.ffn_down_exps.weight": "Q6_K"}
    write_gguf(path, types=types, dims=Dims(experts=NUM_EXPERTS, experts_used=PER_TOKEN))
    return path


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Iterator[GGUFFile]:
    with GGUFFile.open(write(tmp_path_factory.mktemp("models") / "tiny.gguf")) as opened:
        yield opened


@given(data=st.data(), layer=st.sampled_from(LAYERS), num_slots=st.integers(3, 8), was_failed=st.booleans())
def test_the_lowest_scores_go_first(
    file: GGUFFile, data: st.DataObject, layer: int, num_slots: int, was_failed: bool
) -> None:
    policy = Given()
    steps = Steps(file, policy, num_slots)
    if was_failed:  # other slots are filled first then
        for expert in range(num_slots):
            steps.step(layer, [expert])
        steps.tier.forget()
    scores = data.draw(st.permutations(range(policy.scores.size)), "scores")
    policy.scores[:] = scores
    # A slot may be free when the order is set, and taken by the next step before others are given up.
    num_before = data.draw(st.integers(num_slots - 2, num_slots), "residents")
    for expert in range(num_before):
        steps.step(layer, [expert])
    first = layer * NUM_EXPERTS
    before = {first + expert for expert in range(num_before)}
    assert steps.resident(layer) == before
    new = data.draw(st.lists(st.integers(num_before, NUM_EXPERTS - 1), min_size=3, max_size=3, unique=True))
    steps.step(layer, new)
    num_evicted = num_before + 3 - num_slots
    evicted = set(sorted(before, key=lambda expert: scores[expert])[:num_evicted])
    assert steps.resident(layer) == (before - evicted) | {first + expert for expert in new}


def test_layers_of_one_size_give_up_their_lowest_scores_together(file: GGUFFile) -> None:
    policy = Given()
    steps = Steps(file, policy, 4)
    policy.scores[[0, 1, 2 * NUM_EXPERTS, 2 * NUM_EXPERTS + 1]] = 1.0, 4.0, 2.0, 3.0
    for layer in (0, 2):
        steps.step(layer, [0, 1])
    steps.step(2, [5, 6])
    assert steps.resident(0) == {1, 2 * NUM_EXPERTS + 1, 2 * NUM_EXPERTS + 5, 2 * NUM_EXPERTS + 6}


@pytest.mark.parametrize(
    ("num_tokens", "teaches"), [(1, True), (DECODE_TOKENS, True), (DECODE_TOKENS + 1, False)]
)
def test_steps_of_up_to_so_many_tokens_teach_the_policy(
    file: GGUFFile, num_tokens: int, teaches: bool
) -> None:
    policy = Lru()
    Steps(file, policy, 4).step(0, [3, 4], num_tokens)
    assert sorted(np.flatnonzero(policy.scores >= 0)) == ([3, 4] if teaches else [])
