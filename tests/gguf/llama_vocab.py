"""llama.cpp's tokenizer as an oracle, through the C functions that the `xllamacpp` extension exports."""

import ctypes
import importlib.util
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType

# llama_model_params is passed by value. Only its head is known here; the rest is room for more fields.
VOCAB_ONLY_OFFSET = 72
USE_EXTRA_BUFFERS_OFFSET = 74


class _ModelParams(ctypes.Structure):
    _fields_ = (("raw", ctypes.c_uint8 * 512),)


LOG_CALLBACK = ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_char_p, ctypes.c_void_p)


@LOG_CALLBACK
def _discard_log(level: int, text: bytes, data: int) -> None:
    """llama.cpp reports every odd token on standard error; the tests compare ids instead."""


class LlamaVocab:
    """A vocabulary loaded by llama.cpp from a GGUF file without tensors; a context manager."""

    def __init__(self, path: Path) -> None:
        import xllamacpp  # noqa: F401  its package loads the libraries that the extension needs

        folder = Path(importlib.util.find_spec("xllamacpp").origin).parent
        self._lib = ctypes.CDLL(str(next(folder.glob("*.so"))))
        self._lib.llama_log_set(_discard_log, None)
        self._lib.llama_model_default_params.restype = _ModelParams
        self._lib.llama_model_load_from_file.argtypes = [ctypes.c_char_p, _ModelParams]
        self._lib.llama_model_load_from_file.restype = ctypes.c_void_p
        self._lib.llama_model_free.argtypes = [ctypes.c_void_p]
        self._lib.llama_model_get_vocab.argtypes = [ctypes.c_void_p]
        self._lib.llama_model_get_vocab.restype = ctypes.c_void_p
        self._lib.llama_vocab_is_eog.argtypes = [ctypes.c_void_p, ctypes.c_int32]
        self._lib.llama_vocab_is_eog.restype = ctypes.c_bool
        self._lib.llama_vocab_n_tokens.argtypes = [ctypes.c_void_p]
        self._lib.llama_tokenize.argtypes = [
            *(ctypes.c_void_p, ctypes.c_char_p, ctypes.c_int32),
            *(ctypes.POINTER(ctypes.c_int32), ctypes.c_int32, ctypes.c_bool, ctypes.c_bool),
        ]
        self._lib.llama_detokenize.argtypes = [
            *(ctypes.c_void_p, ctypes.POINTER(ctypes.c_int32), ctypes.c_int32),
            *(ctypes.c_char_p, ctypes.c_int32, ctypes.c_bool, ctypes.c_bool),
        ]
        params = self._lib.llama_model_default_params()
        assert params.raw[USE_EXTRA_BUFFERS_OFFSET] == 1, (
            "llama_model_params has another layout in this version"
        )
        params.raw[VOCAB_ONLY_OFFSET] = 1
        self._model = self._lib.llama_model_load_from_file(str(path).encode(), params)
        assert self._model, "llama.cpp refused the vocabulary"
        self._vocab = self._lib.llama_model_get_vocab(self._model)

    def __enter__(self) -> "LlamaVocab":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._lib.llama_model_free(self._model)

    def encode(self, text: str, parse_special: bool = False) -> list[int]:
        data = text.encode()
        ids = (ctypes.c_int32 * (len(data) + 8))()
        count = self._lib.llama_tokenize(self._vocab, data, len(data), ids, len(ids), True, parse_special)
        assert count >= 0
        return ids[:count]

    def decode(self, ids: Sequence[int], skip_special: bool = True) -> bytes:
        array = (ctypes.c_int32 * len(ids))(*ids)
        text = ctypes.create_string_buffer(64 * len(ids) + 8)
        count = self._lib.llama_detokenize(
            self._vocab, array, len(ids), text, len(text), False, not skip_special
        )
        assert count >= 0
        return text.raw[:count]

    def eos_ids(self) -> set[int]:
        return {
            i
            for i in range(self._lib.llama_vocab_n_tokens(self._vocab))
            if self._lib.llama_vocab_is_eog(self._vocab, i)
        }
