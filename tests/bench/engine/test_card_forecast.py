"""Forecasts for cards by their data sheets: a real plan of a file without matrices."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from bench.engine import card_forecast
from bench.engine.card_forecast import CARDS, Card, Reached, forecast_row, write_without_matrices
from bench.full_size_model import FULL_SHAPE, FullSizeWriter
from coldstream.gguf.reader import GGUFFile
from coldstream.models.read_spec import read_spec

ALL = Reached(0.9, 0.4, 0.8)
# Of the shape's layers and words a few: what a plan counts is the same for each layer.
SHAPE = replace(FULL_SHAPE, layers=4, vocab=2048)


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Iterator[GGUFFile]:
    path = tmp_path_factory.mktemp("card") / "full.gguf"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(card_forecast, "FULL_SHAPE", SHAPE)
        write_without_matrices(path)
    with GGUFFile.open(path) as opened:
        yield opened


def row(card: Card, file: GGUFFile) -> dict[str, float]:
    return forecast_row(card, ALL, file, read_spec(file.metadata, file.tensors))


@pytest.mark.sharded(of="measurements")
def test_the_file_has_the_tensors_of_the_real_one_and_takes_no_room(file: GGUFFile, tmp_path: Path) -> None:
    writer = FullSizeWriter(tmp_path / "whole.gguf", SHAPE, 0, 1)
    writer.write()
    with GGUFFile.open(tmp_path / "whole.gguf") as whole:
        assert file.num_bytes == whole.num_bytes
        assert {name: info.shape for name, info in file.tensors.items()} == {
            name: info.shape for name, info in whole.tensors.items()
        }
    assert file.paths[0].stat().st_blocks * 512 < file.num_bytes / 20


@pytest.mark.sharded
@pytest.mark.parametrize("rate", ["bytes_per_s", "bus_bytes_per_s", "int8_ops_per_s"])
def test_a_faster_card_is_forecast_no_slower(file: GGUFFile, rate: str) -> None:
    card = Card("small", 2, 2e11, 1e14, 1.5e10)
    slow, fast = row(card, file), row(replace(card, **{rate: 4 * getattr(card, rate)}), file)
    speeds = ("decode_tok_s", "prefill_tok_s")
    assert all(fast[each] >= slow[each] for each in speeds)
    assert any(fast[each] > slow[each] for each in speeds)


@pytest.mark.sharded(of="measurements")
def test_more_memory_holds_more_experts(file: GGUFFile) -> None:
    card = Card("card", 2, 2e11, 1e14, 1.5e10)
    shares = [row(replace(card, memory_gib=gib), file)["experts_share"] for gib in (2, 8)]
    assert shares == sorted(set(shares))
    assert shares[-1] == 1


def test_shares_of_a_data_sheet_are_those_of_the_measured_card() -> None:
    measured = {"copy_bytes_per_s": 2.4e12, "product_ops_per_s": 1.979e14, "link_bytes_per_s": 6.3e9}
    assert Reached.of(measured) == Reached(0.5, 0.1, 0.1)


def test_cards_have_names_of_their_own() -> None:
    assert len({card.name for card in CARDS}) == len(CARDS)
