"""Which files of a repository or folder make up which model: pure functions over file names.

Unit of work: one listing → `ModelFiles`, and one choice among them. Knows neither network nor disk.
"""

import difflib
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath

from coldstream.errors import DownloadError, ModelNotFoundError

DEFAULT_QUANT = "Q4_K_M"
SUFFIX = ".gguf"
MAX_LISTED = 12
_SIMILAR = 0.8  # a slip of one letter in five

_HUB_NAME = re.compile(r"(?P<repo>[\w.-]+/[\w.-]+)(?::(?P<quant>[\w./-]+))?", re.ASCII)
# The address of a repository or of a file in it, as a browser or Ollama has it.
_ADDRESS = re.compile(r"(?:https?://)?(?:huggingface\.co|hf\.co)/(?P<path>[^?#]+?)/?(?:[?#].*)?", re.ASCII)
_PAGE = re.compile(r"(?P<repo>[\w.-]+/[\w.-]+)/(?:tree|blob|resolve)/main(?:/(?P<quant>[\w./-]+))?", re.ASCII)
_SPLIT = re.compile(r"-(?P<number>\d{5})-of-(?P<count>\d{5})$")
_QUANT = re.compile(
    r"(?:^|[-._])(?P<quant>(?:UD-)?(?:I?Q\d+_\w+?|TQ\d_\d|MXFP4(?:_[A-Z]+)?|NVFP4|BF16|F16|F32))(?=[-.]|$)",
    re.ASCII | re.IGNORECASE,
)
# GGUF files that are parts of another model or by-products: vision towers, lone MTP heads, calibration data.
_NOT_A_MODEL = re.compile(r"^mmproj|^mtp-|imatrix|[-_.]mmproj", re.ASCII | re.IGNORECASE)
_SIDECAR = "mtp-"  # how llama.cpp's converter and its downloads begin the name of a lone MTP head
_BITS = re.compile(r"\d+")


@dataclass(frozen=True)
class HubName:
    """`org/repo[:QUANT]`; a `quant` ending in `.gguf` is the path of a file in the repository."""

    repo: str
    quant: str | None

    def __str__(self) -> str:
        return self.repo if self.quant is None else f"{self.repo}:{self.quant}"

    @classmethod
    def parse(cls, name: str) -> "HubName | None":
        """The parts of `name`, also of the address of a page of the hub; None if it is neither."""
        address = _ADDRESS.fullmatch(name)
        path = name if address is None else address["path"]
        match = _HUB_NAME.fullmatch(path) or (address and _PAGE.fullmatch(path))
        if match is None or any(part.strip(".") == "" for part in match["repo"].split("/")):
            return None
        return cls(match["repo"], match["quant"])


@dataclass(frozen=True)
class ModelFiles:
    """One model: its files in order, as POSIX paths in the repository. The names claim `num_parts` files.

    num_there: parts among them; a file whose number is beyond `num_parts` is none.
    """

    stem: str
    quant: str | None
    files: tuple[str, ...]
    num_parts: int
    num_there: int

    @property
    def complete(self) -> bool:
        return self.num_there == self.num_parts

    @property
    def label(self) -> str:
        """The name after the colon, with a remark if parts are missing."""
        missing = "" if self.complete else f" ({self.num_there} of {self.num_parts} parts)"
        return f"{self.quant or self.files[0]}{missing}"


def group_models(paths: Iterable[str], named: str | None = None) -> list[ModelFiles]:
    """The models in a listing of paths, sorted. Other files, such as mmproj files, are left out, but for the
    one that is `named`.
    """
    groups: dict[tuple[str, int], dict[int, str]] = {}
    for path in paths:
        is_other = path != named and _NOT_A_MODEL.search(PurePosixPath(path).name)
        if not path.lower().endswith(SUFFIX) or is_other:
            continue
        stem, number, count = path[: -len(SUFFIX)], 1, 1
        if split := _SPLIT.search(stem):
            stem, number, count = stem[: split.start()], int(split["number"]), int(split["count"])
        groups.setdefault((stem, count), {})[number] = path
    models = [_model_of(stem, count, parts) for (stem, count), parts in groups.items()]
    return sorted(models, key=lambda model: model.files)


def choose(name: HubName, models: Sequence[ModelFiles]) -> ModelFiles:
    """The model that `name` means: the file or quant it names, else Q4_K_M, else the only one there is.

    Raises `ModelNotFoundError`, listing what there is, when none or several fit or parts are missing.
    """
    matches = _matches(name.quant, models)
    wanted = name.quant or DEFAULT_QUANT
    if len(matches) > 1:
        files = enumerate_some(model.files[0] for model in matches)
        raise ModelNotFoundError(f"{name.repo}: several models are {wanted}: name a file; there is {files}")
    if not matches or not matches[0].complete:
        labels = enumerate_some(model.label for model in matches or models)
        meant = _similar(wanted, [] if matches else models)
        raise ModelNotFoundError(f"{name.repo}: no complete {wanted}{meant}; there is {labels}")
    return matches[0]


def choose_sidecar(model: ModelFiles, paths: Iterable[str]) -> str | None:
    """The file of `paths` that llama.cpp takes for the block for multi-token prediction of a model, if any.

    It lies in the model's folder or in one around it, the nearest first. Of several there, the one of the
    model's quant is taken, or else one of about as many bits.
    """
    home = PurePosixPath(model.files[0]).parent
    found = [
        path
        for path in map(PurePosixPath, paths)
        if path.name.startswith(_SIDECAR)
        and path.suffix.lower() == SUFFIX
        and home.is_relative_to(path.parent)
    ]

    def rank(path: PurePosixPath) -> tuple[int, bool, int, str]:
        quant = _quant_of(path.with_suffix(""))
        depth = len(path.parent.parts)
        return -depth, quant != model.quant, abs(_num_bits(quant) - _num_bits(model.quant)), str(path)

    return str(min(found, key=rank)) if found else None


def _num_bits(quant: str | None) -> int:
    """The first number of a quant's name; 0 without one."""
    match = _BITS.search(quant or "")
    return int(match[0]) if match else 0


def choose_only(folder: str, models: Sequence[ModelFiles]) -> ModelFiles:
    """The one model of a folder. Raises `ModelNotFoundError` for none, several, or only parts of one."""
    if not models:
        raise ModelNotFoundError(f"{folder}: a folder with no model in it: name a GGUF file")
    labels = enumerate_some(model.files[0] if model.complete else model.label for model in models)
    if len(models) > 1:
        raise ModelNotFoundError(f"{folder}: a folder with several models: {labels}: name a file")
    if not models[0].complete:
        raise ModelNotFoundError(f"{folder}: the model in this folder is not complete: {labels}")
    return models[0]


def enumerate_some(names: Iterable[str]) -> str:
    """The first few of `names` for a message."""
    listed = list(names)
    more = f" and {len(listed) - MAX_LISTED} more" if len(listed) > MAX_LISTED else ""
    return ", ".join(listed[:MAX_LISTED]) + more if listed else "no model"


def check_relative(path: str) -> None:
    """Raise `DownloadError` unless `path` stays below the folder it is relative to, on every system."""
    leads_out = any(part in ("", ".", "..") for part in path.split("/"))
    if leads_out or not path.isprintable() or set(path) & set("\\:"):
        raise DownloadError(f"the hub lists an unsafe file name: {path[:100]!r}")


def _similar(wanted: str, models: Sequence[ModelFiles]) -> str:
    """Suggestions for a message."""
    labels = {model.label.upper(): model.label for model in models}
    close = difflib.get_close_matches(wanted.upper(), labels, n=2, cutoff=_SIMILAR)
    return f" (did you mean {' or '.join(labels[label] for label in close)}?)" if close else ""


def _model_of(stem: str, count: int, parts: dict[int, str]) -> ModelFiles:
    quant = _quant_of(PurePosixPath(stem))
    expected = tuple(parts[number] for number in range(1, count + 1) if number in parts)
    return ModelFiles(stem, quant, expected or tuple(parts.values()), count, len(expected))


def _quant_of(stem: PurePosixPath) -> str | None:
    """The quant that a file's name without its suffix gives, or else the folder's."""
    found = [match["quant"].upper() for match in _QUANT.finditer(stem.name)]
    folder = _QUANT.fullmatch(stem.parent.name)
    return found[-1] if found else folder["quant"].upper() if folder else None


def _matches(quant: str | None, models: Sequence[ModelFiles]) -> list[ModelFiles]:
    if quant is not None and quant.lower().endswith(SUFFIX):
        return [model for model in models if quant in model.files]
    wanted = (quant or DEFAULT_QUANT).upper()
    exact = [model for model in models if model.quant == wanted]
    matches = exact or [model for model in models if model.quant == f"UD-{wanted}"]
    return list(models) if not matches and quant is None and len(models) == 1 else matches
