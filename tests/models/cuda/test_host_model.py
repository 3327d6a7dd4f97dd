"""A model of a GPU on the host, runner, operations, launchers and kernels: the bits of the CPU."""

import gc
import weakref
from base64 import b64decode
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from itertools import count
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

import numpy as np
import pytest
from cuda_runner_cases import check_chains, open_cuda, open_partly
from one_sequence import OneSequence, chosen_after, open_cpu
from runner_cases import MIXED_LAYERS, token_ids, write_mixed_layers
from tree_cases import CONTEXT, Oracle, Prompts, Tree, check_batch_of_trees, prompt

from bench.runners import open_model_file, partial_plan
from coldstream.decoding import SampledToken, SamplingParams, TokenChoice, begin_choices
from coldstream.experts.prefetch import Prefetching
from coldstream.kernels.cuda.contents import CudaArray
from coldstream.kernels.cuda.runtime import calls
from coldstream.kernels.experts import moe
from coldstream.kernels.ops import SHORT_CONTEXT, ChoiceRule
from coldstream.kernels.router.cuda import router_choose_cuda
from coldstream.kvcache import Batch, CacheSize, Segment
from coldstream.models.cuda import runner as cuda_runner
from coldstream.models.cuda.inputs import StepShape
from coldstream.models.cuda.loaded_model import Loaded
from coldstream.models.cuda.runner import CudaRunner

SIZE = CacheSize.of(80, CONTEXT, num_trees=8)
LENGTHS = (0, 5, 64, 130, 257)


class Model(NamedTuple):
    path: Path
    kv_type: str
    cpu: OneSequence


@pytest.fixture(scope="module", params=MIXED_LAYERS, ids="-".join)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Model]:
    arch, kv_type = request.param
    path = write_mixed_layers(tmp_path_factory.mktemp("models"), arch)
    with open_cpu(path, threads=1, context_length=CONTEXT, cache_size=SIZE, kv_type=kv_type) as runner:
        yield Model(path, kv_type, runner)


@pytest.mark.sharded
@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize("short_context", [SHORT_CONTEXT, 0], ids=["short", "deep"])
def test_a_chain(model: Model, monkeypatch: pytest.MonkeyPatch, short_context: int) -> None:
    """Short contexts have kernels of their own, which are all that differs."""
    monkeypatch.setattr(cuda_runner, "SHORT_CONTEXT", short_context)
    with open_cuda(model.path, context_length=CONTEXT, kv_type=model.kv_type, cache_size=SIZE) as runner:
        check_chains(runner, model.cpu, (1, 5, 20, 130) if short_context else (5, 130))


@pytest.mark.sharded
@pytest.mark.usefixtures("gpu")
def test_long_prompts_of_several_sequences(model: Model) -> None:
    lengths = (40, 1, 70)
    with open_cuda(model.path, context_length=CONTEXT, kv_type=model.kv_type, cache_size=SIZE) as runner:
        sequences = [runner.new_sequence() for _ in lengths]
        segments = [
            Segment(sequence, token_ids(length)) for sequence, length in zip(sequences, lengths, strict=True)
        ]
        logits = [np.array(found[0]) for found in runner.step(Batch(tuple(segments)))]
        for sequence, length, found in zip(sequences, lengths, logits, strict=True):
            model.cpu.reset()
            assert np.array_equal(found, model.cpu.prefill(token_ids(length))), length
            assert np.array_equal(runner.runner.extend(sequence, [3]), model.cpu.decode(3)), length


@pytest.mark.sharded
@pytest.mark.usefixtures("gpu")
def test_trees_and_chains(model: Model) -> None:
    with open_cuda(model.path, context_length=CONTEXT, kv_type=model.kv_type, cache_size=SIZE) as runner:
        prompts, oracle = Prompts(runner), Oracle(model.cpu)
        check_batch_of_trees(prompts, oracle, Random(5), num_trees=3, lengths_of_prompts=LENGTHS, num_next=4)


@pytest.mark.sharded
@pytest.mark.usefixtures("gpu")
def test_each_node_of_a_tree_chooses_by_its_own_path(model: Model) -> None:
    """Beside a chain of another request, whose settings are others."""
    tree = Tree([7, 7, 9, 7, 9], [-1, 0, 0, 1, 1])
    params = SamplingParams(frequency_penalty=-2.0, presence_penalty=-2.0)  # what was there comes again
    other = SamplingParams(temperature=0, repetition_penalty=1.5, repeat_last_n=2)
    choices = []
    with open_cuda(model.path, context_length=CONTEXT, kv_type=model.kv_type, cache_size=SIZE) as runner:
        first, second = (Prompts(runner).begin(length) for length in (5, 3))
        segments = Segment(first, tree.token_ids, tree.parents), Segment(second, [4, 4])
        nodes, chain = runner.step(Batch(segments))
        for node in range(len(tree.parents)):
            path = prompt(5) + [tree.token_ids[row] for row in tree.path(node)]
            choices.append(TokenChoice(nodes[node], path, params, 3))
        choices.append(TokenChoice(chain[0], [*prompt(3), 4, 4], other, 0))
        outcomes = begin_choices(choices).outcomes()
        expected = [
            chosen_after(model.cpu.runner.logits(each.context)[-1], each.context, each.params, each.seed)
            for each in choices
        ]
    assert outcomes == [SampledToken(token_id) for token_id in expected]


@pytest.fixture(scope="module", params=["qwen35moe", "qwen3moe"])
def path_of_experts(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With a shared expert in each layer, and without."""
    return write_mixed_layers(tmp_path_factory.mktemp("models"), request.param)


@pytest.mark.sharded(9)
@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize(
    ("share", "streamed", "prefetching"),
    [(0.0, 0.0, None), (0.0, 1.0, None), (0.5, 0.5, None), (0.25, 0.0, Prefetching(1, 4))],
    ids=str,
)
@pytest.mark.parametrize("path_of_experts", ["qwen35moe", "qwen3moe", "qwen3next", "laguna"], indirect=True)
def test_wherever_experts_are(
    path_of_experts: Path, share: float, streamed: float, prefetching: Prefetching | None
) -> None:
    options = {"streamed": streamed, "context_length": CONTEXT, "prefetching": prefetching}
    with (
        open_cpu(path_of_experts, threads=1, context_length=CONTEXT) as plain,
        open_partly(path_of_experts, share, **options) as runner,
    ):
        check_chains(runner, plain, (1, 5, 20, 90) if share == 0.0 else (1, 8, 40, 90))
        counts = runner.stream_counters
        assert counts is not None
        assert (counts.wanted.sum() > 0) == (streamed == 0.0), "the host shares out what the bus cannot read"


@pytest.mark.usefixtures("gpu")
def test_rows_of_no_sequence_want_no_experts_of_their_own(
    path_of_experts: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step of 17 rows is the captured one of 18."""
    chosen = []

    def choose(
        logits: CudaArray, ids: CudaArray, weights: CudaArray, positions: CudaArray, rule: ChoiceRule
    ) -> None:
        router_choose_cuda(logits, ids, weights, positions, rule)
        if not calls.is_capturing():
            chosen.append((np.asarray(positions).tolist(), np.asarray(ids).tolist()))

    with open_partly(path_of_experts, 0.0, streamed=0.5, context_length=CONTEXT) as runner:
        monkeypatch.setattr(moe, "router_choose_cuda", choose)
        runner.prefill(token_ids(17))
    assert chosen
    for positions, ids in chosen:
        assert positions == [*range(17), -1]
        assert ids[17] == ids[0]
    assert any(ids[1] != ids[0] for _, ids in chosen), "or this would see nothing"


@pytest.mark.usefixtures("gpu")
def test_the_runner_does_what_its_plan_says(path_of_experts: Path) -> None:
    """It attends to a window, streams all experts of prompts, and copies none into slots while it decodes."""
    file, spec = open_model_file(path_of_experts)
    sizes = {"context_length": CONTEXT, "chunk_size": 512, "ring_bytes": 2**22}
    plan = partial_plan(file, spec, 2, **sizes, threads=1)
    plan = replace(plan, attention_window=3, max_cpu_rows=0, copy_bytes_per_step=0)
    with (
        open_cpu(path_of_experts, threads=1, context_length=CONTEXT, attention_window=3) as plain,
        OneSequence(CudaRunner.load(file, spec, plan)) as runner,
    ):
        check_chains(runner, plain, (20, 90))
        for token in range(12):
            runner.decode(token)
        assert runner.stream_counters.on_cpu.sum() == 0 < runner.stream_counters.streamed.sum()
        counters = runner.expert_cache.counters
        assert counters.copies.sum() == plan.placement.num_resident
        assert counters.misses.sum() > 0
        picture = runner.runner.expert_map()
        assert picture is not None
        assert picture.resident is not None
        shape = len(picture.layers), picture.num_experts
        assert shape == (spec.num_layers, spec.num_experts)
        resident = np.frombuffer(b64decode(picture.resident), np.uint8).reshape(shape)
        assert np.array_equal(resident, np.tile(np.arange(spec.num_experts) < 2, (spec.num_layers, 1)))
        assert any(b64decode(picture.uses))


@pytest.mark.sharded(of="models on a GPU")
@pytest.mark.usefixtures("gpu")
def test_mm03_the_first_step_of_a_sequence_is_repeated_where_memory_was_given_back(
    path_of_experts: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    step, failures = Loaded.step, count()

    def failing_once(loaded: Loaded, shape: StepShape) -> Any:
        hidden = step(loaded, shape)
        if next(failures) == 0:
            raise calls.out_of_memory()  # when the state is already another one
        return hidden

    with (
        open_cpu(path_of_experts, threads=1, context_length=CONTEXT) as plain,
        open_partly(path_of_experts, 0.5, context_length=CONTEXT) as runner,
    ):
        assert runner.gpu_experts is not None
        before = runner.gpu_experts.num_slots
        monkeypatch.setattr(Loaded, "step", failing_once)
        check_chains(runner, plain, (20,))
        assert 0 <= runner.gpu_experts.num_slots < before


@pytest.mark.sharded
@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize("open_model", [open_cuda, partial(open_partly, share=0.5)], ids=["whole", "partly"])
def test_trap_24_a_closed_runner_gives_the_memory_of_sequences_back(
    path_of_experts: Path, open_model: Callable[..., OneSequence]
) -> None:
    with open_model(path_of_experts, context_length=CONTEXT) as runner:
        runner.prefill(token_ids(5))
        tensors = weakref.ref(runner._sequences.tensors)
    assert tensors() is None
    runner.release(runner.sequence)


@pytest.mark.usefixtures("gpu")
def test_experts_of_weighted_layers_are_protected_and_change_no_bit(path_of_experts: Path) -> None:
    hits, logits = [], []
    for weights in ((30.0, 1.0), (1.0, 30.0)):
        with open_partly(path_of_experts, 0.4, context_length=CONTEXT, layer_weights=weights) as runner:
            logits += [np.array(runner.decode(token)) for token in token_ids(40)]
            assert runner.expert_cache is not None
            hits.append(runner.expert_cache.counters.hits)
    assert np.array_equal(logits[:40], logits[40:])
    assert hits[0][0] > 1.5 * hits[1][0]
    assert hits[1][1] > 1.5 * hits[0][1]


@pytest.mark.sharded
@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize("options", [None, {}, {"in_ram": 0.25}], ids=["resident", "partly", "tiers"])
def test_trap_24_a_closed_runner_waits_for_no_garbage_collection(
    options: dict[str, float] | None, tmp_path: Path
) -> None:
    """Else the next model finds its memory taken."""
    path = write_mixed_layers(tmp_path, "qwen35moe")
    gc.collect()
    gc.disable()
    try:
        with open_cuda(path) if options is None else open_partly(path, 0.25, **options) as runner:
            runner.prefill(token_ids(5))
            loaded = runner.runner._loaded
            held = [weakref.ref(each) for each in (loaded.memory, loaded.ops, loaded.ops.model_executor)]
            del loaded
        assert [each() for each in held] == [None] * len(held)
    finally:
        gc.enable()
