"""A DFlash drafter observes the residual streams of a sequence, and leaves its answers as they are."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from builders import Dims, write_gguf
from coldstream.decoding import FixedSizes, Speculation, TokenTree
from coldstream.decoding.drafters.dflash import DflashDrafter
from coldstream.engine import LLM, EngineConfig, SamplingParams, open_model
from coldstream.models.cpu.runner import CpuRunner
from coldstream.models.dflash.file import DflashFile
from coldstream.models.dflash.spec import check_target
from dflash_cases import PUBLISHED_KINDS, for_target, random_tensors, spec_of, write_converted
from hash_runner import opened_with
from plain_loop import plain_output

AUX_LAYERS = (0, 1, 3)
PROMPTS = ["def add(a, b):\n", "and the re in d", "class Shape:"]


@dataclass
class Recorder:
    """A drafter that keeps what it observes. It proposes a right token behind a wrong one."""

    aux_layers: tuple[int, ...] = AUX_LAYERS
    name: str = "recorder"
    wants_hidden: bool = False
    token_ids: list[int] = field(default_factory=list)
    rows: list[np.ndarray] = field(default_factory=list)
    answer: dict[tuple[int, ...], tuple[int, ...]] = field(default_factory=dict)  # to each prompt

    def truncate(self, length: int) -> None:
        del self.token_ids[length:], self.rows[length:]

    def extend(self, token_ids: Sequence[int], hidden: Any) -> None:
        assert len(token_ids) == len(hidden)
        self.token_ids += token_ids
        self.rows += list(np.array(hidden))

    def propose(self, context: Sequence[int], budget: int) -> TokenTree:
        ((prompt, answer),) = self.answer.items()
        right = answer[len(context) - len(prompt)]
        return TokenTree(((right + 1) % 300, right), (-1, -1), (-0.1, -0.2)).first(budget)


def load_with_aux_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Has models loaded on the CPU keep the residual streams after `AUX_LAYERS`, whatever their plan says."""
    load = CpuRunner.load
    monkeypatch.setattr(
        CpuRunner,
        "load",
        lambda *arguments, **options: load(*arguments, **options | {"aux_layers": AUX_LAYERS}),
    )


@pytest.fixture
def runner(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[CpuRunner]:
    """Of a tiny model, loaded with auxiliary layers."""
    load_with_aux_layers(monkeypatch)
    (path,) = write_gguf(tmp_path / "tiny.gguf", "qwen35moe")
    opened = open_model(EngineConfig(str(path), device="cpu", threads=2, ctx_size=600, spec_type="ngram"))
    assert isinstance(opened.runner, CpuRunner)
    yield opened.runner
    opened.close()


def test_a_drafter_with_aux_layers_observes_the_features_of_every_committed_token(runner: CpuRunner) -> None:
    """Of a prompt in several chunks, of accepted nodes, and of what follows them."""
    prompt = [i % 300 for i in range(530)]
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    opened = opened_with(runner, 600)
    answer = plain_output(opened, prompt, params).token_ids
    drafter = Recorder(answer={tuple(prompt): answer})
    llm = LLM.from_opened(replace(opened, speculation=Speculation(drafter, FixedSizes(4))))
    found = llm.generate([prompt], params)[0]
    assert found.token_ids == answer
    assert found.statistics.speculation.accepted > 2
    expected_ids = [*prompt, *answer[:-1]]
    assert drafter.token_ids == expected_ids
    features = np.stack(drafter.rows)
    llm.forget()
    assert drafter.token_ids == []
    sequence, expected = runner.new_sequence(), []
    runner.extend(sequence, expected_ids, None, lambda chunk, rows: expected.append(rows), runner.features)
    runner.release(sequence)
    assert np.array_equal(features, np.concatenate(expected))


@pytest.mark.sharded(of="models on the CPU")
@pytest.mark.parametrize(
    ("target", "kind"), [(target, kind) for target, kinds in PUBLISHED_KINDS.items() for kind in kinds]
)
def test_answers_are_those_of_the_plain_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, target: str, kind: str
) -> None:
    """With a drafter of random weights, over the target's own embedding and head."""
    (path,) = write_gguf(tmp_path / "tiny.gguf", target)
    engine = EngineConfig(str(path), device="cpu", threads=2, ctx_size=512)
    plain = LLM.from_opened(open_model(replace(engine, spec_type="none")))
    load_with_aux_layers(monkeypatch)
    opened = open_model(replace(engine, spec_type="ngram"))
    runner = opened.runner
    assert isinstance(runner, CpuRunner)
    values = for_target(kind, Dims(), AUX_LAYERS)
    path = write_converted(tmp_path / "drafter", values, random_tensors(spec_of(values)))
    with DflashFile.open(path) as file:
        check_target(file.spec, runner.spec)
        assert file.spec.aux_layers == runner.aux_layers
        model = runner.load_dflash(file)
    drafter = DflashDrafter(model.new_sequence())
    drafting = LLM.from_opened(replace(opened, speculation=Speculation(drafter, FixedSizes(7))))
    for seed, prompt in enumerate(PROMPTS):
        params = SamplingParams(seed=seed, max_tokens=40, ignore_eos=True)
        (expected,), (found,) = plain.generate(prompt, params), drafting.generate(prompt, params)
        assert found.token_ids == expected.token_ids
        assert found.statistics.speculation.drafted > 100
    plain.close()
    opened.close()
