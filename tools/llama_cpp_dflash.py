"""llama.cpp as an oracle for DFlash drafters, see `llama_cpp`.

The drafter's file needs an embedding and a head of its own, and no tokenizer. Features of committed rows are
a batch without tokens; what follows is a block of tokens, whose rows see each other.
"""

import ctypes
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import cache
from pathlib import Path
from typing import NamedTuple

import numpy as np

from tools.llama_cpp import GGML_TYPE_F32, Batch, library, open_model


class Functions(NamedTuple):
    """Functions beyond those of `Library`."""

    set_causal: Callable[[int, bool], None]  # in a context
    forget: Callable[[int, int, int, int], bool]  # of a memory: a sequence's positions first … end


@cache
def _functions() -> Functions:
    c = library().c
    c.llama_set_causal_attn.restype = None
    c.llama_set_causal_attn.argtypes = [ctypes.c_void_p, ctypes.c_bool]
    c.llama_memory_seq_rm.restype = ctypes.c_bool
    c.llama_memory_seq_rm.argtypes = [ctypes.c_void_p, ctypes.c_int32, ctypes.c_int32, ctypes.c_int32]
    return Functions(c.llama_set_causal_attn, c.llama_memory_seq_rm)


class Drafter:
    """A drafter with one context, fed from position 0 on. Use `open_drafter`."""

    def __init__(self, model: int, context: int) -> None:
        self._context = context
        vocab = library().c.llama_model_get_vocab(model)
        self._vocab_size: int = library().c.llama_vocab_n_tokens(vocab)
        self._length = 0

    def append(self, features: np.ndarray) -> None:
        """Committed rows, float32 [n, feature size]."""
        embedded = np.ascontiguousarray(features, np.float32)
        self._run(len(embedded), embedded=embedded)
        self._length += len(features)

    def draft(self, token_ids: Sequence[int]) -> np.ndarray:
        """Logits float32 [B, vocab] of a block after the committed rows, which is forgotten."""
        c = library().c
        self._run(len(token_ids), token_ids=token_ids)
        rows = [c.llama_get_logits_ith(self._context, i) for i in range(len(token_ids))]
        logits = np.stack([np.ctypeslib.as_array(row, (self._vocab_size,)).copy() for row in rows])
        if not _functions().forget(c.llama_get_memory(self._context), 0, self._length, -1):
            raise library().failure("the block cannot be forgotten")
        return logits

    def _run(
        self, count: int, *, token_ids: Sequence[int] | None = None, embedded: np.ndarray | None = None
    ) -> None:
        integers = ctypes.c_int32 * count
        sequence = integers(0)
        batch = Batch(
            n_tokens=count,
            pos=integers(*range(self._length, self._length + count)),
            n_seq_id=integers(*[1] * count),
            seq_id=(ctypes.POINTER(ctypes.c_int32) * count)(*[sequence] * count),
            logits=(ctypes.c_int8 * count)(*[1] * count),
        )
        if embedded is not None:
            batch.embd = embedded.ctypes.data_as(ctypes.POINTER(ctypes.c_float))
        if token_ids is not None:
            batch.token = integers(*token_ids)
        status = library().c.llama_decode(self._context, batch)
        if status != 0:
            raise library().failure(f"a batch of a drafter returned {status}")


@contextmanager
def open_drafter(path: Path, *, is_causal: bool, context_length: int = 256) -> Iterator[Drafter]:
    """A drafter in float32. is_causal: whether the rows of a block see only those before them."""
    lib = library()
    changes = {"n_ctx": context_length, "n_batch": context_length, "n_ubatch": context_length}
    changes |= {"type_k": GGML_TYPE_F32, "type_v": GGML_TYPE_F32, "flash_attn_type": 0}
    with open_model(path) as model, ExitStack() as stack:
        context = lib.c.llama_init_from_model(model, lib.context_params(**changes))
        if not context:
            raise lib.failure("cannot make a context")
        stack.callback(lib.c.llama_free, context)
        _functions().set_causal(context, is_causal)
        yield Drafter(model, context)
