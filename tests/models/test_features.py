"""Residual streams that a step leaves for drafters: what the model's auxiliary layers put out."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from one_sequence import OneSequence, open_cpu
from runner_cases import VARIANTS, token_ids, write_variant

from coldstream.errors import InvalidRequestError, UnsupportedError
from coldstream.gguf.reader import GGUFFile
from coldstream.kernels.ops import Rows
from coldstream.kernels.reference_ops import ReferenceOps
from coldstream.kvcache import Batch, CacheSize, ModelCache, Segment
from coldstream.models.causal_lm import CausalLM
from coldstream.models.cpu.runner import CpuRunner
from coldstream.models.read_spec import read_spec

CONTEXT = 600
AUX_LAYERS = (0, 2, 3)


def reference_streams(path: Path, ids: Sequence[int]) -> list[np.ndarray]:
    """By docs/arithmetic.md: after every layer, of a chain from position 0."""
    with GGUFFile.open(path) as file:
        ops = ReferenceOps(exact=True)
        model = CausalLM.load(file, read_spec(file.metadata, file.tensors), ops)
    cache = ModelCache(model.spec, ops, num_states=1, context_length=len(ids))
    rows = Rows(torch.arange(len(ids), dtype=torch.int32), torch.zeros(len(ids), dtype=torch.int32))
    streams: list[np.ndarray] = []
    model.forward(
        torch.tensor(ids, dtype=torch.int32), rows, cache, lambda layer, x: streams.append(x.numpy().copy())
    )
    return streams


def open_keeping(path: Path, aux_layers: tuple[int, ...] = AUX_LAYERS, **options: object) -> OneSequence:
    return open_cpu(path, threads=2, context_length=CONTEXT, aux_layers=aux_layers, **options)


@pytest.mark.sharded(9)
@pytest.mark.parametrize("name", VARIANTS)
def test_trap_29_every_aux_layer_has_its_own_features(tmp_path: Path, name: str) -> None:
    path, ids = write_variant(tmp_path, name), token_ids(6)
    streams = reference_streams(path, ids)
    aux_layers = tuple(range(len(streams)))
    with open_keeping(path, aux_layers) as runner:
        runner.extend(ids)
        found = runner.runner.features(range(6))
        assert found.dtype == np.float32
        for layer, part in zip(aux_layers, np.split(found, len(aux_layers), axis=1), strict=True):
            assert np.array_equal(part, streams[layer])


def test_trap_30_every_token_of_a_prompt_has_features_whatever_its_chunk(tmp_path: Path) -> None:
    path, ids = write_variant(tmp_path, "moe"), token_ids(CONTEXT)
    observed: list[np.ndarray] = []
    tokens: list[int] = []

    def on_chunk(chunk: Sequence[int], features: np.ndarray) -> None:
        tokens.extend(chunk)
        observed.append(features)

    with open_keeping(path) as opened:
        runner, size = opened.runner, opened.chunk_size
        runner.extend(opened.sequence, ids, None, on_chunk, runner.features)
        assert tokens == ids
        assert [len(part) for part in observed] == [size, CONTEXT - size]
        opened.reset()
        whole = np.concatenate(observed)
        for end in (3, 4, 40):
            first = opened.position
            opened.extend(ids[first:end])
            assert np.array_equal(runner.features(range(end - first)), whole[first:end])


def test_rows_are_given_in_any_order_of_chains_and_a_tree(tmp_path: Path) -> None:
    size = CacheSize.of(3, CONTEXT, num_trees=1)
    with open_keeping(write_variant(tmp_path, "moe"), cache_size=size) as runner:
        expected = []
        for path in ([4, 7], [4, 7, 8], [4, 7, 9]):
            runner.reset()
            runner.extend(path)
            expected.append(runner.runner.features([len(path) - 1])[0])
        other = runner.new_sequence()
        runner.runner.extend(other, [4])
        runner.reset()
        runner.step(Batch((Segment(runner.sequence, [5, 6]), Segment(other, [7, 8, 9], [-1, 0, 0]))))
        found = runner.runner.features(np.array([4, 2, 3]))
        assert np.array_equal(found, [expected[2], expected[0], expected[1]])
        assert runner.runner.features([]).shape == (0, len(AUX_LAYERS) * runner.spec.hidden_size)
        with pytest.raises(InvalidRequestError, match="the last step computed 5"):
            runner.runner.features([5])


def test_aux_layers_change_no_bit_and_take_only_their_own_memory(tmp_path: Path) -> None:
    path, ids = write_variant(tmp_path, "moe"), token_ids(50)
    with open_keeping(path) as keeping, open_keeping(path, ()) as plain:
        assert np.array_equal(keeping.extend(ids), plain.extend(ids))
        assert np.array_equal(keeping.hidden(range(50)), plain.hidden(range(50)))
        runners = [each.runner for each in (keeping, plain)]
        assert all(isinstance(runner, CpuRunner) for runner in runners)
        more, fewer = (runner.activation_bytes for runner in runners)
        stream = keeping.chunk_size * keeping.spec.hidden_size * 4
        # Some of it lies in blocks that were free anyway.
        assert 0 < more - fewer <= len(AUX_LAYERS) * stream


def test_a_runner_without_aux_layers_refuses_before_anything_changes(tmp_path: Path) -> None:
    with open_keeping(write_variant(tmp_path, "dense-tied"), ()) as opened:
        runner = opened.runner
        opened.extend([1, 2])
        with pytest.raises(UnsupportedError, match="without keeping residual streams"):
            runner.features([0])
        with pytest.raises(UnsupportedError, match="without keeping residual streams"):
            runner.extend(opened.sequence, [3], None, lambda chunk, states: None, runner.features)
        assert opened.position == 2
