"""The table of three tiers of memory: llama.cpp counts at the fastest of its placements."""

from typing import Any

import pytest

from bench.report import partial


def placement(tok_s: float) -> dict[str, Any]:
    return {"depths": [{"depth": 0, "decode_tok_s": {"median": tok_s}}]}


def test_llama_cpp_is_compared_at_its_fastest_placement(monkeypatch: pytest.MonkeyPatch) -> None:
    results = {"gpu/three_tiers_peer_18": {"placements": [placement(20.0), placement(33.0), placement(31.0)]}}
    monkeypatch.setattr(partial, "load", results.__getitem__)
    assert partial.decode_tok_s(partial.peer_of_tiers(18)) == 33.0
