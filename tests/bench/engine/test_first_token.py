"""Where a sample of the main thread counts, what a start under the sampler leaves, and a peer's starts."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from bench.engine import first_token, sampled_start
from coldstream.assets import demo_model_path

ROOT = Path(__file__).parents[3]


def test_every_phase_names_functions_that_exist() -> None:
    for phase, names in sampled_start.PHASES.items():
        for module, function in names:
            if module == "importlib":
                continue
            source = ROOT / "src" / "coldstream" / (module.replace(".", "/") + ".py")
            assert f"def {function.rpartition('.')[2]}(" in source.read_text(), (phase, module, function)


@pytest.mark.sharded(of="measurements")
def test_a_start_is_divided_into_phases(tmp_path: Path) -> None:
    out = tmp_path / "phases.json"
    script = ROOT / "bench" / "engine" / "sampled_start.py"
    argv = ["run", str(demo_model_path()), "--device", "cpu", "-p", "import", "-n", "1", "--quiet", "--raw"]
    subprocess.run([sys.executable, str(script), str(out), *argv], check=True, capture_output=True)
    kept = json.loads(out.read_text())
    phases, functions = kept["phases_s"], kept["functions_s"]
    assert phases["import"] > 0
    assert phases.keys() <= {*sampled_start.PHASES, "other"}
    assert functions["cli.main.main"] >= functions["engine.opened_model.open_model"] > 0
    assert any(name.startswith("import coldstream") for name in functions)


def peer_program(path: Path, last: str) -> str:
    """A program that says what llama.cpp says while it loads, and writes its options."""
    said = 'echo "load_tensors: CUDA0 model buffer size = 12.50 MiB" >&2'
    path.write_text(f'#!/bin/sh\necho "$@" >> {path}.options\n{said}\n{last}\n')
    path.chmod(0o755)
    return str(path)


def test_a_peer_starts_in_both_ways_and_says_where_its_weights_are(tmp_path: Path) -> None:
    program = tmp_path / "llama"
    peer = first_token.Peer(peer_program(program, "echo token"), Path("folder/full.gguf"), 34)
    peer.start(tmp_path)
    peer.start(tmp_path)
    found = peer.result()
    assert found["weights_mib"] == {"CUDA0": 12.5}
    assert [len(found[key]) for key in ("starts_s", "bare_starts_s")] == [2, 2]
    assert "-m full.gguf" in found["command"]
    assert "--n-cpu-moe 34" in found["command"]
    options = Path(f"{program}.options").read_text().splitlines()
    assert ["--no-warmup --no-repack" in line for line in options] == [False, True, False, True]


def test_a_peer_without_a_token_is_an_error(tmp_path: Path) -> None:
    peer = first_token.Peer(peer_program(tmp_path / "llama", ":"), Path("full.gguf"), 34)
    with pytest.raises(RuntimeError, match="ended with 0"):
        peer.start(tmp_path)
