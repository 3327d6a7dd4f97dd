"""Products of tensor cores on the host are those of a GPU."""

import pytest
import torch

from coldstream.kernels.cuda.program import CudaProgram
from host_device import HOST

PROGRAM = CudaProgram(HOST / "products.cu", ("multiply<true>", "multiply<false>"))


def check(device: str) -> None:
    generator = torch.Generator().manual_seed(3)
    for signed in (True, False):
        for _ in range(20):
            a = torch.randint(-128, 128, (16, 32), generator=generator, dtype=torch.int8)
            b = torch.randint(-128, 128, (8, 32), generator=generator, dtype=torch.int8)
            sums = torch.randint(-(2**31), 2**31, (16, 8), generator=generator)
            factors = b.long() if signed else b.view(torch.uint8).long()
            expected = sums + a.long() @ factors.T
            d = sums.to(torch.int32).to(device)
            kernel = PROGRAM.kernel(f"multiply<{str(signed).lower()}>")
            kernel.launch((1, 1, 1), 32, (a.to(device), b.to(device), d), shared_bytes=768)
            assert torch.equal(d.cpu(), expected.to(torch.int32))


@pytest.mark.usefixtures("host")
def test_a_warp_multiplies_bytes() -> None:
    check("cpu")


@pytest.mark.gpu
def test_a_warp_of_a_gpu_multiplies_the_same() -> None:
    check("cuda")
