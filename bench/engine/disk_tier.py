"""Generation from a file twice as large as the memory it may use: our disk tier against llama.cpp's mmap.

    python -m bench.full_size_model tier.gguf --layers 10 --vocab 32768                     5.2 GB
    python -m bench.engine.disk_tier tier.gguf --peer-python PEER/bin/python --out docs/results/disk_tier.json

Both run under a memory cgroup with the same limit, half of the file by default, and generate in turn, each
the next tokens of its own text; ratios are taken pair by pair. Both texts must be that of a run of ours
without a limit. llama.cpp runs without copies of weights in another layout, for which there is no room, and
with the better of two settings: read-ahead as the system does it, and none.

Beside the figures stand their floors: what a token costs with all weights in memory, and the bytes that it
missed at the rate at which the disk gives pieces of that size to as many threads as ours has.
"""

import argparse
import json
import mmap
import os
import random
import statistics
import sys
import threading
import time
from contextlib import closing
from dataclasses import asdict
from pathlib import Path
from typing import Any

from bench.memory_limit import MemoryLimit, memory_limit
from bench.peers.versus_llama_cpp import Side
from bench.results import write_result
from coldstream.experts.cpu.pooled_stacks import NUM_READERS
from coldstream.gguf.reader import GGUFFile
from coldstream.placement.hardware import Hardware

CONTEXT = 2048
HEADROOM = 320 << 20  # of the limit, for the interpreter, the tokenizer and the pages that loading passes
READ_BYTES = 2 << 30


def disk_rate(path: Path, piece: int) -> float:
    """Bytes per second of direct reads of `piece` bytes at random places of a file."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECT)
    offsets = list(range(0, os.fstat(descriptor).st_size - piece, piece))
    random.Random(1).shuffle(offsets)
    del offsets[READ_BYTES // piece :]
    total, lock = len(offsets) * piece, threading.Lock()

    def read() -> None:
        buffer = mmap.mmap(-1, piece)
        while True:
            with lock:
                if not offsets:
                    return
                offset = offsets.pop()
            os.preadv(descriptor, [buffer], offset)

    threads = [threading.Thread(target=read) for _ in range(NUM_READERS)]
    started = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    os.close(descriptor)
    return total / (time.perf_counter() - started)


def forget_pages(path: Path) -> None:
    """Drops the file from the page cache."""
    descriptor = os.open(path, os.O_RDONLY)
    os.fsync(descriptor)  # what is not written yet stays
    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(descriptor)


def peer_side(options: argparse.Namespace, limit: MemoryLimit, is_random: bool) -> Side:
    settings = ("1", "1", "0", str(int(is_random)))  # flash attention, mmap, repacking, no read-ahead
    model = (str(options.model.resolve()), str(options.threads), str(CONTEXT))
    return Side(*limit.command(options.peer_python, "-m", "bench.peers.peer_llama_cpp", *model, *settings))


def our_command(options: argparse.Namespace, *ram: str) -> tuple[str, ...]:
    model = (str(options.model.resolve()), str(options.threads), str(CONTEXT))
    return (sys.executable, "-m", "bench.engine.worker", *model, "auto", *ram)


def rates_by_advice(options: argparse.Namespace, limit: MemoryLimit) -> dict[bool, float]:
    """llama.cpp's tokens per second, by whether the mapping is not read ahead."""
    rates = {}
    for is_random in (False, True):
        forget_pages(options.model)
        with closing(peer_side(options, limit, is_random)) as side:
            side.ask("generate", options.tokens)
            rates[is_random] = side.rate("generate", options.tokens)
    print(f"llama.cpp with read-ahead {rates[False]:.2f} tok/s, without {rates[True]:.2f}", flush=True)
    return rates


def compare(options: argparse.Namespace) -> dict[str, Any]:
    """See the module docstring."""
    with GGUFFile.open(options.model) as file:
        file_bytes = file.num_bytes
        piece = next(
            info.num_bytes // info.shape[0] for name, info in file.tensors.items() if "_gate_exps" in name
        )
    limit_bytes = options.limit or file_bytes // 2
    piece = -(-piece // 4096) * 4096
    rate = disk_rate(options.model, piece)
    with memory_limit("ours", limit_bytes) as our_limit, memory_limit("peer", limit_bytes) as peer_limit:
        by_advice = rates_by_advice(options, peer_limit)
        is_random = by_advice[True] > by_advice[False]
        forget_pages(options.model)
        ours = Side(*our_limit.command(*our_command(options, str(limit_bytes - HEADROOM))))
        peer = peer_side(options, peer_limit, is_random)
        engines = (ours, peer)
        with closing(ours), closing(peer):
            answers = [
                tuple(engine.ask("generate", options.tokens) for engine in engines)
                for _ in range(options.pairs + 1)
            ]
    with closing(Side(*our_command(options))) as unlimited:
        whole = [unlimited.ask("generate", options.tokens) for _ in answers]
    for (our_answer, peer_answer), answer in zip(answers, whole, strict=True):
        assert our_answer["tokens"] == answer["tokens"], "our text depends on the limit"
        assert peer_answer["tokens"] == answer["tokens"], "llama.cpp's text is another one"
    return {
        "model": options.model.name,
        "file_bytes": file_bytes,
        "limit_bytes": limit_bytes,
        "command": f"python -m bench.engine.disk_tier {options.model.name} --threads {options.threads}",
        "machine": asdict(Hardware.measure()),
        "ours": ours.about,
        "peer": peer.about,
        "peer_read_ahead": not is_random,
        "peer_tuning_tok_s": {"read_ahead": by_advice[False], "no_read_ahead": by_advice[True]},
        "read_ahead_bytes": read_ahead_bytes(options.model),
        "tokens_per_pair": options.tokens,
        "pairs": options.pairs,
        "same_text": True,
        "read_piece_bytes": piece,
        "disk_bytes_s": rate,
        **figures(options.tokens, answers, whole, rate),
    }


def figures(
    count: int, answers: list[tuple[dict[str, Any], ...]], whole: list[dict[str, Any]], disk_bytes_s: float
) -> dict[str, Any]:
    """Figures of all pairs but the first, in which both fill their memory."""
    pairs = [tuple(count / answer["seconds"] for answer in pair) for pair in answers[1:]]
    ratios = sorted(a / b for a, b in pairs)
    before, after = answers[0][0]["disk"], answers[-1][0]["disk"]
    done = {key: after[key] - before[key] for key in ("hits", "misses", "bytes_read", "wait_s")}
    num_tokens = count * len(pairs)
    in_memory = statistics.median(count / answer["seconds"] for answer in whole[1:])
    return {
        "ours_tok_s": statistics.median(a for a, _ in pairs),
        "llama_cpp_tok_s": statistics.median(b for _, b in pairs),
        "ratio": statistics.median(ratios),
        "ratio_min": ratios[0],
        "ratio_max": ratios[-1],
        "filling_tok_s": count / answers[0][0]["seconds"],
        "in_memory_tok_s": in_memory,
        "slot_share": after["num_slots"] / after["num_experts"],
        "hit_rate": done["hits"] / (done["hits"] + done["misses"]),
        "read_bytes_per_token": done["bytes_read"] / num_tokens,
        "wait_s_per_token": done["wait_s"] / num_tokens,
        "disk_floor_tok_s": disk_bytes_s / max(1.0, done["bytes_read"] / num_tokens),
        "is_direct": after["is_direct"],
    }


def read_ahead_bytes(path: Path) -> int | None:
    """The system's read-ahead on the disk of `path`; None if it does not report it."""
    device = os.stat(path).st_dev
    file = Path(f"/sys/dev/block/{os.major(device)}:{os.minor(device)}/queue/read_ahead_kb")
    return int(file.read_text()) * 1024 if file.exists() else None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("--peer-python", required=True)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--limit", type=int, help="bytes; half of the file if not given")
    parser.add_argument("--tokens", type=int, default=48, help="of each side in a pair")
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    result = compare(options)
    print(json.dumps({key: result[key] for key in ("ours_tok_s", "llama_cpp_tok_s", "ratio")}), flush=True)
    write_result(result, options.out)


if __name__ == "__main__":
    main()
