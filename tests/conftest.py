"""Settings for every test: reproducible properties, and no memory that happens to hold the right answer."""

import os
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, settings

if not torch.cuda.is_available():
    # Triton asks for this where a kernel is defined, so it must be set before a test imports one.
    os.environ["TRITON_INTERPRET"] = "1"

settings.register_profile(
    "repeatable",
    derandomize=True,
    max_examples=50,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
    print_blob=True,
)
settings.load_profile("repeatable")


@pytest.fixture(autouse=True)
def poisoned_empty(monkeypatch: pytest.MonkeyPatch) -> None:
    """`torch.empty` returns NaN, so that an element nobody wrote shows."""
    empty = torch.empty

    def poisoned(*size: Any, **options: Any) -> torch.Tensor:
        tensor = empty(*size, **options)
        return tensor.fill_(torch.nan) if tensor.is_floating_point() else tensor

    monkeypatch.setattr(torch, "empty", poisoned)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests that need a GPU are skipped, visibly, where there is none."""
    if torch.cuda.is_available():
        return
    no_gpu = pytest.mark.skip(reason="no CUDA device")
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(no_gpu)
