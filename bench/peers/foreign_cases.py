"""Runs other projects' cases of parsers against this package's, from a checkout that the caller has.

    python -m bench.peers.foreign_cases vllm CHECKOUT [--out docs/results/vllm_parser_cases.json]

CHECKOUT is a source tree of vLLM: a clone, or its unpacked sdist. The test files are copied to a temporary
folder and run there as they are, with `vllm_adapter.py` in the place of vLLM. Nothing of them is kept but
the names of cases, their outcomes, and the reason of each failure.
"""

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.results import write_result
from coldstream.placement.hardware import Hardware

BENCH = Path(__file__).parent


@dataclass(frozen=True)
class Project:
    """Where a project's cases are, and why some of them fail here."""

    files: tuple[str, ...]  # of cases
    helpers: tuple[str, ...]  # that they import, as far as the checkout has them
    adapter: str  # the plugin of pytest
    reasons: dict[str, str]  # by a part of the case's name or of its error


VLLM = Project(
    files=(
        "tests/tool_parsers/test_hermes_tool_parser.py",
        "tests/tool_parsers/test_qwen3coder_tool_parser.py",
        "tests/tool_parsers/test_qwen3xml_tool_parser.py",
        "tests/tool_parsers/test_glm4_moe_tool_parser.py",
        "tests/tool_parsers/test_glm47_moe_tool_parser.py",
        "tests/tool_parsers/test_poolside_v1_tool_parser.py",
        "tests/tool_parsers/test_gemma4_tool_parser.py",
        "tests/reasoning/test_qwen3_reasoning_parser.py",
        "tests/reasoning/test_glm4_moe_reasoning_parser.py",
        "tests/reasoning/test_gemma4_reasoning_parser.py",
    ),
    helpers=(
        "tests/tool_parsers/conftest.py",
        "tests/tool_parsers/utils.py",
        "tests/tool_parsers/common_tests.py",
        "tests/reasoning/utils.py",
        "tests/parser/engine/replay_harness.py",
    ),
    adapter="vllm_adapter",
    reasons={
        "Granite4ToolParser": "another family of models, whose format is not read here",
        "_parse_gemma4": "a function inside of vLLM's parser, which has no counterpart",
        "ResponsesRequest": "vLLM's own shapes of requests, which are read elsewhere here",
        "structured_outputs": "vLLM's own way to demand a call; it is a grammar here",
        "to_sampling_params": "vLLM's own way to see control tokens; they are marked here",
        "skip_special_tokens": "vLLM's own way to see control tokens; they are marked here",
        "ParserEngineReasoningAdapter": "a class inside of vLLM's parser",
        "is_reasoning_end": "vLLM asks for the end of a thought by token ids; it is found in the text here",
        "adjust_request": "vLLM's own way to prepare a request, which has no counterpart",
        "glm53_template": "whether a prompt opens a thought is read off the prompt here",
        "[invalid_": "a thought without its opening tag is content here, as in vLLM's own streams",
        "[new_line": "blanks between a thought or a text and a call are part of neither here",
        "tool_call_started": "a call that has only begun is held back here",
        "new_turn_reasoning_end": "whether a prompt opens a thought is read off the prompt here",
        "three_mixed": "what is no call is content here; vLLM makes calls without arguments of it",
        "malformed": "what is no call is content here; vLLM makes calls without arguments of it",
        "structural_tag": "structural tags are vLLM's own; what a call must be is a grammar here",
        "I need to re": "blanks between a thought or a text and a call are part of neither here",
    },
)
PROJECTS = {"vllm": VLLM}


def run(project: Project, checkout: Path) -> list[dict[str, str]]:
    """The outcome of each case."""
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        present = [name for name in project.files if (checkout / name).is_file()]
        if not present:
            raise SystemExit(f"{checkout}: none of the files of cases is there: {', '.join(project.files)}")
        for name in (*present, *project.helpers):
            if (checkout / name).is_file():
                (root / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(checkout / name, root / name)
        for package in (
            *("tests", "tests/tool_parsers", "tests/reasoning"),
            *("tests/parser", "tests/parser/engine"),
        ):
            (root / package / "__init__.py").touch()
        out = root / "outcomes.json"
        command = [sys.executable, "-m", "pytest", "-q", "-p", project.adapter, "-p", "no:cacheprovider"]
        paths = os.pathsep.join(map(str, (root, BENCH, *filter(None, sys.path))))
        subprocess.run(
            [*command, "-c", os.devnull, "--rootdir", folder, *present],
            cwd=root,
            env={**os.environ, "PYTHONPATH": paths, "FOREIGN_CASES_OUT": str(out)},
            stdout=sys.stderr,
            check=False,
        )
        return list(json.loads(out.read_text())) if out.is_file() else []


def summary(project: Project, outcomes: list[dict[str, str]]) -> dict[str, Any]:
    """Counts by file, and each case that did not pass with its reason."""
    files: dict[str, Counter[str]] = {}
    failures = []
    for each in outcomes:
        name, _, case = each["case"].partition("::")
        counts = files.setdefault(Path(name).name, Counter())
        counts[each["outcome"]] += 1
        if each["outcome"] == "failed":
            failures.append({"case": case, "reason": reason_of(project, each)})
    return {"files": {name: dict(counts) for name, counts in files.items()}, "failures": failures}


def reason_of(project: Project, outcome: dict[str, str]) -> str:
    """Why a case fails; without a known reason, its error."""
    found = [
        why for part, why in project.reasons.items() if part in outcome["case"] or part in outcome["error"]
    ]
    return found[0] if found else f"unexplained: {' '.join(outcome['error'].split())[:200]}"


def version_of(checkout: Path) -> str:
    """The commit of a clone, or the version of an sdist and the commit that it names."""
    try:
        command = ["git", "-C", str(checkout), "rev-parse", "--short=12", "HEAD"]
        if (checkout / ".git").exists():
            return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        pass
    texts = [
        path.read_text()
        for path in (checkout / "PKG-INFO", *checkout.glob("*/_version.py"))
        if path.is_file()
    ]
    version = re.search(r"^Version: (\S+)$", "\n".join(texts), re.MULTILINE)
    commit = re.search(r"commit_id = '(\w+)'", "\n".join(texts))
    return " ".join(each[1] for each in (version, commit) if each) or "unknown"


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("project", choices=PROJECTS)
    parser.add_argument("checkout", type=Path)
    parser.add_argument("--out", type=Path, help="also write the result here")
    options = parser.parse_args()
    project = PROJECTS[options.project]
    found = summary(project, run(project, options.checkout))
    command = f"python -m bench.peers.foreign_cases {options.project} CHECKOUT"
    where = {"command": command, "cpu": Hardware.measure().cpu_name}
    result = {**where, "version": version_of(options.checkout), **found}
    write_result(result, options.out)
    return 0 if found["files"] else 1


if __name__ == "__main__":
    sys.exit(main())
