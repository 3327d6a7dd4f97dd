"""llama.cpp as an oracle for a block for multi-token prediction (MTP), see `llama_cpp`.

Two contexts over one model: the trunk's, which gives its hidden states, and the block's, whose rows are a
token and a hidden state each. Neither has the artefact of llama.cpp's own drafting, a first row of zeros.
"""

import ctypes
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from tools.llama_cpp import GGML_TYPE_F32, Batch, Params, library

LOAD_MTP_OFFSET = 77  # in the model's parameters, behind the flags that `model_params` checks
CONTEXT_TYPE_MTP = 1
KEEP_HIDDEN = "_Z26llama_set_embeddings_nextnP13llama_contextbb"
GET_HIDDEN = "_Z30llama_get_embeddings_nextn_ithP13llama_contexti"


class Rows(NamedTuple):
    """By row: what the head reads, [T, E], and its logits, [T, vocab]."""

    hidden: np.ndarray
    logits: np.ndarray


class Functions(NamedTuple):
    """Functions beyond those of `Library`."""

    hidden_size: Callable[[int], int]  # of a model
    keep_hidden: Callable[[int, bool, bool], None]  # in a context; only of rows whose logits are wanted
    hidden: Callable[[int, int], Any]  # of a context's row


@cache
def _functions() -> Functions:
    """The library, with the functions of C++ that its header for experiments declares."""
    c = library().c
    c.llama_model_n_embd.restype, c.llama_model_n_embd.argtypes = ctypes.c_int32, [ctypes.c_void_p]
    keep, get = c[KEEP_HIDDEN], c[GET_HIDDEN]
    keep.restype, keep.argtypes = None, [ctypes.c_void_p, ctypes.c_bool, ctypes.c_bool]
    get.restype, get.argtypes = ctypes.POINTER(ctypes.c_float), [ctypes.c_void_p, ctypes.c_int32]
    return Functions(c.llama_model_n_embd, keep, get)


class Context:
    """A context of the trunk or of the block, fed from position 0 on."""

    def __init__(self, model: int, context: int, batch: Batch) -> None:
        self._context, self._batch = context, batch
        self._hidden_size = _functions().hidden_size(model)
        self._vocab_size: int = library().c.llama_vocab_n_tokens(library().c.llama_model_get_vocab(model))
        self._position = 0

    def feed(self, token_ids: Sequence[int], hidden: np.ndarray | None = None) -> Rows:
        """The next rows; hidden: float32 [T, E], of rows of the block."""
        c, batch = library().c, self._batch
        batch.n_tokens = len(token_ids)
        if hidden is not None:
            states = np.ascontiguousarray(hidden, np.float32)
            batch.embd = states.ctypes.data_as(ctypes.POINTER(ctypes.c_float))
        for i, token_id in enumerate(token_ids):
            batch.token[i], batch.pos[i] = int(token_id), self._position + i
            batch.n_seq_id[i], batch.seq_id[i][0], batch.logits[i] = 1, 0, 1
        status = c.llama_decode(self._context, batch)
        batch.embd = None
        if status != 0:
            raise library().failure(f"decode returned {status}")
        self._position += len(token_ids)
        outputs = (_functions().hidden(self._context, i) for i in range(len(token_ids)))
        logits = (c.llama_get_logits_ith(self._context, i) for i in range(len(token_ids)))
        return Rows(
            np.stack([np.ctypeslib.as_array(row, (self._hidden_size,)).copy() for row in outputs]),
            np.stack([np.ctypeslib.as_array(row, (self._vocab_size,)).copy() for row in logits]),
        )


@contextmanager
def open_trunk_and_block(path: Path, context_length: int) -> Iterator[tuple[Context, Context]]:
    """Contexts in float32 of the trunk and of the block of the model at `path`."""
    lib = library()
    changes = {"n_ctx": context_length, "n_batch": context_length, "n_ubatch": context_length}
    changes |= {"type_k": GGML_TYPE_F32, "type_v": GGML_TYPE_F32, "flash_attn_type": 0}
    params: Params = lib.model_params(vocab_only=False)
    params.raw[LOAD_MTP_OFFSET] = True
    model = lib.c.llama_model_load_from_file(str(path).encode(), params)
    if not model:
        raise lib.failure(f"cannot load {path}")
    with ExitStack() as stack:
        stack.callback(lib.c.llama_model_free, model)
        contexts = []
        for context_type in (0, CONTEXT_TYPE_MTP):
            context = lib.c.llama_init_from_model(model, lib.context_params(**changes, ctx_type=context_type))
            if not context:
                raise lib.failure("cannot make a context")
            stack.callback(lib.c.llama_free, context)
            _functions().keep_hidden(context, True, True)
            batch = lib.c.llama_batch_init(context_length, 0, 1)
            stack.callback(lib.c.llama_batch_free, batch)
            contexts.append(Context(model, context, batch))
        yield contexts[0], contexts[1]
