"""The figures of a server that is made to fail, and of long conversations."""

from typing import Any

from bench.report.tables import Row, load, table


def kills() -> str:
    """What came of the requests, and how soon the engine was back."""
    r, found = _result("kills")
    back, errors_s, requests = found["back_s"], found["answered_s"], found["requests"]
    held = found["descriptors"]
    rows = [
        [
            "kills, while loading, with requests in flight",
            f"{found['kills']}, {found['kills_while_loading']}, {found['kills_with_requests']}",
        ],
        ["requests in flight at a kill, all together", str(found["in_flight"])],
        ["answered with the bits of the undisturbed answer", f"{requests['answered']:,}"],
        [
            "… of these with a kept prefix; prefixes read from files",
            f"{found['answers_with_kept_prefixes']}; {found['prefixes_from_files']}",
        ],
        ["streams cut off with one error at their end", str(requests["cut off"])],
        ["refused with 503 and `Retry-After`", f"{requests['refused']:,}"],
        ["wrong answers, requests without a clear end", f"{requests['wrong']}, {requests['lost']}"],
        ["until the last request in flight had its error", _times(errors_s)],
        ["until the engine was ready again", _times(back)],
        [
            "loading without load, and the limit for coming back",
            f"{found['load_s']:.2f}, {found['limit_s']:.2f} s",
        ],
        [
            "kills that left half a file; other files than whole ones at the end",
            f"{found['kills_that_left_half_a_file']}; {found['files_left_broken']} of {found['files_left']}",
        ],
        ["descriptors of the API process before and after", f"{held['before']}, {held['after']}"],
    ]
    return table(["engine processes killed under load", ""], rows) + _source(r, found)


def cancel_storm() -> str:
    """Rate and outcome of the storm, and the tokens of the steady streams around it."""
    r, found = _result("storm")
    tokens, per_cpu = found["tokens"], found["tokens_a_cpu_s"]
    rows = [
        ["requests begun and left", f"{found['requests']:,} in {found['seconds']:.0f} s"],
        ["a second, asked and reached", f"{found['asked_rate']:.0f}, {found['rate']:.0f}"],
        ["of these cancelled in the engine", f"{found['cancelled_in_engine']:,}"],
        [
            f"tokens a second of {found['steady_streams']} steady streams: before, in the storm, after",
            f"{tokens['before']:.0f}, {tokens['during']:.0f}, {tokens['after']:.0f}",
        ],
        [
            "tokens a second of processors, before and after",
            f"{per_cpu['before']:.0f}, {per_cpu['after']:.0f}",
        ],
        ["back to 95 % of before within", "never" if tokens["back_s"] is None else f"{tokens['back_s']} s"],
    ]
    return table(["a storm of cancels", ""], rows) + _source(r, found)


def conversations() -> str:
    """Time to the first token by kind of turn."""
    r, found = _result("turns")
    words = f"\nThe next turn begins {found['next_turn_ratio']:.0f} times as soon as the first. Medians of "
    words += f"{found['conversations']} conversations; of the last column the most. "
    return turns_table(found) + words + _source(r, found).lstrip("\n")


def turns_table(found: dict[str, Any]) -> str:
    """Kinds of turns, of the figures of `bench/serving/conversations.py`."""
    rows: list[Row] = [
        [
            what,
            f"{each['first_s']:.2f}",
            f"{each['prompt_tokens']:,.0f}",
            f"{each['reused_tokens']:,.0f}",
            f"{each['most_replayed_tokens']:,}",
        ]
        for what, each in found["kinds"].items()
    ]
    return table(["prompt", "first token, s", "tokens", "found", "known, computed again"], rows)


def _result(part: str) -> tuple[dict[str, Any], dict[str, Any]]:
    r = load("failures")
    return r, r[part]


def _times(found: dict[str, float]) -> str:
    return f"{found['median']:.2f} s; 95 %: {found['p95']:.2f}; worst: {found['worst']:.2f}"


def _source(r: dict[str, Any], part: dict[str, Any]) -> str:
    return f"\n{r['threads']} threads, {r['cpu']}, commit {part['commit']}: `{r['command']}`\n"
