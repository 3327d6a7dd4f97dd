"""The page of aims: what the engine is to reach, what was measured of it, and where a miss is explained."""

import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise, product
from statistics import mean
from typing import Any, Final

from bench.report.drafts import speeds
from bench.report.gpu_mixes import over_llama_cpp
from bench.report.gpu_types import CASES as GPU_CASES
from bench.report.gpu_types import ROWS as GPU_ROWS
from bench.report.gpu_types import cells
from bench.report.partial import decode_tok_s, peer_of_tiers, tiers
from bench.report.peer_figures import nearest, peer_figures
from bench.report.tables import has, load, table

LAUNCHES: Final = "gpu-decode.md#one-launch-for-all-layers"
CORES: Final = "missed-aims.md#a-prompt-of-2048-tokens"
STAGING: Final = "missed-aims.md#steps-of-several-rows"
START: Final = "startup.md#imports-context-and-dry-runs"
DENSE: Final = "dense-layers.md#layers-that-are-missing"
TIERS: Final = "missed-aims.md#less-ram-than-the-file-has-bytes"
AHEAD: Final = "missed-aims.md#decoding-with-a-part-of-the-experts"
ON_GPU: Final = "draft-sizes.md#how-many-nodes-to-ask-for"
MISSING: Final = "missed-aims.md#drafts-where-experts-are-missing"
DFLASH: Final = "drafts-gpu.md#dflash-as-one-graph"
ON_CPU: Final = "drafts-cpu.md#the-bundled-drafter"
CLIENTS: Final = "serving.md#64-clients-on-two-cores"
TYPES: Final = "cpu-kernels.md#where-a-decoded-tokens-time-goes"
TYPES_IN_ROWS: Final = "cpu-kernels.md#long-prompts-on-avx-512"
FORECASTS: Final = "startup.md#forecasts-by-type-of-weights"
GPU_TYPES: Final = "gpu-prefill.md#weight-types"
FIRST_TOKENS: Final = "serving.md#a-first-token-beside-a-long-prompt"


@dataclass(frozen=True)
class Aim:
    """A figure to reach.

    is_most: whether it may not be exceeded; digits: of both figures, behind the point; unit: behind them;
    why: the page and section of the notes that say what keeps it from being reached.
    """

    what: str
    wanted: float
    found: float
    source: str
    digits: int = 0
    unit: str = ""
    is_most: bool = False
    why: str = ""

    @property
    def is_met(self) -> bool:
        """Of the figures as they are printed."""
        wanted, found = (round(each, self.digits) for each in (self.wanted, self.found))
        return found <= wanted if self.is_most else found >= wanted


def rows_of(aims: Iterable[Aim]) -> str:
    """The table of them."""
    rows = []
    for aim in aims:
        sign = "≤" if aim.is_most else "≥"
        missed = f"no: [why]({aim.why})" if aim.why else "no"
        rows.append(
            [
                aim.what,
                f"{sign} {aim.wanted:,.{aim.digits}f}{aim.unit}",
                f"{aim.found:,.{aim.digits}f}{aim.unit}",
                "yes" if aim.is_met else missed,
                f"`{aim.source}`",
            ]
        )
    return table(["what", "aim", "measured", "reached", "result file"], rows)


def aims_resident() -> str:
    """Steps of a model whose experts are all on the GPU."""
    return rows_of(_resident())


def _resident() -> Iterator[Aim]:
    steps = load("gpu/rows")["depths"][0]
    wanted = {2: 2.1, 4: 2.4, 8: 3.0, 9: 3.2, 16: 4.0, 24: 4.8, 32: 5.5, 64: 8.0}
    text = "a token of a text"
    yield Aim(f"{text}, ms", 1.35, steps["generated_ms"], "gpu/rows.json", 2, is_most=True, why=LAUNCHES)
    for rows, most in wanted.items():
        found = steps["step_ms"][str(rows)]
        what = f"a step of {rows} rows with its logits, ms"
        yield Aim(what, most, found, "gpu/rows.json", 1, is_most=True, why=LAUNCHES)
    ms = [steps["step_ms"][str(rows)] for rows in sorted(map(int, steps["step_ms"]))]
    slowest = max(before / after for before, after in pairwise(ms))
    yield Aim("a step's time over that of the next longer one", 1, slowest, "gpu/rows.json", 2, is_most=True)


def aims_partial() -> str:
    """Steps, prompts and starts of a model whose experts do not all fit."""
    return rows_of(_partial())


def _partial() -> Iterator[Aim]:
    hybrid = {round(row["experts_bytes"] / 2**30, 1): row for row in load("gpu/hybrid_handover")["rows"]}
    source, whole = "gpu/hybrid_handover.json", max(row["tok_s"] for row in hybrid.values())
    what = "decoding, 10.7 GiB of experts, of all"
    yield Aim(what, 0.92, hybrid[10.7]["tok_s"] / whole, source, 2, why=AHEAD)
    for gib, name, least in ((3.0, "3 GiB", 0.45), (0.0, "none", 0.72)):
        what = f"decoding, {name}: the time of its bytes, of a token's"
        yield Aim(what, least, hybrid[gib]["share_of_floor"], source, 2, why=AHEAD)
    steps = {(row["gib"], row["rows"]): row["ms"] for row in load("gpu/cold_rows")["rows"]}
    for rows, most in {4: 14, 8: 22, 16: 33, 32: 48, 64: 75}.items():
        what, source = f"a step of {rows} rows, 0.25 GiB", "gpu/cold_rows.json"
        yield Aim(f"{what}, ms", most, steps[0.25, rows], source, is_most=True, why=STAGING)
        share = steps[3.0, rows] / steps[0.25, rows]
        yield Aim("the same with 3 GiB, of it", 0.6, share, source, 2, is_most=True, why=STAGING)
    prompts = {
        row["tokens"]: row["tok_s"] for row in load("gpu/streaming_guess")["rows"] if row["experts_gib"] == 0
    }
    for tokens, least in {168: 1140, 512: 3000, 2048: 8500, 8192: 16150}.items():
        what = f"a prompt of {tokens} tokens, none, tok/s"
        yield Aim(what, least, prompts[tokens], "gpu/streaming_guess.json", why=CORES)
    start, source = load("gpu/first_token"), "gpu/first_token.json"
    starts = {
        "first token of `run --vram 6G`, s": (2.5, start["later_starts_s"]),
        "the same the very first time, s": (6, [start["first_start_s"]]),
        "the same with all experts on the GPU, s": (4, start["resident_starts_s"]),
    }
    for what, (most, seconds) in starts.items():
        yield Aim(what, most, statistics.median(seconds), source, 1, is_most=True, why=START)
    found = tiers()
    for gib in (10, 14, 18):
        run, name = found[gib]
        ratio = run["tok_s"] / decode_tok_s(peer_of_tiers(gib))
        what = f"decoding, 4 GiB of VRAM and {gib} of RAM, over llama.cpp"
        yield Aim(what, 3, ratio, f"{name}.json", 1, "×", why=TIERS)


def aims_dense() -> str:
    """The dense model, beside llama.cpp."""
    return rows_of(_dense())


def _dense() -> Iterator[Aim]:
    ours = {each["missing"]: each for each in load("gpu/27b/layers")["placements"]}
    peers = {each["cpu_expert_layers"]: each for each in load("gpu/27b/peer")["placements"]}
    prompts = {row["tokens"]: row["tok_s"]["median"] for row in peers[0]["prefill"]}
    source = "gpu/27b/layers.json"
    decode = 1e3 / ours[0]["generated_ms"] / decode_tok_s(peers[0])
    yield Aim("decoding, resident, over llama.cpp", 1.5, decode, source, 1, "×")
    for row in ours[0]["prefill"]:
        if row["tokens"] in prompts:
            ratio = row["tok_s"] / prompts[row["tokens"]]
            yield Aim(f"a prompt of {row['tokens']} tokens", 2, ratio, source, 1, "×", why=DENSE)
    (whole,) = load("gpu/27b/peer_whole")["placements"]
    half = 1e3 / ours[32]["generated_ms"] / decode_tok_s(whole)
    yield Aim("decoding, half of the layers' networks resident", 2, half, source, 1, "×")


def aims_cpu() -> str:
    """Two cores, beside llama.cpp."""
    return rows_of(_cpu())


def _cpu() -> Iterator[Aim]:
    for name, least in {"demo": 1.3, "cut": 1.6}.items():
        cases, source = load(f"cpu_rows_{name}")["cases"], f"cpu_rows_{name}.json"
        yield Aim(f"decoding {name}.gguf, over llama.cpp", least, cases["1"]["ratio"], source, 1, "×")
        eight = cases["8"]["ours_tok_s"] / cases["1"]["ours_tok_s"]
        yield Aim(f"{name}.gguf, tokens a second of eight rows, of one", 2, eight, source, 1, "×")
    for name, found in load("family_speed")["models"].items():
        ratios = [case["ratios"][case["better_peer"]]["median"] for case in found["cases"].values()]
        what = f"a part of {name}, over the better peer, at least"
        yield Aim(what, 1, min(ratios), "family_speed.json", 2, "×")


# Types that many people download for small memories.
COMMON_TYPES: Final = ("Q2_K", "Q3_K", "IQ4_XS", "IQ3_S", "MXFP4")


TYPE_RUNS: Final = {
    "cpu_types": "Zen 5, AVX-512",
    "cpu_types_avx2": "Zen 5, AVX2",
    "cpu_types_beside": "Xeon, AVX-512",
    "cpu_types_avx2_beside": "Xeon, AVX2",
}


TYPE_MODELS: Final = {"cut": "", "small": ", small model"}


def aims_types() -> str:
    """Two cores by type of weights, beside the better of llama.cpp and ik_llama.cpp."""
    return rows_of(_types())


def _types() -> Iterator[Aim]:
    for (name, tier), (model, of_model) in product(TYPE_RUNS.items(), TYPE_MODELS.items()):
        types = load(name)["models"].get(model)
        if not types:
            continue
        common = {kind: found for kind, found in types.items() if kind in COMMON_TYPES}
        for case, aim, among, why in (
            ("decode", 1.0, types, TYPES),
            ("decode", 1.3, common, TYPES),
            ("prompt of 512", 1.3, types, TYPES_IN_ROWS),
            ("8 rows", 1.3, types, TYPES_IN_ROWS),
        ):
            ratios = {kind: _over_the_better(found["cases"][case]) for kind, found in among.items()}
            least = min(ratios, key=ratios.__getitem__)
            reached = sum(ratio >= aim for ratio in ratios.values())
            what = f"{tier}{of_model}, {case}: least of {len(ratios)} types ({least}; {reached} reach it)"
            yield Aim(what, aim, ratios[least], f"{name}.json", 2, "×", why=why)


def aims_gpu_types() -> str:
    """Products on a GPU by type of weights, beside Q4_K's."""
    return rows_of(_gpu_types())


def _gpu_types() -> Iterator[Aim]:
    found = cells(load("gpu/types"))
    for rows, name in GPU_ROWS.items():
        for what in GPU_CASES:
            ratios = {kind: cell["ratio"] for (kind, *place), cell in found.items() if place == [rows, what]}
            aim = {1: 1.15, 2048: 1.25}[rows]
            most = max(ratios, key=ratios.__getitem__)
            reached = sum(ratio <= aim for ratio in ratios.values())
            text = f"{what}, {name}: most of {len(ratios)} types ({most}; {reached} reach it)"
            yield Aim(text, aim, ratios[most], "gpu/types.json", 2, "×", is_most=True, why=GPU_TYPES)


def aims_gpu_mixes() -> str:
    """The full-size file in other types, beside llama.cpp with the nearest share of its experts."""
    return rows_of(_gpu_mixes())


def _gpu_mixes() -> Iterator[Aim]:
    mixes = {name: mix["rows"] for name, mix in load("gpu/mixes")["mixes"].items() if has(f"gpu/peer_{name}")}
    for place, where, cases in (
        (0, "all experts on the GPU", {"decode": 2.0, "512": 2.0, "2048": 2.0}),
        (1, "3 GiB of experts", {"decode": 2.5}),
        (2, "hardly any experts", {"decode": 2.5}),
    ):
        for case, aim in cases.items():
            ratios = {name: over_llama_cpp(name, rows[place], case) for name, rows in mixes.items()}
            least = min(ratios, key=ratios.__getitem__)
            what = case if case == "decode" else f"prompt of {case}"
            text = f"{where}, {what}: least of {len(ratios)} mixes ({least})"
            yield Aim(text, aim, ratios[least], "gpu/mixes.json", 1, "×", why=GPU_TYPES)
    near = [
        figure["is_near"] for rows in mixes.values() for row in rows for figure in row["figures"].values()
    ]
    text = f"forecasts within 20 % of the run, of {len(near)}"
    yield Aim(text, len(near), sum(near), "gpu/mixes.json", why=FORECASTS)


def _over_the_better(case: Mapping[str, Any]) -> float:
    return float(case["ratios"][case["better_peer"]]["median"])


def aims_drafts() -> str:
    """What drafts bring."""
    return rows_of(_drafts())


def _gpu_drafts(name: str, drafter: str, aims: Mapping[str, float | None]) -> Iterator[Aim]:
    """aims: by memory, what drafts by cost are to be over none."""
    cells, source = {cell["vram"]: cell["rows"] for cell in load(name)["cells"]}, f"{name}.json"
    for vram, least in aims.items():
        found = list(zip(cells[vram], speeds(cells[vram]), strict=True))
        fixed = max(speed for row, speed in found if row["budget"] not in (0, "auto"))
        by_cost = max(speed for row, speed in found if row["budget"] == "auto")
        where, why = f"--vram {vram}", MISSING
        if vram == "auto":
            where, why = "all experts on the GPU", DFLASH if drafter == "DFlash" else ON_GPU
        if least is not None:
            yield Aim(f"{drafter} by cost over none, {where}", least, by_cost, source, 2, "×", why=why)
        what = f"{drafter} by cost over the best fixed size, {where}"
        yield Aim(what, 0.97, by_cost / fixed, source, 3, "×", why=why)
        what = f"{drafter} by cost is not slower than none, {where}"
        yield Aim(what, 0.98, by_cost, source, 3, "×", why=why)


def _drafts() -> Iterator[Aim]:
    for name, drafter, aims in (
        ("speculation", "the block", {"auto": 1.8, "7G": 1.3}),
        ("speculation_dflash", "DFlash", {"auto": None, "7G": None}),
    ):
        yield from _gpu_drafts(f"gpu/{name}", drafter, aims)
    rows = load("gpu/rows")["depths"][0]["step_ms"]
    for nodes, most in {4: 1.4, 8: 1.8, 16: 2.4}.items():
        share = between(rows, nodes + 1) / rows["1"]
        what = f"a step of {nodes} drafted tokens, of one without"
        yield Aim(what, most, share, "gpu/rows.json", 1, "×", is_most=True, why=LAUNCHES)
    on_cpu: dict[str, list[float]] = {}
    for result in load("cpu_speculation")["results"]:
        best = max(way["ratio"] for way in result["ways"] if way["budget"] == "auto")
        on_cpu.setdefault(result["kind"], []).append(best)
    for kind, least in {"code": 1.5, "prose": 1.2, "random bytes": 0.98}.items():
        what = f"two cores, {kind}, the best drafter by cost over none"
        yield Aim(what, least, mean(on_cpu[kind]), "cpu_speculation.json", 2, "×", why=ON_CPU)


def between(step_ms_of: dict[str, float], rows: int) -> float:
    """Of so many rows, on a straight line between the nearest that were measured."""
    known = sorted((int(each), ms) for each, ms in step_ms_of.items())
    (low, low_ms) = [each for each in known if each[0] <= rows][-1]
    (high, high_ms) = next(each for each in known if each[0] >= rows)
    return low_ms + (high_ms - low_ms) * (rows - low) / max(1, high - low)


def aims_serving() -> str:
    """Many clients of a server."""
    return rows_of(_serving())


def _serving() -> Iterator[Aim]:
    r = load("serving")
    ours, peer = r["coldstream"], r["llama_cpp"]
    source, loaded = "serving.json", ours["closed_loop"]["64"]
    single = ours["closed_loop"]["1"]["tok_s"]
    best_peer = max(each["tok_s"] for each in peer["closed_loop"].values())
    yield Aim(
        "64 clients on two cores, of one's tok/s", 3, loaded["tok_s"] / single, source, 1, "×", why=CLIENTS
    )
    yield Aim(
        "the same over llama.cpp's server at its best", 1.3, loaded["tok_s"] / best_peer, source, 1, "×"
    )
    lost = sum(each["lost"] for each in (*ours["closed_loop"].values(), ours["open_loop"]))
    yield Aim("requests that were lost", 0, lost, source, is_most=True)
    first = ours["first_token"]
    share = first["beside_long_p95_s"] / first["alone_p95_s"]
    what = "p95 of a short chat's first token beside a long prompt, of alone"
    yield Aim(what, 3, share, source, 1, "×", is_most=True, why=FIRST_TOKENS)
    peers = peer_figures()
    for placement in load("gpu/streams")["placements"]:
        gib, steps = placement["experts_gib"], nearest(peers["sequences"], placement["experts_share"])
        where = "all experts on the GPU" if gib is None else f"{gib:g} GiB"
        for row in placement["rows"]:
            ratio = row["tok_s"] * steps[str(row["streams"])] / (1e3 * row["streams"])
            what = f"{row['streams']} texts side by side, {where}, over llama.cpp"
            yield Aim(what, 2, ratio, "gpu/streams.json", 1, "×")
    yield from _long_lived()


def _long_lived() -> Iterator[Aim]:
    """What a server is to keep up for long: conversations, equal answers, its memory."""
    soak = load("soak")
    yield Aim("minutes of mixed traffic", 30, soak["seconds"] / 60, "soak.json")
    wrong = len(soak["faults"]) + len(soak["grown_too_much"])
    yield Aim("wrong answers in them, and what grew", 0, wrong, "soak.json", is_most=True)
    turns = load("failures")["turns"]
    ratio = turns["next_turn_ratio"]
    what = "a next turn behind 8,000 tokens on two cores, sooner than the first"
    yield Aim(what, 20, ratio, "failures.json", unit="×")
    on_gpu, source = load("gpu/serving"), "gpu/serving.json"
    next_s = on_gpu["turns"]["kinds"]["next turn"]["first_s"]
    yield Aim("a next turn behind 80,000 tokens on a GPU, s", 1, next_s, source, 2, is_most=True)
    for where, found in (("two cores", turns), ("a GPU", on_gpu["turns"])):
        what = f"known tokens that a changed line makes {where} compute again"
        name = "failures.json" if found is turns else source
        yield Aim(what, 2048, found["most_replayed_tokens"], name, is_most=True)
    different = len(on_gpu["equality"]["different"])
    what = "answers that 31 others and a part of the experts change on a GPU"
    yield Aim(what, 0, different, source, is_most=True)


BLOCKS: Final[dict[str, Callable[[], str]]] = {
    each.__name__: each
    for each in (
        aims_resident,
        aims_partial,
        aims_dense,
        aims_cpu,
        aims_types,
        aims_gpu_types,
        aims_gpu_mixes,
        aims_drafts,
        aims_serving,
    )
}
