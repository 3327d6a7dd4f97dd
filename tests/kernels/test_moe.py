"""Which kernels compute a step's experts, and how often they read one."""

from dataclasses import replace

import pytest
import torch

from coldstream.gguf.quant_types import QuantType
from coldstream.kernels.experts.moe import Form, rows_per_read
from coldstream.kernels.experts.table import ExpertTable
from host_device import HostDevice

RANKS, EXPERTS = 8, 256


def stacks(quant_type: QuantType, *, is_partial: bool) -> tuple[ExpertTable, ExpertTable, ExpertTable]:
    table = ExpertTable(torch.zeros(EXPERTS).long(), quant_type, 512, 2048, is_partial)
    return table, table, replace(table, rows=2048, cols=512)


@pytest.mark.parametrize(
    ("is_partial", "forms"),
    [
        (
            True,
            {1: Form.FEW, 2: Form.GROUPED, 8: Form.GROUPED, 32: Form.GROUPED, 33: Form.MANY, 64: Form.MANY},
        ),
        (False, {1: Form.FEW, 8: Form.FEW, 9: Form.GROUPED, 16: Form.GROUPED, 17: Form.MANY, 64: Form.MANY}),
    ],
)
def test_an_expert_over_the_bus_is_read_for_several_rows_from_two_on(
    is_partial: bool, forms: dict[int, Form]
) -> None:
    of = stacks(QuantType.Q4_K, is_partial=is_partial)
    assert {tokens: Form.of(tokens, of) for tokens in forms} == forms


def test_for_how_many_rows_a_read_is(host: HostDevice) -> None:
    of = stacks(QuantType.Q4_K, is_partial=True)
    assert [rows_per_read(tokens, RANKS, of) for tokens in (1, 2, 32, 33, 64)] == [1, 8, 8, 16, 16]
    floats = stacks(QuantType.F16, is_partial=True)
    assert [rows_per_read(tokens, RANKS, floats) for tokens in (1, 8, 64)] == [1, 1, 1]
