"""ServedModel: what the API process knows of the model that the engine process computes.

The tokenizer, the chat template and the sampling defaults are read again from the file's header. What only an
opened model knows comes from the engine process as `EngineFacts`.
"""

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Self

from coldstream.decoding import SamplingParams
from coldstream.engine.grammar import Grammars
from coldstream.engine.opened_model import OpenedModel, sampling_defaults
from coldstream.engine.request_reader import RequestReader
from coldstream.errors import ModelChangedError
from coldstream.gguf.chat_template import ChatTemplate
from coldstream.gguf.reader import GGUFFile
from coldstream.gguf.tokenizer import Tokenizer
from coldstream.planning.machine import rates_are_due


@dataclass(frozen=True)
class EngineFacts:
    """What an open model says of itself, as plain values that cross processes."""

    path: str  # path of the file's first part
    fingerprint: str  # fingerprint of its headers, see `GGUFFile`
    architecture: str
    ctx_size: int
    tier: str  # of CPU kernels
    threads: int  # of the CPU
    device: str  # cpu or cuda
    seed: int | None  # for requests that name none
    spec_type: str  # what drafts tokens, or none
    cache_type: str  # of keys and values
    fast_tier: str  # the memory whose budget counts: vram or ram
    budget_bytes: int  # budget of that memory
    resident_experts: int  # experts that begin in that memory
    num_experts: int  # experts of all layers
    prompt_cache_bytes: int  # of RAM for kept prefixes
    warnings: tuple[str, ...] = ()
    chat_template: str | None = None  # its source, if another one than the file's is used
    rates_are_due: bool = False  # whether the machine is to be measured again in an idle moment

    @classmethod
    def of(cls, opened: OpenedModel) -> Self:
        """The facts of an open model."""
        placement, file = opened.plan.placement, opened.runner.file
        is_moe = opened.runner.spec.is_moe  # a plan places layers of a dense model as if they were experts
        return cls(
            path=str(file.paths[0]),
            fingerprint=file.fingerprint,
            architecture=str(file.metadata["general.architecture"]),
            ctx_size=opened.ctx_size,
            tier=opened.tier,
            threads=opened.threads,
            device=opened.config.device,
            seed=opened.seed,
            spec_type=opened.plan.spec_type,
            cache_type=placement.fixed.kv_type,
            fast_tier=placement.tier,
            budget_bytes=placement.budget_bytes,
            resident_experts=placement.num_resident if is_moe else 0,
            num_experts=placement.num_all if is_moe else 0,
            prompt_cache_bytes=opened.plan.prompt_cache_bytes,
            warnings=opened.warnings,
            chat_template=opened.chat_template.source if opened.config.chat_template else None,
            rates_are_due=rates_are_due(opened.planned.hardware),
        )


@dataclass(frozen=True)
class ServedModel:
    """A model as clients see it: its name, limits, and how its requests are read."""

    name: str  # the model's name for clients
    created: int  # when it was opened first, in seconds since 1970
    facts: EngineFacts
    tokenizer: Tokenizer
    chat_template: ChatTemplate
    template_source: str | None  # None: the model has no chat template, and using `chat_template` raises
    default_sampling: SamplingParams
    grammars: Grammars  # checks those of requests before an engine sees them

    @classmethod
    def read(cls, name: str, created: int, facts: EngineFacts) -> Self:
        """Read the header of the file that the engine has opened; nothing stays open.

        Raises ModelChangedError if it is another file by now, and as `GGUFFile.open` does.
        """
        with GGUFFile.open(facts.path) as file:
            if file.fingerprint != facts.fingerprint:
                raise ModelChangedError(f"{facts.path} was replaced while it was opened: start again")
            metadata = file.metadata
            tokenizer = Tokenizer.from_metadata(metadata)
            template = ChatTemplate.from_metadata(metadata, tokenizer.vocabulary, source=facts.chat_template)
            return cls(
                name,
                created,
                facts,
                tokenizer,
                template,
                template.source,
                sampling_defaults(metadata),
                Grammars(tokenizer),
            )

    @classmethod
    def of_opened(cls, name: str, created: int, opened: OpenedModel) -> Self:
        """A model that this process has opened itself, whose parts are shared."""
        return cls(
            name,
            created,
            EngineFacts.of(opened),
            opened.tokenizer,
            opened.chat_template,
            opened.chat_template.source,
            opened.default_sampling,
            opened.grammars,
        )

    def opened_anew(self, facts: EngineFacts) -> Self:
        """This model, opened by another engine; what was read of its file is shared. Raises as `read`."""
        if (facts.fingerprint, facts.chat_template) != (self.facts.fingerprint, self.facts.chat_template):
            return self.read(self.name, self.created, facts)
        return replace(self, facts=facts)

    @property
    def has_chat_template(self) -> bool:
        """Whether conversations can be written out."""
        return self.template_source is not None

    @property
    def ctx_size(self) -> int:
        """Tokens of a prompt and its answer together."""
        return self.facts.ctx_size

    @property
    def seed(self) -> int | None:
        """For requests that name none; None: a fresh one for each."""
        return self.facts.seed

    @property
    def tier(self) -> str:
        """Of CPU kernels."""
        return self.facts.tier

    @property
    def threads(self) -> int:
        """CPU threads that compute."""
        return self.facts.threads

    @cached_property
    def requests(self) -> RequestReader:
        """Makes requests of prompts and conversations. Rendering and tokenising block."""
        return RequestReader(self)
