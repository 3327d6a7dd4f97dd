"""A llama.cpp worker for paired benchmarks; runs under any interpreter that has `llama-cpp-python`.

    python bench/peer_llama_cpp.py MODEL THREADS CONTEXT FLASH_ATTENTION MMAP

Commands on standard input, one a line, each answered by one line of JSON:
    prefill N     clears the state, feeds N tokens                → {"seconds": s}
    decode N      feeds N single tokens, reading the logits each   → {"seconds": s}
"""

import ctypes
import json
import sys
import time

import llama_cpp

from peer_tokens import random_tokens


class Peer:
    """One model in one llama.cpp context."""

    def __init__(self, path: str, threads: int, context: int, flash_attention: bool, mmap: bool) -> None:
        llama_cpp.llama_backend_init()
        model_params = llama_cpp.llama_model_default_params()
        model_params.use_mmap = mmap
        self.model = llama_cpp.llama_model_load_from_file(path.encode(), model_params)
        params = llama_cpp.llama_context_default_params()
        params.n_ctx = context
        params.n_batch = params.n_ubatch = 512
        params.n_threads = params.n_threads_batch = threads
        params.flash_attn_type = int(flash_attention)
        self.context = llama_cpp.llama_init_from_model(self.model, params)

    def feed(self, tokens: list[int]) -> None:
        ids = (ctypes.c_int32 * len(tokens))(*tokens)
        if llama_cpp.llama_decode(self.context, llama_cpp.llama_batch_get_one(ids, len(tokens))):
            raise RuntimeError("llama_decode failed")

    def prefill(self, count: int) -> None:
        llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(self.context), True)
        tokens = random_tokens(count, 1)
        for start in range(0, count, 512):
            self.feed(tokens[start : start + 512])
        _ = llama_cpp.llama_get_logits_ith(self.context, -1)[0]

    def decode(self, count: int) -> None:
        for token in random_tokens(count, 2):
            self.feed([token])
            _ = llama_cpp.llama_get_logits_ith(self.context, -1)[0]


def main() -> None:
    path, threads, context, flash_attention, mmap = sys.argv[1:]
    peer = Peer(path, int(threads), int(context), bool(int(flash_attention)), bool(int(mmap)))
    print(
        json.dumps(
            {"version": llama_cpp.__version__, "system": llama_cpp.llama_print_system_info().decode()}
        ),
        flush=True,
    )
    for line in sys.stdin:
        verb, count = line.split()
        started = time.perf_counter()
        getattr(peer, {"prefill": "prefill", "decode": "decode"}[verb])(int(count))
        print(json.dumps({"seconds": time.perf_counter() - started}), flush=True)


if __name__ == "__main__":
    main()
