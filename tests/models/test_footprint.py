"""How much of a model one token touches, against sums written out by hand."""

from pathlib import Path

import pytest

from builders import Dims, write_gguf
from coldstream.gguf.reader import GGUFFile
from coldstream.models.footprint import active_parameters, bytes_per_token, num_parameters
from coldstream.models.read_spec import read_spec

DIMS = Dims(layers=4, hidden=32, experts=8, experts_used=2, expert_ffn=32, shared_ffn=32, state=32, ffn=64)


@pytest.mark.parametrize("arch", ["qwen35", "qwen35moe"])
@pytest.mark.parametrize("tied", [False, True], ids=["head", "tied"])
@pytest.mark.parametrize("nextn", [False, True], ids=["trunk", "nextn"])
def test_a_token_needs_the_trunk_its_experts_and_the_head(
    tmp_path: Path, arch: str, tied: bool, nextn: bool
) -> None:
    (path,) = write_gguf(tmp_path / "tiny.gguf", arch, dims=DIMS, quant="F32", tied=tied, nextn=nextn)
    with GGUFFile.open(path) as file:
        spec = read_spec(file.metadata, file.tensors)
        expected = 0
        for name, info in file.tensors.items():
            values = info.num_bytes // info.quant_type.block_bytes * info.quant_type.block_elements
            if name.startswith("blk.4."):
                continue
            if name == "token_embd.weight" and not tied:
                values = DIMS.hidden
            elif "_exps." in name:
                values = values * 2 // 8
            expected += values
        assert active_parameters(spec, file.tensors) == expected
        if not tied or nextn or arch == "qwen35moe":
            assert num_parameters(file.tensors.values()) > expected
        if all(info.quant_type.name == "F32" for info in file.tensors.values()):
            assert bytes_per_token(spec, file.tensors) == 4 * expected
