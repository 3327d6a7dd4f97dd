"""The kinds of prompts that callers may give, and how they are distinguished."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral
from typing import Any, NotRequired, TypedDict, cast

import numpy as np
from numpy.typing import NDArray

from coldstream.decoding import SamplingParams
from coldstream.errors import ContextFullError, InvalidRequestError, shown

TokenIds = Sequence[int] | NDArray[np.integer[Any]]


class TextPrompt(TypedDict):
    """A prompt as text."""

    prompt: str


class TokensPrompt(TypedDict):
    """A prompt as token ids; `prompt` is the text that they are said to come from, and is not read."""

    prompt_token_ids: TokenIds
    prompt: NotRequired[str]


Prompt = str | TokenIds | TextPrompt | TokensPrompt
"""A text, token ids (also a NumPy vector of integers), or a dict of either."""

Conversation = Sequence[Mapping[str, Any]]
Tools = Sequence[Mapping[str, Any]]

_RENDERER_ARGUMENTS = ("messages", "tools", "add_generation_prompt", "continue_final_message")
_WANTED = "a text, a list of token ids, or a dict with prompt or prompt_token_ids"


@dataclass(frozen=True)
class ReadPrompt:
    """A prompt of known kind: a text to be encoded, or token ids not yet checked."""

    text: str | None
    token_ids: Sequence[int] | None


def as_prompts(prompts: object) -> list[object]:
    """Several prompts as they are; one, a text, a dict or what begins with an integer, as a list of one.

    Raises InvalidRequestError for anything that is no list of prompts. The prompts themselves are not looked
    at.
    """
    if isinstance(prompts, str | Mapping):
        return [prompts]
    if isinstance(prompts, np.ndarray) and prompts.ndim == 1 and prompts.dtype.kind in "iu":
        return [prompts]
    if not _is_list(prompts):
        raise InvalidRequestError(f"prompts must be a list of prompts, or {_WANTED}, not {_named(prompts)}")
    items = cast(Sequence[object], prompts)
    return [items] if len(items) and isinstance(items[0], Integral) else list(items)


def read_prompt(prompt: object, name: str) -> ReadPrompt:
    """`prompt`, called `name` in messages. Raises InvalidRequestError if it is none of `Prompt`."""
    if isinstance(prompt, str):
        return ReadPrompt(prompt, None)
    if isinstance(prompt, Mapping):
        return _read_dict(prompt, name)
    return ReadPrompt(None, _token_ids(prompt, name))


def params_of_each(sampling_params: object, count: int, default: SamplingParams) -> list[SamplingParams]:
    """The settings for each of `count` prompts, from one for all, a list with one for each, or None."""
    if sampling_params is None:
        return [default] * count
    if isinstance(sampling_params, SamplingParams):
        return [sampling_params] * count
    if not isinstance(sampling_params, list | tuple) or not all(
        isinstance(params, SamplingParams) for params in sampling_params
    ):
        raise InvalidRequestError(
            f"sampling_params must be SamplingParams or a list of them, not {_named(sampling_params)}"
        )
    if len(sampling_params) != count:
        raise InvalidRequestError(
            f"sampling_params must be one for all prompts or one for each of {count}, not "
            f"{len(sampling_params)}"
        )
    return list(sampling_params)


def one_params(sampling_params: object, default: SamplingParams) -> SamplingParams:
    """The settings of a stream, which gives one answer. Raises InvalidRequestError for anything else."""
    (params,) = params_of_each(None if sampling_params is None else [sampling_params], 1, default)
    if params.n != 1:
        raise InvalidRequestError(f"n must be 1 for a stream, which gives one answer, not {params.n}")
    return params


def as_conversations(messages: object) -> list[Conversation]:
    """Several conversations as they are; one, a list of messages, as a list of one. Checks no message."""
    if isinstance(messages, list | tuple) and all(isinstance(item, list | tuple) for item in messages):
        return list(messages)
    return [cast(Conversation, messages)]


class ChatOptions(TypedDict, total=False):
    """What `chat` and `stream_chat` take for the chat template beside the messages."""

    add_generation_prompt: bool  # whether the assistant's next message is begun; True
    continue_final_message: bool  # whether the answer goes on with the last message; False
    tools: Tools | None  # functions in the shape of OpenAI's API
    chat_template_kwargs: Mapping[str, Any] | None  # further variables of the template


def template_settings(
    *,
    add_generation_prompt: object = True,
    continue_final_message: object = False,
    tools: object = None,
    chat_template_kwargs: object = None,
) -> dict[str, Any]:
    """The chat template's arguments beside the messages, from `ChatOptions`.

    Raises InvalidRequestError for what are none.
    """
    if chat_template_kwargs is not None and not isinstance(chat_template_kwargs, Mapping):
        raise InvalidRequestError(f"chat_template_kwargs must be a dict, not {_named(chat_template_kwargs)}")
    flags = {
        "add_generation_prompt": add_generation_prompt,
        "continue_final_message": continue_final_message,
    }
    for name, flag in flags.items():
        if not isinstance(flag, bool):
            raise InvalidRequestError(f"{name} must be True or False, not {shown(flag)}")
    settings = dict(chat_template_kwargs or {})
    for name in settings:
        if not isinstance(name, str) or name in _RENDERER_ARGUMENTS:
            raise InvalidRequestError(f"chat template setting {shown(name)}: reserved for the renderer")
    return {**settings, "tools": tools, **flags}


def checked_ids(
    token_ids: object, name: str, *, max_tokens: int, ctx_size: int, vocab_size: int
) -> list[int]:
    """`token_ids` as a list. Raises InvalidRequestError for other things than ids of the vocabulary, and for
    none or more than `max_tokens` of them.
    """
    ids = _token_ids(token_ids, name)
    if not 1 <= len(ids) <= max_tokens:
        message = (
            f"{name}: {len(ids)} tokens: a context of {ctx_size} has room for 1 to {max_tokens}; shorten the "
            "prompt or raise ctx_size (--ctx-size)"
        )
        raise ContextFullError(message, len(ids)) if ids else InvalidRequestError(message)
    are_ints = set(map(type, ids)) == {int}  # as of most prompts; far quicker than one by one
    if are_ints and min(ids) >= 0 and max(ids) < vocab_size:
        return list(ids)
    for token_id in ids:
        is_integer = isinstance(token_id, Integral) and not isinstance(token_id, bool)
        if not is_integer or not 0 <= token_id < vocab_size:
            raise InvalidRequestError(
                f"{name}: {shown(token_id)} is not a token id of a vocabulary of {vocab_size}"
            )
    return [int(token_id) for token_id in ids]


def _read_dict(prompt: Mapping[Any, Any], name: str) -> ReadPrompt:
    unknown = prompt.keys() - {"prompt", "prompt_token_ids"}
    if unknown or not prompt:
        found = f"{shown(min(map(str, unknown)))}" if unknown else "nothing"
        raise InvalidRequestError(f"{name}: a dict has prompt or prompt_token_ids, this one {found}")
    text = prompt.get("prompt")
    if "prompt_token_ids" in prompt:
        if text is not None and not isinstance(text, str):
            raise InvalidRequestError(f"{name}: prompt must be a text, not {_named(text)}")
        return ReadPrompt(text, _token_ids(prompt["prompt_token_ids"], f"{name}: prompt_token_ids"))
    if not isinstance(text, str):
        raise InvalidRequestError(f"{name}: prompt must be a text, not {_named(text)}")
    return ReadPrompt(text, None)


def _token_ids(ids: object, name: str) -> Sequence[int]:
    if isinstance(ids, np.ndarray):
        if ids.ndim != 1 or ids.dtype.kind not in "iu":
            raise InvalidRequestError(
                f"{name}: token ids are a vector of integers, not {ids.dtype} of shape {ids.shape}"
            )
        return cast(list[int], ids.tolist())
    if not _is_list(ids):
        raise InvalidRequestError(f"{name} must be {_WANTED}, not {_named(ids)}")
    return cast(Sequence[int], ids)


def _is_list(value: object) -> bool:
    is_sequence = isinstance(value, Sequence) or (isinstance(value, np.ndarray) and value.ndim > 0)
    return is_sequence and not isinstance(value, str | bytes | bytearray | memoryview)


def _named(value: object) -> str:
    """A value that is no prompt, with what to do about it where that is known."""
    if isinstance(value, bytes | bytearray | memoryview):
        return f"{type(value).__name__}: decode them first"
    if value is None or isinstance(value, int | float):
        return shown(value)
    return f"a value of type {type(value).__name__}"
