"""A file whose matrices have many types: the same tokens whatever the budget, the drafts and the company."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from builders import Dims, write_gguf
from coldstream.engine import LLM, EngineConfig, SamplingParams, open_model
from coldstream.gguf.reader import GGUFFile
from plain_loop import plain_output

CONTEXT = 256
PARAMS = SamplingParams(seed=3, max_tokens=16, temperature=1.0, ignore_eos=True)
PROMPTS = [[7, 9, 11] * 9, [200, 3] * 20, [5]]
# The matrices of an expert differ in type, and those of one layer from those of others.
TYPES = {
    "*.attn_*.weight": "IQ4_NL",
    "*.ffn_gate_exps.weight": "Q2_K",
    "*.ffn_up_exps.weight": "Q2_0",
    "*.ffn_down_exps.weight": "Q3_K",
    "blk.1.ffn_gate_exps.weight": "IQ3_S",
    "blk.1.ffn_down_exps.weight": "MXFP4",
}


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("mixed") / "tiny.gguf"
    return write_gguf(path, quant="Q6_K", types=TYPES, nextn=True, dims=Dims(experts=32))[0]


@pytest.fixture(scope="module")
def expected(path: Path) -> list[tuple[int, ...]]:
    """Token by token, each prompt alone."""
    opened = open_model(EngineConfig(str(path), device="cpu", ctx_size=CONTEXT, spec_type="none"))
    tokens = [plain_output(opened, prompt, PARAMS).token_ids for prompt in PROMPTS]
    opened.close()
    return tokens


@pytest.fixture(params=["none", "mtp"], ids=["plain", "drafts"])
def spec_type(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(params=["auto", 21 * 2**20], ids=["all in RAM", "experts on the disk"])
def llm(request: pytest.FixtureRequest, path: Path, spec_type: str) -> Iterator[LLM]:
    ram = request.param if spec_type == "mtp" or request.param == "auto" else 14 * 2**20
    opened = open_model(EngineConfig(str(path), device="cpu", ctx_size=CONTEXT, spec_type=spec_type, ram=ram))
    assert opened.plan.placement.is_all_resident == (ram == "auto")
    with LLM.from_opened(opened) as llm:
        yield llm


@pytest.mark.sharded(of="models on the CPU")
def test_the_file_has_the_types(path: Path) -> None:
    with GGUFFile.open(path) as file:
        tensors = file.tensors
    by_layer = [
        {tensors[f"blk.{layer}.ffn_{matrix}_exps.weight"].quant_type for matrix in ("gate", "up", "down")}
        for layer in (0, 1)
    ]
    assert [len(kinds) for kinds in by_layer] == [3, 3]
    assert by_layer[0] != by_layer[1]


@pytest.mark.sharded
def test_a_list_has_the_tokens_of_each_prompt_alone(llm: LLM, expected: list[tuple[int, ...]]) -> None:
    assert [output.token_ids for output in llm.generate(PROMPTS, PARAMS)] == expected


@pytest.mark.sharded(of="models on the CPU")
def test_prompts_one_after_the_other_have_them_too(llm: LLM, expected: list[tuple[int, ...]]) -> None:
    assert [llm.generate(prompt, PARAMS)[0].token_ids for prompt in PROMPTS] == expected
