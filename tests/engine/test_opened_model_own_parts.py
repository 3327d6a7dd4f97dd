"""Policies and executors of a caller's own: they are asked, change no answer, and what is none is refused."""

from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from operator import call
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from builders import Dims, write_gguf
from coldstream import LLM, ConfigError, Executor, Policy, SamplingParams
from coldstream.assets import demo_model_path
from coldstream.engine import EngineConfig
from coldstream.kernels.experts.moe import MoeKernels
from coldstream.kernels.ops import ExpertOutputs, Routing
from coldstream.models.cpu.runner import CpuRunner
from coldstream.models.cuda.runner import CudaRunner
from coldstream.placement.plan import PlanOptions
from coldstream.placement.plan_file import save_plan
from coldstream.placement.policies import Changes
from coldstream.planning.gather import plan_by_name
from host_device import HostDevice
from host_gpu import opened_on
from test_python_page import PAGE, snippets

DIMS = Dims(layers=4, hidden=128, experts=16, experts_used=3, expert_ffn=128, shared_ffn=64)
CONTEXT, NEW_TOKENS = 128, 8
SAMPLED = SamplingParams(seed=3, max_tokens=NEW_TOKENS, ignore_eos=True)
ON_GPU: dict[str, Any] = {"device": "cuda", "ctx_size": CONTEXT, "vram": "465408K", "threads": 1}


class CountingLru(Policy):
    """Counts what it is asked."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()

    def start(self, profile: np.ndarray) -> None:
        self.calls["start"] += 1
        self.scores = profile - profile.max() - 1.0

    def observe(self, used: np.ndarray) -> None:
        self.calls["observe"] += 1
        self.scores[used] = self.calls["observe"]

    def choose(self, candidates: np.ndarray, residents: np.ndarray, num_free: int) -> Changes:
        self.calls["choose"] += 1
        return super().choose(candidates, residents, num_free)


class Noting:
    """Wraps the product's; notes by layer the pairs that are computed, and calls of `route`.

    queue: does a step's work, or records it for a graph; by default pairs are noted when they are asked for.
    """

    def __init__(self, product: Executor, queue: Callable[[Callable[[], None]], None] = call) -> None:
        self.product, self._queue = product, queue
        self.num_routed = 0
        self.layers: dict[int, int] = {}
        self.pairs: Counter[int] = Counter()

    def route(self, *args: Any) -> Any:
        self.num_routed += 1
        return self.product.route(*args)

    def compute(self, x: Any, routing: Any, weights: Any) -> Any:
        layer = self.layers.setdefault(id(weights.gate), len(self.layers))
        self._queue(partial(self._note, layer, routing.ids.numel()))
        return self.product.compute(x, routing, weights)

    def _note(self, layer: int, count: int) -> None:
        self.pairs[layer] += count


class OfKernels:
    """Where all experts are resident: computes with the kernels, and leaves nothing to the product."""

    def __init__(self, product: Executor, kernels: MoeKernels) -> None:
        self._kernels = kernels

    def route(self, x: Any, weights: Any, experts: Any) -> Routing:
        return self._kernels.route(x, weights)

    def compute(self, x: Any, routing: Routing, weights: Any) -> ExpertOutputs:
        routed, shared = self._kernels.outputs(x, routing.ids, weights)
        return ExpertOutputs(routed, shared, routing)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("models") / "small.gguf"
    write_gguf(path, dims=DIMS)
    return path


@pytest.fixture
def gpu(compiled_for_the_host: HostDevice) -> Iterator[None]:
    """A GPU on the host."""
    with opened_on(compiled_for_the_host):
        yield


@pytest.fixture(scope="module")
def expected(path: Path) -> list[tuple[int, ...]]:
    with LLM(path, device="cpu", ctx_size=CONTEXT, threads=1) as llm:
        return answers(llm)


def answers(llm: LLM) -> list[tuple[int, ...]]:
    """Of a short prompt, and of a long one."""
    prompts = [[7, 300, 5], [token % 500 for token in range(40, 120)]]
    return [llm.generate(ids, SAMPLED)[0].token_ids for ids in prompts]


def test_a_policy_decides_what_stays_in_ram_and_changes_no_token() -> None:
    path, prompts = demo_model_path(), ["import os\n", "def main():"]
    with LLM(path, device="cpu", ctx_size=128, threads=2) as whole:
        wanted = [output.token_ids for output in whole.generate(prompts, SAMPLED)]
    mine = CountingLru()
    with LLM(path, device="cpu", ctx_size=128, threads=2, tier="generic", ram="26M", policy=mine) as llm:
        assert not llm.opened.plan.placement.is_all_resident
        found = [llm.generate(prompt, SAMPLED)[0] for prompt in prompts]
        assert isinstance(llm.opened.runner, CpuRunner)
        tier = llm.opened.runner._disk
        assert tier is not None
        order = tier.pool.owners(0)
        assert np.array_equal(tier._policy.scores, mine.scores)
        assert set(np.argsort(-mine.scores)[:20].tolist()) <= set(order.tolist())
    assert [output.token_ids for output in found] == wanted
    assert mine.calls["start"] > 0
    assert mine.calls["observe"] >= 2 * (SAMPLED.max_tokens or 0) - 2


@pytest.mark.usefixtures("gpu")
def test_a_policy_and_an_executor_on_a_gpu_with_some_experts(
    path: Path, expected: list[tuple[int, ...]], compiled_for_the_host: HostDevice
) -> None:
    mine, made = CountingLru(), list[Noting]()

    def make(product: Executor, kernels: object) -> Executor:
        made.append(Noting(product, compiled_for_the_host.driver.queue))
        return made[0]

    with LLM(path, **ON_GPU, policy=mine, executor=make) as llm:
        plan = llm.opened.plan.placement
        assert 0 < plan.num_resident < plan.num_all
        before = made[0].pairs.copy()
        assert answers(llm) == expected
        assert isinstance(llm.opened.runner, CudaRunner)
        cache = llm.opened.runner.expert_cache
        assert cache is not None
        assert cache.counters.evictions.sum() > 0
    assert len(made) == 1
    asked = {layer: made[0].pairs[layer] - before[layer] for layer in made[0].pairs}
    # Rows of both prompts and of all new tokens but the last of each, and what a step was filled up to.
    least = (3 + 80 + 2 * (NEW_TOKENS - 1)) * 3
    assert sorted(asked) == list(range(4))
    assert len(set(asked.values())) == 1
    assert least <= asked[0] <= 1.5 * least
    assert made[0].num_routed % 4 == 0
    assert mine.calls["start"] == 1
    assert mine.calls["observe"] >= 2 * (NEW_TOKENS - 2)
    assert mine.calls["choose"] > 0


@pytest.mark.usefixtures("gpu")
def test_the_executor_of_the_page_on_a_gpu_that_holds_all(
    path: Path, expected: list[tuple[int, ...]]
) -> None:
    (code,) = (block[1] for block in snippets(PAGE.read_text()) if "class CountingExecutor" in block[1])
    names: dict[str, Any] = {}
    exec(code.partition("try:")[0], names)
    made = []

    def make(product: Executor, kernels: object) -> Executor:
        made.append(names["CountingExecutor"](product, kernels))
        return made[0]

    with LLM(path, device="cuda", ctx_size=CONTEXT, executor=make) as llm:
        assert llm.opened.plan.placement.is_all_resident
        assert answers(llm) == expected
    assert sorted(made[0].pairs) == list(range(4))


@pytest.mark.sharded(of="models on a GPU")
@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize(
    ("settings", "make"),
    [
        ({"device": "cuda", "ctx_size": CONTEXT}, OfKernels),
        ({**ON_GPU, "prefetch": 1}, lambda product, kernels: Noting(product)),
    ],
    ids=["all resident", "prefetched"],
)
def test_an_executor_of_ones_own_gives_the_tokens_of_the_built_in_one(
    path: Path, expected: list[tuple[int, ...]], settings: dict[str, Any], make: Any
) -> None:
    """Which has those of the CPU."""
    with LLM(path, **settings, executor=make) as llm:
        assert llm.opened.plan.placement.is_all_resident == (llm.opened.plan.prefetch == 0)
        assert answers(llm) == expected


@pytest.mark.usefixtures("gpu")
def test_a_policy_that_fails_ends_its_request_and_not_the_model(
    path: Path, expected: list[tuple[int, ...]]
) -> None:
    class Failing(CountingLru):
        def observe(self, used: np.ndarray) -> None:
            super().observe(used)
            if self.calls["observe"] in (3, 4, 14):
                raise KeyError("mine")

    mine = Failing()
    with LLM(path, **ON_GPU, policy=mine) as llm:
        said = []
        while mine.calls["observe"] < 28:
            try:
                assert answers(llm) == expected
            except ConfigError as error:
                said.append(str(error))
    assert said == 3 * ["policy Failing: observe raised KeyError: 'mine'"]


def test_a_policy_that_fails_in_ram_ends_its_request_and_not_the_model() -> None:
    class Failing(CountingLru):
        def observe(self, used: np.ndarray) -> None:
            super().observe(used)
            self.scores = self.scores if self.calls["observe"] != 3 else self.scores[:5]

    params = SamplingParams(temperature=0, max_tokens=6)
    with LLM(demo_model_path(), device="cpu", ctx_size=128, threads=1) as whole:
        wanted = whole.generate("import os\n", params)[0].token_ids
    options: dict[str, Any] = {
        "device": "cpu",
        "ctx_size": 128,
        "threads": 2,
        "tier": "generic",
        "ram": "26M",
    }
    with LLM(demo_model_path(), **options, policy=Failing()) as llm:
        with pytest.raises(ConfigError, match=r"policy Failing: scores must be float64 \[256\]"):
            llm.generate("import os\n", params)
        assert isinstance(llm.opened.runner, CpuRunner)
        tier = llm.opened.runner._disk
        assert tier is not None
        assert set(tier.pool.owners(0).tolist()) == {-1}, "no slot has been given yet"
        with pytest.raises(ConfigError, match="policy Failing"):  # its scores are still the wrong ones
            llm.generate("import os\n", params)
    with LLM(demo_model_path(), **options, policy=CountingLru()) as llm:
        assert llm.generate("import os\n", params)[0].token_ids == wanted


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"policy": CountingLru}, "policy must be an object of a subclass of Policy, not <class"),
        ({"policy": "lru"}, "policy must be an object of a subclass of Policy, not 'lru'"),
        ({"executor": 5}, "executor must be a function or class that makes one, not 5"),
        ({"executor": Noting}, "executor is for a GPU, and the device is the CPU: leave it out"),
    ],
)
def test_what_is_no_part_is_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        LLM(demo_model_path(), device="cpu", ctx_size=64, **settings)
    assert message in str(caught.value)


def _raises(product: Executor, kernels: object) -> Executor:
    raise KeyError("mine")


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize(
    ("make", "message"),
    [
        (_raises, "executor _raises: raised KeyError: 'mine'"),
        (lambda product, kernels: None, "executor <lambda>: made None, which has no method route"),
        (lambda: None, "executor <lambda>: raised TypeError"),
        (
            lambda product, kernels: SimpleNamespace(route=product.route, compute=lambda *_: None),
            "executor <lambda>: compute must return ExpertOutputs, not None",
        ),
        (
            lambda product, kernels: SimpleNamespace(route=lambda *_: 5, compute=product.compute),
            "executor <lambda>: route must return Routing, not 5",
        ),
    ],
)
def test_what_makes_no_executor_is_refused(path: Path, make: Any, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        LLM(path, **ON_GPU, executor=make)
    assert message in str(caught.value)


def test_a_plan_that_weighs_layers_leaves_the_policy_to_the_product(tmp_path: Path) -> None:
    config = EngineConfig(str(demo_model_path()), device="cpu", ram="32M", ctx_size=64, threads=1)
    planned = plan_by_name(config, PlanOptions(layer_weights=((0, 2.0),)))
    save_plan(planned.run, tmp_path / "my.plan")
    with pytest.raises(ConfigError, match="policy: the plan weighs layers"):
        LLM(demo_model_path(), device="cpu", plan=tmp_path / "my.plan", policy=CountingLru())
    LLM(demo_model_path(), device="cpu", plan=tmp_path / "my.plan").close()
