"""CudaRunner: whole models on a GPU, held to the exact definition, to the CPU and to themselves."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from cuda_runner_cases import open_cuda
from hypothesis import given
from hypothesis import strategies as st
from one_sequence import OneSequence, chosen_after, open_cpu, step_rows
from runner_cases import FAMILIES, MIX, VARIANTS, reference_logits, token_ids, write_variant

from bench.runners import open_model_file, resident_plan
from builders import write_gguf
from coldstream.assets import demo_model_path
from coldstream.decoding import SamplingParams, sample_token
from coldstream.errors import InvalidRequestError, UnsupportedError
from coldstream.gguf.reader import GGUFFile
from coldstream.kept_files import MACHINE_CODE, KeptFiles
from coldstream.kernels.attention.cache_layout import INTEGER_CACHE_TYPES
from coldstream.kernels.cuda import limits
from coldstream.kernels.cuda.limits import DeviceLimits
from coldstream.kernels.cuda.program import CudaProgram, Kernel
from coldstream.kernels.cuda.runtime import allocations, calls
from coldstream.kernels.cuda.skinny_shapes import SKINNY_TYPES, instance_for
from coldstream.kvcache import Batch, CacheSize, Segment
from coldstream.models.cuda import runner as cuda_runner
from coldstream.models.cuda.limits import (
    MAX_GRAPH_ROWS,
    SIZES_PER_DOUBLING,
    SMALLEST_PADDED_ROWS,
    Limits,
    padded_rows,
)
from coldstream.models.cuda.memory_plan import check_supported, check_types, kernels_of
from coldstream.models.cuda.runner import CudaRunner
from coldstream.models.read_spec import read_spec
from coldstream.models.spec.layer_specs import AttentionSpec, DeltaNetSpec, MoeSpec
from specs import with_layers


@pytest.fixture(scope="module", params=FAMILIES)
def family_path(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_variant(tmp_path_factory.mktemp("models"), request.param)


@pytest.fixture(scope="module")
def runner(family_path: Path) -> Iterator[OneSequence]:
    """One sequence of up to 1024 tokens; tests leave it in any state."""
    with open_cuda(family_path, context_length=1024) as runner:
        yield runner


@pytest.mark.gpu
@pytest.mark.parametrize("variant", VARIANTS)
def test_the_gpu_computes_what_the_reference_defines(variant: str, tmp_path: Path) -> None:
    path = write_variant(tmp_path, variant)
    ids = token_ids(21)
    expected = reference_logits(path, ids, "i16").numpy()
    with open_cuda(path) as runner:
        assert np.array_equal(runner.logits(ids), expected)
        runner.reset()
        assert np.array_equal(np.stack([runner.decode(token) for token in ids]), expected)


@pytest.mark.gpu
def test_the_demo_model_has_the_same_bits_on_gpu_and_cpu() -> None:
    ids = token_ids(300)
    with open_cpu(demo_model_path(), threads=4, context_length=512) as cpu:
        expected = cpu.logits(ids)
    with open_cuda(demo_model_path(), context_length=512) as gpu:
        assert np.array_equal(gpu.logits(ids), expected)


@pytest.mark.gpu
def test_a_request_alone_and_among_31_others_in_any_chunks(family_path: Path) -> None:
    """Row and chunk invariance, bit for bit: at once and in chunks of 64 and 4096, alone and in slot 17."""
    context_length, tokens = 4352, token_ids(9)
    prompts = [token_ids(300 + 7 * slot) for slot in range(32)]
    prompts[17] = token_ids(context_length - 152)
    with open_cuda(family_path, context_length) as alone:
        assert alone.chunk_size >= len(prompts[17])
        first = alone.prefill(prompts[17])
        others = [alone.decode(token) for token in tokens]
        for size in (64, 4096):
            alone.reset()
            for start in range(0, len(prompts[17]), size):
                in_chunks = alone.prefill(prompts[17][start : start + size])
            assert np.array_equal(in_chunks, first)
            assert np.array_equal([alone.decode(token) for token in tokens], others)
    size = CacheSize(num_blocks=context_length // 256 + 31 * 3, num_states=32)
    with open_cuda(family_path, context_length, cache_size=size) as crowd:
        sequences = [crowd.new_sequence() for _ in prompts]
        for i, prompt in enumerate(prompts):
            chunk = 4096 if i == 17 else 100
            for start in range(0, len(prompt), chunk):
                in_chunks = np.array(crowd.runner.extend(sequences[i], prompt[start : start + chunk]))
            if i == 17:
                assert np.array_equal(in_chunks, first)
        for step, token in enumerate(tokens):
            assert np.array_equal(step_rows(crowd, sequences, [token] * 32)[17], others[step])


@pytest.mark.gpu
def test_trap_22_a_captured_graph_bakes_nothing_in(runner: OneSequence) -> None:
    """The graph of one row serves every position, state and request after the one it was captured for."""
    ids = token_ids(400)
    expected = runner.logits(ids)
    for start in (1, 63, 64, 255, 256, 399):
        runner.reset()
        runner.prefill(ids[:start])
        assert np.array_equal(runner.decode(ids[start]), expected[start])


@pytest.mark.gpu
@pytest.mark.alone
def test_trap_23_twenty_requests_leave_memory_flat_and_answer_alike(runner: OneSequence) -> None:
    def answer() -> np.ndarray:
        runner.reset()
        first = runner.prefill(token_ids(130))
        return np.stack([first, *(runner.decode(token) for token in token_ids(6))])

    expected = answer()

    def free_after_twenty_requests() -> int:
        for other in range(1, 21):
            runner.reset()
            runner.prefill(token_ids(17 * other))
            assert np.array_equal(answer(), expected)
        allocations.trim()
        return calls.free_memory()[0]

    # The first time also captures a graph for each of their sizes.
    assert free_after_twenty_requests() == free_after_twenty_requests()


@pytest.mark.gpu
def test_trap_24_a_reset_leaves_nothing_of_the_last_sequence(family_path: Path, runner: OneSequence) -> None:
    runner.reset()
    runner.prefill(token_ids(200))
    runner.reset()
    used = runner.logits(token_ids(50))
    with open_cuda(family_path, context_length=1024) as fresh:
        assert np.array_equal(fresh.logits(token_ids(50)), used)


@pytest.mark.gpu
@pytest.mark.alone
def test_trap_24_a_closed_runner_gives_its_memory_back(moe_path: Path) -> None:
    def free() -> int:
        allocations.trim()
        return calls.free_memory()[0]

    def use() -> None:
        with open_cuda(moe_path) as runner:
            runner.prefill(token_ids(5))

    use()  # the driver keeps the code and the local memory of kernels that have run once
    before = free()
    for _ in range(3):
        use()
    assert free() == before


@pytest.mark.gpu
def test_compiled_kernels_that_are_not_kept_are_a_warning(
    moe_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    homeless = KeptFiles(MACHINE_CODE, None)
    homeless.put("add.cubin", b"")
    monkeypatch.setattr(cuda_runner, "default_cache", lambda: homeless)
    with open_cuda(moe_path) as runner:
        assert [warning for warning in runner.warnings if "compiled kernels are not kept" in warning]


@pytest.mark.gpu
def test_trap_25_every_state_has_memory_of_its_own(family_path: Path) -> None:
    """Two sequences with equal prompts, of which one goes on: the other's state has not moved."""
    with open_cuda(family_path, cache_size=CacheSize.of(2, 256)) as runner:
        first, second = runner.new_sequence(), runner.new_sequence()
        for sequence in (first, second):
            runner.runner.extend(sequence, token_ids(20))
        expected = step_rows(runner, [first], [7])
        step_rows(runner, [first], [9])
        other = step_rows(runner, [second], [7])
    assert np.array_equal(other, expected)


@pytest.mark.gpu
def test_trap_26_inputs_arrive_before_they_are_used_and_results_before_they_are_read(
    runner: OneSequence,
) -> None:
    """Steps queued without pause: a late copy or an early read would mix neighbouring tokens."""
    ids = token_ids(60)
    expected = runner.logits(ids)
    for _ in range(5):
        runner.reset()
        results = [runner.decode(token) for token in ids]
        assert np.array_equal(np.stack(results), expected)


@pytest.mark.gpu
@pytest.mark.parametrize("count", [1, 2, 3, 8, 9, 33])
def test_trap_36_positions_mean_the_same_for_one_row_and_for_many(runner: OneSequence, count: int) -> None:
    ids = token_ids(40 + count)
    expected = runner.logits(ids)
    runner.reset()
    runner.prefill(ids[:40])
    assert np.array_equal(runner.prefill(ids[40:]), expected[-1])


@pytest.mark.gpu
@pytest.mark.parametrize("arch", ["qwen35moe", "qwen3next"])
@pytest.mark.parametrize("count", [1, 2, 3, 4])
def test_trap_55_the_shared_gate_of_one_to_four_rows(tmp_path: Path, count: int, arch: str) -> None:
    path = tmp_path / "gate.gguf"
    write_gguf(path, arch, types={**MIX, "*.ffn_gate_inp_shexp.weight": "F16"})
    ids = token_ids(count)
    with open_cuda(path) as runner:
        assert np.array_equal(runner.logits(ids), reference_logits(path, ids, "i16").numpy())


@pytest.mark.gpu
def test_what_cannot_be_computed_is_refused_and_changes_nothing(moe_path: Path) -> None:
    with open_cuda(moe_path, context_length=16) as runner:
        runner.prefill(token_ids(8))
        for bad in ([], token_ids(9), [-1], [runner.spec.vocab_size]):
            with pytest.raises(InvalidRequestError):
                runner.prefill(bad)
        assert runner.position == 8
        after = runner.decode(5)
        runner.reset()
        assert np.array_equal(runner.prefill([*token_ids(8), 5]), after)


@pytest.mark.gpu
@pytest.mark.parametrize("kv_type", INTEGER_CACHE_TYPES)
def test_types_of_keys_and_values_have_the_bits_of_the_reference(family_path: Path, kv_type: str) -> None:
    ids = token_ids(70)
    with open_cuda(family_path, kv_type=kv_type) as runner:
        assert np.array_equal(runner.logits(ids), reference_logits(family_path, ids, kv_type).numpy())


@pytest.mark.gpu
def test_trap_49_a_token_that_the_gpu_chose_is_one_of_the_vocabulary(runner: OneSequence) -> None:
    runner.reset()
    context: list[int] = []
    for token in token_ids(20):
        context.append(token)
        logits = runner.extend((token,))
        expected = np.asarray(logits)
        for params in (SamplingParams(temperature=0), SamplingParams(repetition_penalty=1.3)):
            chosen = chosen_after(logits, context, params, 7)
            assert 0 <= chosen < runner.spec.vocab_size
            assert chosen == sample_token(expected, context, params, 7)
    runner.extend((1,))
    with pytest.raises(RuntimeError, match="another step"):
        np.asarray(logits)


@given(st.integers(1, 10000))
def test_rows_are_padded_by_little_and_to_few_sizes(count: int) -> None:
    rows = padded_rows(count)
    assert count <= rows <= max(count, count * (1 + 2 / SIZES_PER_DOUBLING))
    assert padded_rows(rows) == rows
    assert rows == count or SMALLEST_PADDED_ROWS <= count <= MAX_GRAPH_ROWS


def test_there_are_about_as_many_sizes_as_graphs() -> None:
    sizes = {padded_rows(count) for count in range(SMALLEST_PADDED_ROWS, MAX_GRAPH_ROWS + 1)}
    assert len(sizes) <= SIZES_PER_DOUBLING * 8
    assert max(sizes) == MAX_GRAPH_ROWS


@pytest.mark.parametrize(
    ("kind", "change", "message"),
    [
        (AttentionSpec, {"head_dim": 12}, "attention heads of 12: multiples of 32 up to 256, and 512"),
        (AttentionSpec, {"head_dim": 384}, "attention heads of 384: multiples of 32 up to 256, and 512"),
        (DeltaNetSpec, {"state_size": 96}, r"DeltaNet heads of 96: \(32, 64, 128\)"),
        (DeltaNetSpec, {"conv_kernel": 9}, "9 convolution taps: 2 to 8"),
        (MoeSpec, {"num_experts_per_tok": 17}, "17 experts a token: at most 16"),
        (MoeSpec, {"num_experts": 2048}, "2048 experts: at most 1024"),
    ],
)
def test_a_model_without_kernels_is_refused_by_name(
    moe_path: Path, kind: type, change: dict[str, int], message: str
) -> None:
    with GGUFFile.open(moe_path) as file:
        spec = read_spec(file.metadata, file.tensors)
    check_supported(spec)
    with pytest.raises(UnsupportedError, match=message + r".*use --device cpu"):
        check_supported(with_layers(spec, kind, **change))


def test_gates_and_ups_of_an_integer_and_a_float_type_are_refused_by_name(tmp_path: Path) -> None:
    path = tmp_path / "tiny.gguf"
    write_gguf(path, types={"blk.1.ffn_gate_exps.weight": "F16"})
    with GGUFFile.open(path) as file:
        tensors = file.tensors
    with pytest.raises(
        UnsupportedError,
        match=r"blk.1.ffn_gate_exps.weight is F16 and .*ffn_up_exps.weight Q8_0.*--device cpu",
    ):
        check_types(tensors)
    check_types({name: info for name, info in tensors.items() if not name.startswith("blk.1.")})


@pytest.mark.parametrize("chunk_size", [256, 2048])
def test_the_kernels_of_a_model_are_known_before_it_runs(
    moe_path: Path, chunk_size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "_limits_of", lambda index: DeviceLimits(132, 227 * 1024, 228 * 1024))
    with GGUFFile.open(moe_path) as file:
        spec = read_spec(file.metadata, file.tensors)
        noted = kernels_of(file, spec, Limits(CacheSize.of(1, 1024, 1), 1024, "i8"), chunk_size)
    names = " ".join(instance for _, instance in noted.all)
    decode = "linear_one", "linear_rows", "linear_skinny", "expert_gate_up", "grouped_gate_up"
    norms_before = (  # for one row, and for more
        "router_gemv<true, 1, true, false, true>",
        "router_gemv<true, 1, false, false, true>",
    )
    for part in (*decode, *norms_before, "linear_gemm<", "experts_gemm<"):
        assert part in names
    assert names.count("attention_integers_decode<8") == 2  # for up to eight pairs, and for more
    assert names.count("attention_integers<8") == 4  # for some rows and many, with and without trees
    assert instance_for("coldstream::linear_one", SKINNY_TYPES) not in names, "only what the model has"


@pytest.mark.gpu
@pytest.mark.parametrize("variant", VARIANTS)
def test_nothing_is_compiled_once_a_model_is_loaded(
    variant: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_variant(tmp_path, variant)
    seen: list[tuple[int, int]] = []
    used: set[tuple[Path, str]] = set()
    kernel = CudaProgram.kernel

    def noting(self: CudaProgram, instance: str) -> Kernel:
        assert instance in self._kernels
        used.add((self.source, instance))
        return kernel(self, instance)

    file, spec = open_model_file(path)
    opened = CudaRunner.load(
        file,
        spec,
        resident_plan(file, spec, 1024),
        cache_size=CacheSize.of(3, 1024, 1),
        compiling=lambda *done: seen.append(done),
    )
    with OneSequence(opened) as runner:
        loaded = kernels_of(file, spec, runner.limits, runner.chunk_size).all
        assert seen == [(done, len(seen)) for done in range(1, len(seen) + 1)]
        opened.finish_loading()
        monkeypatch.setattr(CudaProgram, "kernel", noting)
        for count in (1, 2, 3, 9, 16, 17, 40, 100, 700):
            runner.reset()
            logits = runner.extend(token_ids(count))
            for params in (SamplingParams(temperature=0), SamplingParams(repetition_penalty=1.3)):
                chosen_after(logits, [1, 2], params, 7)
        other = runner.new_sequence()
        step_rows(runner, [runner.sequence, other], [1, 2])
        for size in (9, 60):
            runner.step(Batch((Segment(other, [3] * size, range(-1, size - 1)),)))
            runner.commit(other, range(2))
    assert used
    assert used <= {(program.source, instance) for program, instance in loaded}
