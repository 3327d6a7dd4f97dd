"""The table of drafters in docs/cli.md: each is opened beside a model of its family, or refused by name.

That those which are opened draft, and change no token, is in tests/engine/test_dflash_drafts.py, and for
blocks of models in tests/engine/test_sidecars.py.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest

pytest.importorskip("cuda.bindings")

from builders import Dims, write_gguf
from coldstream.errors import ConfigError, UnsupportedError
from coldstream.models.architectures import ARCHITECTURES
from coldstream.planning.config import EngineConfig
from coldstream.planning.draft_file import OpenDraft, open_draft, open_target
from dflash_cases import (
    PUBLISHED_KINDS,
    config,
    for_target,
    random_tensors,
    spec_of,
    write_converted,
    write_gguf_drafter,
)
from sidecar_files import FAMILIES as WITH_BLOCKS

PAGE = (Path(__file__).parents[2] / "docs" / "cli.md").read_text()
DIMS = Dims()


class Row(NamedTuple):
    """What the table says of a family."""

    block: str
    dflash: str
    refused: str


def table() -> dict[str, Row]:
    (part,) = (part for part in PAGE.split("\n## ") if part.startswith("run: which drafters"))
    cells = [
        [cell.strip() for cell in line.strip("|").split("|")] for line in part.splitlines() if "|" in line
    ]
    return {first.split("`")[1]: Row(*others) for first, *others in cells[2:]}


TABLE = table()


@pytest.fixture
def open_beside(tmp_path: Path) -> Callable[..., OpenDraft]:
    """Opens a drafter beside a tiny model of a family, and closes both; what was opened."""

    def opened(family: str, drafter: Path, device: str = "cpu", spec_type: str = "dflash") -> OpenDraft:
        (model,) = write_gguf(tmp_path / f"{family}.gguf", family)
        settings = EngineConfig(str(model), device=device, model_draft=str(drafter), spec_type=spec_type)
        target = open_target(model, settings)
        with target.file, open_draft(target) as draft:
            return draft

    return opened


def test_every_family_has_a_row() -> None:
    assert TABLE.keys() == ARCHITECTURES.keys()
    for family, row in TABLE.items():
        assert row.block.startswith("runs") == (family in WITH_BLOCKS)
        assert row.dflash.startswith("runs") == (family in PUBLISHED_KINDS)
        kinds = PUBLISHED_KINDS.get(family, ())
        assert ("first and second kind" in row.dflash) == ("second" in kinds)


@pytest.mark.sharded
@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize(
    ("family", "kind"), [(family, kind) for family, kinds in PUBLISHED_KINDS.items() for kind in kinds]
)
def test_what_runs_is_opened(
    tmp_path: Path, open_beside: Callable[..., OpenDraft], family: str, kind: str, device: str
) -> None:
    values = for_target(kind, DIMS)
    drafter = write_converted(tmp_path / "drafter", values, random_tensors(spec_of(values)))
    found = open_beside(family, drafter, device)
    assert found.file is not None
    assert found.needs is not None
    assert found.needs.aux_layers == (0, 1)
    assert not found.warnings


def configuration(folder: Path, **changes: Any) -> Path:
    """A folder with a configuration alone."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config(**changes)))
    return folder


# An EAGLE-3 head has a rotary embedding of Llama, which is not what a reader should hear of.
EAGLE: dict[str, Any] = {
    "model_type": "llama",
    "draft_vocab_size": 32000,
    "rope_scaling": {"rope_type": "llama3", "factor": 8.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0},
}


def eagle(folder: Path, name: str = "LlamaForCausalLMEagle3") -> list[Path]:
    file = write_gguf_drafter(folder / "eagle3.gguf", spec_of(config()), {}, "eagle3")
    return [configuration(folder / "head", **EAGLE, architectures=[name]), file]


def with_head(folder: Path, name: str, tensor: str) -> list[Path]:
    """A configuration by its name, and a GGUF file by a tensor that is beside those of a drafter."""
    tensors = random_tensors(spec_of(config()))
    further = tensors | {tensor: tensors["fc.weight"]}
    file = write_gguf_drafter(folder / "head.gguf", spec_of(config()), further)
    return [configuration(folder / "head", architectures=[name]), file]


def assistant(folder: Path) -> list[Path]:
    file = write_gguf_drafter(folder / "assistant.gguf", spec_of(config()), {}, "gemma4-assistant")
    return [configuration(folder / "assistant", architectures=["Gemma4AssistantForCausalLM"]), file]


def any_dflash(folder: Path) -> list[Path]:
    values = for_target("first", DIMS)
    return [write_converted(folder / "dflash", values, random_tensors(spec_of(values)))]


# By the words of the table: files and folders of what is refused, and how the message calls it.
REFUSED: dict[str, tuple[Callable[[Path], list[Path]], str]] = {
    "EAGLE-3": (eagle, "an EAGLE-3 head"),
    "P-EAGLE": (lambda folder: eagle(folder, "PEagleDraftModel"), "an EAGLE-3 head"),
    "DSpark": (lambda folder: with_head(folder, "DSparkDraftModel", "markov_w1.weight"), "a DSpark"),
    "Domino heads": (lambda folder: with_head(folder, "DominoDraftModel", "domino.gru.weight"), "a Domino"),
    "the assistant (`gemma4-assistant`)": (assistant, "Gemma 4's assistant"),
    "GGUF files of `gemma4-dflash-draft`": (
        lambda folder: [write_gguf_drafter(folder / "d.gguf", spec_of(config()), {}, "gemma4-dflash-draft")],
        "as one other program writes it",
    ),
    "any DFlash drafter": (any_dflash, "reads one residual stream, and qwen4exp has 4"),
}
NAMED = [
    (family, name) for family, row in TABLE.items() for name in row.refused.replace(" and ", ", ").split(", ")
]


@pytest.mark.sharded
@pytest.mark.parametrize(("family", "name"), NAMED)
def test_what_is_refused_is_named_with_what_drafts_instead(
    tmp_path: Path, open_beside: Callable[..., OpenDraft], family: str, name: str
) -> None:
    write, called = REFUSED[name]
    for drafter in write(tmp_path):
        with pytest.raises((UnsupportedError, ConfigError)) as caught:
            open_beside(family, drafter)
        message = str(caught.value)
        assert called in message
        assert message.endswith(("draft by --spec-type ngram", "draft in another way"))
        left_out = open_beside(family, drafter, spec_type="auto")
        assert left_out.file is None
        assert left_out.config.spec_type == "none"
        assert left_out.warnings == (f"nothing is drafted: {message}",)
