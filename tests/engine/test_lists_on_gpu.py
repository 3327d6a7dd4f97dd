"""Lists of prompts on a GPU: the answers of the CPU, and one choice a step for all of them."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("cuda.bindings")

from bench.runners import open_cpu_runner, open_model_file, resident_plan
from builders import Dims, write_gguf
from coldstream.assets import demo_model_path
from coldstream.engine import LLM, SamplingParams
from coldstream.kvcache import CacheSize
from coldstream.models.cuda.runner import CudaRunner
from hash_runner import opened_with
from host_device import HostDevice
from host_driver import HostStream
from host_gpu import gpu_on

CONTEXT = 128
SIZE = CacheSize.of(8, CONTEXT)
SEEDED = SamplingParams(seed=5, max_tokens=4, ignore_eos=True)
KINDS = [
    SEEDED,
    replace(SEEDED, temperature=0.0),
    replace(SEEDED, temperature=0.0, repetition_penalty=1.5, repeat_last_n=None),
    replace(SEEDED, temperature=1.5, top_k=0, frequency_penalty=0.7, repeat_last_n=2, n=2),
    replace(SEEDED, temperature=0.9, logprobs=1),
]
EVERY_FAMILY = pytest.mark.parametrize(
    "path", ["qwen35moe", "qwen3moe", "qwen3next", "qwen4exp"], indirect=True
)
PROMPTS = [[1, 2, 3], [4], [5, 6, 5, 6, 5], [7, 8, 7], [9, 1]]


@pytest.fixture(scope="module", params=["qwen35moe"])
def path(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With n-grams where the family has some."""
    path, has_ngrams = tmp_path_factory.mktemp("lists") / "tiny.gguf", request.param == "qwen4exp"
    count = 2 + has_ngrams
    return write_gguf(path, request.param, dims=Dims(layers=count, interval=count), ngrams=has_ngrams)[0]


@pytest.fixture
def stream(compiled_for_the_host: HostDevice) -> Iterator[HostStream]:
    with gpu_on(compiled_for_the_host) as stream:
        yield stream


@contextmanager
def on_gpu(path: Path) -> Iterator[LLM]:
    file, spec = open_model_file(path)
    runner = CudaRunner.load(file, spec, resident_plan(file, spec, CONTEXT), cache_size=SIZE)
    with LLM.from_opened(opened_with(runner, CONTEXT)) as llm:
        yield llm


@contextmanager
def on_cpu(path: Path) -> Iterator[LLM]:
    runner = open_cpu_runner(path, threads=1, context_length=CONTEXT, cache_size=SIZE)
    with LLM.from_opened(opened_with(runner, CONTEXT)) as llm:
        yield llm


def check_lists(gpu: LLM, cpu: LLM) -> None:
    """All that answers say but what is measured."""
    expected = cpu.generate(PROMPTS, KINDS)
    found = gpu.generate(PROMPTS, KINDS)
    statistics = expected[0].outputs[0].statistics
    for output, wanted in zip(found, expected, strict=True):
        for answer, other in zip(output.outputs, wanted.outputs, strict=True):
            assert replace(answer, statistics=statistics) == replace(other, statistics=statistics)


@pytest.mark.sharded(of="models on a GPU")
@EVERY_FAMILY
@pytest.mark.usefixtures("stream")
def test_answers_to_a_list_are_those_of_the_cpu(path: Path) -> None:
    with on_cpu(path) as cpu, on_gpu(path) as gpu:
        check_lists(gpu, cpu)


@EVERY_FAMILY
@pytest.mark.gpu
def test_answers_to_a_list_are_those_of_the_cpu_on_a_gpu(path: Path) -> None:
    with on_cpu(path) as cpu, on_gpu(path) as gpu:
        check_lists(gpu, cpu)


@pytest.mark.gpu
def test_answers_of_the_demo_model_to_a_list_are_those_of_the_cpu_on_a_gpu() -> None:
    with on_cpu(demo_model_path()) as cpu, on_gpu(demo_model_path()) as gpu:
        check_lists(gpu, cpu)


@pytest.mark.sharded(of="models on a GPU")
def test_a_step_waits_for_the_device_as_often_for_many_answers_as_for_two(
    path: Path, stream: HostStream
) -> None:
    with on_gpu(path) as llm:
        asked = []
        for count in (2, 4, 8):
            before = stream.num_waits, stream.num_uploads
            params = [KINDS[1], *[SEEDED] * (count - 1)]
            llm.generate([[number, 3] for number in range(count)], params)
            asked.append((stream.num_waits - before[0], stream.num_uploads - before[1]))
    assert asked[0] == asked[1] == asked[2]
