"""docs/cli.md and README.md are true: sessions, exit codes, and fields of JSON."""

import json
import os
import re
import shlex
import shutil
import signal
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
from doc_sessions import Session, masked, play, sessions

from builders import make_model, write_model
from coldstream import errors
from coldstream.assets import demo_model_path
from coldstream.cli.doctor import document
from coldstream.cli.interrupts import EXIT_INTERRUPTED, EXIT_TERMINATED
from coldstream.cli.main import EXIT_BROKEN_PIPE, VERBS
from coldstream.experts.gpu_statistics import GpuExpertStatistics, MissShareStatistics, StepTimes
from coldstream.experts.prefetch import PrefetchStatistics
from coldstream.placement.hardware import GpuHardware
from coldstream.placement.run_file import LastRun
from coldstream.planning.diagnosis import MachineFacts, find
from coldstream.planning.diagnosis.machine_facts import RefusedLock
from dflash_trees import write_drafter
from hub_server import HubServer
from machine_facts import NO_GPU, SOUND

Run = Callable[..., tuple[int, str, str]]
ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "cli.md").read_text()
SESSIONS = sessions(PAGE)
FIRST_PAGE_SESSIONS = sessions((ROOT / "README.md").read_text())
QUICK_VERBS = {"run", "show", "plan"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, dict[str, str]]]:
    """Where the page's commands run, one after the other, and the environment: a hub, and no GPU."""
    folder = tmp_path_factory.mktemp("page")
    shutil.copy(demo_model_path(), folder / "demo.gguf")
    write_drafter(folder / "drafter", "35B, DFlash 2")
    with HubServer({"tiny-Q4_K_M.gguf": demo_model_path().read_bytes()}) as hub:
        cache = {"HF_HUB_CACHE": str(folder / "cache"), "HF_HUB_DISABLE_XET": "1"}
        yield folder, {"HF_ENDPOINT": hub.endpoint, "CUDA_VISIBLE_DEVICES": "", **cache}
    if (folder / "serve.pid").exists():
        with suppress(ProcessLookupError):  # a server that its session did not end
            os.kill(int((folder / "serve.pid").read_text()), signal.SIGKILL)


def is_quick(session: Session) -> bool:
    """Whether it is one command without a shell's means, of a verb that measures and fetches nothing."""
    program, *verb = session.command.split()[:2]
    is_plain = program == "coldstream" and not re.search(r"[|&;<>$]", session.command)
    return is_plain and not session.is_chat and QUICK_VERBS.issuperset(verb)


@pytest.mark.sharded(of="processes")
def test_every_session_prints_what_the_page_says(
    folder: tuple[Path, dict[str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the page's order, as a later one may use what an earlier one wrote."""
    path, environment = folder
    monkeypatch.chdir(path)
    assert FIRST_PAGE_SESSIONS
    for session in [*SESSIONS, *FIRST_PAGE_SESSIONS]:
        printed = play(session, environment, path)
        assert masked(printed) == masked(session.expected), session.command


def test_sessions_of_one_quick_command_print_what_the_pages_say(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With each commit, unlike the test of all sessions: a line of output that changes is seen at once.

    In this process, on the CPU.
    """
    (tmp_path / "demo.gguf").symlink_to(demo_model_path())
    monkeypatch.chdir(tmp_path)
    quick = [session for session in [*SESSIONS, *FIRST_PAGE_SESSIONS] if is_quick(session)]
    with open(os.devnull) as nothing:
        monkeypatch.setattr("sys.stdin", nothing)
        for session in quick:
            _, *arguments = shlex.split(session.command)
            on_cpu = ("--device", "cpu") if arguments[:1] == ["run"] else ()
            code, out, error = run(*arguments, *on_cpu)
            assert code == 0, error
            assert masked(out + error) == masked(session.expected), session.command
    assert {verb for session in quick for verb in session.command.split()[1:2]} == QUICK_VERBS


def test_the_page_has_a_session_of_every_verb() -> None:
    used = {verb for session in SESSIONS for verb in re.findall(r"\bcoldstream ([\w-]+)", session.command)}
    assert used == set(VERBS)
    assert sum(session.is_chat for session in SESSIONS) == 1


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        ("generated 3 tokens, 4.5 tok/s", "generated 3 tokens, 99.0 tok/s", True),
        ("generated 3 tokens, 4.5 tok/s", "generated 4 tokens, 4.5 tok/s", False),
        ("decode, tok/s      1.0    2.0", "decode, tok/s   1303.7   10.0", True),
        ("a  b\n─  ─\n1  2", "a    b\n───  ─\n1    2", True),
        ("a  b\n─  ─\n1  2", "a    b\n───  ─\n1    3", False),
        ("    x = 1", "  x = 1", False),
        ("| avx2 | 1.5 ± 0.1 | 3% |", "| amx | 20.5 ± 9.1 | 30% |", True),
    ],
)
def test_only_what_belongs_to_the_machine_is_masked(one: str, other: str, same: bool) -> None:
    assert (masked(one) == masked(other)) == same


def test_every_exit_code_is_documented_with_its_errors() -> None:
    rows = dict(re.findall(r"^\| (\d+) \| [^|]+ \| ([^|]*)\|$", PAGE, re.MULTILINE))
    documented = {code: set(re.findall(r"`(\w+)`", names)) for code, names in rows.items()}
    signals = (EXIT_INTERRUPTED, EXIT_TERMINATED, EXIT_BROKEN_PIPE)
    actual: dict[str, set[str]] = {"0": set(), **{str(code): set() for code in signals}}
    for error in vars(errors).values():
        if isinstance(error, type) and issubclass(error, errors.ColdstreamError):
            actual.setdefault(str(error.exit_code), set()).add(error.__name__)
    assert documented == actual


def paths_of(value: Any, path: str = "") -> set[str]:
    """The names of all values in a document: a.b for an object's, a[].b for those of a list of objects."""
    if isinstance(value, dict):
        named = ((f"{path}.{key}" if path else key, inner) for key, inner in value.items())
        return {name for key, inner in named for name in paths_of(inner, key)}
    if isinstance(value, list) and value and isinstance(value[0], dict):
        return {name for inner in value for name in paths_of(inner, f"{path}[]")}
    return {path}


def paths_on_a_gpu(prefix: str, kind: type) -> set[str]:
    """Those of a dataclass that only a machine with a GPU prints."""
    inner = {"step_times": StepTimes, "prefetch": PrefetchStatistics, "shares": MissShareStatistics}
    paths = set()
    for field in fields(kind):
        name = f"{prefix}.{field.name}"
        paths |= paths_on_a_gpu(name, inner[field.name]) if field.name in inner else {name}
    return paths


def documented_paths() -> dict[str, set[str]]:
    """Those of the page's table, by verb."""
    documented: dict[str, set[str]] = {}
    for verb, path in re.findall(r"^\| `(\w+)` \| `([^`]+)` \|", PAGE, re.MULTILINE):
        documented.setdefault(verb, set()).add(path)
    return documented


def as_json(facts: MachineFacts) -> Any:
    """What `doctor --json` prints of these facts."""
    return json.loads(json.dumps(document(facts, find(facts))))


def test_fields_of_a_plan_are_documented(run: Run) -> None:
    """With each commit, as plans change most often."""
    patterns = [each.replace(r"\*", ".+") for each in map(re.escape, documented_paths()["plan"])]
    code, out, error = run("plan", "--device", "cpu", "--json")
    assert (code, error) == (0, "")
    assert not [path for path in paths_of(json.loads(out)) if not re.fullmatch("|".join(patterns), path)]


@pytest.mark.sharded(of="processes")
def test_every_field_of_json_is_documented_and_exists(
    run: Run, tmp_path: Path, folder: tuple[Path, dict[str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    documented = documented_paths()
    foreign = make_model(quant="F32")
    foreign.arch = "llama"
    (llama,) = write_model(tmp_path / "llama.gguf", foreign)
    demo, on_cpu = str(demo_model_path()), ("--device", "cpu")
    quick = ("bench", *on_cpu, "-p", "8", "-n", "2", "-r", "1", "-c", "64")
    commands = {
        "show": [("show", demo, "--tensors"), ("show", str(llama))],
        "bench": [quick, (*quick, "--ram", "30M"), (*quick, "-c", "128", "--spec-type", "mtp")],
        "plan": [
            ("plan", *on_cpu),
            ("plan", *on_cpu, "--ram", "24M", "-c", "512"),
            ("plan", "--vram", "470M", "--ram", "653M", "-c", "512"),
            ("plan", "--vram", "470M", "--ram", "652M", "-c", "512"),
        ],
    }
    commands["verify"] = [("verify", "--minutes", "0.001")]
    actual = {verb: set[str]() for verb in commands}
    for verb, calls in commands.items():
        for call in calls:
            code, out, error = run(*call, "--json")
            assert (code, error if verb != "verify" else "") == (0, "")
            actual[verb] |= paths_of(json.loads(out))
    refused = RefusedLock("2026-01-02 03:04 UTC", 7, 2, 1)
    poor = replace(SOUND, gpu=NO_GPU, rates=replace(SOUND.rates, state="damaged"), refused_lock=refused)
    actual["doctor"] = paths_of(as_json(SOUND)) | paths_of(as_json(poor))
    code, out, _ = run("doctor", "--json")
    assert paths_of(json.loads(out)) <= actual["doctor"]
    path, environment = folder
    play(Session("coldstream pull org/tiny-GGUF", ""), environment, path)
    actual["ls"] = paths_of(json.loads(play(Session("coldstream ls --json", ""), environment, path)))
    actual["bench"] |= paths_on_a_gpu("experts_on_gpu", GpuExpertStatistics)
    actual["bench"] |= {"experts_on_gpu.prefetch", "experts_on_gpu.shares"}
    actual["plan"] |= paths_on_a_gpu("hardware.gpu", GpuHardware)
    actual["plan"] |= paths_on_a_gpu("last_runs[]", LastRun)
    for verb, paths in documented.items():
        patterns = {path: re.compile(re.escape(path).replace(r"\*", ".+")) for path in paths}
        unknown = {path for path in actual[verb] if not any(one.fullmatch(path) for one in patterns.values())}
        assert not unknown, f"{verb}: not in the page"
        absent = {path for path, one in patterns.items() if not any(map(one.fullmatch, actual[verb]))}
        assert not absent, f"{verb}: only in the page"
    assert documented.keys() == actual.keys()
