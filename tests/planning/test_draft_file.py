"""What a plan counts for the drafter that a configuration names."""

import pytest

pytest.importorskip("cuda.bindings")

from coldstream.assets import demo_drafter_path, demo_model_path
from coldstream.models.cpu.dflash import weight_bytes
from coldstream.models.cuda.dflash_block import BlockMemory
from coldstream.models.dflash.file import DflashFile
from coldstream.planning.config import EngineConfig
from coldstream.planning.draft_file import open_draft, open_target


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_drafter_is_counted_for_its_device(device: str) -> None:
    """On a GPU with what its steps need, and with half of the bytes for a key or value."""
    drafter = demo_drafter_path()
    config = EngineConfig(str(demo_model_path()), device=device, model_draft=str(drafter))
    with DflashFile.open(drafter) as file:
        expected = weight_bytes(file) if device == "cpu" else BlockMemory.of(file).total
        of_a_row = (4 if device == "cpu" else 2) * 2 * file.spec.kv_dim
        rows = 3 * file.spec.context_rows(512)
    target = open_target(demo_model_path(), config)
    with target.file, open_draft(target) as draft:
        assert draft.needs is not None
        assert draft.needs.num_bytes(512, 3) == expected + rows * of_a_row
