"""Which layers have a window, and how the layers of a model rotate, by the keys of a file."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from builders import SMALL, MixedAttention, make_model, write_model
from coldstream.errors import InconsistentError, LimitError, UnsupportedError
from coldstream.gguf.reader import GGUFFile
from coldstream.kernels.ops import RopeSpec
from coldstream.kernels.rope.scaling import Yarn, yarn_magnitude
from coldstream.models.read_spec import read_spec
from coldstream.models.spec.hyperparameters import Hyperparameters
from coldstream.models.spec.layer_keys import WindowPattern, read_attention
from coldstream.models.spec.layer_specs import AttentionSpec
from coldstream.models.spec.rope_keys import YarnRules

Read = Callable[..., tuple[AttentionSpec, ...]]
WINDOW, PATTERN = "attention.sliding_window", "attention.sliding_window_pattern"
BASE = "rope.freq_base_swa"
FULL_LAST = WindowPattern(period=2, is_full_first=False, is_scaled=False)
FULL_FIRST = WindowPattern(period=4, is_full_first=True, is_scaled=False)
YARN = {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0, "rope.scaling.original_context_length": 64}


@pytest.fixture
def read(tmp_path: Path) -> Read:
    def read_changed(changes: dict[str, Any], **options: Any) -> tuple[AttentionSpec, ...]:
        model = make_model("qwen3moe", dims=SMALL, quant="F32", tokenizer=False)
        model.metadata |= {f"qwen3moe.{key}": value for key, value in changes.items()}
        with GGUFFile.open(write_model(tmp_path / "tiny.gguf", model)[0]) as file:
            keys = Hyperparameters(file.metadata, file.tensors, "qwen3moe")
            return read_attention(
                keys, output_gate="none", qk_norm="head", rotates_whole_heads=True, **options
            )

    return read_changed


def windows(specs: tuple[AttentionSpec, ...]) -> list[int | None]:
    return [spec.window for spec in specs]


@pytest.mark.parametrize(
    ("changes", "options", "expected"),
    [
        ({}, {}, [None] * 4),
        ({PATTERN: [True] * 4}, {}, [None] * 4),
        ({WINDOW: 0, PATTERN: [True] * 4}, {"windows": FULL_LAST}, [None] * 4),
        ({WINDOW: 7, PATTERN: [True, True, False, True]}, {}, [7, 7, None, 7]),
        ({WINDOW: 7, PATTERN: [1, 0, 0, 1]}, {}, [7, None, None, 7]),
        (
            {WINDOW: 7, PATTERN: [False] * 4},
            {"windows": FULL_FIRST},
            [None] * 4,
        ),  # no other base is asked for
        ({WINDOW: 7, PATTERN: 2}, {}, [7, None, 7, None]),
        ({WINDOW: 7, PATTERN: 1}, {}, [None] * 4),
        ({WINDOW: 7, PATTERN: 3, BASE: 1e4}, {"windows": FULL_FIRST}, [None, 7, 7, None]),
        ({WINDOW: 7, BASE: 1e4}, {"windows": FULL_LAST}, [7, None, 7, None]),
        ({WINDOW: 7, BASE: 1e4}, {"windows": FULL_FIRST}, [None, 7, 7, 7]),
        ({}, {"windows": FULL_FIRST}, [None] * 4),
        ({WINDOW: 4096}, {}, [None] * 4),
        ({WINDOW: 4096, BASE: 1e4}, {"windows": FULL_FIRST}, [None, 4096, 4096, 4096]),
    ],
)
def test_which_layers_have_a_window(
    read: Read, changes: dict[str, Any], options: dict[str, Any], expected: list[int | None]
) -> None:
    """By an array of bools or numbers, a period, or the family. A file that names none may have a window as
    long as the context.
    """
    assert windows(read(changes, **options)) == expected


def test_layers_with_a_window_rotate_in_their_own_way(read: Read) -> None:
    """Also where the window is too long to hide a position."""
    own = {BASE: 1e4, "rope.dimension_count_swa": 4}
    for window in (7, 4096):
        first, *others = read({WINDOW: window, **own, **YARN}, windows=FULL_FIRST)
        plain = RopeSpec(8, 1e7)
        assert (first.rope.num_dims, first.rope.theta) == (8, 1e7)
        assert first.rope.scaling is not None
        assert first.rope.scaling.frequency_factors == Yarn(4.0, 64).frequency_factors(plain)
        assert {spec.rope for spec in others} == {RopeSpec(4, 1e4)}
    without_windows = read(own, windows=FULL_FIRST)
    assert {spec.rope for spec in without_windows} == {plain}


def test_layers_with_a_window_turn_as_many_dimensions_unless_a_key_says_otherwise(read: Read) -> None:
    specs = read({WINDOW: 7, BASE: 1e4, "rope.dimension_count": 4}, windows=FULL_FIRST)
    assert [spec.rope for spec in specs] == [RopeSpec(4, 1e7), *[RopeSpec(4, 1e4)] * 3]


def test_a_scaling_counts_for_windows_where_the_family_says_so(read: Read) -> None:
    stretched = WindowPattern(period=2, is_full_first=False, is_scaled=True)
    specs = read({WINDOW: 7, **YARN}, windows=stretched)
    (rope,) = {spec.rope for spec in specs}
    assert rope.scaling is not None
    assert rope.scaling.magnitude == yarn_magnitude(4.0)
    with pytest.raises(UnsupportedError, match=r"freq_base_swa.*10000, supported: one rotary embedding"):
        read({WINDOW: 7, **YARN, BASE: 1e4}, windows=stretched)
    with pytest.raises(InconsistentError, match=r"freq_base_swa.*missing"):
        read({WINDOW: 7, **YARN}, windows=FULL_LAST)


def test_constants_of_yarn_are_those_of_the_file_where_the_family_says_so(read: Read) -> None:
    keys = {**YARN, "rope.scaling.yarn_beta_fast": 64.0, "rope.scaling.yarn_beta_slow": 2.0}
    (spec,) = set(read(keys, yarn=YarnRules(has_betas=True)))
    assert spec.rope.scaling is not None
    expected = Yarn(4.0, 64, beta_fast=64.0, beta_slow=2.0).frequency_factors(RopeSpec(8, 1e7))
    assert spec.rope.scaling.frequency_factors == expected
    with pytest.raises(UnsupportedError, match=r"yarn_beta_fast.*64, supported: 32"):
        read(keys)
    keys["rope.scaling.yarn_beta_slow"] = 64.0
    with pytest.raises(InconsistentError, match=r"yarn_beta_fast.*64, expected more than"):
        read(keys, yarn=YarnRules(has_betas=True))


def test_yarn_that_blends_between_whole_dimensions(read: Read) -> None:
    """The numbers of gpt-oss: blending begins at 8.0928 and ends at 17.398."""
    rope = RopeSpec(64, 150000.0)
    factors = Yarn(32.0, 4096, truncate=False).frequency_factors(rope)
    shares = [(1 - factor) / (1 - 1 / 32) for factor in factors]
    assert shares[8] == 0
    assert shares[9] == pytest.approx((9 - 8.0928) / (17.398 - 8.0928), abs=1e-4)
    assert shares[17] == pytest.approx((17 - 8.0928) / (17.398 - 8.0928), abs=1e-4)
    assert shares[18] == 1
    rounded = Yarn(32.0, 4096).frequency_factors(rope)
    assert (1 - rounded[9]) / (1 - 1 / 32) == pytest.approx((9 - 8) / (18 - 8))
    (spec,) = set(read(YARN, yarn=YarnRules(truncate=False)))
    assert spec.rope.scaling is not None
    own = Yarn(4.0, 64, truncate=False).frequency_factors(RopeSpec(8, 1e7))
    assert spec.rope.scaling.frequency_factors == own


def test_layers_may_have_other_numbers_of_heads(read: Read) -> None:
    specs = read({"attention.head_count": [4, 8, 8, 4], "attention.head_count_kv": [2, 4, 2, 1]})
    assert [(spec.num_heads, spec.num_kv_heads) for spec in specs] == [(4, 2), (8, 4), (8, 2), (4, 1)]
    mixed = MixedAttention((4, 8, 4, 8), (False, True, True, False), window=9, rope_dims=6)
    assert [(spec.num_heads, spec.window, spec.rope.num_dims) for spec in read(mixed.keys)] == [
        (4, None, 8),
        (8, 9, 6),
        (4, 9, 6),
        (8, None, 8),
    ]


def test_a_window_of_the_user_only_narrows_those_of_layers(tmp_path: Path) -> None:
    mixed = MixedAttention((4,) * 4, (False, True, True, False), window=9, rope_dims=8)
    model = make_model("qwen3moe", dims=SMALL, quant="F32", tokenizer=False, mixed=mixed)
    with GGUFFile.open(write_model(tmp_path / "tiny.gguf", model)[0]) as file:
        spec = read_spec(file.metadata, file.tensors)
    for window, expected in ((5, [5] * 4), (9, [9] * 4), (64, [64, 9, 9, 64]), (None, [None, 9, 9, None])):
        assert windows(spec.with_window(window).attentions) == expected


@pytest.mark.parametrize(
    ("changes", "kind", "message"),
    [
        ({WINDOW: 7}, UnsupportedError, "sliding_window at byte .*: 7, supported: all positions, or windows"),
        ({WINDOW: 7, PATTERN: [True] * 3}, InconsistentError, "pattern.*3 values for 4 layers"),
        ({WINDOW: 7, PATTERN: [0, 2, 0, 0]}, LimitError, "pattern.*2, expected 0 to 1"),
        ({WINDOW: 7, PATTERN: 0}, InconsistentError, "pattern.*0, expected 1 to"),
        ({WINDOW: 7, PATTERN: 2, "rope.dimension_count_swa": 3}, InconsistentError, "swa.*even number"),
        ({WINDOW: 7, PATTERN: 2, "rope.dimension_count_swa": 10}, LimitError, "swa.*10, expected 2 to 8"),
        ({WINDOW: 7, PATTERN: 2, "rope.freq_base_swa": 0.5}, InconsistentError, "swa.*0.5, expected 1.0 to"),
        ({"attention.head_count": [4, 4, 4]}, InconsistentError, "head_count.*3 values for 4 layers"),
        ({"attention.head_count": [4, 4, 3, 4]}, InconsistentError, "head_count_kv.*2 for 3 heads"),
        ({"attention.head_count_kv": [2, 2, 8, 2]}, LimitError, "head_count_kv.*8, expected 0 to 4"),
        ({"attention.head_count": 0}, InconsistentError, "head_count.*0, expected 1 to"),
    ],
)
def test_keys_that_are_refused(read: Read, changes: dict[str, Any], kind: type, message: str) -> None:
    with pytest.raises(kind, match=message):
        read(changes)
