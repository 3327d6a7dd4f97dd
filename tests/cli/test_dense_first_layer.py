"""A model whose first layer has no experts: what is shown and planned names the model's own layers."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from builders import Dims, make_model, write_model
from mixed_ffns import DENSE_KEY, mixed_families

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def path(tmp_path: Path) -> Iterator[str]:
    model = make_model(dims=Dims(experts=64), dense_layers={0}, quant="Q4_K")
    model.metadata[f"qwen35moe.{DENSE_KEY}"] = Dims().ffn
    (path,) = write_model(tmp_path / "mixed.gguf", model)
    with mixed_families():
        yield str(path)


def test_show(run: Run, path: str) -> None:
    assert "64 a layer, 2 a token, and a shared one in 3 layers" in run("show", path)[1]
    spec = json.loads(run("show", path, "--json")[1])["spec"]
    assert (spec["expert_layers"], spec["intermediate_size"]) == ([1, 2, 3], 512)


def test_plans_weigh_layers_by_their_numbers_in_the_model(run: Run, path: str, tmp_path: Path) -> None:
    ram = ("--device", "cpu", "-c", "256", "--ram")
    least = run("plan", path, *ram, "1M")[2]
    budget = least.split("minimum of ")[1].split()[0]
    plan = tmp_path / "plan.json"
    weighed = ("--layer-weights", "2-3=5", "--out", str(plan))
    code, _, err = run("plan", path, *ram, f"{float(budget) + 0.5}M", *weighed)
    assert code == 0, err
    assert "a use of an expert counts for 5 in layers 2 to 3" in err
    placement = json.loads(plan.read_text())
    assert placement["layer_weights"] == [1.0, 5.0, 5.0]
    assert len(placement["resident"]) == 3
    code, _, err = run("plan", path, *ram, f"{float(budget) + 0.5}M", "--layer-weights", "0=5")
    assert (code, "0=5: 3 layers can have a weight, from 1 to 3" in err) == (2, True)


def test_a_trace_has_the_layers_with_experts(run: Run, path: str, tmp_path: Path) -> None:
    text, out = tmp_path / "text.txt", tmp_path / "trace.routing"
    text.write_text("the ring of the dense layer")
    code, said, err = run("profile", path, "--text", str(text), "--out", str(out))
    assert code == 0, err
    assert " 3 layers, " in said
    assert run("plan", path, "--profile", str(out))[0] == 0
