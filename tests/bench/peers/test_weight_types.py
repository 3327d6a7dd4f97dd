"""The benchmark by weight type, with programs that answer like `llama-bench` and our engine in earnest."""

import argparse
import json
import sys
import threading
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from bench.peers import weight_types
from bench.peers.weight_types import CASES, IK_LLAMA_CPP, LLAMA_CPP, Case, Peer, Rates, RefusedError
from coldstream.gguf.quant_types import QuantType
from coldstream.placement.hardware import Hardware
from small_shape import SMALL

# Speeds depend on the settings; the model's name decides whether it is taken; every call is noted.
LLAMA_BENCH = """#!{python}
import json, sys
words = sys.argv[1:]
option = dict(zip(words[::2], words[1::2]))
with open({log!r}, "a") as log:
    print(json.dumps(option), file=log)
if {refused!r} in option["-m"]:
    print("load: error: unknown type", file=sys.stderr)
    sys.exit(1)
prompt, generated = int(option["-p"]), int(option["-n"])
rate = {rate} * (4 if prompt > 8 else 1) * (2 if option.get("-rtr", "0") == "1" and generated else 1)
rate *= 0.5 if option["-fa"] in ("0", "off") else 1
samples = [rate * (1 + 0.01 * i) for i in range(int(option["-r"]))]
print(json.dumps([{{"build_commit": "c0ffee", "cpu_info": "cpu", "samples_ts": samples}}]))
"""


def stand_in(folder: Path, name: str, rate: float, refused: str = "nothing") -> Path:
    """A program; what it was called with is in `calls`."""
    program = folder / name
    log = str(folder / f"{name}.log")
    text = LLAMA_BENCH.format(python=sys.executable, log=log, refused=refused, rate=rate)
    program.write_text(text)
    program.chmod(0o755)
    return program


def calls(program: Path) -> list[dict[str, str]]:
    return [json.loads(line) for line in program.with_name(f"{program.name}.log").read_text().splitlines()]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("types")


@pytest.fixture(scope="module")
def programs(folder: Path) -> tuple[Path, Path]:
    return stand_in(folder, "main", 100.0), stand_in(folder, "ik", 60.0, refused="IQ1_S")


@pytest.fixture(scope="module")
def result(programs: tuple[Path, Path], folder: Path) -> dict[str, Any]:
    """One run over a model as small as tests have."""
    out = folder / "out" / "types.json"
    words = ["--llama-cpp", str(programs[0]), "--ik-llama-cpp", str(programs[1]), "--models", "small"]
    words += [
        "--versions",
        "1.2",
        "of May",
        "--types",
        "Q2_K",
        "IQ1_S",
        "--samples",
        "3",
        "--folder",
        str(folder),
        "--out",
        str(out),
    ]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(weight_types, "SMALL_SHAPE", SMALL)
        patch.setattr(sys, "argv", ["weight_types", *words])
        assert weight_types.main() == 0
    written: dict[str, Any] = json.loads(out.read_text())
    return written


@pytest.mark.sharded(of="measurements", fixture="result")
def test_every_program_is_timed_on_every_case(result: dict[str, Any], folder: Path) -> None:
    found = result["models"]["small"]["Q2_K"]
    assert list(found["cases"]) == [case.name for case in CASES]
    for case in found["cases"].values():
        assert set(case["tok_s"]) == {"ours", "llama.cpp", "ik_llama.cpp"}
        assert {len(runs) for runs in case["runs"].values()} == {3}
        for peer, ratio in case["ratios"].items():
            assert ratio["median"] == pytest.approx(case["tok_s"]["ours"] / case["tok_s"][peer], rel=0.5)
            low, high = ratio["interval"]
            assert low <= ratio["median"] <= high
    assert found["bytes_per_token"] > 0
    shares, decode = found["share_of_bandwidth"], found["cases"]["decode"]["tok_s"]
    for name, share in shares.items():
        expected = decode[name] * found["bytes_per_token"] / found["read_bandwidth_bytes_s"]
        assert share == pytest.approx(expected)
    assert not list(folder.glob("**/*.gguf"))
    assert result["peers"]["ik_llama.cpp"] == {"build_commit": "c0ffee", "version": "of May"}
    assert result["command"].endswith("--samples 3 --models small --types Q2_K IQ1_S")


@pytest.mark.sharded(of="measurements", fixture="result")
def test_settings_are_tuned_for_each_case(result: dict[str, Any], programs: tuple[Path, Path]) -> None:
    found = result["models"]["small"]["Q2_K"]
    assert found["settings"]["llama.cpp"] == {case.name: "-fa on" for case in CASES}
    assert found["settings"]["ik_llama.cpp"]["decode"] == "-fa 1 -fmoe 1 -rtr 1"
    assert found["settings"]["ik_llama.cpp"]["prompt of 512"] == "-fa 1 -fmoe 1 -rtr 0"
    # Repacking doubles this program's decoding: 60 becomes 120, which is more than 100.
    decode = found["cases"]["decode"]
    assert decode["tok_s"]["ik_llama.cpp"] == pytest.approx(120, rel=0.02)
    assert decode["better_peer"] == "ik_llama.cpp"
    assert found["cases"]["8 rows"]["better_peer"] == "llama.cpp"
    asked = calls(programs[1])
    tuning = len(IK_LLAMA_CPP) * len(CASES)
    samples = [call for call in asked if "Q2_K" in call["-m"]][1 + tuning :]
    assert [(call["-p"], call["-n"]) for call in samples] == [("0", "64"), ("512", "0"), ("8", "0")] * 3
    assert {call["-t"] for call in asked} == {"2"}


@pytest.mark.sharded(of="measurements", fixture="result")
def test_a_refused_type_has_the_words_of_the_peer(result: dict[str, Any]) -> None:
    found = result["models"]["small"]["IQ1_S"]
    assert found["refused"] == {"ik_llama.cpp": "load: error: unknown type"}
    for case in found["cases"].values():
        assert set(case["ratios"]) == {"llama.cpp"}
        assert case["better_peer"] == "llama.cpp"


def test_settings_of_an_earlier_result_are_taken_as_they_are(tmp_path: Path) -> None:
    """Of its own files; others are tried."""
    program = stand_in(tmp_path, "again", 1.0)
    peer, settings = Peer("again", program, LLAMA_CPP), {case.name: "-fa on --repack 0" for case in CASES}
    known = peer.tuned(tmp_path / "model", 2, {"again": settings})
    assert known == {case.name: ("-fa", "on", "--repack", "0") for case in CASES}
    assert not program.with_name("again.log").exists()
    assert peer.tuned(tmp_path / "model", 2, {"other": settings}) == {
        case.name: LLAMA_CPP[0] for case in CASES
    }
    assert len(calls(program)) == len(LLAMA_CPP) * len(CASES)


def test_programs_take_the_first_place_alternately(monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []

    class Engine:
        def rate(self, case: Case) -> float:
            order.append("ours")
            return 1.0

    def note(peer: Peer, *_: object) -> float:
        order.append(peer.name)
        return 1.0

    monkeypatch.setattr(Peer, "rate", note)
    peers = {Peer(name, Path(), LLAMA_CPP): {case.name: () for case in CASES} for name in ("a", "b")}
    weight_types.measure_cases(Engine(), peers, Path(), 2, 3)  # type: ignore[arg-type]
    assert order[:3] == ["ours", "a", "b"]
    assert order[9:12] == ["a", "b", "ours"]
    assert order[18:21] == ["b", "ours", "a"]


def test_summaries() -> None:
    rates = Rates(ours=[10.0, 20.0, 30.0], peers={"a": [5.0, 20.0, 10.0], "b": [1.0, 30.0, 40.0]})
    found = rates.summary()
    assert found["tok_s"] == {"ours": 20.0, "a": 10.0, "b": 30.0}
    assert found["better_peer"] == "b"
    assert found["ratios"]["a"] == {"median": 2.0, "interval": [1.0, 3.0]}
    assert Rates(ours=[1.0]).summary()["better_peer"] is None


def test_a_program_that_says_nothing_is_refused(tmp_path: Path) -> None:
    silent = tmp_path / "silent"
    silent.write_text(f"#!{sys.executable}\n")
    silent.chmod(0o755)
    with pytest.raises(RefusedError, match="it ended with 0"):
        Peer("x", silent, LLAMA_CPP).rate(tmp_path, 2, CASES[0], LLAMA_CPP[0])


def test_types_are_all_quantised_ones() -> None:
    floats = {QuantType.F32, QuantType.F16, QuantType.BF16}
    assert set(weight_types.TYPES) == set(QuantType) - floats
    assert weight_types.known_type("IQ3_S") is QuantType.IQ3_S
    with pytest.raises(Exception, match="no weight type 'F16'"):
        weight_types.known_type("F16")


def test_files_beside_each_other_have_cores_of_their_own(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    cpus = list(range(8))
    meeting, busy = threading.Barrier(2, timeout=60), threading.Lock()
    pinned: dict[int, set[int]] = {}  # by thread
    seen: list[set[int]] = []

    def pin(_: int, cores: Iterable[int]) -> None:
        pinned[threading.get_ident()] = set(cores)

    def part(options: argparse.Namespace, model: str, kind: QuantType) -> dict[str, Any]:
        with busy:
            seen.append(pinned[threading.get_ident()])
        meeting.wait()  # there are two at a time
        return {"peers": {"llama.cpp": {"version": "1"}}, "models": {model: {kind.name: {"file": model}}}}

    monkeypatch.setattr(weight_types, "affinity", lambda: cpus)
    monkeypatch.setattr(weight_types, "part", part)
    monkeypatch.setattr(weight_types.os, "sched_setaffinity", pin)
    monkeypatch.setattr(weight_types.Hardware, "measure", pairs_of_threads)
    words = ["--llama-cpp", "a", "--ik-llama-cpp", "b", "--types", "Q2_K", "Q4_K", "--beside", "2"]
    out = tmp_path / "out.json"
    monkeypatch.setattr(sys, "argv", ["weight_types", *words, "--commit", "abc", "--out", str(out)])
    assert weight_types.main() == 0
    assert {frozenset(cores) for cores in seen} == {frozenset({0, 2}), frozenset({4, 6})}
    assert len(seen) == 4
    written = json.loads(out.read_text())
    assert (written["commit"], written["beside"]) == ("abc", 2)
    assert "--beside 2" in written["command"]
    for model in ("cut", "small"):
        assert written["models"][model] == {kind: {"file": model} for kind in ("Q2_K", "Q4_K")}
    with pytest.raises(ValueError, match="there are 4"):
        weight_types.core_sets(2, 3)


def pairs_of_threads(cpu_ids: Iterable[int] = ()) -> Hardware:
    """A machine in which CPUs 2n and 2n + 1 are one core."""
    return Hardware("a CPU", (), 8, len({cpu // 2 for cpu in cpu_ids}), 1 << 30, 1 << 30)
