"""Messages between the processes: what is sent arrives equal, and bytes that are no message are refused."""

import math
import struct
from collections.abc import Callable
from dataclasses import fields, is_dataclass, replace
from typing import Any, Literal, get_args, get_origin, get_type_hints

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from coldstream import errors
from coldstream.decoding import SamplingParams
from coldstream.decoding.sampling_params import LogitsProcessor
from coldstream.engine import EngineConfig
from coldstream.engine.answer import Request
from coldstream.engine.events import Delta, Failed, PromptProgress, Started
from coldstream.engine.limits import EngineLimits
from coldstream.engine.request import Logprob, Piece, Statistics
from coldstream.engine.submission import Submission
from coldstream.server.codec import ProtocolError, decode, encode
from coldstream.server.messages import (
    MAX_FRAME_BYTES,
    Cancel,
    Died,
    FromEngine,
    Loading,
    Open,
    PromptCache,
    Texts,
    ToEngine,
    ToEngineReader,
    framed,
    joined,
    payload_length,
)

COUNTS = st.integers(0, 2**63 - 1)
SECONDS = st.floats(0, 1e9)
TEXTS = st.text(st.characters(codec=None), max_size=20)  # lone surrogates too
IDS = st.lists(st.integers(0, 300_000), max_size=8).map(tuple)
ERROR_KINDS = [
    kind
    for kind in vars(errors).values()
    if isinstance(kind, type) and issubclass(kind, errors.ColdstreamError)
]

PARAMS = st.builds(
    SamplingParams,
    temperature=st.floats(0, 2) | st.just(0),
    top_k=st.integers(0, 100),
    repeat_last_n=st.none() | st.integers(0, 99),
    seed=st.none() | st.integers(0, 2**64 - 1),
    max_tokens=st.none() | st.integers(1, 99),
    stop=st.none() | st.lists(st.text(min_size=1, max_size=5), max_size=3),
    logit_bias=st.none() | st.dictionaries(st.integers(0, 99), st.floats(-100, 100), max_size=3),
    stop_token_ids=IDS,
    logprobs=st.none() | st.integers(0, 20),
)
REQUESTS = st.builds(
    Request,
    prompt=st.none() | TEXTS,
    prompt_token_ids=IDS,
    params=PARAMS,
    seed=COUNTS,
    max_tokens=COUNTS,
    end_ids=IDS.map(frozenset),
    stop_token_ids=IDS.map(frozenset),
    tier=TEXTS,
    threads=COUNTS,
)
SUBMISSIONS = st.builds(
    Submission,
    request_id=COUNTS,
    request=REQUESTS,
    boundaries=IDS,
    namespace=TEXTS,
    priority=st.integers(-9, 9),
    deadline=st.none() | SECONDS,
    progress=st.booleans(),
)
LOGPROBS = st.dictionaries(
    st.integers(0, 300_000), st.builds(Logprob, st.floats(max_value=0, allow_nan=False), COUNTS, TEXTS)
)
STATISTICS = st.builds(
    Statistics,
    prompt_tokens=COUNTS,
    reused_tokens=COUNTS,
    generated_tokens=COUNTS,
    time_to_first_token_s=SECONDS,
    generation_s=SECONDS,
    tier=TEXTS,
    threads=COUNTS,
    seed=COUNTS,
    expert_hit_rate=st.none() | st.floats(0, 1),
)
PIECES = st.builds(
    Piece,
    text=TEXTS,
    token_ids=IDS,
    logprobs=st.none() | st.lists(LOGPROBS, max_size=2).map(tuple),
    finish_reason=st.sampled_from([None, "stop", "length", "cancelled"]),
    stop_reason=st.none() | st.integers(0, 99) | TEXTS,
    statistics=st.none() | STATISTICS,
)
NO_STATISTICS = Statistics(1, 0, 1, 0.1, 0.0, "generic", 1, 0)
EVENTS = (
    st.builds(Started, COUNTS, COUNTS, COUNTS)
    | st.builds(PromptProgress, COUNTS, COUNTS, COUNTS)
    | st.builds(Delta, COUNTS, COUNTS, PIECES)
    | st.builds(Loading, TEXTS, COUNTS, COUNTS)
)


@given(SUBMISSIONS | st.builds(Cancel, COUNTS))
def test_what_is_sent_to_the_engine_arrives_equal(message: Submission | Cancel) -> None:
    (arrived,) = ToEngineReader().feed(framed(message, ToEngine))
    assert arrived == message
    assert type(arrived) is type(message)


@given(EVENTS)
def test_what_the_engine_tells_arrives_equal(event: Any) -> None:
    assert decode(encode(event, FromEngine), FromEngine) == event


@given(st.lists(EVENTS | st.builds(Delta, COUNTS, COUNTS, st.builds(Piece, TEXTS, IDS)), max_size=12))
def test_the_events_of_a_step_arrive_equal_and_in_their_order(events: list[Any]) -> None:
    arrived: list[Any] = []
    for message in joined(events):
        read = decode(encode(message, FromEngine), FromEngine)
        arrived += read.deltas() if isinstance(read, Texts) else [read]
    assert arrived == events


def test_texts_that_follow_each_other_are_one_message() -> None:
    texts = [Delta(1, 0, Piece("a", (1,))), Delta(2, 1, Piece("", (2, 3)))]
    end = Delta(1, 0, Piece("b", (4,), finish_reason="length"))
    assert list(joined([*texts, end, texts[0]])) == [Texts.of(texts), end, Texts.of(texts[:1])]


@pytest.mark.parametrize(
    "more", [{"logprobs": ()}, {"finish_reason": "stop"}, {"stop_reason": 7}, {"statistics": NO_STATISTICS}]
)
def test_a_delta_with_more_than_text_is_a_message_of_its_own(more: dict[str, Any]) -> None:
    delta = Delta(1, 0, replace(Piece("a", (1,)), **more))
    assert list(joined([delta])) == [delta]


def test_lone_surrogates_arrive_as_they_are() -> None:
    delta = Delta(1, 0, Piece("a\ud800\udfff", (7,), stop_reason="\udc80"))
    assert decode(encode(delta, FromEngine), FromEngine) == delta


def test_log_probabilities_keep_their_order_and_may_be_infinite() -> None:
    ranked = {7: Logprob(-0.5, 1, "a"), 3: Logprob(-math.inf, 2, "b")}
    piece = Piece("a", (7,), (ranked,))
    arrived: Delta = decode(encode(Delta(1, 0, piece), FromEngine), FromEngine)
    assert arrived.piece.logprobs is not None
    assert list(arrived.piece.logprobs[0].items()) == list(ranked.items())


@pytest.mark.parametrize("kind", ERROR_KINDS)
def test_errors_keep_their_type_and_message(kind: type[errors.ColdstreamError]) -> None:
    arrived: Failed = decode(encode(Failed(3, kind("what to do")), FromEngine), FromEngine)
    assert type(arrived.error) is kind
    assert str(arrived.error) == "what to do"


def test_an_error_of_another_module_arrives_as_its_nearest_known_ancestor() -> None:
    class OwnError(errors.OutOfMemoryError):
        """Of some other module."""

    arrived: Died = decode(encode(Died(OwnError("needs 9 GiB")), FromEngine), FromEngine)
    assert type(arrived.error) is errors.OutOfMemoryError
    assert str(arrived.error) == "needs 9 GiB"


def test_configuration_and_limits_arrive_equal() -> None:
    opened = Open(
        EngineConfig("m.gguf", vram="6G", threads=3, seed=2**64 - 1),
        EngineLimits(7),
        PromptCache(1 << 30, "/tmp/prompts"),
    )
    assert decode(encode(opened, ToEngine), ToEngine) == opened


def test_functions_are_no_data() -> None:
    params = SamplingParams(logits_processors=[lambda ids, logits: logits])
    request = Request(None, (1,), params, 0, 1, frozenset(), frozenset(), "t", 1)
    with pytest.raises(ProtocolError, match="no data"):
        framed(Submission(1, request), ToEngine)


@given(SUBMISSIONS, st.lists(st.integers(1, 50)))
def test_frames_may_be_split_anywhere(message: Submission, sizes: list[int]) -> None:
    data = framed(message, ToEngine) + framed(Cancel(5), ToEngine)
    reader, arrived, start = ToEngineReader(), [], 0
    for size in [*sizes, len(data)]:
        arrived += reader.feed(data[start : start + size])
        start += size
    assert arrived == [message, Cancel(5)]


@given(st.binary(max_size=200))
def test_random_bytes_are_no_message(data: bytes) -> None:
    with pytest.raises(ProtocolError):
        decode(data, ToEngine)


def hostile(plain: Any) -> bytes:
    return msgspec.msgpack.encode(plain)


def read(data: bytes) -> Any:
    """The arrays of a message."""
    return msgspec.msgpack.decode(data)


HEAD = hostile(["Cancel", 1])[:-1]


@pytest.mark.parametrize(
    "data",
    [
        b"",
        hostile(None),
        hostile([]),
        hostile(3),
        hostile(["Cancel", 1])[:-1],
        hostile(["Cancel", 1]) + b"x",
        b"\xff\xfe",
        b"\x91" * 200_000,  # arrays in arrays
        HEAD + b"\x91" * 200_000,
        HEAD + b"\xdd\xff\xff\xff\xff",  # an array of 4 billion values
        HEAD + b"\xdf\xff\xff\xff\xff",  # a map
        HEAD + b"\xc6\xff\xff\xff\xff",  # bytes
        HEAD + b"\xc9\xff\xff\xff\xff\x01",  # an extension
        hostile(["Cancel"]),
        hostile(["Cancel", 1, 2]),
        hostile(["Cancel", "1"]),
        hostile(["Cancel", b"1"]),
        hostile(["Cancel", True]),
        hostile(["Cancel", 1.0]),
        hostile(["Cancel", None]),
        hostile(["Cancel", {"request_id": 1}]),
        hostile({"type": "Cancel", "request_id": 1}),
        hostile([["Cancel", 1], ["Count", 1]]),
        hostile([b"Cancel", 1]),
        hostile(["EngineStatistics"]),
        hostile(["os.system", "true"]),
        hostile(["Died", ["error", "GenerationFault", b"m"]]),  # of the other direction
        hostile(["Open", ["EngineConfig"], ["EngineLimits"], ["PromptCache", 0, None]]),
    ],
)
def test_hostile_frames_are_refused(data: bytes) -> None:
    with pytest.raises(ProtocolError):
        decode(data, ToEngine)


@pytest.mark.parametrize(
    "error",
    [["OSError", b"m"], ["ProtocolError", b"m"], ["GenerationFault"], ["GenerationFault", 1], ["x", b""]],
)
def test_only_errors_of_the_package_are_made(error: Any) -> None:
    with pytest.raises(ProtocolError):
        decode(hostile(["Died", ["error", *error]]), FromEngine)
    with pytest.raises(ProtocolError):
        decode(hostile(["Died", error]), FromEngine)


@given(SUBMISSIONS, st.data())
def test_a_submission_with_any_value_of_another_kind_is_refused(
    message: Submission, data: st.DataObject
) -> None:
    plain = read(encode(message, ToEngine))
    field = data.draw(st.integers(1, len(plain) - 1))
    plain[field] = data.draw(st.sampled_from([{"x": []}, [[]], [{}], {"map": 3}]))
    with pytest.raises(ProtocolError):
        decode(hostile(plain), ToEngine)


def test_what_a_setting_forbids_is_refused_on_arrival() -> None:
    request = Request(None, (1,), SamplingParams(), 0, 1, frozenset(), frozenset(), "t", 1)
    plain = read(encode(Submission(1, request), ToEngine))
    plain[2][3][1] = -5.0
    with pytest.raises(ProtocolError, match="temperature"):
        decode(hostile(plain), ToEngine)


def test_a_frame_beyond_the_limit_is_neither_sent_nor_awaited() -> None:
    assert payload_length(struct.pack(">I", MAX_FRAME_BYTES)) == MAX_FRAME_BYTES
    with pytest.raises(ProtocolError, match="allowed are"):
        payload_length(struct.pack(">I", MAX_FRAME_BYTES + 1))
    with pytest.raises(ProtocolError, match="allowed are"):
        list(ToEngineReader().feed(b"\xff\xff\xff\xff"))
    with pytest.raises(ProtocolError, match="allowed are"):
        framed(Died(LongError()), FromEngine)


class LongError(errors.ColdstreamError):
    """One whose text is far too long."""

    def __init__(self) -> None:
        super().__init__("m")

    def __str__(self) -> str:
        return "m" * (MAX_FRAME_BYTES + 1)


def leaves(hint: Any) -> set[Any]:
    """The types that a type hint is made of in the end."""
    if is_dataclass(hint):
        hints = get_type_hints(hint)
        return {leaf for field in fields(hint) for leaf in leaves(hints[field.name])}
    if get_origin(hint) in (None, Literal, Callable):
        return {hint if get_origin(hint) is not Literal else str}
    return {leaf for argument in get_args(hint) for leaf in leaves(argument)}


def test_every_field_of_every_message_is_data_but_functions() -> None:
    """A field of another kind would fail at its first use only."""
    found = {leaf for message in (*get_args(ToEngine), *get_args(FromEngine)) for leaf in leaves(message)}
    functions = {leaf for leaf in found if get_origin(leaf) is Callable}
    scalars = {bool, int, float, str, type(None), Ellipsis, errors.ColdstreamError}
    assert found - functions <= scalars
    assert functions == {LogitsProcessor}
