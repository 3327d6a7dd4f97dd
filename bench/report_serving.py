"""The figures of a server under load."""

from collections.abc import Mapping

from report_tables import Row, load, table

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


def _cells(found: Mapping[str, float]) -> list[str]:
    return [f"{found['tok_s']:,.0f}", f"{found['p50_s']:.2f}", f"{found['p95_s']:.2f}"]
