"""llama.cpp's C API as the `xllamacpp` module exports it: its quantiser and its forward pass.

The parameter structs pass by value and have no stable declaration here, so each is taken from its
default-making function into a larger buffer and a few fields are set at offsets; a build whose defaults do
not stand where they are expected is refused.
"""

import ctypes
import struct
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType

import numpy as np
import xllamacpp


class _Params(ctypes.Structure):
    _fields_ = (("raw", ctypes.c_uint8 * 512),)


class _Batch(ctypes.Structure):
    _fields_ = (
        ("n_tokens", ctypes.c_int32),
        ("token", ctypes.POINTER(ctypes.c_int32)),
        ("embd", ctypes.POINTER(ctypes.c_float)),
        ("pos", ctypes.POINTER(ctypes.c_int32)),
        ("n_seq_id", ctypes.POINTER(ctypes.c_int32)),
        ("seq_id", ctypes.POINTER(ctypes.POINTER(ctypes.c_int32))),
        ("logits", ctypes.POINTER(ctypes.c_int8)),
    )


N_CTX, N_BATCH, N_UBATCH, N_THREADS, N_THREADS_BATCH = 0, 4, 8, 28, 32
FLASH_ATTENTION, TYPE_K, TYPE_V = 52, 104, 108
CONTEXT_DEFAULTS = {
    N_CTX: 512,
    N_BATCH: 2048,
    N_UBATCH: 512,
    N_THREADS: 4,
    FLASH_ATTENTION: -1,
    TYPE_K: 1,
    TYPE_V: 1,
}
LOG_CALLBACK = ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_char_p, ctypes.c_void_p)


def load_library() -> ctypes.CDLL:
    """The extension module as a C library, with the result types of the functions used here."""
    library = ctypes.CDLL(str(next(Path(xllamacpp.__file__).parent.glob("*.abi3.so"))))
    for name in (
        "llama_model_load_from_file",
        "llama_init_from_model",
        "llama_get_memory",
        "llama_model_get_vocab",
    ):
        getattr(library, name).restype = ctypes.c_void_p
    library.llama_get_logits_ith.restype = ctypes.POINTER(ctypes.c_float)
    library.llama_context_default_params.restype = _Params
    library.llama_model_default_params.restype = _Params
    library.llama_batch_init.restype = _Batch
    library.ggml_quantize_chunk.restype = ctypes.c_size_t
    return library


def quantize(values: np.ndarray, type_id: int, row_bytes: int) -> np.ndarray:
    """The blocks of float32 `values [rows, columns]` in GGUF type `type_id`, uint8 `[rows, row_bytes]`."""
    library = load_library()
    values = np.ascontiguousarray(values, dtype=np.float32)
    rows, columns = values.shape
    out = np.empty((rows, row_bytes), dtype=np.uint8)
    written = library.ggml_quantize_chunk(
        ctypes.c_int(type_id),
        values.ctypes.data_as(ctypes.c_void_p),
        out.ctypes.data_as(ctypes.c_void_p),
        ctypes.c_int64(0),
        ctypes.c_int64(rows),
        ctypes.c_int64(columns),
        None,  # no importance weights: every column counts alike
    )
    if written != out.nbytes:
        raise RuntimeError(
            f"the quantiser wrote {written} bytes for type {type_id}, {out.nbytes} were expected"
        )
    return out


class LlamaCpp:
    """One model file and one context in llama.cpp; a context manager."""

    def __init__(self, path: Path, context: int, threads: int = 2, exact: bool = False) -> None:
        """Load `path` (RuntimeError if refused); `exact` takes an F32 cache and no flash attention."""
        self._library = load_library()
        self._silence = LOG_CALLBACK(lambda level, text, data: None)
        self._library.llama_log_set(self._silence, None)
        self._library.llama_backend_init()
        model = self._library.llama_model_load_from_file(
            str(path).encode(), self._library.llama_model_default_params()
        )
        if not model:
            raise RuntimeError(f"llama.cpp does not load {path}")
        self._model = ctypes.c_void_p(model)
        settings = {
            N_CTX: context,
            N_BATCH: context,
            N_UBATCH: 512,
            N_THREADS: threads,
            N_THREADS_BATCH: threads,
        }
        if exact:
            settings |= {FLASH_ATTENTION: 0, TYPE_K: 0, TYPE_V: 0}
        self._context = ctypes.c_void_p(
            self._library.llama_init_from_model(self._model, self._checked_context_params(settings))
        )
        vocab = ctypes.c_void_p(self._library.llama_model_get_vocab(self._model))
        self._vocab = vocab
        self.vocab_size: int = self._library.llama_vocab_n_tokens(vocab)

    def _checked_context_params(self, settings: dict[int, int]) -> _Params:
        params: _Params = self._library.llama_context_default_params()
        for offset, default in CONTEXT_DEFAULTS.items():
            (found,) = struct.unpack_from("<i", params.raw, offset)
            if found != default:
                raise RuntimeError(
                    f"this llama.cpp's context parameters differ: {found} at {offset}, not {default}"
                )
        for offset, value in settings.items():
            struct.pack_into("<i", params.raw, offset, value)
        return params

    def __enter__(self) -> "LlamaCpp":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._library.llama_free(self._context)
        self._library.llama_model_free(self._model)

    def clear(self) -> None:
        """Forget everything decoded so far."""
        memory = ctypes.c_void_p(self._library.llama_get_memory(self._context))
        self._library.llama_memory_clear(memory, ctypes.c_bool(True))

    def logits(self, tokens: Sequence[int], start: int = 0, keep: int | None = None) -> np.ndarray:
        """Decode `tokens` from position `start`; float32 logits `[keep, vocab]` of the last `keep` (all)."""
        count = len(tokens)
        keep = count if keep is None else keep
        batch = self._library.llama_batch_init(ctypes.c_int32(count), ctypes.c_int32(0), ctypes.c_int32(1))
        batch.n_tokens = count
        for i, token in enumerate(tokens):
            batch.token[i], batch.pos[i], batch.n_seq_id[i] = token, start + i, 1
            batch.seq_id[i][0] = 0
            batch.logits[i] = i >= count - keep
        status = self._library.llama_decode(self._context, batch)
        if status != 0:
            raise RuntimeError(f"llama_decode returned {status}")
        rows = [
            np.ctypeslib.as_array(
                self._library.llama_get_logits_ith(self._context, ctypes.c_int32(i)), (self.vocab_size,)
            ).copy()
            for i in range(count - keep, count)
        ]
        self._library.llama_batch_free(batch)
        return np.stack(rows)

    def greedy(self, prompt: Sequence[int], count: int) -> list[int]:
        """`count` greedy tokens after `prompt`, from an empty context."""
        self.clear()
        out = [int(self.logits(prompt, keep=1)[0].argmax())]
        while len(out) < count:
            out.append(int(self.logits(out[-1:], start=len(prompt) + len(out) - 1)[0].argmax()))
        return out

    def tokenize(self, text: str) -> list[int]:
        """The ids of `text` by llama.cpp's own tokenizer, control tokens not recognised."""
        raw = text.encode()
        room = (ctypes.c_int32 * (len(raw) + 8))()
        count = self._library.llama_tokenize(
            self._vocab, raw, len(raw), room, len(room), ctypes.c_bool(False), ctypes.c_bool(False)
        )
        return list(room[:count])
