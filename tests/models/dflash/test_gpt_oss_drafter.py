"""Drafters with biases of attention, as published ones of gpt-oss: each bias counts, and none may be missing.

What they compute is compared with the published implementation in test_dflash.py.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from test_dflash import LOADERS

from coldstream.errors import InconsistentError, UnsupportedError
from coldstream.models.cpu.dflash import weight_bytes
from coldstream.models.dflash.convert import convert
from coldstream.models.dflash.file import DflashFile
from coldstream.models.dflash.spec import tensor_shapes
from dflash_cases import (
    ANCHOR,
    GPT_OSS,
    NUM_ROWS,
    config,
    features,
    random_tensors,
    spec_of,
    write_folder,
    write_gguf_drafter,
)
from dflash_reference import read_tensors

SPEC = spec_of(GPT_OSS)
BIASES = [name for name in tensor_shapes(SPEC) if name.endswith(".bias")]
Load = Callable[[DflashFile], Any]


def hidden(path: Path, load: Load, tensors: dict[str, np.ndarray]) -> np.ndarray:
    """Of a block behind rows of a context, which had keys and values before."""
    with DflashFile.open(write_gguf_drafter(path, SPEC, tensors)) as file:
        sequence = load(file).new_sequence()
    rows = features(SPEC, 12)
    sequence.append(rows[:5])
    sequence.hidden(ANCHOR, NUM_ROWS)
    sequence.append(rows[5:])
    return np.asarray(sequence.hidden(ANCHOR, NUM_ROWS))


@pytest.mark.parametrize("load", LOADERS.values(), ids=LOADERS)
def test_each_bias_of_each_layer_counts(tmp_path: Path, load: Load) -> None:
    tensors = random_tensors(SPEC)
    expected = hidden(tmp_path / "all.gguf", load, tensors)
    assert len(BIASES) == 4 * SPEC.num_layers
    for name in BIASES:
        without = tensors | {name: np.zeros_like(tensors[name])}
        found = hidden(tmp_path / f"{name}.gguf", load, without)
        assert np.abs(found - expected).max() > 0.1, name


def test_no_key_of_a_file_says_that_there_are_biases(tmp_path: Path) -> None:
    tensors = random_tensors(SPEC)
    plain = {name: values for name, values in tensors.items() if name not in BIASES}
    for name, given in (("biased", tensors), ("plain", plain)):
        with DflashFile.open(write_gguf_drafter(tmp_path / f"{name}.gguf", SPEC, given)) as file:
            assert file.spec.has_attention_bias == (name == "biased")
            assert read_tensors(file).keys() == given.keys()
            assert weight_bytes(file) == sum(values.nbytes for values in given.values())


@pytest.mark.parametrize("missing", [[BIASES[0]], [BIASES[-1]], BIASES[1:]], ids=["first", "last", "most"])
def test_a_file_has_all_biases_or_none(tmp_path: Path, missing: list[str]) -> None:
    tensors = {name: values for name, values in random_tensors(SPEC).items() if name not in missing}
    path = write_gguf_drafter(tmp_path / "drafter.gguf", SPEC, tensors)
    with pytest.raises(InconsistentError, match=f"{len(missing)} tensors are missing, {missing[0]} first"):
        DflashFile.open(path)


def test_a_folder_has_the_biases_that_its_configuration_states(tmp_path: Path) -> None:
    tensors = random_tensors(SPEC)
    convert(write_folder(tmp_path / "biased", GPT_OSS, tensors), tmp_path / "drafter.gguf")
    with DflashFile.open(tmp_path / "drafter.gguf") as file:
        assert file.spec.has_attention_bias
        assert file.spec.rope == SPEC.rope  # whose ramp has no whole dimensions
        found = read_tensors(file)
    assert all(np.array_equal(found[name], tensors[name]) for name in tensors)
    unstated = write_folder(tmp_path / "unstated", GPT_OSS | {"attention_bias": False}, tensors)
    with pytest.raises(UnsupportedError, match=r"_proj\.bias belongs to biases, which is not supported"):
        convert(unstated, tmp_path / "unstated.gguf")
    plain = random_tensors(spec_of(config()))
    stated = write_folder(tmp_path / "stated", config(attention_bias=True), plain)
    with pytest.raises(InconsistentError, match="12 tensors are missing"):
        convert(stated, tmp_path / "stated.gguf")
