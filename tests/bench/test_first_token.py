"""Where a sample of the main thread counts, and what a start under the sampler leaves."""

import json
import subprocess
import sys
from pathlib import Path

import sampled_start
from coldstream.assets import demo_model_path

ROOT = Path(__file__).parents[2]


def test_every_phase_names_functions_that_exist() -> None:
    for phase, names in sampled_start.PHASES.items():
        for module, function in names:
            if module == "importlib":
                continue
            source = ROOT / "src" / "coldstream" / (module.replace(".", "/") + ".py")
            assert f"def {function.rpartition('.')[2]}(" in source.read_text(), (phase, module, function)


def test_a_start_is_divided_into_phases(tmp_path: Path) -> None:
    out = tmp_path / "phases.json"
    script = ROOT / "bench" / "sampled_start.py"
    argv = ["run", str(demo_model_path()), "--device", "cpu", "-p", "import", "-n", "1", "--quiet", "--raw"]
    subprocess.run([sys.executable, str(script), str(out), *argv], check=True, capture_output=True)
    kept = json.loads(out.read_text())
    phases, functions = kept["phases_s"], kept["functions_s"]
    assert phases["import"] > 0
    assert phases.keys() <= {*sampled_start.PHASES, "other"}
    assert functions["cli.main.main"] >= functions["engine.opened_model.open_model"] > 0
    assert any(name.startswith("import coldstream") for name in functions)
