"""Which kernels compute a step's experts."""

from dataclasses import replace

import pytest
import torch

from coldstream.gguf.quant_types import QuantType
from coldstream.kernels.experts.moe import Form
from coldstream.kernels.experts.table import ExpertTable

EXPERTS = 256


@pytest.mark.parametrize("is_partial", [False, True])
@pytest.mark.parametrize(
    ("quant_type", "forms"),
    [
        (QuantType.Q4_K, {1: "GEMV", 8: "GEMV", 9: "GROUPED", 32: "GROUPED", 33: "GEMM", 64: "GEMM"}),
        (QuantType.IQ2_XXS, {1: "GEMV", 8: "GEMV", 9: "GROUPED", 32: "GROUPED", 33: "GEMM", 64: "GEMM"}),
        (QuantType.F16, {1: "GEMV", 8: "GEMV", 64: "GEMV"}),
    ],
)
def test_forms_follow_from_rows_and_types_wherever_experts_are(
    quant_type: QuantType, forms: dict[int, str], *, is_partial: bool
) -> None:
    table = ExpertTable(torch.zeros(EXPERTS).long(), quant_type, 512, 2048, is_partial)
    stacks = table, table, replace(table, rows=2048, cols=512)
    assert {tokens: Form.of(tokens, stacks).name for tokens in forms} == forms
