"""The page of aims: wrong rates, and several answers and drafts where experts are missing."""

from collections.abc import Iterator, Mapping
from itertools import pairwise
from statistics import mean, median
from typing import Any, Final

from bench.report.aims import MISSING, Aim, rows_of
from bench.report.desktop import CLOSE
from bench.report.tables import load

MOVING: Final = "offloaded-experts.md#shares-that-follow-what-tokens-took"
SIDE_BY_SIDE: Final = "missed-aims.md#eight-answers-at-once"
SHALLOW: Final = "drafts-cpu.md#drafts-by-default"
FORECASTS: Final = "startup.md#forecasts-by-type-of-weights"
TEXTS: Final = {"nothing in common": "gpu/answers", "popular experts": "gpu/answers_shared"}


def aims_machines() -> str:
    """Rates that are wrong, answers side by side, and drafts."""
    return rows_of([*_rates(), *_answers(), *_drafts(), *_forecasts()])


def _rates() -> Iterator[Aim]:
    source = "gpu/wrong_rates.json"
    for row in load("gpu/wrong_rates")["rows"]:
        best = row["best"]["tok_s"]
        least = min(each["tok_s"] for each in row["moving"]) / best
        what = (
            f"from rates ten times wrong, {row['vram_bytes'] / 2**30:.1f} GiB of memory, of the best shares"
        )
        yield Aim(what, 0.9, least, source, 2, why=MOVING)


def _answers() -> Iterator[Aim]:
    for kind, name in TEXTS.items():
        for placement in load(name)["placements"]:
            where = f"{placement['experts_share']:.0%} of experts, texts with {kind}"
            totals = _totals(placement)
            least = min(
                after / before for each in totals.values() for before, after in pairwise(each.values())
            )
            what = f"more answers at once, over fewer, at worst: {where}"
            yield Aim(what, 1, least, f"{name}.json", 2, "×", why=SIDE_BY_SIDE)
            if kind == "popular experts":
                for prompt, each in totals.items():
                    what = f"eight answers over one, prompts of {prompt}: {where}"
                    yield Aim(what, 1.8, each[8] / each[1], f"{name}.json", 2, "×", why=SIDE_BY_SIDE)


def _totals(placement: Mapping[str, Any]) -> dict[int, dict[int, float]]:
    """Tokens a second of all, by length of prompts and number of answers at once, which rises."""
    totals: dict[int, dict[int, float]] = {}
    for row in sorted(placement["rows"], key=lambda row: row["streams"]):
        totals.setdefault(row["prompt"], {})[row["streams"]] = mean(row["runs_tok_s"])
    return totals


def _drafts() -> Iterator[Aim]:
    name = "gpu/speculation_neighbours"
    for cell in load(name)["cells"]:
        plain = max(row["tok_s"] for row in cell["rows"] if row["budget"] == 0)
        best = max(row["tok_s"] for row in cell["rows"] if row["budget"] == "auto")
        where = f"{cell['experts_gib']:.0f} GiB, neighbours share experts"
        yield Aim(
            f"drafts by cost over none: {where}", 1.25, best / plain, f"{name}.json", 2, "×", why=MISSING
        )
    for case in load("cpu_shallow_drafts")["cases"]:
        by_cost = next(way for way in case["ways"] if way["budget"] == "auto")
        layers = case["name"].removeprefix("layers-")
        what = f"drafts by cost over none: a core, {layers} layers of the full-size shape"
        found = median(by_cost["cpu_ratios"])
        yield Aim(what, 1.25, found, "cpu_shallow_drafts.json", 2, "×", why=SHALLOW)


def _forecasts() -> Iterator[Aim]:
    ratios = [
        figure["ratio"]
        for result in load("forecasts")["forecasts"]
        for row in result["rows"]
        for figure in row["figures"].values()
        if not figure["older_than"]
    ]
    near = sum(abs(ratio - 1) <= CLOSE for ratio in ratios)
    what = f"forecasts within {100 * CLOSE:.0f} % of a run of the present program, of {len(ratios)}"
    yield Aim(what, len(ratios), near, "forecasts.json", why=FORECASTS)
