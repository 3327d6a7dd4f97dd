"""Random rows: their values have the spread that was asked for, in every type, and models of them compute."""

from pathlib import Path

import numpy as np
import pytest
import torch

from bench.random_blocks import SCALES, random_blocks
from bench.random_model import RandomModelWriter, quant_type
from bench.runners import open_cpu_runner
from coldstream.gguf.quant_types import QuantType
from coldstream.gguf.reader import GGUFFile
from coldstream.kernels.dequantize.reference import UNPACKERS, dequantize
from coldstream.kernels.quant_tensor import QuantTensor
from small_shape import SMALL

QUANTISED = sorted(UNPACKERS)
ROWS, COLS = 64, 512


def values(quant_type: QuantType, deviation: float | None) -> np.ndarray:
    blocks = random_blocks(np.random.default_rng(3), quant_type, ROWS, COLS, deviation)
    assert blocks.shape == (ROWS, quant_type.row_bytes(COLS))
    return dequantize(QuantTensor(torch.from_numpy(blocks), quant_type, (ROWS, COLS))).numpy()


@pytest.mark.parametrize("quant_type", QUANTISED, ids=lambda quant_type: quant_type.name)
@pytest.mark.parametrize("deviation", [None, 0.013, 1.7])
def test_values_have_the_deviation_and_no_mean(quant_type: QuantType, deviation: float | None) -> None:
    found = values(quant_type, deviation)
    wanted = COLS**-0.5 if deviation is None else deviation
    # Files of Q4_K and Q5_K that are in use are 1.6 times wider, and keep their bytes.
    factor = 1.6 if quant_type in (QuantType.Q4_K, QuantType.Q5_K) else 1.0
    assert found.std() == pytest.approx(factor * wanted, rel=0.06)
    assert abs(found.mean()) < 0.12 * found.std()


def test_types_without_a_rule_are_refused_by_name() -> None:
    with pytest.raises(ValueError, match="no random blocks for F16"):
        random_blocks(np.random.default_rng(0), QuantType.F16, 1, 32)


def test_codes_of_q2_0_have_no_mean_and_use_all_four() -> None:
    fields = np.random.default_rng(0)
    two_bits = type(
        "TwoBits", (), {"name": "Q2_0", "block_bytes": 18, "row_bytes": lambda cols: cols // 64 * 18}
    )
    blocks = random_blocks(fields, two_bits, 256, 256, 2.0)
    codes = (blocks[:, :72].reshape(-1, 18)[:, 2:, None] >> np.array([0, 2, 4, 6])) & 3
    assert set(codes.ravel()) == {0, 1, 2, 3}
    numbers = 2.0 * (codes.astype(float) - 1)
    assert abs(numbers.mean()) < 0.05
    assert numbers.std() == pytest.approx(2.0, rel=0.05)
    scales = blocks[:, :2].copy().view(np.float16)
    assert (scales == 2.0).all()
    assert "Q2_0" in SCALES


@pytest.mark.sharded(9)
@pytest.mark.parametrize("kind", ["experts", "weights"])
@pytest.mark.parametrize("quant_type", QUANTISED, ids=lambda quant_type: quant_type.name)
def test_a_model_of_any_type_computes(quant_type: QuantType, kind: str, tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    types = {"experts": quant_type} | ({"weights": quant_type} if kind == "weights" else {})
    RandomModelWriter(path, SMALL, seed=1, **types).write()
    with GGUFFile.open(path) as file:
        found = {name: tensor.quant_type for name, tensor in file.tensors.items() if len(tensor.shape) > 1}
    experts = {kind for name, kind in found.items() if "_exps." in name}
    others = {kind for name, kind in found.items() if "_exps." not in name} - {QuantType.F32}
    assert experts == {quant_type}
    assert others == ({quant_type} if kind == "weights" else {QuantType.Q4_K, QuantType.Q6_K})
    runner = open_cpu_runner(path, threads=2, context_length=64)
    try:
        logits = runner.extend(runner.new_sequence(), (1, 2, 3))
    finally:
        runner.close()
    assert np.isfinite(logits).all()
    assert 0.01 < logits.std() < 100


def test_names_of_types() -> None:
    assert quant_type("IQ3_S") is QuantType.IQ3_S
    with pytest.raises(Exception, match="no weight type 'IQ3': there are F32"):
        quant_type("IQ3")
