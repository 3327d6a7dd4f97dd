"""Opens the model of a configuration, with its tokenizer, template and plan.

`OwnParts` are objects that a caller replaces, and that a configuration cannot hold.
"""

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, closing, nullcontext, suppress
from dataclasses import dataclass
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, NamedTuple

from coldstream.decoding import SamplingParams, Speculation
from coldstream.engine.drafting import open_speculation
from coldstream.engine.grammar import Grammars
from coldstream.errors import (
    ColdstreamError,
    ConfigError,
    InconsistentError,
    InvalidRequestError,
    ModelFormatError,
    OutOfMemoryError,
    TemplateError,
    host_memory_errors,
    shown,
)
from coldstream.gguf.chat_template import FIELD as CHAT_TEMPLATE_KEY
from coldstream.gguf.chat_template import ChatTemplate
from coldstream.gguf.hub import resolve_model
from coldstream.gguf.reader import GGUFFile
from coldstream.gguf.template_process import MAX_SOURCE_CHARS
from coldstream.gguf.tokenizer import Tokenizer
from coldstream.gguf.vocabulary import Vocabulary
from coldstream.kernels.experts.executor import ExecutorFactory
from coldstream.models.expert_stacks import placed_bytes
from coldstream.models.load_runner import load_runner, lock_file
from coldstream.models.runner import ModelRunner
from coldstream.models.spec.model_spec import ModelSpec
from coldstream.placement.controls import Controls
from coldstream.placement.hardware import Hardware
from coldstream.placement.lock_file import last_refusal, lock_path
from coldstream.placement.policies import Policy
from coldstream.placement.run_plan import RunPlan
from coldstream.planning.choose import is_sure_to_map
from coldstream.planning.config import EngineConfig
from coldstream.planning.device_choice import OpenProgress, choose_device
from coldstream.planning.draft_file import NOTHING_IS_DRAFTED, open_draft, open_target
from coldstream.planning.gather import Sources, bundled_profile, plan_model
from coldstream.planning.last_runs import keep_lock, keep_observed
from coldstream.planning.machine import (
    LateRates,
    compiling_for_rates,
    hardware_of,
    is_time_to_measure_again,
    rates_are_known,
    why_unusable,
    with_rates,
)
from coldstream.planning.planned import Planned

if TYPE_CHECKING:
    from coldstream.experts.file_lock import FileLock
    from coldstream.models.dflash.file import DflashFile


TEMPLATE_TOKENS = 12  # that a chat template adds to a first message, about
CHARS_PER_TOKEN = 4  # of a text, about
MAX_COUNTED_CHARS = 4096  # of a text whose tokens are counted: longer ones take the same kernels


@dataclass(frozen=True)
class OwnParts:
    """The caller's parts, None for the product's. Creation raises ConfigError for objects of a wrong kind."""

    policy: Policy | None = None  # for one model at a time, as it has state
    executor: ExecutorFactory | None = None
    controls: Controls | None = None  # by how the machine's rates were measured

    def __post_init__(self) -> None:
        if self.policy is not None and not isinstance(self.policy, Policy):
            raise ConfigError(f"policy must be an object of a subclass of Policy, not {shown(self.policy)}")
        if self.executor is not None and not callable(self.executor):
            raise ConfigError(
                f"executor must be a function or class that makes one, not {shown(self.executor)}"
            )

    def controls_of(self, hardware: Hardware) -> Controls:
        """The caller's, or those of a machine with these rates."""
        return self.controls or Controls.of(hardware)

    def check(self, device: str, layer_weights: Sequence[float]) -> None:
        """Raises ConfigError for parts that a device, and a plan with these weights, would not use."""
        if self.executor is not None and device == "cpu":
            raise ConfigError("executor is for a GPU, and the device is the CPU: leave it out")
        if self.policy is not None and layer_weights:
            raise ConfigError(
                "policy: the plan weighs layers, which the product's policy does: leave policy out, or make "
                "the plan without --layer-weights"
            )


@dataclass(frozen=True)
class FirstPrompt:
    """The text that a model is opened to answer. is_raw: whether no chat template is applied to it."""

    text: str
    is_raw: bool = False

    def num_tokens(self, reading: Future[Tokenizer], metadata: Mapping[str, Any]) -> int:
        """About how many tokens it has: the order of compilations follows from it, and nothing else.

        reading: the tokenizer of a model with `metadata`, which is not waited for.
        """
        of_template = 0 if self.is_raw or CHAT_TEMPLATE_KEY not in metadata else TEMPLATE_TOKENS
        num_tokens = len(self.text) // CHARS_PER_TOKEN
        if reading.done() and len(self.text) <= MAX_COUNTED_CHARS:
            with suppress(ColdstreamError):  # which answering raises as well
                num_tokens = len(reading.result().encode(self.text))
        return max(1, num_tokens + of_template)


_SAMPLING_KEYS = {
    "general.sampling.temp": "temperature",
    "general.sampling.top_k": "top_k",
    "general.sampling.top_p": "top_p",
    "general.sampling.min_p": "min_p",
    "general.sampling.penalty_repeat": "repetition_penalty",
    "general.sampling.penalty_last_n": "repeat_last_n",
}


@dataclass(frozen=True)
class OpenedModel:
    """A model ready to compute, and its parts."""

    planned: Planned
    runner: ModelRunner
    tokenizer: Tokenizer
    chat_template: ChatTemplate
    has_chat_template: bool  # without one, using `chat_template` raises an error
    default_sampling: SamplingParams
    open_warnings: tuple[str, ...] = ()  # about the file, and why another device or drafter was taken
    speculation: Speculation | None = None
    late_rates: LateRates | None = None  # to be measured behind `close`, where a plan did not wait for them

    @property
    def config(self) -> EngineConfig:
        """The configuration, without `auto`."""
        return self.planned.config

    @property
    def ctx_size(self) -> int:
        """Tokens of a prompt and its answer together."""
        assert self.config.ctx_size, "an opened model has a concrete context"
        return self.config.ctx_size

    @cached_property
    def grammars(self) -> Grammars:
        """The grammars of requests to this model, which it keeps compiled."""
        return Grammars(self.tokenizer)

    @property
    def seed(self) -> int | None:
        """For requests that name none; None: a fresh one for each."""
        return self.config.seed

    @property
    def tier(self) -> str:
        """Of CPU kernels, as the runner chose it."""
        return self.runner.tier

    @property
    def threads(self) -> int:
        """CPU threads that compute."""
        return self.runner.threads

    @property
    def plan(self) -> RunPlan:
        """The plan that the runner carries out."""
        return self.planned.run

    @property
    def warnings(self) -> tuple[str, ...]:
        """Warnings about the device, drafts, the file and its weights."""
        return self.open_warnings + self.runner.warnings

    def close(self) -> None:
        """Release the file, the memory and the process that renders templates. What steps took is kept."""
        self.chat_template.close()
        keep_lock(self.planned, self.runner.locked_bytes)
        keep_observed(self.planned, self.runner.observed, self.runner.expert_uses)
        self.runner.close()


@host_memory_errors()
def open_model(
    config: EngineConfig,
    progress: OpenProgress | None = None,
    own: OwnParts | None = None,
    prompt_cache_bytes: int = 0,
    *,
    is_early: bool = False,
    prompt: FirstPrompt | None = None,
) -> OpenedModel:
    """Find, check and load the model that `config` names. Raises as `LLM` says; nothing stays open then.

    prompt_cache_bytes: of RAM, left to a tier of kept prefixes. is_early: whether steps may come before
    `ModelRunner.finish_loading`: the first may be slow, and any may raise CompileError. prompt: all that the
    model is opened to answer. It waits for no measurement then, and the caller has `late_rates` measured.
    """
    own, begin = own or OwnParts(), partial(_begin, progress)
    begin("looking for a device")
    config, gpu, warnings = choose_device(config)
    hardware, is_auto = hardware_of(gpu), config.spec_type == "auto"
    late_rates, has_rates, is_due, measures = _measurement(hardware, may_be_late=prompt is not None)
    refused = why_unusable(hardware)  # a measurement replaces the file
    path = resolve_model(config.model, offline=config.offline, progress=progress)
    with ExitStack() as cleanup, compiling_for_rates(hardware) if measures else nullcontext():
        begin("reading the header")
        target = open_target(path, config, progress)
        file, spec = cleanup.enter_context(target.file), target.spec
        sure = partial(is_sure_to_map, config, hardware, sum(file.shard_bytes) + prompt_cache_bytes)
        lock = cleanup.enter_context(_begin_lock(file, spec, sure, measures=measures, is_early=is_early))
        with ThreadPoolExecutor(1) as beside, open_draft(target, progress) as draft:
            begin_reading = partial(_begin_reading, config.device, file, beside)
            reading = None if is_early and has_rates else begin_reading()
            if config.device == "cuda":
                beside.submit(file.check_unchanged)  # takes samples; the runner's own check repeats its error
            begin("planning")
            rates = late_rates.find if late_rates else partial(with_rates, hardware, progress, again=is_due)
            profile, refusal = bundled_profile(file, spec), last_refusal(hardware, lock_path())
            sources = Sources(file, spec, hardware, profile, draft.needs, rates, is_early, refusal)
            planned = plan_model(draft.config, sources, prompt_cache_bytes=prompt_cache_bytes)
            config, warnings = planned.config, warnings + refused + draft.warnings + planned.warnings
            own.check(config.device, planned.plan.layer_weights)
            reading = reading or begin_reading()
            if reading.done():
                reading.result()  # raises what is wrong before weights are read
            begin("loading")
            parts = (config.tier, own.policy, own.executor, progress, draft.aux_layers(planned.run), lock)
            rows = prompt.num_tokens(reading, file.metadata) if prompt else None
            load = partial(load_runner, is_early=is_early, controls=own.controls_of(planned.hardware))
            runner = cleanup.enter_context(closing(load(file, spec, planned.run, *parts, first_rows=rows)))
            if lock is not None:
                lock.close()  # what the runner did not take
            begin("waiting for the vocabulary")
            texts = _texts(reading.result(), file.metadata, config.chat_template)
            cleanup.enter_context(texts.chat_template)
            warnings += file_warnings(file, spec, texts.tokenizer.vocabulary)
            begin("preparing drafts")
            speculation, problems = _speculation(planned, runner, draft.file, is_auto=is_auto)
        if not is_early:
            _finish_loading(planned, runner)
        cleanup.pop_all()
    return OpenedModel(planned, runner, *texts, warnings + problems, speculation, late_rates)


def _measurement(hardware: Hardware, *, may_be_late: bool) -> tuple[LateRates | None, bool, bool, bool]:
    """What measures behind the model's end, if that may be; whether rates are known, whether they are to be
    measured again now, and whether planning measures at all.
    """
    has_rates = rates_are_known(hardware)
    if may_be_late:
        return LateRates(hardware), has_rates, False, False
    is_due = is_time_to_measure_again(hardware)
    return None, has_rates, is_due, not has_rates or is_due


def _finish_loading(planned: Planned, runner: ModelRunner) -> None:
    runner.finish_loading()
    keep_lock(planned, runner.locked_bytes)


def _begin_lock(
    file: GGUFFile, spec: ModelSpec, sure: Callable[[int], bool], *, measures: bool, is_early: bool
) -> AbstractContextManager["FileLock | None"]:
    """The lock of a file that a GPU is sure to need in part, begun now; None: loading locks it, if at all.

    sure: whether it needs a file in part, by the bytes of its experts. measures: whether planning measures
    the machine, beside which nothing should run. is_early: whether the first token is to come early, which
    needs no lock of a file with experts.
    """
    waits = measures or (is_early and spec.is_moe)
    if waits or not sure(placed_bytes(file, spec)):
        return nullcontext()
    return closing(lock_file(file, spec))


class _Texts(NamedTuple):
    """What an `OpenedModel` reads and writes text by, in the order of its fields."""

    tokenizer: Tokenizer
    chat_template: ChatTemplate
    has_chat_template: bool
    default_sampling: SamplingParams


def _texts(tokenizer: Tokenizer, metadata: Mapping[str, Any], template_path: str | None) -> _Texts:
    """With a file's tokenizer and metadata, and the chat template at a path if there is one. Raises as
    `chat_template_of`."""
    template = chat_template_of(template_path, metadata, tokenizer.vocabulary)
    has_template = template_path is not None or CHAT_TEMPLATE_KEY in metadata
    return _Texts(tokenizer, template, has_template, sampling_defaults(metadata))


def _speculation(
    planned: Planned, runner: ModelRunner, drafter: "DflashFile | None", *, is_auto: bool
) -> tuple[Speculation | None, tuple[str, ...]]:
    """What drafts by the plan, and why nothing does. Raises as `open_speculation` unless `is_auto`."""
    plan, is_named = planned.run, planned.config.model_draft is not None
    try:
        is_bounded = is_auto and not is_named and plan.spec_type == "mtp" and plan.placement.tier == "ram"
        speculation = open_speculation(plan, runner, drafter, is_bounded=is_bounded)
    except (ModelFormatError, OutOfMemoryError) as error:
        if not is_auto:
            raise
        return None, (NOTHING_IS_DRAFTED.format(error),)
    return speculation, ()


def _begin(progress: OpenProgress | None, stage: str) -> None:
    """Says what is waited for now."""
    if progress is not None:
        progress(stage, 0, 1)


def _begin_reading(device: str, file: GGUFFile, beside: ThreadPoolExecutor) -> Future[Tokenizer]:
    """The file's tokenizer. For a GPU a thread reads it, as a vocabulary of 250,000 tokens takes a second.

    It holds the interpreter's lock as planning does, so that an early start begins it behind that: loading
    waits for the device in between. But where kernels are to be compiled, as on a machine that was never
    measured, their order follows from the tokens of the prompt.

    For a CPU it is read before this returns. There memory of the host runs out first, and Python waits
    forever for a thread that finds none to begin with.
    """
    if device == "cuda":
        return beside.submit(Tokenizer.from_metadata, file.metadata)
    read: Future[Tokenizer] = Future()
    read.set_result(Tokenizer.from_metadata(file.metadata))
    return read


def chat_template_of(path: str | None, metadata: Mapping[str, Any], vocabulary: Vocabulary) -> ChatTemplate:
    """The template in the file at `path`, or the model's own without a path.

    Raises ConfigError for a file that cannot be read, TemplateError for one that does not compile. A template
    of the model that is broken raises when it is used.
    """
    if path is None:
        return ChatTemplate.from_metadata(metadata, vocabulary)
    template = ChatTemplate.from_metadata(metadata, vocabulary, source=_read_template(path))
    try:
        template.check()
    except TemplateError:
        template.close()
        raise
    return template


def _read_template(path: str) -> str:
    try:
        with open(path, "rb") as file:
            data = file.read(MAX_SOURCE_CHARS + 1)
        source = data.decode("utf-8")
    except OSError as error:
        raise ConfigError(f"chat_template (--chat-template) {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"chat_template (--chat-template) {path}: byte {error.start} is no UTF-8: it must be a text file"
        ) from error
    if len(data) > MAX_SOURCE_CHARS:
        raise ConfigError(
            f"chat_template (--chat-template) {path}: more than {MAX_SOURCE_CHARS} bytes: is it a template?"
        )
    return source


def sampling_defaults(metadata: Mapping[str, Any]) -> SamplingParams:
    """`SamplingParams` with what the file's `general.sampling.*` keys recommend.

    A recommendation that cannot be followed counts as absent; see `file_warnings`.
    """
    return SamplingParams(**_recommendations(metadata)[0])


def file_warnings(file: GGUFFile, spec: ModelSpec, vocabulary: Vocabulary) -> tuple[str, ...]:
    """What is wrong with a file without changing what it computes, as text for people."""
    return (
        *file.metadata.warnings,
        *spec.warnings,
        *vocabulary.warnings,
        *_recommendations(file.metadata)[1],
    )


def _recommendations(metadata: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """The values that a file recommends, and what is wrong with the others, which are left out."""
    values: dict[str, Any] = {}
    problems = []
    for key, field in _SAMPLING_KEYS.items():
        try:
            value = metadata.get(key)
            if value is None:
                continue
            is_whole = field == "repeat_last_n" and value == -1
            recommended: dict[str, Any] = {field: None if is_whole else value}
            SamplingParams(**recommended)
        except InvalidRequestError as error:
            problems.append(f"{key}: {error}: the recommendation is ignored")
        except InconsistentError:
            pass  # among the warnings of the metadata
        else:
            values |= recommended
    return values, problems
