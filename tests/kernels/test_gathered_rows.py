"""`load_rows` of every implementation: the rows of a matrix that are named, whatever their type."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from builders import make_model, write_model
from coldstream.errors import ModelChangedError
from coldstream.gguf.reader import GGUFFile
from coldstream.kernels.cpu_ops import CpuOps, UnreadCpuOps
from coldstream.kernels.cuda.loader import CudaLoader
from coldstream.kernels.cuda.memory import MemoryPlan
from coldstream.kernels.dequantize.reference import dequantize
from coldstream.kernels.gathered_rows import read_rows
from coldstream.kernels.reference_ops import ReferenceOps
from host_device import HostMemory
from host_driver import HostDriver

NAME = "blk.0.attn_qkv.weight"  # [512, 256]
ROW_IDS = (7, 6, 511, 0, 7)


@pytest.fixture(params=["F32", "BF16", "Q8_0", "Q4_K", "IQ4_XS"])
def path(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    model = make_model(quant=request.param, tokenizer=False)
    return write_model(tmp_path / "tiny.gguf", model)[0]


def expected_rows(file: GGUFFile) -> np.ndarray:
    return ReferenceOps().read_values(file, file.tensors[NAME])[list(ROW_IDS)]


@pytest.mark.sharded
def test_reference(path: Path) -> None:
    with GGUFFile.open(path) as file:
        expected = expected_rows(file)
        weight = ReferenceOps().load_rows(file, file.tensors[NAME], ROW_IDS)
        exact = ReferenceOps(exact=True).load_rows(file, file.tensors[NAME], ROW_IDS)
    np.testing.assert_array_equal(weight, expected)
    np.testing.assert_array_equal(dequantize(exact), expected)


@pytest.mark.sharded
def test_cpu(path: Path) -> None:
    """A product with the gathered rows is the product with all rows, gathered."""
    x = np.random.default_rng(0).normal(size=(3, 256)).astype(np.float32)
    ops = CpuOps(2)
    with GGUFFile.open(path) as file:
        info = file.tensors[NAME]
        gathered, whole = ops.linear(x, (ops.load_rows(file, info, ROW_IDS), ops.load_weight(file, info)))
    np.testing.assert_array_equal(gathered, whole[:, list(ROW_IDS)])


@pytest.mark.sharded
def test_gpu_loader(path: Path) -> None:
    with GGUFFile.open(path) as file, HostDriver().installed():
        weight = CudaLoader(HostMemory()).load_rows(file, file.tensors[NAME], ROW_IDS)
        expected = expected_rows(file)
    assert weight.shape == (5, 256)
    blocks = torch.from_numpy(weight.blocks.numpy())
    np.testing.assert_array_equal(dequantize(replace(weight, blocks=blocks)), expected)


@pytest.mark.sharded
def test_a_plan_counts_the_bytes_and_reads_nothing(path: Path) -> None:
    with GGUFFile.open(path) as file:
        info = file.tensors[NAME]
    loader = CudaLoader(plan := MemoryPlan())
    weight = loader.load_rows(file, info, ROW_IDS)  # of a file that is closed
    assert weight.shape == (5, 256)
    assert plan.persistent_bytes >= 5 * info.quant_type.row_bytes(256)


@pytest.mark.sharded
def test_ops_that_read_nothing_have_as_many_rows(path: Path) -> None:
    with GGUFFile.open(path) as file:
        assert UnreadCpuOps(1).load_rows(file, file.tensors[NAME], ROW_IDS).num_rows == 5


@pytest.mark.sharded
def test_rows_that_are_not_there(path: Path) -> None:
    with GGUFFile.open(path) as file:
        info = file.tensors[NAME]
        with pytest.raises(IndexError):
            read_rows(file, info, (0, 512))
        path.write_bytes(path.read_bytes()[: info.offset + 100])
        with pytest.raises(ModelChangedError, match=r"blk\.0\.attn_qkv\.weight"):
            read_rows(file, info, ROW_IDS)
