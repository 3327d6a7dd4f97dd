"""A drafter of one family beside a model of another is refused in one sentence, whatever the pair."""

from dataclasses import dataclass, replace
from typing import Any

import pytest

from builders import make_model, write_model
from coldstream.errors import ConfigError
from coldstream.gguf.reader import GGUFFile
from coldstream.models.architectures import ARCHITECTURES
from coldstream.models.dflash.spec import DflashSpec, check_target
from coldstream.models.read_spec import read_spec
from coldstream.models.spec.model_spec import ModelSpec
from dflash_cases import LAGUNA, TINY, spec_of

WITH_STREAMS = ("qwen4exp",)


@dataclass(frozen=True)
class Published:
    """What tells the models of a family from others: their vocabulary, width and number of layers."""

    vocab_size: int
    hidden_size: int
    num_layers: int


PUBLISHED = {
    "qwen35": Published(248_320, 5120, 64),
    "qwen35moe": Published(248_320, 2048, 40),
    "qwen3moe": Published(151_936, 2048, 48),
    "qwen3next": Published(151_936, 2048, 48),
    "qwen4exp": Published(248_320, 2560, 48),
    "laguna": Published(100_352, 2048, 40),
    "gpt-oss": Published(201_088, 2880, 24),
    "gemma4": Published(262_144, 2816, 30),
}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, ModelSpec]:
    """Of every family, in the sizes of one that is published."""
    folder, found = tmp_path_factory.mktemp("families"), {}
    for name in ARCHITECTURES:
        (path,) = write_model(folder / f"{name}.gguf", make_model(name))
        with GGUFFile.open(path) as file:
            found[name] = read_spec(file.metadata, file.tensors)
    return found


def drafter(name: str, sizes: Published) -> DflashSpec:
    """The kind that is published for a family, which for Laguna is one of its own."""
    values: dict[str, Any] = LAGUNA if name == "laguna" else TINY
    spec = spec_of(values)
    numbers = {"num_target_layers": sizes.num_layers, "aux_layers": (0, 1)}
    return replace(spec, vocab_size=sizes.vocab_size, hidden_size=sizes.hidden_size, **numbers)


def sizes_of(spec: ModelSpec) -> Published:
    return Published(spec.vocab_size, spec.hidden_size, spec.num_layers)


def refusal(spec: DflashSpec, model: ModelSpec) -> str:
    with pytest.raises(ConfigError) as caught:
        check_target(spec, model)
    return str(caught.value)


@pytest.mark.parametrize(("cap", "of_model"), [(30.0, 0.0), (30.0, 15.0), (0.0, 30.0), (30.0, 30.0)])
def test_a_cap_of_logits_is_the_models(models: dict[str, ModelSpec], cap: float, of_model: float) -> None:
    """A drafter that states none takes the model's."""
    sizes, spec = PUBLISHED["gemma4"], models["gemma4"]
    layers = (spec.layers * sizes.num_layers)[: sizes.num_layers]
    model = replace(spec, vocab_size=sizes.vocab_size, hidden_size=sizes.hidden_size, layers=layers)
    model, draft = (
        replace(model, logit_softcap=of_model),
        replace(drafter("gemma4", sizes), logit_softcap=cap),
    )
    if cap in (0.0, of_model):
        check_target(draft, model)
        return
    has = f"at {of_model:g}" if of_model else "nowhere"
    assert f"caps logits at 30, and the model caps them {has}: give the drafter" in refusal(draft, model)


def test_families_are_all_listed() -> None:
    assert PUBLISHED.keys() == ARCHITECTURES.keys()


@pytest.mark.parametrize("of_drafter", PUBLISHED)
@pytest.mark.parametrize("of_model", PUBLISHED)
def test_drafters_of_published_models(models: dict[str, ModelSpec], of_drafter: str, of_model: str) -> None:
    sizes, spec = PUBLISHED[of_model], models[of_model]
    layers = (spec.layers * sizes.num_layers)[: sizes.num_layers]
    model = replace(spec, vocab_size=sizes.vocab_size, hidden_size=sizes.hidden_size, layers=layers)
    draft = drafter(of_drafter, PUBLISHED[of_drafter])
    if of_model not in WITH_STREAMS and PUBLISHED[of_drafter] == sizes:
        check_target(draft, model)
        return
    message = refusal(draft, model)
    assert ". " not in message
    assert message.endswith("draft in another way")
    if PUBLISHED[of_drafter] != sizes:
        assert "the drafter is for a model with" in message


@pytest.mark.parametrize("of_model", ARCHITECTURES)
def test_drafters_of_the_same_sizes(models: dict[str, ModelSpec], of_model: str) -> None:
    """A drafter of Laguna is for Laguna. Others say nothing of a family, and fit what has their sizes."""
    model = models[of_model]
    plain, laguna = (drafter(name, sizes_of(model)) for name in ("qwen35moe", "laguna"))
    if of_model in WITH_STREAMS:
        assert f"{of_model} has 4" in refusal(plain, model)
    else:
        check_target(plain, model)
    if of_model == "laguna":
        check_target(laguna, model)
    else:
        assert f"the drafter is for Laguna, and the model is {of_model}: give" in refusal(laguna, model)
