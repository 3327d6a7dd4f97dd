"""Kernels of Turing cards on the host: other products, copies, barriers and sizes give the same bits.

What other files test runs here once more, on a device that has nothing of what came with Ampere, and 64 KiB
of shared memory for a block. `pytest --turing` runs any of their tests so.
"""

from collections.abc import Iterator

import pytest
import test_draft_block
import test_host_delta_net
import test_host_expert_gemv
import test_host_gemm
import test_host_grouped_experts
import test_host_linear
import test_host_ops
import test_host_products
import test_host_router
from attention_batches import Part, random_tree
from test_host_delta_net import fast_instances  # noqa: F401
from test_host_integers import check, check_whole

from coldstream.gguf.quant_types import QuantType
from coldstream.kernels.attention.cache_layout import INTEGER_CACHE_TYPES
from coldstream.kernels.cuda.gemm_tiles import least_tilings
from coldstream.kernels.cuda.skinny_shapes import SKINNY_TYPES
from coldstream.kernels.linear.integer_types import INTEGER_TYPES
from coldstream.kernels.linear.skinny_layouts import Walk
from host_device import TURING_LIMITS, HostDevice, turing_device

pytestmark = pytest.mark.usefixtures("host")

EVERY_INTEGER_TYPE = pytest.mark.parametrize("quant_type", sorted(INTEGER_TYPES), ids=lambda t: t.name)


@pytest.fixture(scope="session")
def turing(compiled_for_the_host: HostDevice) -> HostDevice:
    """Kernels that tests of this file share."""
    return turing_device(compiled_for_the_host.directory)


@pytest.fixture
def host(turing: HostDevice) -> Iterator[HostDevice]:
    """In place of the device of other files."""
    with turing.installed():
        yield turing


def test_a_warp_multiplies_bytes() -> None:
    test_host_products.test_a_warp_multiplies_bytes()


def test_stages_that_are_used_again() -> None:
    """Their barriers have many phases; with a type whose blocks begin anywhere."""
    for quant_type in (QuantType.Q4_K, QuantType.Q6_K):
        test_host_gemm.compare(least_tilings(quant_type)[-1], quant_type, [(2304, 70)])


@pytest.mark.sharded(9)
@EVERY_INTEGER_TYPE
def test_gemm(quant_type: QuantType) -> None:
    test_host_gemm.test_every_type(quant_type)


@pytest.mark.sharded(9)
@EVERY_INTEGER_TYPE
def test_experts_of_many_tokens(quant_type: QuantType) -> None:
    test_host_ops.test_experts_of_many_tokens((quant_type,) * 3)


@pytest.mark.sharded(9)
@pytest.mark.parametrize("quant_type", sorted(SKINNY_TYPES), ids=lambda t: t.name)
def test_products_of_up_to_64_rows(quant_type: QuantType) -> None:
    test_host_linear.test_every_type(quant_type)


@pytest.mark.sharded(36)
@pytest.mark.parametrize("walk", [Walk.ROWS, Walk.TILES, Walk.PARTS], ids=lambda walk: walk.name)
@EVERY_INTEGER_TYPE
def test_every_walk(monkeypatch: pytest.MonkeyPatch, quant_type: QuantType, walk: Walk) -> None:
    test_host_linear.test_every_walk(monkeypatch, quant_type, walk)


def test_grids_of_several_types_in_one_launch() -> None:
    """More than a block's shared memory has room for beside the rings of a row."""
    test_host_linear.test_grids_and_orders_of_several_types_in_one_launch(512)


@pytest.mark.sharded(9)
@EVERY_INTEGER_TYPE
def test_experts_of_a_few_tokens(quant_type: QuantType) -> None:
    test_host_expert_gemv.test_types_of_either_kind_of_scales((quant_type,) * 3, (quant_type,) * 3)
    test_host_grouped_experts.test_every_type(quant_type)


@pytest.mark.sharded(6)
@pytest.mark.parametrize(("experts", "cols", "ranks"), [(7, 31, 3), (300, 33, 16), (8, 5000, 2)])
@pytest.mark.parametrize("tokens", [1, 3, 8])
def test_routers(experts: int, cols: int, ranks: int, tokens: int) -> None:
    """Beside a later layer's, or in front of it where a block has no memory for both choices."""
    test_host_router.test_router_of_any_shape(experts, cols, ranks, tokens, 1)


def test_a_guess_has_a_launch_of_its_own_where_a_choice_fills_the_memory() -> None:
    test_host_router.test_router_of_any_shape(300, 33, 16, 8, 1)


def test_experts_whose_choice_does_not_fit_are_refused() -> None:
    with pytest.raises(ValueError, match="513 experts, but at most 512 are supported"):
        test_host_router.test_router_of_any_shape(513, 16, 1, 1, 0)


@pytest.mark.sharded(of="kernels")
@pytest.mark.usefixtures("fast_instances")
def test_recurrent_states(host: HostDevice) -> None:
    for parts in test_host_delta_net.shaped_trees():
        test_host_delta_net.test_trees_of_every_shape(parts, host)


@pytest.mark.sharded(of="kernels")
@pytest.mark.parametrize("dim", [128, 256])
def test_attention_of_a_draft_block(dim: int) -> None:
    case = test_draft_block.Case(9, 4, 2, dim, 70, 80)
    test_draft_block.test_attention_sees_what_it_may(case, 3, False, "cpu")


def test_keys_and_values_in_turn() -> None:
    """In the kernels of decode, with one pair of a lane and with two."""
    check([Part(200, 1)], "i16", (16, 2, 256), None, 0, TURING_LIMITS)
    check([Part(200, 1), Part(300, 2)], "i16", (16, 2, 256), None, 0, TURING_LIMITS)


@pytest.mark.sharded(9)
@pytest.mark.parametrize("cache_name", INTEGER_CACHE_TYPES)
@pytest.mark.parametrize("heads", [(4, 2, 64), (8, 1, 96), (16, 2, 256)])
def test_chunks_have_the_bits_of_the_definition(cache_name: str, heads: tuple[int, int, int]) -> None:
    """Rows of decode and of trees, whose keys are in tiles of their own or in turn with values."""
    check([Part(200, 1), Part(300, 2)], cache_name, heads, None, 0, TURING_LIMITS)
    check([Part(70, 2), Part(40, 6, (-1, 0, 0, 2, 1, 4))], cache_name, heads, 100, 2, TURING_LIMITS)


@pytest.mark.parametrize("committed", [30, 250])
def test_a_tree_across_tiles_that_come_in_turn(committed: int) -> None:
    """Keys of a tile of positions lie in two tiles, of which one is in shared memory at a time."""
    check([random_tree(committed, 40, seed=4)], "i16", (4, 2, 256), None, committed, TURING_LIMITS)


@pytest.mark.sharded(of="kernels")
@pytest.mark.parametrize("heads", [(4, 2, 64), (2, 1, 128), (2, 1, 256)])
def test_prompts_have_the_bits_of_the_definition(heads: tuple[int, int, int]) -> None:
    check_whole([Part(250, 70), Part(700, 3)], "i16", heads, None, 3, TURING_LIMITS)
