"""The figures of attention on the CPU, by type of keys and values."""

from report_tables import load, table

TYPES = ("f32", "i16", "i8", "i4", "i3")


def cpu_attention() -> str:
    """How many times as fast as over an f16 cache each type is, by tier."""
    r = load("cpu_attention")
    header = ["tier", "rows", "behind", "f16, ms", *TYPES]
    rows = [
        [
            case["tier"],
            str(case["rows"]),
            f"{case['depth']:,}",
            f"{case['f16_ms']:.1f}",
            *(f"{case['speed'][name]:.2f}×" for name in TYPES),
        ]
        for case in r["cases"]
    ]
    command = f"`{r['command']} --threads {r['threads']}`"
    return table(header, rows) + f"\nOne thread, commit {r['commit']}: {command}\n"
