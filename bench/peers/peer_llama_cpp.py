"""A llama.cpp worker for paired benchmarks; runs under any interpreter that has `llama-cpp-python`.

    python -m bench.peers.peer_llama_cpp MODEL THREADS CONTEXT FLASH_ATTENTION MMAP \
        [REPACK RANDOM [SEQUENCES]]

REPACK 0: no copies of weights in another layout, which would not be in the file. RANDOM 1: the mapping is
advised not to be read ahead. SEQUENCES: how many `start` may begin. Commands on standard input, one a line,
each answered by one line of JSON:
    prefill N     clears the state, feeds N tokens                → {"seconds": s}
    append N      feeds N tokens                                   → {"seconds": s}
    keep 0        remembers the state                              → {"seconds": s}
    back 0        makes the state what was last remembered         → {"seconds": s}
    decode N      feeds N single tokens, reading the logits each   → {"seconds": s}
    generate N    N more tokens, the most likely each              → {"seconds": s, "tokens": [...]}
    start N       clears the state, feeds N sequences a prompt each → {"seconds": s}
    steps N       N steps of a token for each of these sequences, reading all logits → {"seconds": s}
"""

import ctypes
import json
import mmap
import sys
import time

import llama_cpp
import numpy as np

from bench.peers.peer_tokens import FIRST_TOKEN, PROMPT_LENGTH, random_tokens


class Peer:
    """One model in one llama.cpp context."""

    def __init__(
        self,
        path: str,
        threads: int,
        context: int,
        flash_attention: bool,
        use_mmap: bool,
        repack: bool,
        num_sequences: int,
    ) -> None:
        llama_cpp.llama_backend_init()
        model_params = llama_cpp.llama_model_default_params()
        model_params.use_mmap = use_mmap
        model_params.use_extra_bufts = repack
        self.model = llama_cpp.llama_model_load_from_file(path.encode(), model_params)
        params = llama_cpp.llama_context_default_params()
        params.n_ctx = context
        params.n_batch = params.n_ubatch = 512
        params.n_seq_max, params.kv_unified = num_sequences, True
        params.n_threads = params.n_threads_batch = threads
        params.flash_attn_type = int(flash_attention)
        self.context = llama_cpp.llama_init_from_model(self.model, params)
        self.vocab_size = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(self.model))
        self.next_token = FIRST_TOKEN
        self.lengths: list[int] = []  # of the sequences that `start` began

    def feed(self, tokens: list[int]) -> None:
        ids = (ctypes.c_int32 * len(tokens))(*tokens)
        if llama_cpp.llama_decode(self.context, llama_cpp.llama_batch_get_one(ids, len(tokens))):
            raise RuntimeError("llama_decode failed")

    def prefill(self, count: int) -> None:
        llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(self.context), True)
        self.append(count)

    def append(self, count: int) -> None:
        tokens = random_tokens(count, 1)
        for start in range(0, count, 512):
            self.feed(tokens[start : start + 512])
        _ = llama_cpp.llama_get_logits_ith(self.context, -1)[0]

    def keep(self, _: int) -> None:
        size = llama_cpp.llama_state_seq_get_size(self.context, 0)
        self.kept = (ctypes.c_uint8 * size)()
        if llama_cpp.llama_state_seq_get_data(self.context, self.kept, size, 0) != size:
            raise RuntimeError("llama_state_seq_get_data failed")

    def back(self, _: int) -> None:
        llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(self.context), True)
        if not llama_cpp.llama_state_seq_set_data(self.context, self.kept, len(self.kept), 0):
            raise RuntimeError("llama_state_seq_set_data failed")

    def decode(self, count: int) -> None:
        for token in random_tokens(count, 2):
            self.feed([token])
            _ = llama_cpp.llama_get_logits_ith(self.context, -1)[0]

    def start(self, count: int) -> None:
        llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(self.context), True)
        self.lengths = [0] * count
        for sequence in range(count):
            tokens = random_tokens(PROMPT_LENGTH, sequence)
            self.feed_rows([(sequence, token) for token in tokens])

    def steps(self, count: int) -> None:
        for token in random_tokens(count, 2):
            rows = [(sequence, (token + sequence) % 256) for sequence in range(len(self.lengths))]
            self.feed_rows(rows)
            for row in range(len(rows)):
                _ = llama_cpp.llama_get_logits_ith(self.context, row)[0]

    def feed_rows(self, rows: list[tuple[int, int]]) -> None:
        """Feeds (sequence, token) in one batch, with the logits of all."""
        batch = llama_cpp.llama_batch_init(len(rows), 0, 1)
        batch.n_tokens = len(rows)
        for row, (sequence, token) in enumerate(rows):
            batch.token[row], batch.pos[row] = token, self.lengths[sequence]
            batch.n_seq_id[row], batch.seq_id[row][0], batch.logits[row] = 1, sequence, 1
            self.lengths[sequence] += 1
        if llama_cpp.llama_decode(self.context, batch):
            raise RuntimeError("llama_decode failed")
        llama_cpp.llama_batch_free(batch)

    def generate(self, count: int) -> list[int]:
        tokens = []
        for _ in range(count):
            self.feed([self.next_token])
            logits = llama_cpp.llama_get_logits_ith(self.context, -1)
            self.next_token = int(np.ctypeslib.as_array(logits, (self.vocab_size,)).argmax())
            tokens.append(self.next_token)
        return tokens


def advise_random(path: str) -> None:
    """Tells the system that pages of the mapped file will be needed one by one."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    with open("/proc/self/maps") as maps:
        for line in maps:
            if line.rstrip().endswith(path):
                begin, end = (int(part, 16) for part in line.split()[0].split("-"))
                if libc.madvise(begin, end - begin, mmap.MADV_RANDOM):
                    raise OSError(ctypes.get_errno(), "madvise")


def main() -> None:
    path, threads, context, flash_attention, use_mmap, *more = sys.argv[1:]
    repack, random = (bool(int(flag)) for flag in more[:2] or ("1", "0"))
    num_sequences = int(more[2]) if len(more) > 2 else 1
    peer = Peer(
        path,
        int(threads),
        int(context),
        bool(int(flash_attention)),
        bool(int(use_mmap)),
        repack,
        num_sequences,
    )
    if random:
        advise_random(path)
    print(
        json.dumps(
            {"version": llama_cpp.__version__, "system": llama_cpp.llama_print_system_info().decode()}
        ),
        flush=True,
    )
    for line in sys.stdin:
        verb, count = line.split()
        started = time.perf_counter()
        tokens = getattr(peer, verb)(int(count))
        answer = {"seconds": time.perf_counter() - started} | ({"tokens": tokens} if tokens else {})
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
