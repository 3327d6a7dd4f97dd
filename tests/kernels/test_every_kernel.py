"""Every kernel compiles for every supported architecture, and a block of it fits a multiprocessor.

A commit's tests have one batch in 36 of those for the oldest architecture, of which no card is at hand, and
one in 288 for the others, for which other tests compile kernels too.
"""

from collections.abc import Iterator

import pytest

from bench.kernels.architectures import batches, compiled, problems
from bench.kernels.every_kernel import DEVICES, ListedKernel, every_kernel
from bench.kernels.machine_code import registers, static_shared_bytes
from coldstream.kernels.cuda.compiler import KERNELS
from coldstream.kernels.cuda.driver import MIN_CAPABILITY
from coldstream.kernels.cuda.features import architecture_of, features_for

OLDEST = architecture_of(MIN_CAPABILITY)


def cases(*archs: str) -> Iterator[object]:
    """An architecture and some kernels of one source."""
    for arch in archs:
        for number, those in enumerate(batches(every_kernel(arch))):
            yield pytest.param(arch, those, id=f"{arch}-{those[0].source.stem}-{number}")


def check(arch: str, those: tuple[ListedKernel, ...]) -> None:
    for kernel, code in compiled(those, arch):
        assert code.cubin.startswith(b"\x7fELF")
        assert problems(kernel, code, DEVICES[arch]) == []


@pytest.mark.sharded(36)
@pytest.mark.parametrize(("arch", "those"), cases(OLDEST))
def test_every_kernel_runs_on_the_oldest_architecture(arch: str, those: tuple[ListedKernel, ...]) -> None:
    check(arch, those)


@pytest.mark.sharded(288)
@pytest.mark.parametrize(("arch", "those"), cases(*(arch for arch in DEVICES if arch != OLDEST)))
def test_every_kernel_runs_on_the_others(arch: str, those: tuple[ListedKernel, ...]) -> None:
    check(arch, those)


def test_all_sources_are_listed() -> None:
    listed = {kernel.source for kernel in every_kernel("sm_90a")}
    assert listed == set(KERNELS.rglob("*.cu"))


def test_a_block_that_does_not_fit_is_a_problem() -> None:
    """A kernel with shared memory of its own, of 1,024 threads."""
    device, kernels = DEVICES["sm_75"], every_kernel("sm_75")
    (group,) = (each for each in kernels if each.instance == "group_pairs")
    ((_, code),) = compiled((group,), "sm_75")
    own = static_shared_bytes(code)
    assert own > 0
    assert 0 < registers(code) <= 64
    for room, is_wrong in ((device.shared_per_block - own, False), (device.shared_per_block - own + 1, True)):
        kernel = ListedKernel(group.source, group.instance, dynamic_bytes=room)
        assert bool(problems(kernel, code, device)) == is_wrong


@pytest.mark.sharded(6)
@pytest.mark.parametrize("arch", DEVICES)
def test_shared_memory_of_a_kernel_is_what_it_declares(arch: str) -> None:
    """Without what the system takes, which some architectures' machine code counts."""
    (group,) = (each for each in every_kernel(arch) if each.instance == "group_pairs")
    ((_, code),) = compiled((group,), arch)
    assert static_shared_bytes(code) == 2 * 32 * 4


def test_what_architectures_offer() -> None:
    features = {arch: features_for(arch) for arch in DEVICES}
    assert [arch for arch, each in features.items() if not each.has_wide_products] == ["sm_75"]
    assert [arch for arch, each in features.items() if each.has_warpgroups] == ["sm_90a"]
    assert [arch for arch, each in features.items() if each.has_clusters] == ["sm_90a", "sm_120"]
    with pytest.raises(ValueError, match="gfx90a is no architecture"):
        features_for("gfx90a")
