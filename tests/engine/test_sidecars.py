"""A block for multi-token prediction in a file of its own drafts as one in the model's, or is refused."""

from pathlib import Path
from typing import Any

import pytest

from builders import write_model
from coldstream.assets import demo_drafter_path
from coldstream.decoding import SizesByCost
from coldstream.engine import LLM, EngineConfig, RequestOutput, SamplingParams, open_model
from coldstream.engine.cache_tiers import cache_identity
from coldstream.errors import ConfigError, InconsistentError, ModelNotFoundError
from coldstream.placement.plan_file import save_plan
from coldstream.planning.gather import plan_by_name
from sidecar_files import FAMILIES, make_whole, split, write_split

PROMPTS = ["def add(a, b):\n", [5, 6, 7, 5, 6]]
PARAMS = SamplingParams(seed=3, max_tokens=40, ignore_eos=True)
NO_SIDECAR = {"spec_type": "none"}


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str, str]:
    """Of a whole model, its trunk and its sidecar."""
    return write_split(tmp_path_factory.mktemp("sidecar"), make_whole())


def answers(model: str, **settings: Any) -> list[RequestOutput]:
    with LLM(model, **{"device": "cpu", "threads": 1, "ctx_size": 256, **settings}) as llm:
        return llm.generate(PROMPTS, PARAMS)


def tokens_of(outputs: list[RequestOutput]) -> list[tuple[int, ...]]:
    return [tuple(output.token_ids) for output in outputs]


@pytest.mark.sharded(of="models on the CPU")
@pytest.mark.parametrize(("family", "shares"), zip(FAMILIES, (False, True, False, True), strict=True))
def test_drafts_are_those_of_a_block_in_the_models_file(tmp_path: Path, family: str, shares: bool) -> None:
    """Token by token, and as many are accepted; without drafts the tokens are the same."""
    options = {"qwen4exp": {"ngrams": True}}.get(family, {})
    whole, trunk, sidecar = write_split(tmp_path, make_whole(family, **options), shares=shares)
    plain = answers(trunk, **NO_SIDECAR)
    within = answers(whole, spec_type="mtp", tree_budget=4)
    beside = answers(trunk, model_draft=sidecar, tree_budget=4)
    assert tokens_of(plain) == tokens_of(within) == tokens_of(beside)
    for one, other in zip(within, beside, strict=True):
        found, expected = other.statistics.speculation, one.statistics.speculation
        assert found is not None
        assert expected is not None
        assert (found.drafter, found.drafted, found.accepted) == ("mtp", expected.drafted, expected.accepted)
        assert found.drafted > 60


@pytest.mark.sharded(of="models on the CPU")
def test_experts_from_the_disk_and_texts_side_by_side_change_no_token(paths: tuple[str, str, str]) -> None:
    _, trunk, sidecar = paths
    expected = tokens_of(answers(trunk, **NO_SIDECAR))
    planned = plan_by_name(EngineConfig(trunk, device="cpu", threads=1, ctx_size=256, model_draft=sidecar))
    ram = planned.plan.total_bytes - planned.plan.expert_bytes[0] * 2
    found = answers(trunk, model_draft=sidecar, tree_budget=3, ram=ram, parallel=2)
    assert tokens_of(found) == expected


@pytest.mark.gpu
@pytest.mark.parametrize("family", FAMILIES)
def test_a_real_gpu_drafts_by_it(tmp_path: Path, family: str) -> None:
    """The tokens are those of a CPU, and as many drafts are accepted as of a whole file."""
    whole, trunk, sidecar = write_split(tmp_path, make_whole(family), shares=family == "qwen4exp")
    settings = {"device": "cuda", "threads": "auto", "tree_budget": 3}
    within = answers(whole, spec_type="mtp", **settings)
    beside = answers(trunk, model_draft=sidecar, **settings)
    assert tokens_of(beside) == tokens_of(answers(trunk, **NO_SIDECAR))
    for one, other in zip(within, beside, strict=True):
        found, expected = other.statistics.speculation, one.statistics.speculation
        assert found is not None
        assert expected is not None
        assert (found.drafted, found.accepted) == (expected.drafted, expected.accepted)


def test_a_plan_counts_it_as_a_block_of_the_models_file(paths: tuple[str, str, str]) -> None:
    whole, trunk, sidecar = paths
    plain = plan_by_name(EngineConfig(trunk, device="cpu", ctx_size=256, **NO_SIDECAR))
    within = plan_by_name(EngineConfig(whole, device="cpu", ctx_size=256, spec_type="mtp"))
    beside = plan_by_name(EngineConfig(trunk, device="cpu", ctx_size=256, model_draft=sidecar))
    assert beside.run.spec_type == "mtp"
    assert beside.draft_reason == "mtp, as asked for"
    assert beside.plan.fixed == within.plan.fixed
    assert beside.plan.fixed.drafter > plain.plan.fixed.drafter == 0
    assert beside.plan.model == plain.plan.model


def test_a_saved_plan_asks_for_it(paths: tuple[str, str, str], tmp_path: Path) -> None:
    _, trunk, sidecar = paths
    planned = plan_by_name(EngineConfig(trunk, device="cpu", ctx_size=256, model_draft=sidecar))
    path = tmp_path / "plan.json"
    save_plan(planned.run, path)
    with pytest.raises(ConfigError, match="has no block for multi-token prediction: name a file with it by"):
        open_model(EngineConfig(trunk, device="cpu", plan=str(path)))
    opened = open_model(EngineConfig(trunk, device="cpu", plan=str(path), model_draft=sidecar))
    assert opened.plan == planned.run
    assert opened.speculation is not None
    opened.close()
    save_plan(plan_by_name(EngineConfig(trunk, device="cpu", ctx_size=256, **NO_SIDECAR)).run, path)
    with pytest.raises(ConfigError, match="is for spec_type dflash or mtp, not none: leave one out"):
        open_model(EngineConfig(trunk, device="cpu", plan=str(path), model_draft=sidecar))


def test_one_plan_takes_no_drafter_of_another_kind(paths: tuple[str, str, str], tmp_path: Path) -> None:
    whole, trunk, sidecar = paths
    dflash = str(demo_drafter_path())
    with pytest.raises(ConfigError, match=r"spec_type dflash: \S+ holds a block for multi-token prediction"):
        LLM(trunk, device="cpu", spec_type="dflash", model_draft=sidecar)
    for drafter in (dflash, whole):
        with pytest.raises(
            ConfigError, match=r"spec_type mtp: \S+ holds no block for multi-token prediction"
        ):
            LLM(trunk, device="cpu", spec_type="mtp", model_draft=drafter)
    with pytest.raises(ModelNotFoundError, match="absent"):
        LLM(trunk, device="cpu", spec_type="mtp", model_draft=str(tmp_path / "absent"))


def test_what_it_loses_is_not_bounded_as_it_was_named(paths: tuple[str, str, str]) -> None:
    _, trunk, sidecar = paths
    with LLM(trunk, device="cpu", ctx_size=256, model_draft=sidecar) as llm:
        assert llm.opened.speculation is not None
        assert isinstance(llm.opened.speculation.sizes, SizesByCost)
        assert not llm.opened.speculation.sizes.is_bounded
        assert llm.opened.config.model_draft == sidecar


def test_one_that_does_not_fit_is_refused_or_left_out_with_a_warning(
    paths: tuple[str, str, str], tmp_path: Path
) -> None:
    _, trunk, _ = paths
    sidecar = split(make_whole())[1]
    del sidecar.tensors["blk.4.nextn.hnorm.weight"]
    other = str(write_model(tmp_path / "other.gguf", sidecar)[0])
    message = r"other\.gguf: the tensor blk\.4\.nextn\.hnorm\.weight \[256\] is missing"
    with pytest.raises(InconsistentError, match=message):
        LLM(trunk, device="cpu", spec_type="mtp", model_draft=other)
    with pytest.warns(UserWarning, match=f"nothing is drafted: .*{message}"):
        llm = LLM(trunk, device="cpu", model_draft=other)
    with llm:
        assert llm.opened.plan.spec_type == "none"
        assert llm.generate("def", PARAMS)[0].statistics.speculation is None


def test_a_sidecar_is_no_model(paths: tuple[str, str, str]) -> None:
    with pytest.raises(Exception, match=r"sidecar\.gguf holds only the MTP .* this one as --model-draft"):
        LLM(paths[2], device="cpu")


def test_kept_prefixes_are_the_models_with_and_without_it(paths: tuple[str, str, str]) -> None:
    _, trunk, sidecar = paths
    found = []
    for settings in (NO_SIDECAR, {"model_draft": sidecar}):
        opened = open_model(EngineConfig(trunk, device="cpu", ctx_size=256, **settings))
        found.append(cache_identity(opened))
        opened.close()
    assert found[0] == found[1]
