"""Norms of what a part of a block gives, before it is added: the definition, and its bits on each device."""

from dataclasses import replace

import pytest
import torch
from cpu_cases import all_runtimes
from cuda_row_cases import CUDA, GuardedActivations, random, spiky
from guarded import Guarded
from same_bits import assert_same_bits

from all_pairs import all_pairs
from coldstream.kernels.cpu_ops import CpuOps
from coldstream.kernels.experts.mailbox import Mailbox
from coldstream.kernels.ops import Array, ExpertOutputs, PostNorms, Routing, RowsElsewhere
from coldstream.kernels.reference_ops import ReferenceOps
from coldstream.kernels.rms_norm.cuda import add_post_norm_cuda
from coldstream.kernels.rms_norm.reference import rms_norm, rms_norm_exact

EPS, SCALE = 1e-6, torch.tensor([0.3])
VECTORS = ("weight", "routed", "shared", "scale")
KINDS = ("plain", "experts", "parallel")
CPU = torch.device("cpu")
SHAPES = {"rows": [1, 3], "size": [1, 7, 24, 100, 256, 704], "ranks": [1, 8, 10], "kind": list(KINDS)}


def moved(values: Array, device: torch.device) -> Array:
    return None if values is None else values.to(device)


def case(
    rows: int, size: int, ranks: int, kind: str
) -> tuple[torch.Tensor, torch.Tensor | ExpertOutputs, PostNorms, torch.Tensor]:
    """x, an update, its norms, and the weights of the norm behind it."""
    x, weight = spiky(1, rows, size), random(2, size)
    post = PostNorms(1 + random(3, size, scale=0.2), scale=SCALE)
    if kind == "plain":
        return x, spiky(4, rows, size), replace(post, scale=None), weight
    ids = torch.zeros(rows, ranks, dtype=torch.int32)  # whose outputs these are doesn't matter to their sum
    routing = Routing(ids, random(5, rows, ranks).softmax(-1), None)
    update = ExpertOutputs(spiky(6, rows, ranks, size), None, routing)
    if kind == "parallel":
        update = replace(update, shared=spiky(7, rows, size))
        post = replace(post, routed=random(8, size), shared=random(9, size))
    return x, update, post, weight


def test_the_definition() -> None:
    x, update, post, weight = case(3, 64, 4, "parallel")
    assert isinstance(update, ExpertOutputs)
    routed = (update.routed * update.routing.weights.unsqueeze(-1)).sum(1)
    both = rms_norm(update.shared, post.shared, EPS) + rms_norm(routed, post.routed, EPS)
    expected = (x + rms_norm(both, post.weight, EPS)) * SCALE
    total, normed = ReferenceOps().add_post_norm(x, update, post, weight, EPS)
    torch.testing.assert_close(total, expected)
    torch.testing.assert_close(normed, rms_norm(expected, weight, EPS))


@all_pairs(**SHAPES)
def test_on_a_cpu(rows: int, size: int, ranks: int, kind: str) -> None:
    x, update, post, weight = case(rows, size, ranks, kind)
    expected = ReferenceOps(exact=True).add_post_norm(x, update, post, weight, EPS)
    for runtime in all_runtimes():
        ops = CpuOps(runtime.threads, runtime.tier)
        found = ops.add_post_norm(x.numpy(), on_host(update), post_on_host(post), weight.numpy(), EPS)
        for values, those in zip(found, expected, strict=True):
            assert_same_bits(torch.from_numpy(values), those)


def on_host(update: torch.Tensor | ExpertOutputs) -> Array:
    if not isinstance(update, ExpertOutputs):
        return update.numpy()
    routing = update.routing
    shared = None if update.shared is None else update.shared.numpy()
    return replace(
        update,
        routed=update.routed.numpy(),
        shared=shared,
        routing=Routing(routing.ids.numpy(), routing.weights.numpy(), None),
    )


def post_on_host(post: PostNorms) -> PostNorms:
    vectors = {name: getattr(post, name) for name in VECTORS}
    return replace(
        post, **{name: None if values is None else values.numpy() for name, values in vectors.items()}
    )


def check(
    rows: int, size: int, ranks: int, kind: str, device: torch.device, *, elsewhere: bool = False
) -> None:
    x, update, post, weight = case(rows, size, ranks, kind)
    expected, normed = ReferenceOps(exact=True).add_post_norm(x, update, post, weight, EPS)
    if isinstance(update, ExpertOutputs):
        routing = Routing(update.routing.ids.to(device), update.routing.weights.to(device), None)
        there = ExpertOutputs(update.routed.to(device), moved(update.shared, device), routing)
        if elsewhere:
            there = partly_elsewhere(there, device)
        update = there
    else:
        update = update.to(device)
    vectors = {name: moved(getattr(post, name), device) for name in VECTORS}
    total, out = Guarded(rows, size, device=device), Guarded(rows, size, device=device)
    total.tensor.copy_(x)  # the sum may take the place of x
    codes = GuardedActivations(rows, size, device)
    add_post_norm_cuda(
        total.tensor, update, replace(post, **vectors), total.tensor, weight.to(device), EPS,
        out.tensor, codes.out,
    )  # fmt: skip
    assert_same_bits(total.checked(), expected)
    assert_same_bits(out.checked(), normed)
    codes.check(normed)
    assert_same_bits(normed, rms_norm_exact(expected, weight, EPS))


def partly_elsewhere(outputs: ExpertOutputs, device: torch.device) -> ExpertOutputs:
    """The first rank of each row, and the last row, are computed by the CPU."""
    rows, ranks, size = outputs.routed.shape
    mine = torch.zeros(rows, ranks, dtype=torch.bool)
    mine[:, 0], mine[-1] = True, True
    box = Mailbox.create(ranks, size, rows)
    box.out.numpy()[:] = outputs.routed.cpu().masked_fill(~mine[..., None], torch.nan).numpy()
    box.done.numpy()[0] = 1
    ids = torch.arange(rows * ranks, dtype=torch.int32).view(rows, ranks).masked_fill(~mine, -1)
    routed = outputs.routed.masked_fill(mine.to(device)[..., None], torch.nan)
    return replace(outputs, routed=routed, elsewhere=RowsElsewhere(ids.to(device), box.out, box.done))


@pytest.mark.usefixtures("host")
@all_pairs(**SHAPES, elsewhere=[True, False])
def test_on_a_gpu_of_the_host(rows: int, size: int, ranks: int, kind: str, *, elsewhere: bool) -> None:
    check(rows, size, ranks, kind, CPU, elsewhere=elsewhere)


@pytest.mark.gpu
@all_pairs(
    rows=[1, 3, 64, 200], size=[7, 100, 256, 2816], ranks=[1, 8, 10], kind=KINDS, elsewhere=[True, False]
)
def test_on_a_gpu(rows: int, size: int, ranks: int, kind: str, *, elsewhere: bool) -> None:
    check(rows, size, ranks, kind, CUDA, elsewhere=elsewhere)


def test_outputs_that_no_kernel_norms_are_refused() -> None:
    x, update, post, weight = case(2, 24, 2, "parallel")
    out = torch.zeros(2, 24)
    with pytest.raises(ValueError, match="plain_shared, expected no_shared"):
        add_post_norm_cuda(x, update, replace(post, routed=None, shared=None), x, weight, EPS, out, None)
    with pytest.raises(ValueError, match="no_shared, expected plain_shared"):
        add_post_norm_cuda(x, replace(update, shared=None), post, x, weight, EPS, out, None)
    with pytest.raises(ValueError, match="norms of outputs with 23 weights"):
        add_post_norm_cuda(x, update, replace(post, weight=weight[:23]), x, weight, EPS, out, None)
