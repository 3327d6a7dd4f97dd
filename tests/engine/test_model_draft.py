"""A drafter that is named: opened, planned, used and refused."""

import json
import os
from dataclasses import replace
from pathlib import Path

import pytest

from builders import write_gguf
from coldstream.engine import LLM, EngineConfig, SamplingParams, open_model, opened_model
from coldstream.errors import (
    ColdstreamError,
    ConfigError,
    ModelFormatError,
    ModelNotFoundError,
    OutOfMemoryError,
    StorageError,
)
from coldstream.placement.plan_file import save_plan
from coldstream.planning.gather import plan_by_name
from dflash_cases import MIXED, config, random_tensors, spec_of, write_folder, write_gguf_drafter

PARAMS = SamplingParams(seed=3, max_tokens=40, ignore_eos=True)
PROMPTS = ["def add(a, b):\n", "class Shape:"]


@pytest.fixture(autouse=True)
def home(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Of a user who has converted nothing."""
    folder = tmp_path_factory.mktemp("home")
    monkeypatch.setattr(Path, "home", lambda: folder)
    return folder


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_gguf(tmp_path_factory.mktemp("model") / "tiny.gguf", "qwen35moe")[0])


@pytest.fixture(scope="module")
def drafter(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(_write(tmp_path_factory.mktemp("drafter") / "drafter"))


def _write(folder: Path, **changes: object) -> Path:
    values = config(**MIXED, hidden_size=256, vocab_size=320, num_target_layers=4)
    values["dflash_config"] = {"target_layer_ids": [0, 1, 3], "mask_token_id": 319}
    values |= changes
    return write_folder(folder, values, random_tensors(spec_of(values)))


@pytest.mark.sharded(of="models on the CPU")
@pytest.mark.parametrize("spec_type", ["auto", "dflash"])
@pytest.mark.parametrize("tree_budget", ["auto", 5])
def test_answers_are_those_without_it(
    model: str, drafter: str, spec_type: str, tree_budget: int | str
) -> None:
    with (
        LLM(model, device="cpu", spec_type="none") as plain,
        LLM(
            model, device="cpu", spec_type=spec_type, model_draft=drafter, tree_budget=tree_budget
        ) as drafting,
    ):
        assert drafting.opened.plan.spec_type == "dflash"
        for prompt in PROMPTS:
            (expected,), (found,) = plain.generate(prompt, PARAMS), drafting.generate(prompt, PARAMS)
            assert found.token_ids == expected.token_ids
            speculation = found.statistics.speculation
            assert speculation is not None
            assert speculation.drafter == "dflash"
            assert tree_budget == "auto" or speculation.drafted > 100


@pytest.mark.sharded(of="models on the CPU")
def test_its_memory_and_the_states_that_it_reads_are_in_the_plan(model: str, drafter: str) -> None:
    plain = plan_by_name(EngineConfig(model, device="cpu", ctx_size=256)).plan.fixed
    both = plan_by_name(EngineConfig(model, device="cpu", ctx_size=256, model_draft=drafter)).plan.fixed
    spec = spec_of(json.loads((Path(drafter) / "config.json").read_text()))
    num_weights = sum(values.size for values in random_tensors(spec).values())
    assert both.drafter == 4 * (num_weights + 2 * spec.context_rows(256) * spec.kv_dim)
    assert plain.drafter == 0
    assert both.workspace > plain.workspace
    assert both.num_tree_rows == 64


@pytest.mark.sharded(of="models on the CPU")
def test_a_gguf_drafter_takes_the_memory_of_its_own_types(model: str, tmp_path: Path) -> None:
    values = config(True, **MIXED, hidden_size=256, vocab_size=320, num_target_layers=4)
    values["dflash_config"] |= {"target_layer_ids": [0, 1, 3], "mask_token_id": 319}
    spec = spec_of(values)
    tensors = random_tensors(spec)
    planned = []
    for kind in ("F32", "Q8_0"):
        types = {"fc.weight": kind, "selector_successor.weight": "F16"}
        path = write_gguf_drafter(tmp_path / f"{kind}.gguf", spec, tensors, types=types)
        engine = EngineConfig(model, device="cpu", ctx_size=256, model_draft=str(path))
        planned.append(plan_by_name(engine).plan.fixed.drafter)
        with LLM(model, device="cpu", ctx_size=256, model_draft=str(path)) as llm:
            assert llm.opened.plan.placement.fixed.drafter == planned[-1]
    num_weights = sum(each.size for each in tensors.values())
    codebook = tensors["selector_successor.weight"].size
    assert planned[0] == 4 * (num_weights + 2 * spec.context_rows(256) * spec.kv_dim) - 2 * codebook
    assert planned[0] - planned[1] == tensors["fc.weight"].size * (4 - 34 / 32)


@pytest.mark.sharded(of="models on the CPU")
def test_a_saved_plan_asks_for_its_drafter(model: str, drafter: str, tmp_path: Path) -> None:
    planned = plan_by_name(EngineConfig(model, device="cpu", ctx_size=256, model_draft=drafter))
    path = tmp_path / "plan.json"
    save_plan(planned.run, path)
    with pytest.raises(ConfigError, match="no drafter is given: name its file or folder with --model-draft"):
        open_model(EngineConfig(model, device="cpu", plan=str(path)))
    with pytest.raises(ModelNotFoundError, match="absent"):
        open_model(EngineConfig(model, device="cpu", plan=str(path), model_draft=str(tmp_path / "absent")))
    opened = open_model(EngineConfig(model, device="cpu", plan=str(path), model_draft=drafter))
    assert opened.plan == planned.run
    opened.close()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"vocab_size": 512}, "a vocabulary of 512 tokens, and the model has 320"),
        ({"hidden_size": 512}, "a hidden size of 512, and the model has 256"),
        ({"num_target_layers": 8}, "8 layers, and the model has 4"),
    ],
)
def test_one_that_does_not_fit_is_refused_or_left_out_with_a_warning(
    model: str, tmp_path: Path, changes: dict[str, object], message: str
) -> None:
    other = str(_write(tmp_path / "other", **changes))
    with pytest.raises(ConfigError, match=message):
        LLM(model, device="cpu", spec_type="dflash", model_draft=other)
    with pytest.warns(UserWarning, match=f"nothing is drafted: .*{message}"):
        llm = LLM(model, device="cpu", model_draft=other)
    with llm:
        assert llm.opened.plan.spec_type == "none"
        assert llm.generate("def", PARAMS)[0].statistics.speculation is None


def test_one_that_does_not_fit_is_closed(model: str, tmp_path: Path) -> None:
    values = config(**MIXED, hidden_size=256, vocab_size=512, num_target_layers=4)
    values["dflash_config"] = {"target_layer_ids": [0, 1, 3], "mask_token_id": 319}
    spec = spec_of(values)
    path = write_gguf_drafter(tmp_path / "other.gguf", spec, random_tensors(spec))
    refused = []  # an error that is kept holds the frames that it went through
    for _ in range(3):
        with pytest.raises(ConfigError, match="a vocabulary of 512 tokens") as caught:
            LLM(model, device="cpu", spec_type="dflash", model_draft=str(path))
        refused.append(caught)
        opened = [os.path.realpath(f"/proc/self/fd/{each}") for each in os.listdir("/proc/self/fd")]
        assert str(path) not in opened


@pytest.mark.parametrize(
    ("kind", "message"),
    [(OutOfMemoryError, "no memory for a drafter"), (ModelFormatError, "a tensor that is not finite")],
)
def test_one_that_cannot_be_loaded_is_left_out_only_where_it_was_not_asked_for(
    model: str, drafter: str, monkeypatch: pytest.MonkeyPatch, kind: type[ColdstreamError], message: str
) -> None:
    def fails(*arguments: object, **named: object) -> None:
        raise kind(message)

    monkeypatch.setattr(opened_model, "open_speculation", fails)
    with pytest.raises(kind, match=message):
        open_model(EngineConfig(model, device="cpu", spec_type="dflash", model_draft=drafter))
    opened = open_model(EngineConfig(model, device="cpu", model_draft=drafter))
    assert opened.speculation is None
    assert opened.warnings == (f"nothing is drafted: {message}",)
    opened.close()


@pytest.mark.sharded(of="models on the CPU")
def test_one_without_kernels_is_refused_on_a_gpu_alone(model: str, tmp_path: Path) -> None:
    draft = str(_write(tmp_path / "drafter", head_dim=40))
    on_gpu = {"vram": "2G", "ctx_size": 256, "model_draft": draft}
    with pytest.raises(ConfigError, match="heads of 40"):
        plan_by_name(EngineConfig(model, spec_type="dflash", **on_gpu))
    planned = plan_by_name(EngineConfig(model, **on_gpu))
    assert planned.run.spec_type == "none"
    assert any("heads of 40" in warning for warning in planned.warnings)
    on_cpu = plan_by_name(EngineConfig(model, device="cpu", ctx_size=256, model_draft=draft))
    assert on_cpu.run.spec_type == "dflash"


def test_one_that_is_none_is_refused(model: str, drafter: str, tmp_path: Path) -> None:
    absent = str(tmp_path / "absent")
    for path, kind in ((model, ModelFormatError), (absent, ModelNotFoundError)):
        with pytest.raises(kind):
            LLM(model, device="cpu", spec_type="dflash", model_draft=path)
    with pytest.raises(ModelNotFoundError, match="absent"):
        LLM(model, device="cpu", model_draft=absent)
    with pytest.raises(ConfigError, match="no drafter is given"):
        LLM(model, device="cpu", spec_type="dflash")
    for spec_type in ("ngram", "none"):
        message = f"is for spec_type dflash or mtp, not {spec_type}: leave one out"
        with pytest.raises(ConfigError, match=message):
            EngineConfig(model, spec_type=spec_type, model_draft=drafter)
    with pytest.raises(ConfigError, match="must be the path of a drafter, not ''"):
        EngineConfig(model, model_draft="")


@pytest.mark.sharded(of="models on the CPU")
def test_a_folder_is_converted_at_its_first_use_with_progress(model: str, drafter: str, home: Path) -> None:
    reported: list[str] = []
    config = EngineConfig(model, device="cpu", ctx_size=256, model_draft=drafter)
    for expected in (True, False):
        reported.clear()
        opened = open_model(config, progress=lambda what, done, total: reported.append(what))
        assert opened.plan.spec_type == "dflash"
        opened.close()
        assert ("converting the drafter" in reported) == expected
    (path,) = (home / ".cache" / "coldstream" / "drafters").glob("*.gguf")
    converted = plan_by_name(replace(config, model_draft=str(path)))
    assert converted.plan.fixed == plan_by_name(config).plan.fixed


def test_a_folder_that_cannot_be_converted_is_an_error_even_if_drafts_were_not_asked_for(
    model: str, drafter: str, home: Path
) -> None:
    (home / ".cache").write_text("not a folder")
    for spec_type in ("auto", "dflash"):
        with pytest.raises(StorageError, match=r"cannot be kept: .* `coldstream convert-drafter FOLDER"):
            LLM(model, device="cpu", spec_type=spec_type, model_draft=drafter)
