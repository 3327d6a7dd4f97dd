"""Published chat templates, by family, from packages on the Python package index and from folders.

Nothing of them is kept but name, origin and digest. Both packages carry copies of what model makers publish:
`llama-cpp-python` those templates that llama.cpp tests its parsers with, `trl` those that it trains with, and
for some of them a variant with `{% generation %}`.
"""

import hashlib
import subprocess
import sys
import tarfile
import zipfile
from dataclasses import dataclass
from pathlib import Path

PACKAGES = {
    "llama-cpp-python==0.3.36": ("--no-binary", "*.tar.gz", "/models/templates/"),
    "trl==1.16.0": ("--only-binary", "*.whl", "/chat_templates/"),
}
# Families in the order of the table, and what the names of their templates begin with.
FAMILIES = {
    "Qwen3": ("Qwen-Qwen3-", "qwen3.", "qwen3_training", "qwen3_instruct", "qwen3_vl"),
    "Qwen3.5": ("Qwen3.5-", "qwen3_5_"),
    "Qwen3.6": ("qwen3_6",),
    "Qwen3.8": ("qwen3_8",),
    "Qwen3-Coder": ("Qwen3-Coder",),
    "QwQ": ("Qwen-QwQ-",),
    "GLM": ("GLM-", "glm4moe"),
    "Laguna": ("poolside-Laguna-",),
    "gpt-oss": ("openai-gpt-oss-", "gptoss"),
    "gemma-4": ("google-gemma-4-", "gemma4"),
    "MiniMax": ("MiniMax-",),
    "DeepSeek": ("deepseek-ai-", "llama-cpp-deepseek-", "deepseekv3", "deepseek_r1_"),
    "Mistral": ("Mistral-", "mistralai-", "unsloth-mistral-"),
}


@dataclass(frozen=True)
class Template:
    family: str
    name: str
    origin: str
    source: str

    @property
    def digest(self) -> str:
        """SHA-256 of the text in UTF-8."""
        return hashlib.sha256(self.source.encode()).hexdigest()


def fetch(downloads: Path) -> list[Template]:
    """The templates of `FAMILIES` in the packages, which are downloaded unless they lie in `downloads`."""
    templates = []
    for requirement, (_, _, folder) in PACKAGES.items():
        for name, source in _members(archive_of(requirement, downloads), folder):
            templates += _of_a_family(name, requirement, source)
    return templates


def archive_of(requirement: str, downloads: Path) -> Path:
    """The archive of a package, which is downloaded unless it lies in `downloads`."""
    kind, pattern, _ = PACKAGES[requirement]
    package, _, version = requirement.partition("==")
    wanted = f"*{version}{pattern}"
    if not any(downloads.glob(wanted)):
        command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", kind, package, "-d"]
        subprocess.run([*command, str(downloads), requirement], check=True)
    return next(downloads.glob(wanted))


def read_folder(folder: Path) -> list[Template]:
    """The templates in `folder`, as `FAMILY/NAME.jinja`. Raises ValueError for an unknown family."""
    templates = []
    for path in sorted(folder.glob("*/*.jinja")):
        if path.parent.name not in FAMILIES:
            raise ValueError(f"{path}: {path.parent.name!r} is not one of {', '.join(FAMILIES)}")
        templates.append(Template(path.parent.name, path.name, "folder", path.read_text()))
    return templates


def _of_a_family(name: str, origin: str, source: str) -> list[Template]:
    families = [family for family, starts in FAMILIES.items() if name.startswith(starts)]
    return [Template(family, name, origin, source) for family in families]


def _members(archive: Path, folder: str) -> list[tuple[str, str]]:
    """Name and text of the templates in a folder of an archive, which is not unpacked."""
    members = []
    if archive.suffix == ".whl":
        with zipfile.ZipFile(archive) as wheel:
            for name in wheel.namelist():
                if folder in name and name.endswith(".jinja"):
                    members.append((Path(name).name, wheel.read(name).decode()))
    else:
        with tarfile.open(archive) as sdist:
            for member in sdist:
                if folder in member.name and member.name.endswith(".jinja"):
                    file = sdist.extractfile(member)
                    assert file is not None
                    members.append((Path(member.name).name, file.read().decode()))
    return sorted(members)
