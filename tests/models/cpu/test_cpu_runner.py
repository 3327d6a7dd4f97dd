"""CpuRunner: whole models through the C++ graph, held to the exact PyTorch definition and to themselves."""

import os
from base64 import b64decode
from pathlib import Path

import numpy as np
import pytest
from one_sequence import open_cpu
from runner_cases import FAMILIES, MIX, VARIANTS, reference_logits, token_ids, write_variant

from builders import Dims, write_gguf
from coldstream.errors import InvalidRequestError, ModelChangedError, UnsupportedError
from coldstream.kernels import _csrc
from coldstream.models.cpu.runner import CpuRunner

MORE_THAN_A_CHUNK = token_ids(CpuRunner.chunk_size + 9)


@pytest.fixture(scope="module", params=VARIANTS, ids=list(VARIANTS))
def model_path(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_variant(tmp_path_factory.mktemp("models"), request.param)


@pytest.fixture(scope="module")
def moe_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("models") / "moe.gguf"
    write_gguf(path, types=MIX)
    return path


@pytest.fixture(scope="module", params=FAMILIES)
def family_path(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Experts behind layers of both kinds of mixer, and behind attention alone."""
    return write_variant(tmp_path_factory.mktemp("models"), request.param)


@pytest.mark.sharded(9)
@pytest.mark.parametrize("kv_type", ["f32", "i16"])
def test_the_graph_computes_what_the_reference_defines(model_path: Path, kv_type: str) -> None:
    ids = token_ids(7)
    with open_cpu(model_path, threads=2, context_length=64, kv_type=kv_type) as runner:
        assert np.array_equal(runner.logits(ids), reference_logits(model_path, ids, kv_type).numpy())


@pytest.fixture(scope="module")
def generic_logits(family_path: Path) -> np.ndarray:
    """Behind `MORE_THAN_A_CHUNK`, by the slowest tier."""
    length = len(MORE_THAN_A_CHUNK)
    with open_cpu(family_path, threads=2, tier="generic", context_length=length) as runner:
        return runner.prefill(MORE_THAN_A_CHUNK)


# The slowest tier has computed what is expected, with two threads.
@pytest.mark.sharded
@pytest.mark.parametrize(
    ("tier", "threads"),
    [
        (tier, threads)
        for tier in _csrc.supported_tiers()
        for threads in ((3,) if tier == "generic" else (1, 3))
    ],
)
def test_tokens_do_not_depend_on_tier_threads_or_chunks(
    family_path: Path, generic_logits: np.ndarray, tier: str, threads: int
) -> None:
    ids, expected = MORE_THAN_A_CHUNK, generic_logits
    with open_cpu(family_path, threads=threads, tier=tier, context_length=len(ids)) as runner:
        assert np.array_equal(runner.prefill(ids), expected)
        runner.reset()
        start = 0
        for size in (1, 2, 15, 16, 17, 64, len(ids)):
            logits = runner.prefill(ids[start : start + size])
            start += size
        assert np.array_equal(logits, expected)


def test_decoding_equals_prefill_bit_for_bit(model_path: Path) -> None:
    ids = token_ids(70)
    with open_cpu(model_path, threads=2, context_length=128) as runner:
        together = runner.logits(ids)
        runner.reset()
        alone = np.stack([runner.decode(token) for token in ids])
    assert np.array_equal(together, alone)


def test_twenty_requests_in_one_process_answer_like_the_first(family_path: Path) -> None:
    with open_cpu(family_path, threads=2, context_length=128) as runner:
        expected = runner.prefill(token_ids(33))
        for other in range(1, 21):
            runner.reset()
            runner.prefill(token_ids(other))
            runner.reset()
            assert np.array_equal(runner.prefill(token_ids(33)), expected)


def test_what_cannot_be_computed_is_refused_and_changes_nothing(moe_path: Path) -> None:
    with open_cpu(moe_path, threads=1, context_length=16) as runner:
        runner.prefill(token_ids(8))
        for bad in ([], token_ids(9), [-1], [runner.spec.vocab_size]):
            with pytest.raises(InvalidRequestError):
                runner.prefill(bad)
        assert runner.position == 8
        after = runner.decode(5)
        runner.reset()
        assert np.array_equal(runner.prefill([*token_ids(8), 5]), after)


def test_fl01_a_file_that_shrinks_is_an_error_and_the_process_lives(tmp_path: Path) -> None:
    path = tmp_path / "shrinking.gguf"
    write_gguf(path, types=MIX)

    def shrink(done: int, total: int) -> None:
        os.truncate(path, 4096)

    ids = token_ids(CpuRunner.chunk_size + 4)
    with open_cpu(path, threads=2, context_length=len(ids)) as runner:
        with pytest.raises(ModelChangedError, match=r"shrinking\.gguf changed while in use: byte \d+"):
            runner.prefill(ids, shrink)
        assert runner.position == 0
        with pytest.raises(ModelChangedError, match=r"shrinking\.gguf was written to while in use"):
            runner.prefill(ids)


def test_an_unknown_tier_is_refused_by_name(moe_path: Path) -> None:
    with pytest.raises(UnsupportedError, match="sse9"):
        open_cpu(moe_path, threads=1, tier="sse9", context_length=16)


@pytest.mark.sharded(of="models on the CPU")
def test_activations_share_memory_between_layers(tmp_path: Path) -> None:
    sizes = []
    for layers in (4, 12):
        path = tmp_path / f"{layers}.gguf"
        write_gguf(path, dims=Dims(layers=layers))
        with open_cpu(path, threads=1, context_length=16) as runner:
            sizes.append(runner.activation_bytes)
    assert sizes[0] == sizes[1]


def test_uses_of_experts_are_what_the_routers_of_decode_steps_chose(moe_path: Path) -> None:
    ids = token_ids(CpuRunner.chunk_size // 4 + 3)
    with open_cpu(moe_path, threads=2, context_length=len(ids)) as runner:
        runner.prefill(ids[:-3])
        picture = runner.expert_map()
        assert picture is not None
        assert set(b64decode(picture.uses)) == {0}, "a prompt's steps say little"
        chosen = np.zeros((runner.spec.num_layers, runner.spec.num_experts), bool)
        for token_id in ids[-3:]:
            runner.decode(token_id)
            for layer, experts in enumerate(runner.topk_ids(1)[0]):
                chosen[layer, experts] = True
        picture = runner.expert_map()
    assert picture is not None
    assert picture.layers == tuple(range(runner.spec.num_layers))
    assert picture.resident is None
    uses = np.frombuffer(b64decode(picture.uses), np.uint8).reshape(chosen.shape)
    assert np.array_equal(uses > 0, chosen)
