"""What n-grams cost: the same text with them and without, from RAM and from the file."""

import argparse
import json
from dataclasses import replace
from pathlib import Path

import pytest

from bench import full_size_model
from bench.engine import ngram_cost
from bench.family_models import FAMILIES, NGRAM, Qwen4ExpWriter
from small_shape import SMALL


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path, family = tmp_path_factory.mktemp("model") / "model.gguf", FAMILIES["Qwen3.8-Flash-Next"]
    shape = replace(SMALL, expert_ffn=320, value_heads=6)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(full_size_model, "POOL_BYTES", 8 << 20)
        writer = family.writer(path, shape, seed=3, threads=2, mix=family.mix)
        assert isinstance(writer, Qwen4ExpWriter)
        writer.ngram = replace(NGRAM, rows=6000)
        writer.write()
    return path


def options(path: Path, *words: str) -> argparse.Namespace:
    return ngram_cost.arguments().parse_args([str(path), "--device", "cpu", *words])


@pytest.mark.sharded(of="measurements")
def test_three_variants_decode_the_same_text(path: Path, tmp_path: Path) -> None:
    out = tmp_path / "found.json"
    words = ["--turns", "2", "--warm-tokens", "2", "--timed-tokens", "4", "--out", str(out)]
    (row,) = ngram_cost.run(options(path, *words))
    (kept,) = json.loads(out.read_text())["rows"]
    assert kept == row
    assert {name: len(found) for name, found in row["runs"].items()} == dict.fromkeys(ngram_cost.VARIANTS, 2)
    assert set(row["added_share"]) == {ngram_cost.CACHED, ngram_cost.FROM_FILE}


@pytest.mark.parametrize("name", ngram_cost.VARIANTS)
def test_variants_differ_in_where_rows_are(name: str, path: Path) -> None:
    with ngram_cost.opened(name, options(path), None) as llm:
        tables = llm.opened.runner._ops.ngram_tables
        for _ in range(2):
            before = [table.hits for table in tables]
            ngram_cost.decoded(llm, ngram_cost.FIRST_ID, 2, 2)
        hits = [table.hits - found for table, found in zip(tables, before, strict=True)]
    steps = ngram_cost.PROMPT_TOKENS + 3  # the last token enters no step
    expected = {ngram_cost.CACHED: [NGRAM.num_heads * steps], ngram_cost.FROM_FILE: [0]}
    assert hits == expected.get(name, [])
