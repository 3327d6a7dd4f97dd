"""`coldstream verify`: the same tokens whatever the budget, drafts, threads or device; and speeds."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click

from coldstream.cli.model_argument import complete_model, model_or_bundled, with_bundled_drafter
from coldstream.cli.options import check_writable, common_options, engine_config, some_engine_options
from coldstream.cli.tables import print_table
from coldstream.cli.terminal import ProgressLine, format_bytes, note, visible

if TYPE_CHECKING:
    from coldstream.cli.rig_report import Figure
    from coldstream.engine.verification import Amount, Outcome, Verification

DIFFERENT: Final = 1  # exit code
_COLUMNS: Final = ("part", "memory", "decode", "its forecast", "prefill", "forecast", "perplexity", "tokens")


@click.command("verify", short_help="Check that all ways to run a model give the same tokens.")
@click.argument("model", required=False, shell_complete=complete_model)
@click.option(
    "--minutes",
    type=click.FloatRange(0, 10, min_open=True),
    metavar="N",
    default=10,
    show_default=True,
    help="Take so long at most, 10 being the most.",
)
@click.option("--json", "as_json", is_flag=True, help="One line of JSON instead of the table.")
@click.option(
    "--report",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Write what the issue form for numbers from your rig asks for to FILE.",
)
@some_engine_options("vram", "ram", "threads", "model-draft", "offline")
@common_options
def command(
    model: str | None,
    minutes: float,
    as_json: bool,
    report: Path | None,
    **options: Any,
) -> int:
    """Run MODEL in several ways, compare their tokens, and show their speeds beside the plan's forecasts.

    The ways are three budgets, drafts, one thread, the CPU and the GPU. Each loads the model anew. The exit
    code is 1 if one of them gives other tokens or another perplexity than the first. Without MODEL: the
    bundled demo model.
    """
    # Imported here because the engine is not needed to show how the verb is used.
    from coldstream.engine.verification import verify

    check_writable(report, "--report")
    config = engine_config(model_or_bundled(model), options)
    if model is None and config.model_draft is None:
        config = with_bundled_drafter(engine_config(config.model, {**options, "spec_type": "dflash"}))
    with ProgressLine() as line:
        found = verify(config, 60 * minutes, line.update)
    document = to_json(found)
    if as_json:
        click.echo(json.dumps(document))
    else:
        rows = [row(outcome) for outcome in found.outcomes]
        print_table(_COLUMNS, rows, left=("part", "memory", "tokens"))
        for text in remarks(found):
            note(text)
    if report is not None:
        from coldstream.cli.rig_report import RigReport, describe_model, given_settings, write_report

        described = describe_model(found.model_name, found.model_bytes)
        settings, shown = given_settings(click.get_current_context()), figures(found)
        write_report(
            RigReport("verify", settings, described, shown, remarks(found), json.dumps(document)), report
        )
    return 0 if found.has_passed else DIFFERENT


def row(outcome: "Outcome") -> tuple[str, ...]:
    """The line of a part in the table."""
    part, measured = outcome.part, outcome.measured
    if measured is None:
        return (part.name, *[""] * 6, "not run")
    forecast = part.expected
    return (
        part.name,
        memory(outcome),
        _speed(measured.decode),
        _speed(forecast.decode) if forecast else "",
        _speed(measured.prefill),
        _speed(forecast.prefill.get(measured.num_prompt)) if forecast else "",
        "" if measured.perplexity is None else f"{measured.perplexity:.4f}",
        verdict(outcome),
    )


def memory(outcome: "Outcome") -> str:
    """The share of experts in fast memory, and what the plan takes of it."""
    planned = outcome.part.planned
    assert planned is not None, "a part that ran has a plan"
    where = "GPU" if planned.plan.tier == "vram" else "RAM"
    share = planned.plan.num_resident / max(1, planned.plan.num_all)
    return f"{where} {format_bytes(planned.plan.total_bytes)}, {share:.0%} of experts"


def verdict(outcome: "Outcome") -> str:
    """Whether a part's tokens are those of the first one."""
    assert outcome.measured is not None
    if outcome.difference is not None:
        return "DIFFERENT"
    return f"{outcome.measured.num_tokens} " + ("to compare with" if outcome.is_reference else "the same")


def remarks(found: "Verification") -> tuple[str, ...]:
    """What was chosen, what did not run and why, and where tokens differ."""
    lines = [f"{describe(found.amount)}; chosen so that all takes at most {found.seconds / 60:g} minutes"]
    for outcome in found.outcomes:
        name, measured = outcome.part.name, outcome.measured
        if measured is None:
            lines.append(f"not run: {name}: {outcome.part.reason}")
        elif outcome.difference is not None:
            lines.append(f"DIFFERENT: {name}: {outcome.difference}")
        elif measured.tokens_per_step is not None:
            assert outcome.part.config is not None, "a part that ran has a configuration"
            size, drafter = outcome.part.config.tree_budget, outcome.part.config.spec_type
            lines.append(
                f"{name}: by {drafter}, of {size} tokens whether that pays or not: "
                f"{measured.tokens_per_step:.2f} tokens a step"
            )
    compared = [outcome for outcome in found.outcomes if outcome.measured and not outcome.is_reference]
    same = sum(outcome.difference is None for outcome in compared)
    lines.append(
        f"{same} of {len(compared)} parts that ran gave what the first one gave"
        if compared
        else "nothing was compared: no part ran beside the first"
    )
    return tuple(visible(line) for line in lines)


def describe(amount: "Amount") -> str:
    """How much each part computes."""
    return (
        f"each part: {amount.num_answers} answers of {amount.num_generated} tokens, the first after a prompt "
        f"of {amount.num_prompt}, and the perplexity of {amount.tokens_of_windows} tokens of text"
    )


def figures(found: "Verification") -> "tuple[Figure, ...]":
    """The table's speeds and results, one below the other."""
    from coldstream.cli.rig_report import Figure

    shown = []
    for outcome in found.outcomes:
        name, _, decode, expected, prefill, expected_prefill, perplexity, result = row(outcome)
        if outcome.measured is not None:
            shown.append(Figure(f"{name}: {memory(outcome)}: decode", decode, expected))
            shown.append(
                Figure(f"{name}: prefill of {outcome.measured.num_prompt}", prefill, expected_prefill)
            )
            shown.append(Figure(f"{name}: perplexity", perplexity, ""))
        shown.append(Figure(f"{name}: tokens", result, ""))
    return tuple(shown)


def to_json(found: "Verification") -> dict[str, Any]:
    """What `--json` prints. Speeds are tokens per second."""
    return {
        "model": found.model_name,
        "size_bytes": found.model_bytes,
        "passed": found.has_passed,
        "seconds_allowed": found.seconds,
        "num_prompt": found.amount.num_prompt,
        "num_generated": found.amount.num_generated,
        "num_answers": found.amount.num_answers,
        "tokens_of_windows": found.amount.tokens_of_windows,
        "parts": [_part_to_json(outcome) for outcome in found.outcomes],
    }


def _part_to_json(outcome: "Outcome") -> Mapping[str, Any]:
    part, measured = outcome.part, outcome.measured
    plan = part.planned.plan if part.planned and measured else None
    expected = part.expected if measured else None
    return {
        "name": part.name,
        "not_run_because": None if measured else part.reason,
        "budget_bytes": plan.budget_bytes if plan else None,
        "taken_bytes": plan.total_bytes if plan else None,
        "experts_in_fast_memory": plan.num_resident / max(1, plan.num_all) if plan else None,
        "decode": measured.decode if measured else None,
        "decode_forecast": expected.decode if expected else None,
        "prefill": measured.prefill if measured else None,
        "prefill_forecast": expected.prefill.get(measured.num_prompt) if expected and measured else None,
        "perplexity": measured.perplexity if measured else None,
        "tokens_per_step": measured.tokens_per_step if measured else None,
        "num_tokens": measured.num_tokens if measured else 0,
        "difference": outcome.difference,
    }


def _speed(tokens_per_s: float | None) -> str:
    return "" if tokens_per_s is None else f"{tokens_per_s:.1f} tok/s"
