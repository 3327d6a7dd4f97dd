"""Only modules that define operations for tests need PyTorch: the product never imports it."""

import ast
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

SOURCES = Path(__file__).parent.parent / "src"
PACKAGE = SOURCES / "coldstream"

# Definitions of operations, which only tests import.
DEFINITIONS = frozenset(
    f"kernels.{name}"
    for name in (
        "arithmetic.reference",
        "attention.cache_types",
        "attention.exact",
        "attention.exact_integers",
        "attention.hadamard",
        "attention.levels",
        "attention.planes",
        "attention.reference",
        "dequantize.integer_blocks",
        "dequantize.reference",
        "dequantize.unpack_grid",
        "dequantize.unpack_linear",
        "draft_block.reference",
        "experts.reference",
        "gated_delta_net.batch",
        "gated_delta_net.exact",
        "gated_delta_net.reference",
        "hyper_connections.reference",
        "indexer.reference",
        "linear.reference",
        "ngram.reference",
        "reference_ops",
        "rms_norm.reference",
        "rope.reference",
        "router.reference",
        "sequences",
        "scalars.reference",
        "swiglu.reference",
    )
)

IMPORT_ALL = """
import importlib, json, sys
sys.modules["torch"] = None
failed = []
for name in json.loads(sys.argv[1]):
    try:
        importlib.import_module(name)
    except ImportError as error:
        assert error.name == "torch", f"{name} lacks {error.name}"
        failed.append(name)
print(json.dumps(failed))
"""


def modules() -> Iterator[tuple[str, Path]]:
    """All modules but the entry point, and those for Ray, which need a package that tests lack."""
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(PACKAGE).with_suffix("").parts
        if parts[0] != "ray" and parts[-1] not in ("__init__", "__main__"):
            yield ".".join(parts), path


def imports_pytorch(path: Path) -> bool:
    """Whether there is an import statement, in a function too, that is not for annotations only."""
    tree = ast.parse(path.read_text())
    for_annotations = {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
        for inner in ast.walk(node)
    }
    names = [
        name
        for node in ast.walk(tree)
        if isinstance(node, ast.Import | ast.ImportFrom) and id(node) not in for_annotations
        for name in (
            [alias.name for alias in node.names] if isinstance(node, ast.Import) else [node.module or ""]
        )
    ]
    return any(name.partition(".")[0] == "torch" for name in names)


def test_modules_import_without_pytorch() -> None:
    names = [f"coldstream.{name}" for name, _ in modules()]
    command = [sys.executable, "-c", IMPORT_ALL, json.dumps(names)]
    process = subprocess.run(command, capture_output=True, text=True, check=False)
    assert process.returncode == 0, process.stderr
    needing = {name.removeprefix("coldstream.") for name in json.loads(process.stdout)}
    needing |= {name for name, path in modules() if imports_pytorch(path)}
    assert sorted(needing) == sorted(DEFINITIONS)
