"""llama.cpp as an oracle for logits, text and tokens, and its quantiser, through the C interface that the
extension module of `xllamacpp` exports.

The parameter structs of that interface pass by value and grow from version to version. They are treated as
bytes here: the defaults are fetched, the few fields that matter are changed at known offsets, and the
defaults around them are checked first, so that a changed layout is an error and not a wrong figure.
"""

import ctypes
import struct
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import NamedTuple

import numpy as np
import xllamacpp

PARAMS_BYTES = 512  # more than any version's struct; the callee reads only its own
GGML_TYPE_F32, GGML_TYPE_F16 = 0, 1
TYPES_THAT_NEED_IMPORTANCE = {16, 17, 19, 22, 29}  # IQ2_XXS, IQ2_XS, IQ1_S, IQ2_S, IQ1_M


class Field(NamedTuple):
    """A field of the context parameters: where it is, how it is written, and its known default."""

    offset: int
    format: str
    default: int | float


CONTEXT_FIELDS = {
    "n_ctx": Field(0, "<I", 512),
    "n_batch": Field(4, "<I", 2048),
    "n_ubatch": Field(8, "<I", 512),
    "n_seq_max": Field(12, "<I", 1),
    "n_threads": Field(28, "<i", 4),
    "n_threads_batch": Field(32, "<i", 4),
    "ctx_type": Field(36, "<i", 0),
    "rope_scaling_type": Field(40, "<i", -1),
    "pooling_type": Field(44, "<i", -1),
    "attention_type": Field(48, "<i", -1),
    "flash_attn_type": Field(52, "<i", -1),
    "rope_freq_base": Field(56, "<f", 0.0),
    "yarn_ext_factor": Field(64, "<f", -1.0),
    "yarn_beta_slow": Field(76, "<f", -1.0),
    "type_k": Field(104, "<i", GGML_TYPE_F16),
    "type_v": Field(108, "<i", GGML_TYPE_F16),
}


# Two flags of the model parameters: one that is wanted, and one whose default tells that the layout is known.
VOCAB_ONLY_OFFSET, USE_EXTRA_BUFFERS_OFFSET = 72, 74


class Params(ctypes.Structure):
    _fields_ = [("raw", ctypes.c_uint8 * PARAMS_BYTES)]


class Batch(ctypes.Structure):
    _fields_ = [
        ("n_tokens", ctypes.c_int32),
        ("token", ctypes.POINTER(ctypes.c_int32)),
        ("embd", ctypes.POINTER(ctypes.c_float)),
        ("pos", ctypes.POINTER(ctypes.c_int32)),
        ("n_seq_id", ctypes.POINTER(ctypes.c_int32)),
        ("seq_id", ctypes.POINTER(ctypes.POINTER(ctypes.c_int32))),
        ("logits", ctypes.POINTER(ctypes.c_int8)),
    ]


LOG_CALLBACK = ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_char_p, ctypes.c_void_p)


class Library:
    """The loaded extension with typed functions, and what it logged last."""

    def __init__(self) -> None:
        (path,) = Path(xllamacpp.__file__).parent.glob("*.abi3.so")
        self.c = ctypes.CDLL(str(path))
        self.log: list[str] = []
        pointer, i32, i64, text = ctypes.c_void_p, ctypes.c_int32, ctypes.c_int64, ctypes.c_char_p
        floats, ints = ctypes.POINTER(ctypes.c_float), ctypes.POINTER(i32)
        signatures = {
            "llama_backend_init": (None, []),
            "llama_log_set": (None, [LOG_CALLBACK, pointer]),
            "llama_model_default_params": (Params, []),
            "llama_context_default_params": (Params, []),
            "llama_model_load_from_file": (pointer, [text, Params]),
            "llama_model_free": (None, [pointer]),
            "llama_init_from_model": (pointer, [pointer, Params]),
            "llama_free": (None, [pointer]),
            "llama_model_get_vocab": (pointer, [pointer]),
            "llama_vocab_n_tokens": (i32, [pointer]),
            "llama_vocab_is_eog": (ctypes.c_bool, [pointer, i32]),
            "llama_n_ctx": (ctypes.c_uint32, [pointer]),
            "llama_batch_init": (Batch, [i32, i32, i32]),
            "llama_batch_free": (None, [Batch]),
            "llama_decode": (i32, [pointer, Batch]),
            "llama_get_logits_ith": (floats, [pointer, i32]),
            "llama_tokenize": (i32, [pointer, text, i32, ints, i32, ctypes.c_bool, ctypes.c_bool]),
            "llama_token_to_piece": (i32, [pointer, i32, text, i32, i32, ctypes.c_bool]),
            "llama_detokenize": (i32, [pointer, ints, i32, text, i32, ctypes.c_bool, ctypes.c_bool]),
            "llama_get_memory": (pointer, [pointer]),
            "llama_memory_clear": (None, [pointer, ctypes.c_bool]),
            "ggml_quantize_init": (None, [ctypes.c_int]),
            "ggml_quantize_chunk": (
                ctypes.c_size_t,
                [ctypes.c_int, floats, pointer, i64, i64, i64, floats],
            ),
        }
        for name, (result, arguments) in signatures.items():
            function = getattr(self.c, name)
            function.restype, function.argtypes = result, arguments
        self._on_log = LOG_CALLBACK(lambda level, line, user: self.log.append(line.decode(errors="replace")))
        self.c.llama_log_set(self._on_log, None)
        self.c.llama_backend_init()

    def context_params(self, **changes: int) -> Params:
        """The default context parameters with some fields changed. RuntimeError if the layout is another."""
        params = self.c.llama_context_default_params()
        raw = bytearray(params.raw)
        for name, (offset, format_, default) in CONTEXT_FIELDS.items():
            (found,) = struct.unpack_from(format_, raw, offset)
            if found != default:
                raise RuntimeError(
                    f"llama.cpp's context parameters changed: {name} is {found}, not {default}"
                )
        for name, value in changes.items():
            struct.pack_into(CONTEXT_FIELDS[name].format, raw, CONTEXT_FIELDS[name].offset, value)
        return Params.from_buffer_copy(raw)

    def model_params(self, *, vocab_only: bool) -> Params:
        """The default model parameters, or those for a file without tensors. RuntimeError as above."""
        params: Params = self.c.llama_model_default_params()
        if params.raw[USE_EXTRA_BUFFERS_OFFSET] != 1 or params.raw[VOCAB_ONLY_OFFSET] != 0:
            raise RuntimeError("llama.cpp's model parameters changed")
        params.raw[VOCAB_ONLY_OFFSET] = vocab_only
        return params

    def failure(self, what: str) -> RuntimeError:
        return RuntimeError(f"llama.cpp: {what}\n{''.join(self.log[-20:])}")


@cache
def library() -> Library:
    return Library()


class Vocabulary:
    """The tokenizer of a loaded model."""

    def __init__(self, model: int) -> None:
        self._vocab = library().c.llama_model_get_vocab(model)
        self.num_tokens: int = library().c.llama_vocab_n_tokens(self._vocab)

    def encode(self, text: str, parse_special: bool = False, *, add_special: bool = True) -> list[int]:
        """Token ids. parse_special: the text may name special tokens; add_special: the file may add a BOS."""
        raw = text.encode()
        capacity = len(raw) + 8
        ids = (ctypes.c_int32 * capacity)()
        count = library().c.llama_tokenize(
            self._vocab, raw, len(raw), ids, capacity, add_special, parse_special
        )
        if count < 0:
            raise library().failure(f"tokenize returned {count}")
        return list(ids[:count])

    def decode(self, ids: Sequence[int], skip_special: bool = True) -> bytes:
        """The text of some tokens."""
        array = (ctypes.c_int32 * len(ids))(*ids)
        text = ctypes.create_string_buffer(64 * len(ids) + 8)
        count = library().c.llama_detokenize(
            self._vocab, array, len(ids), text, len(text), False, not skip_special
        )
        if count < 0:
            raise library().failure(f"detokenize returned {count}")
        return text.raw[:count]

    def piece(self, token_id: int) -> bytes:
        """The bytes of one token, special tokens included."""
        buffer = ctypes.create_string_buffer(1024)
        count = library().c.llama_token_to_piece(self._vocab, token_id, buffer, len(buffer), 0, True)
        if count < 0:
            raise library().failure(f"token_to_piece returned {count}")
        return buffer.raw[:count]

    def eos_ids(self) -> set[int]:
        """The tokens that end a generation."""
        return {i for i in range(self.num_tokens) if library().c.llama_vocab_is_eog(self._vocab, i)}


class Session:
    """A model with one context, fed from position 0 on. Use `open_session`."""

    def __init__(self, model: int, context: int, batch: Batch, capacity: int) -> None:
        self._context, self._batch, self._capacity = context, batch, capacity
        self.vocabulary = Vocabulary(model)
        self.num_tokens = 0

    def clear(self) -> None:
        """Forgets everything fed so far."""
        library().c.llama_memory_clear(library().c.llama_get_memory(self._context), True)
        self.num_tokens = 0

    def feed(self, token_ids: Sequence[int]) -> np.ndarray:
        """Logits float32 [T, vocab] after each of the next tokens of the sequence."""
        parts = [
            self._feed_batch(token_ids[start : start + self._capacity])
            for start in range(0, len(token_ids), self._capacity)
        ]
        return np.concatenate(parts)

    def _feed_batch(self, token_ids: Sequence[int]) -> np.ndarray:
        lib, batch = library(), self._batch
        batch.n_tokens = len(token_ids)
        for i, token_id in enumerate(token_ids):
            batch.token[i] = int(token_id)
            batch.pos[i] = self.num_tokens + i
            batch.n_seq_id[i] = 1
            batch.seq_id[i][0] = 0
            batch.logits[i] = 1
        status = lib.c.llama_decode(self._context, batch)
        if status != 0:
            raise lib.failure(f"decode returned {status}")
        self.num_tokens += len(token_ids)
        rows = [lib.c.llama_get_logits_ith(self._context, i) for i in range(len(token_ids))]
        return np.stack([np.ctypeslib.as_array(row, (self.vocabulary.num_tokens,)).copy() for row in rows])

    def greedy(self, token_ids: Sequence[int], num_tokens: int) -> list[int]:
        """The next `num_tokens` most likely tokens, one at a time, end tokens included like any other."""
        generated: list[int] = []
        pending = list(token_ids)
        while len(generated) < num_tokens:
            pending = [int(self.feed(pending)[-1].argmax())]
            generated += pending
        return generated


@contextmanager
def open_model(path: str | Path, *, vocab_only: bool = False) -> Iterator[int]:
    """A loaded model's handle. RuntimeError with llama.cpp's log if it refuses the file."""
    lib = library()
    lib.log.clear()
    model = lib.c.llama_model_load_from_file(str(path).encode(), lib.model_params(vocab_only=vocab_only))
    if not model:
        raise lib.failure(f"cannot load {path}")
    try:
        yield model
    finally:
        lib.c.llama_model_free(model)


@contextmanager
def open_vocabulary(path: str | Path) -> Iterator[Vocabulary]:
    """The tokenizer in a file, which needs no tensors."""
    with open_model(path, vocab_only=True) as model:
        yield Vocabulary(model)


@contextmanager
def open_session(
    path: str | Path, context_length: int, num_threads: int = 2, *, float32_attention: bool = True
) -> Iterator[Session]:
    """A session on the model at `path`.

    `float32_attention` keeps keys and values in float32 and turns flash attention off, which is what to
    compare float32 results with; otherwise both are as llama.cpp's defaults have them.
    """
    lib = library()
    capacity = min(context_length, 512)
    changes = {"n_ctx": context_length, "n_batch": capacity, "n_ubatch": capacity}
    changes |= {"n_threads": num_threads, "n_threads_batch": num_threads}
    if float32_attention:
        changes |= {"type_k": GGML_TYPE_F32, "type_v": GGML_TYPE_F32, "flash_attn_type": 0}
    with open_model(path) as model:
        context = lib.c.llama_init_from_model(model, lib.context_params(**changes))
        if not context:
            raise lib.failure("cannot make a context")
        batch = lib.c.llama_batch_init(capacity, 0, 1)
        try:
            if lib.c.llama_n_ctx(context) < context_length:
                raise lib.failure(
                    f"a context of {lib.c.llama_n_ctx(context)}, not {context_length} positions"
                )
            yield Session(model, context, batch, capacity)
        finally:
            lib.c.llama_batch_free(batch)
            lib.c.llama_free(context)


def logits(path: str | Path, token_ids: Sequence[int], *, float32_attention: bool = True) -> np.ndarray:
    """Logits float32 [T, vocab] at every position of a sequence."""
    with open_session(path, len(token_ids), float32_attention=float32_attention) as session:
        return session.feed(token_ids)


def greedy(path: str | Path, token_ids: Sequence[int], num_tokens: int) -> list[int]:
    """`Session.greedy` from an empty context."""
    with open_session(path, len(token_ids) + num_tokens) as session:
        return session.greedy(token_ids, num_tokens)


def quantize(values: np.ndarray, type_id: int) -> np.ndarray:
    """Blocks uint8 [..., row_bytes] of float32 values [..., columns], by llama.cpp's own quantiser."""
    lib = library()
    values = np.ascontiguousarray(values, np.float32)
    columns = values.shape[-1]
    rows = values.size // columns
    blocks = np.zeros(values.nbytes, np.uint8)
    importance = np.ones(columns, np.float32) if type_id in TYPES_THAT_NEED_IMPORTANCE else None
    as_floats = ctypes.POINTER(ctypes.c_float)
    lib.c.ggml_quantize_init(type_id)
    num_bytes = lib.c.ggml_quantize_chunk(
        type_id,
        values.ctypes.data_as(as_floats),
        blocks.ctypes.data_as(ctypes.c_void_p),
        0,
        rows,
        columns,
        None if importance is None else importance.ctypes.data_as(as_floats),
    )
    return blocks[:num_bytes].reshape(*values.shape[:-1], -1)
