"""Fields that several routes take in their bodies, with OpenAI's names, and the sampling settings they mean.

Unknown fields are ignored and null means that a field is absent; values of known ones are never converted.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Annotated, Any, Final

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, GetCoreSchemaHandler
from pydantic_core import CoreSchema

from coldstream.decoding import SamplingParams
from coldstream.decoding.sampling_params import MAX_LOGIT_BIASES, MAX_STOP_CHARS, MAX_STOP_STRINGS
from coldstream.server.http.problems import refused
from coldstream.server.http.settings import ServerSettings

MAX_TOKENS: Final = 2**31 - 1
MAX_TOP_LOGPROBS: Final = 20
MAX_TEXT_CHARS: Final = 1 << 22

Whole = Annotated[int, Field(strict=True)]
Number = Annotated[float, Field(strict=True, allow_inf_nan=False)]
Flag = Annotated[bool, Field(strict=True)]
Name = Annotated[str, Field(max_length=1024)]
Text = Annotated[str, Field(max_length=MAX_TEXT_CHARS)]
TokenCount = Annotated[int, Field(strict=True, ge=1, le=MAX_TOKENS)]
StopString = Annotated[str, Field(min_length=1, max_length=MAX_STOP_CHARS)]


def _unless_unlimited(given: Any) -> Any:
    """Clients of llama.cpp and LM Studio send -1 for an answer as long as the context allows."""
    return None if type(given) is int and given == -1 else given


def _without_empty(given: Any) -> Any:
    """Clients of llama.cpp, which leaves empty stop strings out, send forms that nobody filled in."""
    if isinstance(given, list):
        return [each for each in given if each != ""]
    return None if given == "" else given


TokenLimit = Annotated[TokenCount | None, BeforeValidator(_unless_unlimited)]
StopStrings = Annotated[
    StopString | Annotated[list[StopString], Field(max_length=MAX_STOP_STRINGS)] | None,
    BeforeValidator(_without_empty),
]


def _check_biases(given: Any) -> Any:
    """An object's entries are counted here, as pydantic counts them after it has validated all of them."""
    if isinstance(given, dict) and len(given) > MAX_LOGIT_BIASES:
        raise ValueError(f"{len(given)} tokens are biased: at most {MAX_LOGIT_BIASES} may be")
    return given


# Fields that are named as `SamplingParams` names them.
_PLAIN: Final = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "repeat_last_n",
    "max_tokens",
    "min_tokens",
    "ignore_eos",
    "stop",
    "stop_token_ids",
    "include_stop_str_in_output",
    "n",
)


def _stop_at_first(schema: Any) -> None:
    """Makes all lists of a schema of pydantic's end their validation at their first wrong entry."""
    if isinstance(schema, dict):
        if schema.get("type") in ("list", "tuple", "set", "frozenset"):
            schema["fail_fast"] = True
        schema = schema.values()
    elif not isinstance(schema, (list, tuple)):
        return
    for part in schema:
        _stop_at_first(part)


class Body(BaseModel):
    """A request body, or an object in one. A list is refused for its first wrong entry: errors of a million
    would take more memory than they do.
    """

    model_config = ConfigDict(extra="ignore")

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        schema = handler(source)
        _stop_at_first(schema)
        return schema


class StreamOptions(Body):
    """`include_usage`: a last chunk has the counts of tokens."""

    include_usage: Flag | None = None


class SamplingFields(Body):
    """How tokens are chosen, when an answer ends, and how it is sent."""

    model: Name | None = None
    stream: Flag | None = None
    stream_options: StreamOptions | None = None
    return_progress: Flag | None = None
    n: Annotated[int, Field(strict=True, ge=1)] | None = None
    seed: Annotated[int, Field(strict=True, ge=-1, lt=2**64)] | None = None
    max_tokens: TokenLimit = None
    min_tokens: Annotated[int, Field(strict=True, ge=0, le=MAX_TOKENS)] | None = None
    temperature: Annotated[Number, Field(ge=0, le=100)] | None = None
    top_p: Annotated[Number, Field(ge=0, le=1)] | None = None
    top_k: Annotated[int, Field(strict=True, ge=-1, le=MAX_TOKENS)] | None = None
    min_p: Annotated[Number, Field(ge=0, le=1)] | None = None
    presence_penalty: Annotated[Number, Field(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[Number, Field(ge=-2, le=2)] | None = None
    repetition_penalty: Annotated[Number, Field(ge=0.01, le=100)] | None = None
    repeat_penalty: Annotated[Number, Field(ge=0.01, le=100)] | None = None
    repeat_last_n: Annotated[int, Field(strict=True, ge=-1, le=MAX_TOKENS)] | None = None
    stop: StopStrings = None
    stop_token_ids: Annotated[list[Whole], Field(max_length=1024)] | None = None
    include_stop_str_in_output: Flag | None = None
    ignore_eos: Flag | None = None
    logit_bias: (
        Annotated[
            dict[Annotated[str, Field(max_length=20)], Annotated[Number, Field(ge=-100, le=100)]],
            Field(max_length=MAX_LOGIT_BIASES),
            BeforeValidator(_check_biases),
        ]
        | None
    ) = None
    cache_salt: Name | None = None
    user: Name | None = None

    @property
    def wants_usage(self) -> bool:
        """Whether a stream ends with the counts of tokens."""
        return bool(self.stream_options and self.stream_options.include_usage)


def sampling_of(
    fields: SamplingFields, default: SamplingParams, settings: ServerSettings, **more: Any
) -> SamplingParams:
    """The settings of a request: those that it gives, `more`, and for the rest the model's.

    Raises ProblemError for what this server does not allow, InvalidRequestError as `SamplingParams`.
    """
    given = {name: getattr(fields, name) for name in _PLAIN if getattr(fields, name) is not None}
    if given.get("repeat_last_n") == -1:
        given["repeat_last_n"] = None
    if fields.repetition_penalty is None and fields.repeat_penalty is not None:
        given["repetition_penalty"] = fields.repeat_penalty
    if fields.seed is not None and fields.seed != -1:
        given["seed"] = fields.seed
    if fields.logit_bias:
        given["logit_bias"] = _biases(fields.logit_bias)
    if given.get("n", 1) > settings.max_n:
        raise refused(f"n: {given['n']} answers: at most {settings.max_n} to a prompt are served", "n")
    return replace(default, **{**given, **{name: value for name, value in more.items() if value is not None}})


def _biases(given: Mapping[str, float]) -> dict[int, float]:
    for name in given:
        if not (name.isascii() and name.isdecimal()):
            raise refused('logit_bias: its keys must be token ids, such as "42"', "logit_bias")
    return {int(name): bias for name, bias in given.items()}
