"""llama.cpp as a shared library: a model with experts on the GPU or the CPU, and contexts fed with tokens.

Parameters pass through that interface as structs by value, which grow from version to version. Every field is
declared here with its default, and the library's defaults are compared with them when it is loaded: with
another layout a field would hold another's value, and what is measured would not be what was asked for.
"""

import ctypes
import functools
import re
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np

Pointer, Int, Unsigned, Float, Bool = (
    ctypes.c_void_p,
    ctypes.c_int32,
    ctypes.c_uint32,
    ctypes.c_float,
    ctypes.c_bool,
)
LOAD_MODE_NONE, FLASH_ATTENTION = 0, 1
DEVICE_GPU, LOG_ERROR = 1, 4
# What --n-cpu-moe matches, and the FFN of a dense layer.
EXPERTS_OF_LAYER = r"blk\.{}\.ffn_(up|down|gate|gate_up)(_(ch|)exps)?\.weight"
MAX_OUTPUTS = 64  # rows of a step whose logits may be wanted: room for a whole micro-batch is gigabytes
UNKNOWN_BYTES = 256  # beyond the known fields; the callee reads only its own

Fields = list[tuple[str, Any, object]]

# Fields of llama_model_params and llama_context_params with their defaults; None where any value is one.
MODEL_FIELDS: Fields = [
    ("devices", Pointer, None),
    ("tensor_buft_overrides", Pointer, None),
    ("n_gpu_layers", Int, -1),
    ("split_mode", Int, 1),
    ("load_mode", Int, -1),
    ("lazy_mode", Int, 1),
    ("main_gpu", Int, 0),
    *((name, Pointer, None) for name in ("tensor_split", "progress", "progress_data", "kv_overrides")),
    ("vocab_only", Bool, False),
    ("check_tensors", Bool, False),
    ("use_extra_bufts", Bool, True),
    *((name, Bool, False) for name in ("no_host", "no_alloc", "load_mtp")),
]
CONTEXT_FIELDS: Fields = [
    ("n_ctx", Unsigned, 512),
    ("n_batch", Unsigned, 2048),
    ("n_ubatch", Unsigned, 512),
    ("n_seq_max", Unsigned, 1),
    ("n_rs_seq", Unsigned, 0),
    ("n_outputs_max", Unsigned, 0),
    ("n_outputs_max_per_seq", Unsigned, 1),
    ("n_threads", Int, 4),
    ("n_threads_batch", Int, 4),
    ("ctx_type", Int, 0),
    *((name, Int, -1) for name in ("rope_scaling_type", "pooling_type", "attention_type", "flash_attn_type")),
    *((name, Float, 0.0) for name in ("rope_freq_base", "rope_freq_scale")),
    *((f"yarn_{name}", Float, -1.0) for name in ("ext_factor", "attn_factor", "beta_fast", "beta_slow")),
    ("yarn_orig_ctx", Unsigned, 0),
    ("defrag_thold", Float, -1.0),
    *((name, Pointer, None) for name in ("cb_eval", "cb_eval_data")),
    *((name, Int, 1) for name in ("type_k", "type_v")),  # GGML_TYPE_F16
    *((name, Pointer, None) for name in ("abort_callback", "abort_data")),
]
CONTEXT_FLAGS: Fields = [
    ("embeddings", Bool, False),
    *((name, Bool, True) for name in ("offload_kqv", "no_perf", "op_offload", "swa_full")),
    ("kv_unified", Bool, False),
    ("samplers", Pointer, None),
    ("n_samplers", ctypes.c_size_t, 0),
    ("ctx_other", Pointer, None),
]


# llama.cpp 0.5.0, and later versions, which have 8 bytes more of which nothing is known here but that they
# are 0 by default.
CONTEXT_LAYOUTS = (
    CONTEXT_FIELDS + CONTEXT_FLAGS,
    [*CONTEXT_FIELDS, ("later", ctypes.c_uint64, 0), *CONTEXT_FLAGS],
)


class Defaults(ctypes.Structure):
    """The bytes of any of these structs."""

    _fields_ = [("raw", ctypes.c_uint8 * 512)]


def struct_of(name: str, raw: bytes, layouts: Sequence[Fields]) -> type[ctypes.Structure]:
    """The first of `layouts` that reads `raw` as its defaults, as a struct. Raises RuntimeError without one,
    with the field at which the first of them differs.
    """
    wrong = ""
    for fields in layouts:
        unknown = ("unknown", ctypes.c_uint8 * UNKNOWN_BYTES)
        members = [field[:2] for field in fields]
        struct = type(name, (ctypes.Structure,), {"_fields_": [*members, unknown]})
        found = struct.from_buffer_copy(raw)
        differing = [(field, default) for field, _, default in fields if getattr(found, field) != default]
        if not differing:
            return struct
        field, default = differing[0]
        wrong = wrong or f"the default of {field} is {getattr(found, field)}, not {default}"
    raise RuntimeError(
        f"{name} of this llama.cpp are laid out as none known here: {wrong}. Declare its fields in "
        f"{Path(__file__).name}"
    )


class Batch(ctypes.Structure):
    _fields_ = [
        ("n_tokens", Int),
        *((name, Pointer) for name in ("token", "embd", "pos", "n_seq_id", "seq_id", "logits")),
    ]


class BufferOverride(ctypes.Structure):
    _fields_ = [("pattern", ctypes.c_char_p), ("buffer_type", Pointer)]


OnLog = ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_char_p, Pointer)
SIGNATURES: dict[str, tuple[Any, list[Any]]] = {
    "ggml_backend_load_all_from_path": (None, [ctypes.c_char_p]),
    "ggml_backend_cpu_buffer_type": (Pointer, []),
    "ggml_backend_dev_by_type": (Pointer, [ctypes.c_int]),
    "ggml_version": (ctypes.c_char_p, []),
    "llama_version": (ctypes.c_char_p, []),
    "llama_print_system_info": (ctypes.c_char_p, []),
    "llama_log_set": (None, [OnLog, Pointer]),
    "llama_backend_init": (None, []),
    "llama_model_default_params": (Defaults, []),
    "llama_context_default_params": (Defaults, []),
    "llama_model_free": (None, [Pointer]),
    "llama_model_n_layer": (Int, [Pointer]),
    "llama_model_get_vocab": (Pointer, [Pointer]),
    "llama_vocab_n_tokens": (Int, [Pointer]),
    "llama_free": (None, [Pointer]),
    "llama_set_n_threads": (None, [Pointer, Int, Int]),
    "llama_decode": (Int, [Pointer, Batch]),
    "llama_get_logits_ith": (ctypes.POINTER(Float), [Pointer, Int]),
    "llama_get_memory": (Pointer, [Pointer]),
    "llama_memory_clear": (None, [Pointer, Bool]),
    "llama_memory_seq_cp": (None, [Pointer, Int, Int, Int, Int]),
    "llama_memory_seq_rm": (Bool, [Pointer, Int, Int, Int]),
}


def library_file(path: Path) -> Path:
    """`path` itself if it is a file, else the one libllama in that folder. Raises FileNotFoundError."""
    if path.is_file():
        return path
    found = sorted(path.glob("libllama.*so*"))
    if len(found) != 1:
        raise FileNotFoundError(f"{path} should hold one libllama.*so: there are {len(found)}")
    return found[0]


class Library:
    """The functions of libllama, with the backends that lie beside it, and what they logged: `library_at`."""

    def __init__(self, file: Path) -> None:
        self.file = file
        self.c = ctypes.CDLL(str(file))
        self.log: list[tuple[int, str]] = []
        for name, (result, arguments) in SIGNATURES.items():
            self._declare(name, result, arguments)
        self.model_defaults = bytes(self.c.llama_model_default_params())
        self.context_defaults = bytes(self.c.llama_context_default_params())
        self.ModelParams = struct_of("model parameters", self.model_defaults, [MODEL_FIELDS])
        self.ContextParams = struct_of("context parameters", self.context_defaults, CONTEXT_LAYOUTS)
        self._declare("llama_model_load_from_file", Pointer, [ctypes.c_char_p, self.ModelParams])
        self._declare("llama_init_from_model", Pointer, [Pointer, self.ContextParams])
        self._on_log = OnLog(self._logged)
        self.listen()
        self.c.ggml_backend_load_all_from_path(str(file.parent).encode())
        self.c.llama_backend_init()

    def listen(self) -> None:
        """Makes `log` the one of the process, whoever had it."""
        self.c.llama_log_set(self._on_log, None)

    def _logged(self, level: int, line: bytes, _: object) -> None:
        self.log.append((level, line.decode(errors="replace").strip()))
        if level == LOG_ERROR:  # at once: the library ends the process where a launch fails
            print(self.log[-1][1], file=sys.stderr, flush=True)

    def _declare(self, name: str, result: Any, arguments: list[Any]) -> None:
        function = getattr(self.c, name)
        function.restype, function.argtypes = result, arguments

    def about(self) -> dict[str, str]:
        """Versions, and what the loaded backends were built for."""
        return {
            "version": self.c.llama_version().decode(),
            "ggml": self.c.ggml_version().decode(),
            "system": self.c.llama_print_system_info().decode().strip(),
        }

    def require_gpu(self) -> None:
        """Raises OSError, with the loader's words, if the backend for CUDA could not be loaded, and
        RuntimeError if it sees no GPU: the library itself would go on without.
        """
        if not self.c.ggml_backend_dev_by_type(DEVICE_GPU):
            ctypes.CDLL(str(self.file.with_name("libggml-cuda.so")))
            raise RuntimeError("llama.cpp sees no GPU")

    def failed(self, what: str) -> RuntimeError:
        """The error to raise when a function gave nothing, with what the library said last."""
        said = [line for level, line in self.log if level == LOG_ERROR][-3:]
        return RuntimeError(f"llama.cpp: {what} failed: {' '.join(said) or 'without a message'}")


_library_of = functools.cache(Library)


def library_at(path: Path) -> Library:
    """The library at `path` or in that folder, opened once and never given up: it calls its log to the end.

    Raises FileNotFoundError.
    """
    return _library_of(library_file(path).resolve())


class Model:
    """A model whose weights are in the backends' memory, some layers' experts in that of the CPU."""

    def __init__(
        self,
        library: Library,
        path: Path,
        num_gpu_layers: int,
        num_cpu_expert_layers: int,
        *,
        is_mapped: bool = False,
    ) -> None:
        """num_gpu_layers: as --n-gpu-layers, -1 for all. num_cpu_expert_layers: as --n-cpu-moe. is_mapped:
        whether the CPU's weights are those of the mapped file, and not in memory of their own.
        """
        self.library = library
        library.listen()
        cpu = library.c.ggml_backend_cpu_buffer_type()
        patterns = [EXPERTS_OF_LAYER.format(layer).encode() for layer in range(num_cpu_expert_layers)]
        overrides = (BufferOverride * (len(patterns) + 1))(*((pattern, cpu) for pattern in patterns))
        params: Any = library.ModelParams.from_buffer_copy(library.model_defaults)
        params.n_gpu_layers = num_gpu_layers
        if not is_mapped:
            params.load_mode = LOAD_MODE_NONE
        params.tensor_buft_overrides = ctypes.addressof(overrides)
        start = len(library.log)
        self.handle = library.c.llama_model_load_from_file(str(path).encode(), params)
        if not self.handle:
            raise library.failed(f"loading {path}")
        self.num_layers: int = library.c.llama_model_n_layer(self.handle)
        self.vocab_size: int = library.c.llama_vocab_n_tokens(library.c.llama_model_get_vocab(self.handle))
        self.buffers = buffer_sizes(line for _, line in library.log[start:])

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.library.c.llama_model_free(self.handle)


def buffer_sizes(log: Any) -> dict[str, float]:
    """MiB of weights by kind of memory, from the lines that loading a model logs."""
    sizes: dict[str, float] = {}
    for line in log:
        if match := re.search(r"(\S+) model buffer size *= *([\d.]+) MiB", line):
            sizes[match[1]] = sizes.get(match[1], 0.0) + float(match[2])
    return sizes


class Context:
    """Sequences of tokens of one model, with f16 keys and values and flash attention."""

    def __init__(
        self,
        model: Model,
        *,
        num_tokens: int,
        micro_batch: int,
        num_sequences: int,
        are_forks: bool,
        threads: int,
        copies_weights: bool = True,
    ) -> None:
        """num_tokens: in all sequences. are_forks: they share positions, and one may become a fork of
        another; without, each has its own memory, which is faster. copies_weights: whether the GPU multiplies
        large steps with weights of the CPU, which are copied for that.
        """
        library = model.library
        self.model, self.c, self.are_forks = model, library.c, are_forks
        params: Any = library.ContextParams.from_buffer_copy(library.context_defaults)
        params.n_ctx, params.n_batch, params.n_ubatch = num_tokens, num_tokens, micro_batch
        params.n_seq_max, params.kv_unified = num_sequences, are_forks
        params.n_outputs_max = max(MAX_OUTPUTS, num_sequences)
        params.n_threads = params.n_threads_batch = threads
        params.flash_attn_type = FLASH_ATTENTION
        params.op_offload = copies_weights
        self.handle = self.c.llama_init_from_model(model.handle, params)
        if not self.handle:
            raise library.failed(f"a context of {num_tokens} tokens")
        self.memory = self.c.llama_get_memory(self.handle)
        self.lengths = [0] * num_sequences
        self._wanted = np.empty(0, np.int64)
        self._tokens, self._positions, self._sequences, self._one = np.zeros((4, num_tokens), np.int32)
        self._one[:] = 1
        self._logits = np.zeros(num_tokens, np.int8)
        places = self._sequences.ctypes.data + 4 * np.arange(num_tokens, dtype=np.uint64)
        self._sequence_pointers = places.astype(np.uint64)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.c.llama_free(self.handle)

    def set_threads(self, threads: int) -> None:
        self.c.llama_set_n_threads(self.handle, threads, threads)

    def clear(self) -> None:
        """All sequences are empty."""
        self.c.llama_memory_clear(self.memory, False)
        self.lengths = [0] * len(self.lengths)

    def fork(self, source: int, to: int) -> None:
        """Sequence `to` is what `source` is, which stays as it is."""
        self.c.llama_memory_seq_rm(self.memory, to, -1, -1)
        self.c.llama_memory_seq_cp(self.memory, source, to, -1, -1)
        self.lengths[to] = self.lengths[source]

    def extend(self, token_ids: dict[int, Sequence[int]]) -> float:
        """Appends to sequences, in one batch; the seconds until the logits after each one's last token are
        in host memory. Raises RuntimeError.
        """
        at, last = 0, []
        for sequence, ids in token_ids.items():
            end = at + len(ids)
            self._tokens[at:end] = ids
            self._positions[at:end] = np.arange(len(ids)) + self.lengths[sequence]
            self._sequences[at:end] = sequence
            self.lengths[sequence] += len(ids)
            last.append(end - 1)
            at = end
        self._logits[:at] = 0
        self._logits[last] = 1
        self._wanted = np.array(last)
        arrays = (self._tokens, None, self._positions, self._one, self._sequence_pointers, self._logits)
        batch = Batch(at, *(None if array is None else array.ctypes.data for array in arrays))
        start = time.perf_counter()
        status = self.c.llama_decode(self.handle, batch)
        if status or not self.c.llama_get_logits_ith(self.handle, last[-1]):
            raise self.model.library.failed(f"a step of {at} tokens (status {status})")
        return time.perf_counter() - start

    def logits(self) -> np.ndarray:
        """float32 [sequences, vocab] after the last call of `extend`; a copy."""
        shape = (self.model.vocab_size,)
        rows = (self.c.llama_get_logits_ith(self.handle, int(row)) for row in self._wanted)
        return np.stack([np.ctypeslib.as_array(row, shape) for row in rows])
