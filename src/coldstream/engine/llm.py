"""`LLM`: the engine for people who write Python.

    llm = LLM("model.gguf", threads=8)
    print(llm.generate("Once upon a time", SamplingParams(max_tokens=64))[0].outputs[0].text)
    for piece in llm.stream("Once upon a time"):
        print(piece.text, end="")

Requests of all threads, streams and lists run side by side on one engine, which is made when it is first
used. Kept prefixes of earlier prompts serve later ones.
"""

import math
import os
import threading
import warnings
from collections.abc import Sequence
from typing import Final, Literal, Never, Self, Unpack, overload

from coldstream.closing import Closing
from coldstream.decoding import Logits, SamplingParams
from coldstream.engine.answer import Request
from coldstream.engine.engine import Engine
from coldstream.engine.limits import EngineLimits
from coldstream.engine.lists import ListProgress, generate_list
from coldstream.engine.opened_model import OpenedModel, OwnParts, open_model
from coldstream.engine.prompts import (
    ChatOptions,
    Conversation,
    Prompt,
    TokenIds,
    one_params,
    template_settings,
)
from coldstream.engine.request import RequestOutput
from coldstream.engine.request_reader import RequestReader
from coldstream.engine.shared_engine import SharedEngine
from coldstream.engine.stream import Stream
from coldstream.errors import InvalidRequestError, OutOfMemoryError, host_memory_errors, shown
from coldstream.gguf.tokenizer import Tokenizer
from coldstream.kernels.experts.executor import ExecutorFactory
from coldstream.models.runner import Progress
from coldstream.placement.hardware import Hardware
from coldstream.placement.policies import Policy
from coldstream.planning.config import CacheType, EngineConfig

# Steps have as many rows of prompts as they take: a program wants its answers, and nobody watches a chunk.
_LIMITS: Final = EngineLimits(target_step_ms=math.inf)


class LLM(Closing):
    """A model, ready to generate. Also a context manager; `close` frees the file and the memory.

    All methods may be called from any thread. Opening raises ConfigError for an impossible setting,
    ModelNotFoundError, DownloadError, ModelFormatError and its children, DeviceError and OutOfMemoryError.

    The settings are the command line's flags, but for the last two:

    - model: a path, or org/repo[:QUANT] on the hub.
    - ctx_size: tokens of context, prompt and answer together, also as "32k"; None: all that the model was
      trained for if half of the memory beside its weights holds them, otherwise what that holds, or up to
      32768.
    - vram: bytes of the GPU's memory, also as "6G"; auto: what is free.
    - ram: the same for weights in RAM; auto: what is available.
    - plan: a file of `coldstream plan --out`, instead of budgets, context, cache types and window.
    - threads: of the CPU; auto: one per physical core.
    - device: cpu, cuda, or auto: a GPU that can be used, or the CPU.
    - cache_type_k, cache_type_v: types of cached keys and values, the same for both; one that is given alone
      holds for the other one, too. auto: i16.
    - attention_window: positions that a token attends to at most, its own included; None: all. Other than
      the other settings it changes what the model says.
    - tier: kernels of the CPU; auto: the fastest that it has.
    - prefetch: most experts of a layer that a GPU fetches before they are chosen; auto: where that pays.
    - spec_type: what drafts tokens for the model to verify: mtp, dflash, ngram or none; auto: the drafter
      that is named, mtp where all of the model is held and it may pay, or none. No token depends on it.
    - model_draft: a drafter: a sidecar, which is a GGUF file with the model's own block for multi-token
      prediction and without its layers, or a DFlash drafter: a GGUF file, or a folder with safetensors and
      config.json, which is converted at its first use.
    - tree_budget: tokens of a draft; auto: as many as pay in each step.
    - parallel: whole contexts that there is memory for together, up to 64; auto: as many as an eighth of the
      memory holds. Prompts of a list share it, however many they are.
    - seed: for requests that name none; None: a fresh one for each.
    - chat_template: a file with a Jinja template to be used instead of the model's own.
    - offline: never ask the hub.
    - policy: decides which experts stay in fast memory, for this model alone; None: the product's.
    - executor: makes the object that computes routed experts on a GPU, from the product's own; None: that.
    """

    def __init__(
        self,
        model: str | os.PathLike[str],
        *,
        ctx_size: int | str | None = None,
        vram: int | str = "auto",
        ram: int | str = "auto",
        plan: str | os.PathLike[str] | None = None,
        threads: int | Literal["auto"] = "auto",
        device: str = "auto",
        cache_type_k: CacheType = "auto",
        cache_type_v: CacheType = "auto",
        attention_window: int | None = None,
        tier: str = "auto",
        prefetch: int | Literal["auto"] = "auto",
        spec_type: str = "auto",
        model_draft: str | os.PathLike[str] | None = None,
        tree_budget: int | Literal["auto"] = "auto",
        parallel: int | Literal["auto"] = 1,
        seed: int | None = None,
        chat_template: str | os.PathLike[str] | None = None,
        offline: bool = False,
        policy: Policy | None = None,
        executor: ExecutorFactory | None = None,
        **unknown: Never,
    ) -> None:
        """Open a model. The class says what the settings are."""
        settings = {
            "model": model,
            "ctx_size": ctx_size,
            "vram": vram,
            "ram": ram,
            "plan": plan,
            "threads": threads,
            "device": device,
            "cache_type_k": cache_type_k,
            "cache_type_v": cache_type_v,
            "attention_window": attention_window,
            "tier": tier,
            "prefetch": prefetch,
            "spec_type": spec_type,
            "model_draft": model_draft,
            "tree_budget": tree_budget,
            "parallel": parallel,
            "seed": seed,
            "chat_template": chat_template,
            "offline": offline,
        }
        config = EngineConfig.from_options({**settings, **unknown})
        opened = open_model(config, own=OwnParts(policy, executor))
        for warning in opened.open_warnings:
            warnings.warn(warning, stacklevel=2)
        self._take(opened)

    @classmethod
    def from_opened(cls, opened: OpenedModel) -> Self:
        """An LLM over a model that is already open; it is closed with the LLM."""
        llm = cls.__new__(cls)
        llm._take(opened)
        return llm

    def _take(self, opened: OpenedModel) -> None:
        self._opened = opened
        self._reader = RequestReader(opened)
        self._engine = SharedEngine(lambda: Engine(opened, _LIMITS))
        self._closing = threading.Lock()
        self._is_released = False

    @property
    def opened(self) -> OpenedModel:
        """The parts: concrete configuration, runner, tokenizer, template and the file's sampling defaults."""
        return self._opened

    def __reduce__(self) -> Never:
        raise InvalidRequestError(
            "an LLM cannot be pickled or copied: it holds memory and threads of this process; "
            "open the model where it is needed"
        )

    def get_tokenizer(self) -> Tokenizer:
        """The tokenizer of the model's file: `encode(text)` gives ids, `decode(ids)` a text."""
        return self._opened.tokenizer

    def close(self) -> None:
        """Release the model, once the step that another thread takes is done. Closing twice is allowed.

        Later and unfinished requests raise InvalidRequestError. In a forked child, to which the model does
        not belong, this does nothing.
        """
        if not self._engine.process.is_here():
            return
        self._engine.close()
        with self._closing:
            if not self._is_released:
                self._is_released = True
                self._opened.close()

    # Two signatures, because a type checker cannot tell what the items of a list are from the union of both.
    @overload
    def generate(
        self,
        prompts: Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        progress: ListProgress | None = None,
    ) -> list[RequestOutput]: ...

    @overload
    def generate(
        self,
        prompts: Prompt,
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        progress: ListProgress | None = None,
    ) -> list[RequestOutput]: ...

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        progress: ListProgress | None = None,
    ) -> list[RequestOutput]:
        """Complete each prompt; a single prompt is a list of one.

        Those that there is memory for are computed side by side; each answer is what it is alone. The error
        of an answer is raised in place of all of them. `progress` is called with (prompts done, in all) each
        time that all answers to a prompt are there.

        A prompt is a text, token ids, `{"prompt": …}` or `{"prompt_token_ids": …}`. `sampling_params`: one
        for all prompts, one for each, or None for the model file's own sampling defaults. A given seed serves
        every prompt. Raises InvalidRequestError before computing anything if any prompt can't be served.
        """
        self._engine.check()
        requests = self._reader.of_prompts(prompts, sampling_params, self._opened.default_sampling)
        return self._complete_all(requests, progress)

    def stream(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        *,
        progress: Progress | None = None,
    ) -> Stream:
        """Complete one prompt piece by piece. `progress` is called with (prompt tokens done, in all)."""
        self._engine.check()
        params = one_params(sampling_params, self._opened.default_sampling)
        return self._stream(self._reader.of_prompt(prompt, "prompt", params), progress)

    @overload
    def chat(
        self,
        messages: Conversation,
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        progress: ListProgress | None = None,
        **template: Unpack[ChatOptions],
    ) -> list[RequestOutput]: ...

    @overload
    def chat(
        self,
        messages: Sequence[Conversation],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        progress: ListProgress | None = None,
        **template: Unpack[ChatOptions],
    ) -> list[RequestOutput]: ...

    def chat(
        self,
        messages: Conversation | Sequence[Conversation],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        progress: ListProgress | None = None,
        **template: Unpack[ChatOptions],
    ) -> list[RequestOutput]:
        """Answer a conversation of `{"role": …, "content": …}`, or each of a list of conversations.

        The model's chat template writes them out; `template` is for it, see `ChatOptions`. With
        `continue_final_message`, and without `add_generation_prompt`, the answer goes on with the last
        message, the assistant's. Otherwise as `generate`.
        """
        self._engine.check()
        requests = self._reader.of_chats(
            messages, sampling_params, self._opened.default_sampling, template_settings(**template)
        )
        return self._complete_all(requests, progress)

    def stream_chat(
        self,
        messages: Conversation,
        sampling_params: SamplingParams | None = None,
        *,
        progress: Progress | None = None,
        **template: Unpack[ChatOptions],
    ) -> Stream:
        """`chat` with one conversation, piece by piece. One that extends an earlier conversation computes
        only what is new.
        """
        self._engine.check()
        params = one_params(sampling_params, self._opened.default_sampling)
        return self._stream(self._reader.of_chat(messages, params, template_settings(**template)), progress)

    def forget(self) -> None:
        """Free the memory of all kept prefixes."""
        with self._engine.exclusively() as engine:
            engine.clear_prefixes()

    @host_memory_errors()
    def logits(self, token_ids: TokenIds) -> Logits:
        """Logits after each of `token_ids`, from an empty context: float32 [T, vocab].

        Raises InvalidRequestError for an id out of range or more ids than the context holds. Raises
        OutOfMemoryError if the result wouldn't fit, or if unfinished requests leave no room in the context
        memory.
        """
        self._engine.check()
        ids = self._reader.checked_ids(token_ids, "token_ids", self._opened.ctx_size)
        need = len(ids) * self._opened.tokenizer.vocab_size * 4
        free = Hardware.measure().ram_available_bytes
        if need > free:
            raise OutOfMemoryError(
                f"logits of {len(ids)} tokens need {need / 2**30:.1f} GiB, "
                f"{free / 2**30:.1f} GiB are free: ask for fewer tokens at a time"
            )
        with self._engine.exclusively() as engine:
            engine.make_room(len(ids))
            return self._opened.runner.logits(ids)

    def _stream(self, request: Request, progress: Progress | None = None) -> Stream:
        if progress is not None and not callable(progress):
            raise InvalidRequestError(f"progress must be a function, not {shown(progress)}")
        return Stream(request, self._engine, progress)

    @host_memory_errors()
    def _complete_all(
        self, requests: Sequence[Request], progress: ListProgress | None
    ) -> list[RequestOutput]:
        if progress is not None and not callable(progress):
            raise InvalidRequestError(f"progress must be a function, not {shown(progress)}")
        if not requests:
            return []
        return generate_list(requests, self._engine.requests(), self._engine.max_running, progress)
