"""RoutingTrace: what is written is read, and no other file is taken for a trace of this model."""

import hashlib
import os
import re
import tracemalloc
import zlib
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from struct import pack_into

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from coldstream.errors import (
    MAX_MESSAGE_CHARS,
    InconsistentError,
    LimitError,
    ModelFormatError,
    ModelNotFoundError,
    StorageError,
    TruncatedError,
    UnsupportedError,
)
from coldstream.placement import routing_trace
from coldstream.placement.routing_trace import RoutedModel, RoutingTrace

MODEL = RoutedModel("ac98d166eabcd4c77c6349aa95570033", num_layers=3, num_experts=40, num_experts_per_tok=4)
STEPS_AT, LAYERS_AT = 32, 40  # bytes of the header


def random_trace(model: RoutedModel, num_steps: int, seed: int = 0) -> RoutingTrace:
    rng = np.random.default_rng(seed)
    draws = rng.random((num_steps, model.num_layers, model.num_experts))
    return RoutingTrace(model, draws.argsort(axis=2)[:, :, : model.num_experts_per_tok].astype(np.uint16))


def resealed(content: bytes) -> bytes:
    """The bytes with length and hash made right, as a hostile writer would."""
    changed = bytearray(content)
    pack_into("<Q", changed, 8, len(changed))
    return bytes(changed[:-16]) + hashlib.blake2b(changed[:-16], digest_size=16).digest()


def with_field(content: bytes, offset: int, layout: str, value: int) -> bytes:
    changed = bytearray(content)
    pack_into(layout, changed, offset, value)
    return resealed(bytes(changed))


def with_ids(content: bytes, ids: bytes) -> bytes:
    return resealed(content[:52] + zlib.compress(ids) + bytes(16))


@pytest.fixture
def path(tmp_path: Path) -> Path:
    random_trace(MODEL, 50).save(tmp_path / "good.routing")
    return tmp_path / "good.routing"


@given(
    num_layers=st.integers(1, 5),
    num_experts=st.sampled_from((1, 2, 4, 255, 256, 257, 1000)),
    num_experts_per_tok=st.integers(1, 8),
    num_steps=st.integers(1, 20),
    fingerprint=st.binary(min_size=16, max_size=16),
)
def test_what_is_saved_is_loaded(
    tmp_path: Path,
    num_layers: int,
    num_experts: int,
    num_experts_per_tok: int,
    num_steps: int,
    fingerprint: bytes,
) -> None:
    model = RoutedModel(fingerprint.hex(), num_layers, num_experts, min(num_experts_per_tok, num_experts))
    trace = random_trace(model, num_steps)
    trace.save(tmp_path / "trace")
    loaded = RoutingTrace.load(tmp_path / "trace", model)
    assert np.array_equal(loaded.topk_ids, trace.topk_ids)
    assert loaded.topk_ids.dtype == np.uint16
    assert loaded.counts().sum() == trace.topk_ids.size


def test_counts_are_by_layer_and_expert() -> None:
    trace = random_trace(MODEL, 30)
    counts = trace.counts()
    assert counts.shape == (3, 40)
    for layer in range(3):
        for expert in range(40):
            assert counts[layer, expert] == (trace.topk_ids[:, layer] == expert).sum()


@given(data=st.data())
def test_a_damaged_file_is_refused(path: Path, tmp_path: Path, data: st.DataObject) -> None:
    content = bytearray(path.read_bytes())
    match data.draw(st.sampled_from(("flip", "cut", "append", "insert"))):
        case "flip":
            content[data.draw(st.integers(0, len(content) - 1))] ^= data.draw(st.integers(1, 255))
        case "cut":
            del content[data.draw(st.integers(0, len(content) - 1)) :]
        case "append":
            content += data.draw(st.binary(min_size=1, max_size=40))
        case "insert":
            at = data.draw(st.integers(0, len(content)))
            content[at:at] = data.draw(st.binary(min_size=1, max_size=8))
    (tmp_path / "changed.routing").write_bytes(content)
    with pytest.raises(ModelFormatError) as caught:
        RoutingTrace.load(tmp_path / "changed.routing", MODEL)
    assert "changed.routing" in str(caught.value)
    assert "coldstream profile" in str(caught.value)
    assert len(str(caught.value)) <= MAX_MESSAGE_CHARS


@given(data=st.data())
def test_a_hostile_file_with_a_right_hash_is_refused_or_sound(
    path: Path, tmp_path: Path, data: st.DataObject
) -> None:
    content = bytearray(path.read_bytes())
    for _ in range(data.draw(st.integers(1, 3))):
        content[data.draw(st.integers(0, len(content) - 17))] = data.draw(st.integers(0, 255))
    (tmp_path / "hostile").write_bytes(resealed(bytes(content)))
    try:
        trace = RoutingTrace.load(tmp_path / "hostile", MODEL)
    except ModelFormatError:
        return
    assert trace.topk_ids.max() < MODEL.num_experts


@pytest.mark.parametrize(
    "foreign",
    [
        replace(MODEL, fingerprint="00" * 16),
        replace(MODEL, num_layers=4),
        replace(MODEL, num_experts=41),
        replace(MODEL, num_experts_per_tok=2),
    ],
    ids=lambda model: str(model),
)
def test_the_trace_of_another_model_is_refused(path: Path, foreign: RoutedModel) -> None:
    with pytest.raises(InconsistentError, match=r"good\.routing: (fingerprint|shape) at byte \d+"):
        RoutingTrace.load(path, foreign)


@pytest.mark.parametrize("num_steps", [0, 51, 2**31, 2**62, 2**64 - 1])
def test_a_number_of_steps_that_the_file_does_not_hold_allocates_nothing(path: Path, num_steps: int) -> None:
    path.write_bytes(with_field(path.read_bytes(), STEPS_AT, "<Q", num_steps))
    tracemalloc.start()
    try:
        with pytest.raises((InconsistentError, LimitError), match=r"good\.routing"):
            RoutingTrace.load(path, MODEL)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


def test_ids_that_no_router_gives_are_refused(path: Path) -> None:
    content = path.read_bytes()
    ids = random_trace(MODEL, 50).topk_ids.astype(np.uint8)
    too_large, twice = ids.copy(), ids.copy()
    too_large[7, 1, 2] = 40
    twice[7, 1, 2] = twice[7, 1, 3]
    for bad, message in ((too_large, "expert 40 of 40"), (twice, "chosen twice")):
        path.write_bytes(with_ids(content, bad.tobytes()))
        with pytest.raises(InconsistentError, match=message):
            RoutingTrace.load(path, MODEL)
    path.write_bytes(with_ids(content, ids.tobytes()))
    assert np.array_equal(RoutingTrace.load(path, MODEL).topk_ids, ids)
    with pytest.raises(ValueError, match="expert 40 of 40"):
        RoutingTrace(MODEL, too_large.astype(np.uint16))


def test_more_ids_than_declared_are_not_unpacked(path: Path) -> None:
    path.write_bytes(with_ids(path.read_bytes(), bytes(1 << 24)))
    with pytest.raises(InconsistentError, match="not 600 bytes unpacked"):
        RoutingTrace.load(path, MODEL)


@pytest.mark.parametrize(
    ("content", "error", "message"),
    [
        (b"", TruncatedError, "0 bytes"),
        (b"CSROU", TruncatedError, "5 bytes"),
        (b"CSROUTE1" + bytes(20), TruncatedError, "28 bytes"),
        (b"CSROUTE2" + bytes(90), UnsupportedError, "a version that this program does not know"),
        (b"GGUF" + bytes(90), UnsupportedError, "not a routing trace"),
    ],
)
def test_what_is_no_trace_says_so(
    tmp_path: Path, content: bytes, error: type[ModelFormatError], message: str
) -> None:
    (tmp_path / "x").write_bytes(content)
    with pytest.raises(error, match=message):
        RoutingTrace.load(tmp_path / "x", MODEL)


def test_a_file_beyond_the_limit_is_not_read(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(routing_trace, "_MAX_FILE_BYTES", 100)
    with pytest.raises(LimitError, match="at most 100"):
        RoutingTrace.load(path, MODEL)


@pytest.mark.parametrize("device", ["/dev/zero", "/proc", "fifo"])
def test_only_regular_files_are_read(tmp_path: Path, device: str) -> None:
    os.mkfifo(tmp_path / "fifo")
    with pytest.raises(UnsupportedError, match="not a regular file"):
        RoutingTrace.load(tmp_path / device, MODEL)


@pytest.mark.parametrize("name", ["absent", "absent/x", "a\0b"])
def test_no_such_file(tmp_path: Path, name: str) -> None:
    with pytest.raises(ModelNotFoundError, match=re.escape("Give the path of a routing trace")):
        RoutingTrace.load(tmp_path / name, MODEL)


def test_a_failed_save_leaves_what_was_there(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = path.read_bytes()

    def refuse(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("coldstream.files.os.replace", refuse)
    with pytest.raises(StorageError, match="No space left"):
        random_trace(MODEL, 60).save(path)
    assert path.read_bytes() == before
    assert [entry.name for entry in path.parent.iterdir()] == [path.name]


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), KeyboardInterrupt()])
def test_a_save_that_fails_or_is_interrupted_leaves_nothing_else(
    path: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    def fail(*_: object) -> None:
        raise error

    before = path.read_bytes()
    monkeypatch.setattr("coldstream.files.os.replace", fail)
    with pytest.raises((StorageError, KeyboardInterrupt)):
        random_trace(MODEL, 60).save(path)
    assert path.read_bytes() == before
    assert [entry.name for entry in path.parent.iterdir()] == [path.name]


@pytest.mark.parametrize(
    "change",
    [
        lambda ids: zlib.compress(ids[:-1]),
        lambda ids: zlib.compress(ids + b"\0"),
        lambda ids: zlib.compress(ids + bytes(1 << 24)),
        lambda ids: zlib.compress(ids)[:-1],  # all ids, and not the stream's own checksum
        lambda ids: zlib.compress(ids) + b"\0",
    ],
    ids=["one less", "one more", "many more", "no end", "a rest"],
)
def test_ids_that_are_not_all_there_is_are_refused(path: Path, change: Callable[[bytes], bytes]) -> None:
    content = path.read_bytes()
    ids = zlib.decompress(content[52:-16])
    path.write_bytes(resealed(content[:52] + change(ids) + bytes(16)))
    tracemalloc.start()
    try:
        with pytest.raises(InconsistentError, match=f"not {len(ids)} bytes unpacked"):
            RoutingTrace.load(path, MODEL)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("num_experts", [256, 257])
@pytest.mark.parametrize("num_steps", [0, 1, 10, 11, 12, 2**63])
def test_a_number_of_steps_is_refused_from_the_first_that_cannot_be(
    monkeypatch: pytest.MonkeyPatch, num_experts: int, num_steps: int
) -> None:
    """There are between 1 and so many ids, and zlib packs at most so many bytes into one."""
    model = replace(MODEL, num_experts=num_experts)
    num_bytes = num_steps * 12 * (1 if num_experts == 256 else 2)
    monkeypatch.setattr(routing_trace, "MAX_IDS", 11 * 12)
    monkeypatch.setattr(routing_trace, "_MAX_RATIO", 12)
    payload_bytes = num_bytes // 12
    check = partial(routing_trace._check_size, Path("x"), num_steps, model=model)
    if 1 <= num_steps <= 11:
        check(payload_bytes)
        with pytest.raises(
            InconsistentError, match=f"{num_steps} steps cannot lie in {payload_bytes - 1} bytes"
        ):
            check(payload_bytes - 1)
    else:
        with pytest.raises(LimitError, match="a trace has 1 to 132 ids"):
            check(payload_bytes)
