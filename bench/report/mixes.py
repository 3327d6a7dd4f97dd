"""The block on the full-size file: the types of each mix, and where they come from."""

from bench.full_size_mixes import MIXES, Rule, every_layer
from bench.report.tables import table


def mixes() -> str:
    """A table of all mixes; the first rule that fits a matrix gives its type."""
    rows = [[f"`{mix.name}`", "; ".join(map(rule_text, mix.rules)), mix.source] for mix in MIXES.values()]
    return table(["mix", "types of matrices, the first that fits", "source"], rows)


def rule_text(rule: Rule) -> str:
    """A rule in a few words."""
    if rule.names == "*":
        return f"all else {rule.type_name}"
    names = ", ".join(f"`{name}`" for name in rule.names.split())
    return f"{names} {rule.type_name}" + ("" if rule.layers is every_layer else " in some layers")
