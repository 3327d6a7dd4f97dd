"""A closed model on a GPU whose object is still there holds none of the device's memory."""

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("cuda.bindings")

from builders import SMALL_EXPERTS, write_gguf
from coldstream.engine import LLM, SamplingParams
from dflash_cases import write_drafter
from host_device import HostDevice
from host_gpu import opened_on

GREEDY = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True)


@pytest.mark.parametrize("spec_type", ["none", "mtp", "dflash"])
def test_a_closed_model_holds_no_memory_of_the_device(
    tmp_path: Path, compiled_for_the_host: HostDevice, spec_type: str
) -> None:
    (path,) = write_gguf(tmp_path / "tiny.gguf", dims=SMALL_EXPERTS, nextn=True)
    options: dict[str, Any] = {"device": "cuda", "ctx_size": 64, "threads": 1, "spec_type": spec_type}
    if spec_type == "dflash":
        options["model_draft"] = write_drafter(tmp_path, SMALL_EXPERTS)
    if spec_type != "none":
        options["tree_budget"] = 2
    with opened_on(compiled_for_the_host):
        device = compiled_for_the_host.driver
        llm = LLM(path, **options)
        llm.generate([1, 2, 3], GREEDY)
        assert device.taken_bytes > 0
        llm.close()
        assert device.taken_bytes == 0
        assert (llm.opened.speculation is None) == (spec_type == "none")
