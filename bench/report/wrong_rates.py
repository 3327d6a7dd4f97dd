"""The block and the picture of decoding from wrong rates: shares that move beside fixed ones."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from html import escape
from itertools import pairwise
from typing import Any, Final

from bench.report.tables import Row, has, load, table

RESULT: Final = "gpu/wrong_rates"
GIB: Final = 2**30

Windows = list[dict[str, Any]]
Points = list[tuple[float, float]]

_PANEL_WIDTH, _PANEL_HEIGHT = 360, 190  # pixels
_LEFT, _TOP, _GAP_X, _GAP_Y, _BELOW = 56, 52, 70, 46, 60
_COLOURS: Final = ("#1b3a6b", "#b4142a", "#e08a00", "#2a7f4f", "#7a3fa0")
_GREY: Final = "#8a8f98"
_STEPS: Final = (1, 2, 5, 10, 20, 25, 50, 100, 200, 500, 1000)


def wrong_rates() -> str:
    """Two tables: from wrong rates, and beside another program."""
    r = load(RESULT)
    header = ["memory of the GPU", "times at first", "shares stay, tok/s", "shares move, tok/s"]
    header += ["of the best fixed share", "of all missing experts by the bus, at first", "at the end"]
    rows: list[Row] = []
    for row in r["rows"]:
        stay = {each["case"]: each for each in row["fixed"]}
        name = f"{row['vram_bytes'] / GIB:.2f} GiB, {row['resident_experts'] / row['experts']:.0%} of experts"
        for each in row["moving"]:
            fixed = stay[each["case"]]
            rows.append(
                [
                    name,
                    each["case"],
                    f"{fixed['tok_s']:.0f}",
                    f"{each['tok_s']:.0f}",
                    f"{each['tok_s'] / row['best']['tok_s']:.2f}",
                    f"{bus_share(fixed['windows'][0]):.0%}",
                    f"{bus_share(each['windows'][-1]):.0%}",
                ]
            )
            name = ""
    best = ", ".join(f"{row['best']['case']} with {row['best']['tok_s']:.0f} tok/s" for row in r["rows"])
    note = (
        f"From the token {r['settled']} on. Best fixed shares: {best}. {r['machine']['gpu']}, "
        f"{r['machine']['cores']} cores, commit {r['commit']}: `{r['command']}`"
    )
    return f"{table(header, rows)}\n{_beside(r)}\n{note}\n"


def _beside(r: dict[str, Any]) -> str:
    header = ["half of the cores are taken", "before, tok/s", f"in the first {r['settled']} tokens"]
    header += ["later", "of the best fixed share", f"{r['settled']} tokens after it"]
    rows: list[Row] = []
    for row in r["rows"]:
        if "load" not in row:
            continue
        best = row["load"]["best"]["tok_s"]
        for run in row["load"]["runs"]:
            before, beside, after = phases(run)
            count = -(-r["settled"] // r["window"])
            later = _rate(beside[count:])
            rows.append(
                [
                    moving_parts(run),
                    _shown(_rate(before)),
                    _shown(_rate(beside[:count])),
                    _shown(later),
                    f"{later / best:.2f}" if later else "",
                    _shown(_rate(after[count:])),
                ]
            )
    return table(header, rows)


def moving_parts(run: dict[str, Any]) -> str:
    if not run["moves"]:
        return "as planned"
    return "shares and threads move" if run.get("moves_threads") else "shares move"


def phases(run: dict[str, Any]) -> tuple[Windows, Windows, Windows]:
    """Windows before the other program began, beside it, and since it has ended."""
    begun, ended = run["load_s"]
    windows: Windows = run["windows"]
    before = [each for each in windows if each["at"] <= begun]
    beside = [each for each in windows if begun < each["at"] <= ended]
    return before, beside, [each for each in windows if each["at"] > ended]


def bus_share(window: dict[str, Any]) -> float:
    """Of the experts of all tokens that miss 1, 2, … of them."""
    by_bus: Sequence[int] = window["by_bus"]
    return sum(by_bus) / sum(range(1, len(by_bus) + 1))


def _rate(windows: Windows) -> float | None:
    return len(windows) / sum(1 / each["tok_s"] for each in windows) if windows else None


def _shown(rate: float | None) -> str:
    return "" if rate is None else f"{rate:.0f}"


@dataclass(frozen=True)
class Line:
    name: str
    points: Points
    colour: str


@dataclass(frozen=True)
class Panel:
    """A place in the picture, and the values at its edges; both axes begin at 0."""

    column: int
    row: int
    most_x: float
    most_y: float

    @property
    def left(self) -> int:
        return _LEFT + self.column * (_PANEL_WIDTH + _GAP_X)

    @property
    def top(self) -> int:
        return _TOP + self.row * (_PANEL_HEIGHT + _GAP_Y)

    def at(self, x: float, y: float) -> str:
        right = self.left + _PANEL_WIDTH * x / self.most_x
        below = self.top + _PANEL_HEIGHT * (1 - y / self.most_y)
        return f"{right:.1f},{below:.1f}"

    def axes(self, name: str, unit: str, shown: Callable[[float], str]) -> list[str]:
        """A frame with a title, and three numbers at each axis."""
        parts = [
            f'<rect x="{self.left}" y="{self.top}" width="{_PANEL_WIDTH}" height="{_PANEL_HEIGHT}" '
            'fill="none" stroke="#d0d4da"/>',
            f'<text x="{self.left}" y="{self.top - 8}" font-weight="bold">{escape(name)}</text>',
        ]
        for share in (0.0, 0.5, 1.0):
            x, y = self.left + share * _PANEL_WIDTH, self.top + (1 - share) * _PANEL_HEIGHT
            parts.append(
                f'<text x="{x:g}" y="{self.top + _PANEL_HEIGHT + 15}" text-anchor="middle">'
                f"{share * self.most_x:.3g}{unit if share == 1 else ''}</text>"
            )
            value = shown(share * self.most_y)
            parts.append(f'<text x="{self.left - 6}" y="{y + 4:g}" text-anchor="end">{value}</text>')
        return parts

    def line(self, line: Line, dashes: str = "") -> str:
        points = " ".join(self.at(x, y) for x, y in line.points)
        dashed = f' stroke-dasharray="{dashes}"' if dashes else ""
        return (
            f'<polyline points="{points}" fill="none" stroke="{line.colour}" stroke-width="1.6"{dashed}>'
            f"<title>{escape(line.name)}</title></polyline>"
        )

    def span(self, begin: float, end: float) -> str:
        left, right = (self.left + _PANEL_WIDTH * x / self.most_x for x in (begin, end))
        return (
            f'<rect x="{left:.1f}" y="{self.top}" width="{right - left:.1f}" height="{_PANEL_HEIGHT}" '
            'fill="#f1e3c8"/>'
        )


def picture(r: dict[str, Any]) -> str:
    """In SVG: a column for each budget and one for each load, rates above and shares of the bus below."""
    columns = [_moving(r, row, number) for number, row in enumerate(r["rows"])]
    loaded = [row for row in r["rows"] if "load" in row]
    columns += [_loaded(row, number) for number, row in enumerate(loaded, start=len(columns))]
    width = _LEFT + len(columns) * (_PANEL_WIDTH + _GAP_X) - _GAP_X + 30
    height = _TOP + 2 * _PANEL_HEIGHT + _GAP_Y + _BELOW
    title = "Shares that move while a model decodes: from wrong rates, and beside another program"
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" '
            f'height="{height}" font-family="sans-serif" font-size="11" fill="#333" role="img">',
            f"<title>{title}</title>",
            f'<rect width="{width}" height="{height}" fill="#fff"/>',
            f'<text x="{_LEFT}" y="22" font-size="14">{title}</text>',
            *(part for column in columns for part in column),
            "</svg>",
            "",
        ]
    )


def _moving(r: dict[str, Any], row: dict[str, Any], column: int) -> Iterable[str]:
    """Over tokens, from each beginning; dashed: the best fixed share."""
    window, count = r["window"], len(row["moving"][0]["windows"])
    most = _most_rate([*row["moving"], {"windows": [row["best"]]}])
    rates, shares = Panel(column, 0, count * window, most), Panel(column, 1, count * window, 1.0)
    yield from rates.axes(f"tok/s, {row['vram_bytes'] / GIB:.2f} GiB", " tokens", lambda y: f"{y:.3g}")
    yield from shares.axes("share of the bus", " tokens", lambda y: f"{y:.0%}")
    best: Points = [(0.0, row["best"]["tok_s"]), (count * window, row["best"]["tok_s"])]
    yield rates.line(Line(f"best fixed share: {row['best']['case']}", best, _GREY), "5 4")
    names = []
    for run, colour in zip(row["moving"], _COLOURS, strict=True):
        ends = [window * (number + 1) for number in range(count)]
        for panel, values in (
            (rates, [each["tok_s"] for each in run["windows"]]),
            (shares, [bus_share(each) for each in run["windows"]]),
        ):
            yield panel.line(Line(run["case"], list(zip(ends, values, strict=True)), colour))
        names.append((run["case"], colour))
    yield from _legend(shares, [*names, ("best fixed share", _GREY)])


def _loaded(row: dict[str, Any], column: int) -> Iterable[str]:
    """Over seconds, with the time of the other program shaded."""
    runs = row["load"]["runs"]
    seconds = max(run["windows"][-1]["at"] for run in runs)
    most = _most_rate([*runs, {"windows": [row["load"]["best"]]}])
    rates, shares = Panel(column, 0, seconds, most), Panel(column, 1, seconds, 1.0)
    yield rates.span(*runs[0]["load_s"])
    yield shares.span(*runs[0]["load_s"])
    name = f"tok/s, {row['load']['processes']} other processes in the middle"
    yield from rates.axes(name, " s", lambda y: f"{y:.3g}")
    yield from shares.axes("share of the bus", " s", lambda y: f"{y:.0%}")
    best = row["load"]["best"]
    span: Points = [(at, best["tok_s"]) for at in runs[0]["load_s"]]
    yield rates.line(Line(f"best fixed share: {best['case']}", span, _GREY), "5 4")
    names = []
    for run, colour in zip(runs, _COLOURS, strict=False):
        name = moving_parts(run)
        for panel, value in ((rates, lambda each: each["tok_s"]), (shares, bus_share)):
            yield panel.line(Line(name, [(each["at"], value(each)) for each in run["windows"]], colour))
        names.append((name, colour))
    yield from _legend(shares, [*names, ("best fixed share", _GREY)])


def _legend(panel: Panel, names: Sequence[tuple[str, str]]) -> Iterable[str]:
    """Below a panel, three names a line."""
    for number, (name, colour) in enumerate(names):
        x = panel.left + (number % 3) * (_PANEL_WIDTH // 3)
        y = panel.top + _PANEL_HEIGHT + 34 + 15 * (number // 3)
        yield f'<rect x="{x}" y="{y - 8}" width="12" height="8" fill="{colour}"/>'
        yield f'<text x="{x + 17}" y="{y}">{escape(name)}</text>'


def _most_rate(runs: Sequence[dict[str, Any]]) -> float:
    """A number of few digits that is not below any rate."""
    most = max(each["tok_s"] for run in runs for each in run["windows"])
    scale = next((step for step, larger in pairwise(_STEPS) if most <= 10 * larger), _STEPS[-1])
    return float(scale * -(-most // scale))


def pictures() -> dict[str, str]:
    """The picture's file below docs/, if there is a result."""
    return {"wrong_rates.svg": picture(load(RESULT))} if has(RESULT) else {}
