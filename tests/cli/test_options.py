"""Options: what their texts mean, and how they become settings."""

import click
import pytest
from hypothesis import given
from hypothesis import strategies as st

from coldstream.cli.options import (
    engine_config,
    parse_counts,
    parse_json_object,
    parse_layer_weights,
    parse_number_or_auto,
    parse_size,
    sampling_params,
)
from coldstream.decoding import SamplingParams
from coldstream.engine import EngineConfig
from coldstream.errors import ConfigError


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("0", 0),
        ("4096", 4096),
        ("8k", 8192),
        ("8K", 8192),
        ("10G", 10 * 2**30),
        ("1.5GiB", 3 * 2**29),
        ("2MB", 2**21),
    ],
)
def test_sizes(text: str, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "k", "-1", "8x", "1e3", "8 k", "0x10", "9" * 99])
def test_what_is_no_size(text: str) -> None:
    with pytest.raises(click.BadParameter, match="is not a size"):
        parse_size(text)


@given(st.integers(0, 10**15 - 1))
def test_plain_numbers_are_sizes(number: int) -> None:
    assert parse_size(str(number)) == number


@given(st.lists(st.integers(0, 10**9 - 1), min_size=1, max_size=32))
def test_lists_of_counts(counts: list[int]) -> None:
    assert parse_counts(",".join(map(str, counts))) == tuple(counts)


@pytest.mark.parametrize("text", ["", ",", "1,", "1;2", "-1", "1.5", ",".join("1" * 33)])
def test_what_is_no_list_of_counts(text: str) -> None:
    with pytest.raises(click.BadParameter):
        parse_counts(text)


def test_weights_of_layers() -> None:
    assert parse_layer_weights("3=2") == ((3, 2.0),)
    assert parse_layer_weights("0-2=1.5,7=0.25") == ((0, 1.5), (1, 1.5), (2, 1.5), (7, 0.25))


@pytest.mark.parametrize(
    "text", ["", "3", "3=", "=2", "3=0", "3=0.0", "5-3=2", "3=-1", "3=nan", "3=2,", "-1=2"]
)
def test_what_are_no_weights_of_layers(text: str) -> None:
    with pytest.raises(click.BadParameter, match="is not LAYER=WEIGHT or FIRST-LAST=WEIGHT"):
        parse_layer_weights(text)


def test_a_number_or_auto() -> None:
    assert (parse_number_or_auto("auto"), parse_number_or_auto("12")) == ("auto", 12)
    for text in ("all", "-1", "1.5", "²", ""):
        with pytest.raises(click.BadParameter):
            parse_number_or_auto(text)


@pytest.mark.parametrize("text", ["", "{", "[]", "1", "[" * 100_000])
def test_what_is_no_json_object(text: str) -> None:
    with pytest.raises(click.BadParameter):
        parse_json_object(text)


def test_only_given_options_change_the_configuration() -> None:
    nothing = dict.fromkeys(
        (
            "ctx_size",
            "vram",
            "ram",
            "plan",
            "threads",
            "device",
            "cache_type_k",
            "cache_type_v",
            "attention_window",
            "tier",
            "offline",
        )
    )
    assert engine_config("m.gguf", nothing) == EngineConfig("m.gguf")
    given_options = {**nothing, "ctx_size": 100, "tier": "avx2", "offline": True}
    assert engine_config("m.gguf", given_options) == EngineConfig(
        "m.gguf", ctx_size=100, tier="avx2", offline=True
    )


def test_budgets_are_given_as_sizes() -> None:
    config = engine_config("m.gguf", {"vram": "6G", "ram": "auto"})
    assert (config.vram, config.ram) == (6 * 2**30, "auto")
    with pytest.raises(ConfigError, match="--vram"):
        engine_config("m.gguf", {"vram": "plenty"})


def test_only_given_options_change_the_defaults_of_sampling() -> None:
    defaults = SamplingParams(temperature=0.6, top_k=20, stop=("a",))
    nothing = {"temperature": None, "top_k": None, "stop": (), "ignore_eos": None, "max_tokens": None}
    assert sampling_params(nothing, defaults) == defaults
    options = {
        **nothing,
        "temperature": 0.0,
        "stop": ("b", "c"),
        "max_tokens": -1,
        "repeat_last_n": -1,
        "seed": 0,
    }
    expected = SamplingParams(temperature=0.0, top_k=20, stop=("b", "c"), repeat_last_n=None, seed=0)
    assert sampling_params(options, defaults) == expected
