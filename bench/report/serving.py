"""The figures of a server under load, on a CPU and on a GPU."""

from collections.abc import Mapping
from typing import Any

from bench.report.failures import turns_table
from bench.report.tables import Row, load, table

NAMES = {"coldstream": "coldstream", "llama_cpp": "llama.cpp's server"}


def serving() -> str:
    """Throughput and latency of both servers by number of clients, and with more than they answer."""
    r = load("serving")
    columns = ("tok/s", "p50 s", "p95 s")
    header = ["clients", *(f"{name}, {what}" for name in NAMES.values() for what in columns)]
    rows: list[Row] = []
    for count in r["coldstream"]["closed_loop"]:
        loads = [r[name]["closed_loop"][count] for name in NAMES]
        rows.append([count, *(cell for each in loads for cell in _cells(each))])
    opened = [r[name]["open_loop"] for name in NAMES]
    rows.append(["1.5 times what it answers", *(cell for each in opened for cell in _cells(each))])
    first = r["coldstream"]["first_token"]
    alone, beside = (f"{1e3 * first[name]:.0f} ms" for name in ("alone_p95_s", "beside_long_p95_s"))
    most = r["coldstream"]["closed_loop"][max(r["coldstream"]["closed_loop"], key=int)]
    lost = sum(each["lost"] + each["refused"] for each in opened)
    return table(header, rows) + (
        f"\nLost or refused: {lost}. First token of a short stream, 95th percentile: {alone} alone, {beside} "
        f"beside a long prompt. The clients run on the same cores, of which they took "
        f"{most['client_cores']:.2f} where they were most, our server {most['server_cores']:.2f}. "
        f"{r['slots']} slots, "
        f"{r['new_tokens']} tokens an answer, {r['threads']} threads, {r['cpu']}, commit {r['commit']}: "
        f"`{r['command']}`\n"
    )


def gpu_serving() -> str:
    """A server on a GPU: its load, what long conversations cost, and answers side by side."""
    r = load("gpu/serving")
    return "\n".join((_gpu_load(r["load"]), turns_table(r["turns"]), _gpu_equality(r["equality"]))) + (
        f"\n{r['load']['machine']['gpu']}, {r['load']['machine']['cores']} cores, commits "
        f"{' and '.join(dict.fromkeys(r[part]['commit'] for part in ('load', 'turns', 'equality')))}: "
        f"`{r['command']}`\n"
    )


def _gpu_load(found: Mapping[str, Any]) -> str:
    percentiles = [f"{what}, ms: p50 | p95" for what in ("first token", "between tokens")]
    header = ["experts on the GPU", "clients", "tok/s of all", *" | ".join(percentiles).split(" | ")]
    rows: list[Row] = []
    for budget in found["budgets"]:
        for row in budget["rows"]:
            first, between = row["first_token_ms"], row["between_ms"]
            cells = [
                f"{first['p50']:.0f}",
                f"{first['p95']:.0f}",
                f"{between['p50']:.1f}",
                f"{between['p95']:.1f}",
            ]
            rows.append(
                [f"{budget['experts_share']:.0%}", str(row["clients"]), f"{row['tok_s']:,.0f}", *cells]
            )
    return table(header, rows)


def _gpu_equality(found: Mapping[str, Any]) -> str:
    counts = found["statistics"]
    answers = found["repeats"] * found["requests"]
    same = answers - len(found["different"])
    return (
        f"{same} of {answers} answers are those of a server that has each alone, all experts on the GPU and "
        f"no drafts: {found['requests']} at a time and {found['repeats']} times, with "
        f"{found['experts_share']:.0%} of the experts on the GPU. Beside them {counts['cancelled_requests']} "
        f"requests were given up, {counts['reused_tokens']:,} tokens of prompts were found in the cache, and "
        f"{counts['accepted_tokens']:,} of {counts['drafted_tokens']:,} drafted tokens were accepted.\n"
    )


def _cells(found: Mapping[str, float]) -> list[str]:
    return [f"{found['tok_s']:,.0f}", f"{found['p50_s']:.2f}", f"{found['p95_s']:.2f}"]
