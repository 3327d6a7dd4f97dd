"""The device that is chosen, and what is said of a GPU that is not used."""

import pytest

from coldstream.errors import DeviceError
from coldstream.planning import device_choice
from coldstream.planning.config import EngineConfig
from coldstream.planning.device_choice import choose_device


def unusable() -> None:
    raise DeviceError("device cuda: too old")


def test_a_gpu_that_cannot_be_used_is_named_and_the_cpu_computes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_choice, "gpu_is_visible", lambda: True)
    monkeypatch.setattr(device_choice, "check_software", unusable)
    config, gpu, warnings = choose_device(EngineConfig("m.gguf"))
    assert (config.device, gpu) == ("cpu", None)
    assert warnings == ("there is a GPU, but the CPU computes: device cuda: too old",)
    assert choose_device(EngineConfig("m.gguf", device="cpu"))[2] == ()
    with pytest.raises(DeviceError, match="too old"):
        choose_device(EngineConfig("m.gguf", device="cuda"))


def test_without_a_gpu_there_is_nothing_to_warn_of(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_choice, "gpu_is_visible", lambda: False)
    config, gpu, warnings = choose_device(EngineConfig("m.gguf"))
    assert (config.device, gpu, warnings) == ("cpu", None, ())


def test_what_computes_is_imported_while_the_driver_makes_its_context(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    done: list[str] = []
    monkeypatch.setattr(device_choice, "check_software", lambda: done.append("checked"))
    monkeypatch.setattr(device_choice.ahead, "begin", lambda: done.append("begun"))
    monkeypatch.setattr(device_choice, "import_module", done.append)
    monkeypatch.setattr(device_choice, "find_gpu", lambda: done.append("waited"))
    choose_device(EngineConfig("m.gguf", device="cuda"))
    assert done == ["checked", "begun", "coldstream.models.cuda.runner", "waited"]
