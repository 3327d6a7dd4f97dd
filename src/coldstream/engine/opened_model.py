"""From a configuration to a model that is ready to compute, with everything around it."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

from coldstream.decoding import Logits, SamplingParams
from coldstream.engine.config import CACHE_DTYPES, EngineConfig, resolve
from coldstream.engine.live_sequence import Runner
from coldstream.errors import InconsistentError, InvalidRequestError
from coldstream.gguf.chat_template import FIELD as CHAT_TEMPLATE_KEY
from coldstream.gguf.chat_template import ChatTemplate
from coldstream.gguf.hub import resolve_model
from coldstream.gguf.reader import GGUFFile
from coldstream.gguf.tokenizer import Tokenizer
from coldstream.models.footprint import dense_bytes
from coldstream.models.runner import ModelRunner
from coldstream.models.spec import ModelSpec
from coldstream.placement.hardware import Hardware

OpenProgress = Callable[[str, int, int], None]  # called with (what is going on, bytes done, bytes in all)

_SAMPLING_KEYS = {
    "general.sampling.temp": "temperature",
    "general.sampling.top_k": "top_k",
    "general.sampling.top_p": "top_p",
    "general.sampling.min_p": "min_p",
    "general.sampling.penalty_repeat": "repetition_penalty",
    "general.sampling.penalty_last_n": "repeat_last_n",
}


class ModelHandle(Runner, Protocol):
    """An open model: a runner, facts about how it runs, and a way to close it."""

    @property
    def spec(self) -> ModelSpec:
        """The model's numbers."""

    @property
    def file(self) -> GGUFFile:
        """The open file."""

    @property
    def warnings(self) -> tuple[str, ...]:
        """What looks wrong with the file and may be right, for people."""

    @property
    def tier(self) -> str:
        """Of the CPU kernels in use."""

    @property
    def threads(self) -> int:
        """Worker threads in use."""

    def logits(self, token_ids: Sequence[int]) -> Logits:
        """Logits after each token, from an empty state: float32 [T, vocab]. Leaves the state unspecified."""

    def close(self) -> None:
        """Release file and memory."""


@dataclass(frozen=True)
class OpenedModel:
    """A model ready to compute and what belongs to it. `config` has no `auto` left."""

    config: EngineConfig
    runner: ModelHandle
    tokenizer: Tokenizer
    chat_template: ChatTemplate
    has_chat_template: bool  # if not, `chat_template` says so when used
    default_sampling: SamplingParams

    def close(self) -> None:
        """Release the file, the memory and the process that renders templates."""
        self.chat_template.close()
        self.runner.close()


def open_model(config: EngineConfig, progress: OpenProgress | None = None) -> OpenedModel:
    """Find, check and load the model that `config` names. Raises as `LLM` says; nothing stays open then."""
    path = resolve_model(config.model, offline=config.offline, progress=progress)
    with ExitStack() as cleanup:
        file = cleanup.enter_context(GGUFFile.open(path))
        spec = ModelSpec.from_gguf(file.metadata, file.tensors)
        config = resolve(config, spec, Hardware.measure(), dense_bytes(spec, file.tensors))
        tokenizer = Tokenizer.from_metadata(file.metadata)
        default_sampling = sampling_defaults(file.metadata)
        template = ChatTemplate.from_metadata(file.metadata, tokenizer.vocabulary)
        assert isinstance(config.threads, int)
        assert config.ctx_size
        runner = ModelRunner.load(
            file,
            spec,
            threads=config.threads,
            tier=config.tier,
            context_length=config.ctx_size,
            kv_dtype=CACHE_DTYPES[config.cache_type_k],
            progress=partial(progress, "loading") if progress else None,
        )
        cleanup.pop_all()
    return OpenedModel(
        config, runner, tokenizer, template, CHAT_TEMPLATE_KEY in file.metadata, default_sampling
    )


def sampling_defaults(metadata: Mapping[str, Any]) -> SamplingParams:
    """`SamplingParams` with what the file's `general.sampling.*` keys recommend.

    Raises InconsistentError if a recommendation is out of its range.
    """
    values = {field: metadata[key] for key, field in _SAMPLING_KEYS.items() if key in metadata}
    if values.get("repeat_last_n") == -1:
        values["repeat_last_n"] = None
    try:
        return SamplingParams(**values)
    except InvalidRequestError as error:
        raise InconsistentError(f"general.sampling: {error}") from error
