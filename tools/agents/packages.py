"""What is downloaded: agents from npm, chat templates from the Python package index; models with these."""

import json
import subprocess
import sys
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import gguf
from coldstream.assets import demo_model_path
from tools.agents.clients import Client

TEMPLATE_PACKAGE: Final = "trl==1.16.0"
TEMPLATES: Final = {"qwen3": "Qwen3", "qwen3_6": "Qwen3.6", "qwen3_8": "Qwen3.8"}  # and whose they are


def install_agents(folder: Path, clients: Sequence[Client], newest: bool) -> dict[str, str]:
    """Install the agents below `folder` and return their versions. npm does nothing for what is there.

    Raises subprocess.CalledProcessError if npm fails, and FileNotFoundError if there is none.
    """
    folder.mkdir(exist_ok=True)
    manifest = folder / "package.json"
    if not manifest.exists():
        manifest.write_text('{"private": true}\n')
    wanted = [f"{client.package}@{'latest' if newest else client.version}" for client in clients]
    options = ["--no-audit", "--no-fund", "--save-exact"]
    subprocess.run(
        ["npm", "install", "--loglevel=error", *options, *wanted], cwd=folder, check=True, stdout=sys.stderr
    )
    return {client.name: _version(folder, client.package) for client in clients}


def _version(folder: Path, package: str) -> str:
    version: str = json.loads((folder / "node_modules" / package / "package.json").read_text())["version"]
    return version


def fetch_templates(folder: Path) -> dict[str, Path]:
    """The published templates by name, as files below `folder`; downloaded unless they are there."""
    paths = {name: folder / "templates" / f"{name}.jinja" for name in TEMPLATES}
    if all(path.exists() for path in paths.values()):
        return paths
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary", ":all:"]
    subprocess.run([*command, "--dest", str(folder), TEMPLATE_PACKAGE], check=True)
    (wheel,) = folder.glob(f"{TEMPLATE_PACKAGE.replace('==', '-')}*.whl")
    (folder / "templates").mkdir(exist_ok=True)
    with zipfile.ZipFile(wheel) as archive:
        for path in paths.values():
            path.write_bytes(archive.read(f"trl/chat_templates/{path.name}"))
    return paths


def retag(template: Path, out: Path, context: int) -> Path:
    """Write the bundled model with another chat template and another length of context to `out`."""
    reader = gguf.GGUFReader(demo_model_path())
    architecture = reader.fields["general.architecture"].contents()
    writer = gguf.GGUFWriter(out, architecture)
    changed = {"tokenizer.chat_template": template.read_text(), f"{architecture}.context_length": context}
    for key, entry in reader.fields.items():
        if not key.startswith("GGUF.") and key != "general.architecture":
            is_array = entry.types[0] == gguf.GGUFValueType.ARRAY
            value = changed.get(key, entry.contents())
            writer.add_key_value(key, value, entry.types[0], sub_type=entry.types[-1] if is_array else None)
    for tensor in reader.tensors:
        data = tensor.data
        writer.add_tensor_info(tensor.name, data.shape, data.dtype, data.nbytes, tensor.tensor_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for tensor in reader.tensors:
        writer.write_tensor_data(tensor.data)
    writer.close()
    return out
