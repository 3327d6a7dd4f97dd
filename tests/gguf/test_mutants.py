"""Damaged models by the thousand: each opens as a consistent model or is refused by a typed error.

A mutant is a valid file with some of its header changed: bits, whole fields (every length, count, dimension,
type and offset is a target), pieces moved, and the length of the file. Weights are left out, since nothing
here reads them: the file has its full length with a hole instead. A failure names the seed and the number of
the mutant, which make the same one again.
"""

import random
import resource
from collections import Counter
from dataclasses import dataclass, replace
from itertools import cycle
from pathlib import Path
from typing import Any

import pytest

from builders import SMALL, TinyModel, make_model, write_model
from coldstream.errors import MAX_MESSAGE_CHARS, ModelFormatError
from coldstream.gguf import GGUFFile, QuantType
from coldstream.models import read_spec

pytestmark = pytest.mark.usefixtures("no_descriptor_leaks")

MUTANTS_PER_SEED = 2500
WIDE = replace(SMALL, hidden=256, ffn=256, expert_ffn=256, shared_ffn=256, head_dim=64, state=64)
SEEDS: dict[str, dict[str, Any]] = {
    "dense": {"arch": "qwen35", "quant": "F32"},
    "dense, all types": {"arch": "qwen35", "quant": "Q8_0", "dims": WIDE},
    "MoE": {"quant": "Q8_0"},
    "MoE, all types": {"quant": "Q4_K", "dims": replace(WIDE, layers=2, interval=2), "nextn": True},
    "MoE, fused, MTP": {"quant": "Q4_0", "nextn": True, "fused_experts": True, "fused_attention": True},
    "split": {"quant": "BF16"},
    "split, tied": {"arch": "qwen35", "quant": "Q5_1", "tied": True},
    "tokenizer": {
        "arch": "qwen35",
        "dims": replace(SMALL, vocab=290, layers=1, interval=1),
        "tokenizer": True,
    },
}
SCALAR_SIZES = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}
STRING, ARRAY = 8, 9
REFUSALS = [kind.__name__ for kind in ModelFormatError.__subclasses__()]


@dataclass(frozen=True)
class Field:
    offset: int
    width: int

    @property
    def span(self) -> slice:
        return slice(self.offset, self.offset + self.width)


@dataclass(frozen=True)
class Seed:
    """A valid file: its header, where the fields are in it, and the length of the whole."""

    path: Path
    header: bytes
    fields: list[Field]
    size: int


def make_seed_model(name: str) -> TinyModel:
    options: dict[str, Any] = {"dims": SMALL, "tokenizer": False} | SEEDS[name]
    model = make_model(**options)
    if "all types" in name:
        matrices = [tensor for tensor, type_name in model.types.items() if type_name != "F32"]
        assert len(matrices) >= len(QuantType)
        model.types |= {tensor: kind.name for tensor, kind in zip(matrices, cycle(QuantType), strict=False)}
    return model


def find_fields(data: bytes) -> tuple[list[Field], int]:
    """Every length, count, type, number, dimension and offset in the header of a valid file, and where it
    ends.
    """
    fields: list[Field] = []
    position = 4

    def read(width: int) -> int:
        nonlocal position
        fields.append(Field(position, width))
        position += width
        return int.from_bytes(data[position - width : position], "little")

    def skip_string() -> None:
        nonlocal position
        length = read(8)
        position += length

    read(4)
    num_tensors, num_pairs = read(8), read(8)
    for _ in range(num_pairs):
        skip_string()
        kind, count = read(4), 1
        if kind == ARRAY:
            kind, count = read(4), read(8)
        for _ in range(count):
            if kind == STRING:
                skip_string()
            else:
                read(SCALAR_SIZES[kind])
    for _ in range(num_tensors):
        skip_string()
        for width in (8,) * read(4) + (4, 8):
            read(width)
    return fields, position


def load_seed(path: Path) -> Seed:
    content = path.read_bytes()
    fields, end = find_fields(content)
    return Seed(path, content[:end], fields, len(content))


def change(seed: Seed, rng: random.Random) -> tuple[bytes, int]:
    """The header and the file length of a mutant."""
    header, size = bytearray(seed.header), seed.size
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        kind = rng.choice(("bits", "bits", "field", "field", "field", "field", "copy", "move", "length"))
        if kind == "bits":
            for _ in range(rng.choice((1, 1, 2, 8))):
                header[rng.randrange(len(header))] ^= 1 << rng.randrange(8)
        elif kind == "field":
            field = rng.choice(seed.fields)
            value = interesting_number(rng, seed, header, field) % (1 << 8 * field.width)
            header[field.span] = value.to_bytes(field.width, "little")
        elif kind == "copy":  # of a string, mostly, over another: both keep their form
            source, target = (record_span(header, rng.choice(seed.fields)) for _ in range(2))
            header[target] = header[source]
        elif kind == "move":
            start, target_start = rng.randrange(len(header)), rng.randrange(len(header))
            piece = header[start : start + rng.randrange(1, 200)]
            header[target_start : target_start + rng.choice((0, len(piece)))] = piece
        else:
            shorter, just_too_short = rng.randrange(seed.size), len(header) + rng.randrange(200)
            size = rng.choice((shorter, just_too_short, size - 1, size + 1, 1 << 40))
    return bytes(header), size


def record_span(header: bytearray, field: Field) -> slice:
    """The field, and the string behind it if it is the length of one."""
    length = int.from_bytes(header[field.span], "little") if field.width == 8 else 0
    return slice(field.offset, field.span.stop + (length if length < 100 else 0))


def interesting_number(rng: random.Random, seed: Seed, header: bytearray, field: Field) -> int:
    old = int.from_bytes(header[field.span], "little")
    power = 1 << rng.randrange(8 * field.width)
    near = rng.choice((old + 1, old - 1, 2 * old, old // 2, old + 32, -old))
    copied = int.from_bytes(header[rng.choice(seed.fields).span], "little")
    rest = seed.size - field.offset
    return rng.choice((0, 1, power, power - 1, -power, near, copied, rest, rng.getrandbits(64)))


def outcome(path: Path) -> str:
    """Opens a mutant as a model. What it accepts must be usable: every tensor lies in the file."""
    try:
        with GGUFFile.open(path) as file:
            read_spec(file.metadata, file.tensors)
            for info in file.tensors.values():
                assert info.offset + info.num_bytes <= file.shard_bytes[info.shard]
            smallest = min(file.tensors.values(), key=lambda info: info.num_bytes)
            assert len(file.read(smallest)) == smallest.num_bytes
    except ModelFormatError as error:
        message, kind = str(error), type(error).__name__
        assert len(message) <= MAX_MESSAGE_CHARS
        assert message.isprintable()
        return kind
    return "opened"


@pytest.mark.parametrize("name", SEEDS)
def test_gg17_mutants(name: str, tmp_path: Path, part_of_examples: slice) -> None:
    paths = write_model(tmp_path / "seed.gguf", make_seed_model(name), 3 if "split" in name else 1)
    assert outcome(paths[0]) == "opened"
    seeds = [load_seed(path) for path in paths]
    peak_before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss

    outcomes: Counter[str] = Counter()
    for number in range(MUTANTS_PER_SEED)[part_of_examples]:
        rng = random.Random(f"{name} {number}")
        seed = rng.choice(seeds)
        write_hollow(seed.path, *change(seed, rng))
        try:
            outcomes[outcome(rng.choice(paths))] += 1
        except Exception as error:
            raise AssertionError(f"mutant {number} of seed {name!r}") from error
        write_hollow(seed.path, seed.header, seed.size)

    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - peak_before < 256 << 10  # KiB
    # The mutants reach every check: some stay valid, and every kind of refusal occurs; only in the seed that
    # is mostly tokens are names that appear twice too rare.
    assert {"opened", *REFUSALS} - {"DuplicateError"} <= outcomes.keys()
    assert "DuplicateError" in outcomes or name == "tokenizer"


def write_hollow(path: Path, header: bytes, size: int) -> None:
    """Replaces a file by a header and a hole, without emptying it first: ext4 would write to disk."""
    with path.open("r+b") as stream:
        stream.write(header)
        stream.truncate()
        stream.truncate(size)
