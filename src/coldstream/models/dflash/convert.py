"""Converts a DFlash drafter from safetensors to the GGUF file that is run, and keeps what it has converted.

The bytes of all weights stay as they are: F32, F16 and BF16 are types of both formats. Laguna's drafters have
the projections of attention in one matrix, which is divided, and norms one by one, which are joined.

A drafter that is given as a folder is converted once, into the user's cache. The cache has a file for each
folder, and beside it a record of its sources. The file is used again if the sources have the recorded sizes
and times, and if nobody has written to the file since. Otherwise it is made anew.
"""

import fcntl
import hashlib
import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from coldstream.errors import InconsistentError, ModelChangedError, ModelNotFoundError, StorageError
from coldstream.files import cannot_write, replacing, write_file
from coldstream.gguf.header_bytes import NewTensor, header_bytes
from coldstream.gguf.messages import RECONVERT, shorten
from coldstream.models.dflash.config import read_config
from coldstream.models.dflash.file import matched_names
from coldstream.models.dflash.metadata import metadata_of
from coldstream.models.dflash.safetensors import FILE_NAME, INDEX_NAME, SafetensorsFile
from coldstream.models.dflash.spec import DflashSpec, tensor_shapes

Progress = Callable[[int, int], None]  # bytes that are written, of all

CONFIG_NAME: Final = "config.json"
VERSION: Final = 1  # of what is written: a file of another one is made anew
ADVICE: Final = "or convert it with `coldstream convert-drafter FOLDER FILE`, and give FILE as the drafter"
_MAX_RECORD_BYTES: Final = 1 << 20

_HF_NAMES: Final = {
    "fc.weight": "fc.weight",
    "hidden_norm.weight": "enc.output_norm.weight",
    "norm.weight": "output_norm.weight",
    "aux_hidden_norms": "enc.aux_norm.weight",
    "candidate_selector.predecessor_codebook": "selector_predecessor.weight",
    "candidate_selector.successor_codebook": "selector_successor.weight",
    "candidate_selector.hidden_projection.weight": "selector_hidden.weight",
}
_HF_LAYER_NAMES: Final = {
    "input_layernorm.weight": "attn_norm.weight",
    "self_attn.q_proj.weight": "attn_q.weight",
    "self_attn.k_proj.weight": "attn_k.weight",
    "self_attn.v_proj.weight": "attn_v.weight",
    "self_attn.o_proj.weight": "attn_output.weight",
    "self_attn.q_proj.bias": "attn_q.bias",
    "self_attn.k_proj.bias": "attn_k.bias",
    "self_attn.v_proj.bias": "attn_v.bias",
    "self_attn.o_proj.bias": "attn_output.bias",
    "self_attn.g_proj.weight": "attn_gate.weight",
    "self_attn.qkv_proj.weight, queries": "attn_q.weight",
    "self_attn.qkv_proj.weight, keys": "attn_k.weight",
    "self_attn.qkv_proj.weight, values": "attn_v.weight",
    "self_attn.q_norm.weight": "attn_q_norm.weight",
    "self_attn.k_norm.weight": "attn_k_norm.weight",
    "post_attention_layernorm.weight": "ffn_norm.weight",
    "mlp.gate_proj.weight": "ffn_gate.weight",
    "mlp.up_proj.weight": "ffn_up.weight",
    "mlp.down_proj.weight": "ffn_down.weight",
    "attention_conv.base_kernel": "attn_conv_base",
    "attention_conv.kernel_projection.weight": "attn_conv_proj.weight",
    "mlp_conv.base_kernel": "ffn_conv_base",
    "mlp_conv.kernel_projection.weight": "ffn_conv_proj.weight",
}


def folder_of(path: Path) -> Path | None:
    """The folder of a drafter that has to be converted; a file in it may be named. None for other paths."""
    if path.is_dir():
        return path
    return path.parent if path.name in (CONFIG_NAME, FILE_NAME, INDEX_NAME) else None


def convert(folder: Path, out: Path, progress: Progress | None = None) -> None:
    """Writes the drafter in `folder` to the GGUF file `out`: the whole new file, or what was there before.

    Raises ModelNotFoundError if a file of the folder is absent, and a subclass of ModelFormatError if one is
    not valid in every respect. Raises ModelChangedError if one shrinks meanwhile, and StorageError if `out`
    cannot be written.
    """
    spec = read_config(folder / CONFIG_NAME)
    with SafetensorsFile.open(folder) as source:
        sources = _sources(spec, source, folder)
        shapes = {name: each.shape for name, each in sources.items()}
        names = matched_names(spec, shapes, _hf_names(spec), folder)
        tensors = [
            NewTensor(name, shape, source.types[sources[names[name]].parts[0].name])
            for name, shape in tensor_shapes(spec).items()
        ]
        header, places = header_bytes(metadata_of(spec), tensors)
        total, done = sum(place.num_bytes for place in places), 0
        try:
            with replacing(Path(os.path.realpath(out))) as file:
                file.write(header)
                for place in places:
                    file.write(bytes(place.offset - file.tell()))
                    for piece in _pieces(source, sources[names[place.name]]):
                        file.write(piece)
                        done += len(piece)
                        if progress is not None:
                            progress(done, total)
        except (OSError, ValueError) as error:  # ValueError: a NUL byte in the path
            raise cannot_write(out, error, total) from error


def converted(folder: Path, progress: Progress | None = None, cache: Path | None = None) -> Path:
    """The GGUF file of the drafter in `folder`, which is converted unless that was done before.

    cache: where converted files are kept; None for the user's cache. Of two processes, one waits for the
    other. Raises as `convert`; the StorageError says how to do without the cache.
    """
    folder = Path(os.path.realpath(folder))
    source = _identity(folder)
    cache = default_cache() if cache is None else cache
    name = hashlib.blake2b(os.fsencode(folder), digest_size=16).hexdigest()
    path, record = cache / f"{name}.gguf", cache / f"{name}.json"
    if _is_valid(record, path, source):
        return path
    with _storage_advice(), _locked(cache / f"{name}.lock"):
        if not _is_valid(record, path, source):
            convert(folder, path, progress)
            if _identity(folder) != source:
                raise ModelChangedError(f"{shorten(folder)} changed while it was converted: load it again")
            write_file(record, json.dumps(_record_of(path, source)).encode())
    return path


def default_cache() -> Path:
    """The folder of converted drafters in the user's cache. Raises StorageError without a home directory."""
    try:
        home = Path.home()
    except RuntimeError as error:
        problem = f"this user has no home directory for the cache of converted drafters: set one, {ADVICE}"
        raise StorageError(problem) from error
    return home / ".cache" / "coldstream" / "drafters"


def _identity(folder: Path) -> list[list[Any]]:
    """The names, sizes and times of the files that a drafter is made from.

    Raises ModelNotFoundError for a folder that cannot be read.
    """
    try:
        paths = [folder / CONFIG_NAME, folder / INDEX_NAME, *folder.glob("*.safetensors")]
        states = [(path.name, path.stat()) for path in sorted(paths) if path.exists()]
    except OSError as error:
        raise ModelNotFoundError(f"{shorten(folder)}: {error.strerror}. Give a drafter's folder") from error
    return [[name, state.st_size, state.st_mtime_ns] for name, state in states]


def _record_of(path: Path, source: list[list[Any]]) -> dict[str, Any]:
    """What is noted of a converted file. Any write to it changes its times. Raises OSError."""
    state = path.stat()
    file = [state.st_size, state.st_mtime_ns, state.st_ctime_ns, state.st_ino]
    return {"version": VERSION, "source": source, "file": file}


def _is_valid(record: Path, path: Path, source: list[list[Any]]) -> bool:
    try:
        with open(record, "rb") as file:
            document = json.loads(file.read(_MAX_RECORD_BYTES))
        return bool(document == _record_of(path, source))
    except (OSError, ValueError, RecursionError):
        return False


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Makes the folder of `path` if it is absent. Other processes wait meanwhile. Raises StorageError."""
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise cannot_write(path, error, 0) from error
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


@contextmanager
def _storage_advice() -> Iterator[None]:
    try:
        yield
    except StorageError as error:
        raise StorageError(f"the drafter cannot be kept: {error}; {ADVICE}") from error


@dataclass(frozen=True)
class _Part:
    """Some rows of a tensor in a safetensors file."""

    name: str
    rows: slice  # within the tensor


@dataclass(frozen=True)
class _Source:
    """What a tensor is made from."""

    shape: tuple[int, ...]
    parts: tuple[_Part, ...]  # in order


def _sources(spec: DflashSpec, source: SafetensorsFile, folder: Path) -> dict[str, _Source]:
    """The tensors of a folder by the names that `_hf_names` knows. InconsistentError if norms differ."""
    found: dict[str, _Source] = {}
    norms = [f"aux_hidden_norms.{index}.weight" for index in range(len(spec.aux_layers))]
    present = [name for name in norms if name in source.shapes]
    if spec.is_laguna and present:
        kinds = {(source.shapes[name], source.types[name]) for name in present}
        if len(kinds) > 1:
            problem = f"{present[0]} and its neighbours differ in shape or type: {RECONVERT}"
            raise InconsistentError(f"{shorten(folder)}: {problem}")
        shape = (len(present), *source.shapes[present[0]])
        found["aux_hidden_norms"] = _Source(shape, tuple(_Part(name, slice(None)) for name in present))
    for name, shape in source.shapes.items():
        if spec.is_laguna and name in present:
            continue
        if spec.is_laguna and name.endswith(".qkv_proj.weight") and len(shape) == 2:
            bounds = (0, spec.query_dim, spec.query_dim + spec.kv_dim, shape[0])
            for part, first, end in zip(("queries", "keys", "values"), bounds, bounds[1:], strict=False):
                rows = slice(first, end)
                found[f"{name}, {part}"] = _Source((max(0, end - first), shape[1]), (_Part(name, rows),))
        else:
            found[name] = _Source(shape, (_Part(name, slice(None)),))
    return found


def _pieces(source: SafetensorsFile, tensor: _Source) -> Iterator[bytes]:
    for part in tensor.parts:
        yield from source.pieces(part.name, part.rows)


def _hf_names(spec: DflashSpec) -> dict[str, str]:
    """Names of `tensor_shapes` by the names in a safetensors file."""
    layers = {
        f"layers.{i}.{name}": f"blk.{i}.{canonical}"
        for i in range(spec.num_layers)
        for name, canonical in _HF_LAYER_NAMES.items()
    }
    return _HF_NAMES | layers
