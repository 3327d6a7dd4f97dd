"""CPU kernels of coldstream."""

from collections.abc import Sequence
from typing import Annotated

import numpy
from numpy.typing import NDArray


def supported_tiers() -> list[str]:
    """Names of the tiers this machine can run, from generic upwards."""

class MappedFile:
    """A file mapped read-only; only ops read it."""

    def __init__(self, fd: int, size: int, name: str = 'the model file') -> None:
        """
        Maps the first `size` bytes of the open descriptor `fd`, which may be closed afterwards; `name` is what errors call the file. Raises OSError, or ModelChangedError if the file is shorter.
        """

    @property
    def size(self) -> int: ...

    @property
    def address(self) -> int:
        """Where it is mapped: for registering with a device, not for reading."""

    def read_ahead(self, offset: int, num_bytes: int) -> None:
        """
        Asks the system to read the range soon. Returns nothing: it is no proof that the bytes can be read, which touch_pages gives. Raises ValueError for a range outside the mapping.
        """

class Graph:
    """
    Ops over fixed buffers, captured once and run many times. The buffers must outlive it.
    """

    @property
    def num_ops(self) -> int: ...

    @property
    def capacity(self) -> int: ...

    @property
    def scratch_bytes(self) -> int:
        """
        Memory of the threads that a run takes at most; graphs of a runtime share it.
        """

    def run(self, rows: int) -> None:
        """
        Runs all ops on the first `rows` rows of their buffers. Raises ValueError for rows outside 1 … capacity or data out of range, ModelChangedError when the model file shrank, GenerationFault after a fork.
        """

    def profile(self, rows: int) -> list[tuple[str, float]]:
        """The same as run; returns (op name, seconds) in order."""

class Runtime:
    """A thread pool, a tier, and the capture of ops into graphs."""

    def __init__(self, threads: int, tier: str = 'auto') -> None:
        """
        `threads` workers, the calling thread included. ValueError for a tier that is unknown or that this machine cannot run.
        """

    @property
    def tier(self) -> str: ...

    @property
    def threads(self) -> int: ...

    @property
    def active_threads(self) -> int:
        """
        How many threads take part in the runs that begin from now on; the others sleep.
        """

    @active_threads.setter
    def active_threads(self, arg: int, /) -> None: ...

    @property
    def stays_awake(self) -> bool:
        """Whether its threads poll between two runs, and do not sleep."""

    @property
    def capturing(self) -> bool: ...

    def begin_capture(self, capacity: int) -> None:
        """
        From now on ops called with this runtime are recorded, not run; their arrays must have `capacity` rows.
        """

    def end_capture(self) -> Graph:
        """Ends the capture and returns its Graph."""

def touch_pages(runtime: Runtime, file: MappedFile, offset: int, num_bytes: int) -> None:
    """
    Reads one byte of every page of the range, on all threads. Raises ModelChangedError when a page is gone.
    """

class ExpertPool:
    """
    Experts in a bounded part of memory, read from their file as they are needed.
    """

    def __init__(self, files: Sequence[tuple[int, str]], layers: Sequence[Sequence[tuple[int, int, int]]], num_experts: int, num_threads: int) -> None:
        """
        files: (descriptor, name for errors) of each; the descriptors are not kept. layers: for each, the (file, offset, bytes) of the matrices of its first expert; those of the others follow at intervals of `bytes`. Raises OSError.
        """

    @property
    def slot_bytes(self) -> list[int]:
        """Bytes of a slot, for each size of slots."""

    def class_of(self, layer: int) -> int:
        """Index into slot_bytes."""

    def allocate(self, num_slots: Sequence[int], num_staging: int) -> None:
        """
        Allocates num_slots slots of each size. A step of prefill uses at most num_staging of them for experts that are not expected to be needed again.
        """

    def owners(self, size_class: int) -> Annotated[NDArray[numpy.int64], dict(shape=(None,))]:
        """
        int64 [slots] of layer · experts + expert, or -1 for a free slot; a copy.
        """

    def set_order(self, size_class: int, order: Annotated[NDArray[numpy.int64], dict(shape=(None,), order='C', device='cpu', writable=False)]) -> None:
        """
        int64 indices of slots, in the order in which they are to be given to other experts.
        """

    def preload(self, layer: int, experts: Sequence[int]) -> None:
        """
        Between steps: reads these experts of a layer into free slots. Raises ValueError if there are too few, ModelChangedError if the file cannot be read.
        """

    def memory(self) -> tuple[int, int]:
        """The address of all slots, and their bytes."""

    def hold(self, layer: int, expert: int) -> list[int] | None:
        """
        The addresses of an expert's matrices, which stays where it is until `release`. None, with nothing held, if it is not in memory or too few slots would be left for other experts.
        """

    def release(self, layer: int, expert: int) -> None:
        """Ends one `hold` of an expert. Raises ValueError if there is none."""

    def reserve(self, layer: int, expert: int, num_worse: int) -> tuple[int, list[int]] | None:
        """
        (slot, addresses of the matrices) of a place for an expert that is not in memory, until `deliver`: a free one, or that of one of the first num_worse in the order. None if there is no such place.
        """

    def deliver(self, layer: int, expert: int, slot: int, is_whole: bool) -> None:
        """
        Ends `reserve`. is_whole: whether the bytes are there; otherwise the slot is free again. Raises ValueError for a slot that is not reserved.
        """

    def keep(self, layer: int) -> None:
        """
        From now on the layer's experts give their slots to no other. There must be slots for all of them.
        """

    def clear(self) -> None:
        """
        Forgets all experts in memory that are not held, as after a change of the file.
        """

    def begin_step(self, is_prefill: bool) -> None:
        """Before each run of a graph. Ends what a failed run has left."""

    def used(self) -> Annotated[NDArray[numpy.int64], dict(shape=(None,))]:
        """int64 numbers of the experts that the step has used, a copy."""

    @property
    def is_direct(self) -> bool:
        """Whether all files are read past the page cache."""

    def count(self) -> tuple[int, int, float, int, int]:
        """
        (hits, misses, seconds waited, bytes read, reads tried again) since the pool was made.
        """

class Weight:
    """
    A matrix [rows, cols] or a stack of them, in GGUF's block layout where it lies.
    """

    @staticmethod
    def from_file(file: MappedFile, offset: int, type_id: int, rows: int, cols: int, matrices: int = 1) -> Weight:
        """
        A weight at byte `offset` of a mapped file, read in place. Raises ValueError unless it lies within the file.
        """

    @staticmethod
    def from_array(array: Annotated[NDArray[numpy.uint8], dict(shape=(None,), order='C', device='cpu', writable=False)], type_id: int, rows: int, cols: int, matrices: int = 1) -> Weight:
        """
        A weight in a uint8 array [bytes], which is kept, not copied. Raises ValueError unless it fits.
        """

    @staticmethod
    def from_pool(pool: ExpertPool, layer: int, part: int, type_id: int, rows: int, cols: int) -> Weight:
        """
        A part of a pool's layer: a stack of matrices that are read when they are needed, for pooled_experts alone. Raises ValueError unless it has that size.
        """

    def rows(self, begin: int, end: int) -> Weight:
        """
        A view of these output rows of every matrix. Raises ValueError unless 0 <= begin < end <= num_rows.
        """

    @property
    def address(self) -> int:
        """
        Where the first matrix lies: for a device that has its memory registered, not for reading.
        """

    @property
    def matrix_bytes(self) -> int:
        """From one matrix to the next."""

    @property
    def type_id(self) -> int: ...

    @property
    def num_matrices(self) -> int: ...

    @property
    def num_rows(self) -> int: ...

    @property
    def num_cols(self) -> int: ...

class ExpertGlu:
    """How an expert's gate and up become one."""

    def __init__(self, kind: int = 0, limit: float = 0.0, gate_bias: Annotated[NDArray[numpy.float32], dict(shape=(None, None), order='C', device='cpu', writable=False)] | None = None, up_bias: Annotated[NDArray[numpy.float32], dict(shape=(None, None), order='C', device='cpu', writable=False)] | None = None) -> None:
        """
        kind: a number of `GATED_UNITS`; limit: of a clamped one. Biases float32 [experts, F], both or neither, are added before. Raises ValueError for others.
        """

def quant_geometry() -> list:
    """(type id, name, elements per block, bytes per block) of every type."""

def gather_grid(type_id: int, gathers: bool) -> None:
    """
    Whether tiers with 512-bit registers gather entries of a type's grid. For tests: they time both ways when they are first chosen. Raises ValueError for an unknown type.
    """

def linear(runtime: Runtime, x: Annotated[NDArray[numpy.float32], dict(shape=(None, None), device='cpu', writable=False)], weights: Sequence[Weight], outs: Sequence[Annotated[NDArray[numpy.float32], dict(shape=(None, None), device='cpu')]]) -> None:
    """
    x [T, in] times each weight [out, in] into outs, float32 [T, out] each. x is quantised once for all.
    """

def embed(runtime: Runtime, table: Weight, token_ids: Annotated[NDArray[numpy.int32], dict(shape=(None,), order='C', device='cpu', writable=False)], out: Annotated[NDArray[numpy.float32], dict(shape=(None, None), device='cpu')]) -> None:
    """
    Rows of the table by int32 token_ids [T] into out [T, E]. Raises ValueError for an id outside the table.
    """

def routed_experts(runtime: Runtime, x: Annotated[NDArray[numpy.float32], dict(shape=(None, None), device='cpu', writable=False)], topk_ids: Annotated[NDArray[numpy.int32], dict(shape=(None, None), device='cpu', writable=False)], gate: Weight, up: Weight, down: Weight, out: Annotated[NDArray[numpy.float32], dict(shape=(None, None, None), device='cpu')], glu: ExpertGlu | None = None) -> None:
    """
    down_e(glu(gate_e x, up_e x)) for int32 topk_ids [T, K] into out [T, K, E]. Rows of id -1 are left as they are. Raises ValueError for any other id outside the experts.
    """

def request_experts(runtime: Runtime, pool: ExpertPool, gate: Weight, topk_ids: Annotated[NDArray[numpy.int32], dict(shape=(None, None), device='cpu', writable=False)]) -> None:
    """
    Begins to read the experts, int32 topk_ids [T, K], of gate's layer of the pool that are not in memory. Raises ValueError for an id outside the experts, ModelChangedError if the file cannot be read.
    """

def pooled_experts(runtime: Runtime, pool: ExpertPool, x: Annotated[NDArray[numpy.float32], dict(shape=(None, None), device='cpu', writable=False)], topk_ids: Annotated[NDArray[numpy.int32], dict(shape=(None, None), device='cpu', writable=False)], gate: Weight, up: Weight, down: Weight, out: Annotated[NDArray[numpy.float32], dict(shape=(None, None, None), device='cpu')], glu: ExpertGlu | None = None) -> None:
    """
    routed_experts of what request_experts was called for last, each expert as soon as it is there. Raises ModelChangedError if the file cannot be read.
    """

def quantize_activations(runtime: Runtime, x: Annotated[NDArray[numpy.float32], dict(shape=(None, None), device='cpu', writable=False)], scale_size: int = 256) -> tuple:
    """
    (int8 [T, 256·G], float32 scales, int16 sums [T, 16·G]) of x [T, K], padded to whole groups of 256, with a scale for each `scale_size` inputs: 256 or 32. Raises ValueError for others.
    """

def dequantize(runtime: Runtime, weight: Weight, out: Annotated[NDArray[numpy.float32], dict(order='C', device='cpu')]) -> None:
    """
    All values of a weight into a contiguous float32 array of as many elements.
    """

def add(runtime: Runtime, x: Annotated[NDArray[numpy.float32], dict(shape=(None, None), device='cpu')], y: Annotated[NDArray[numpy.float32], dict(shape=(None, None), device='cpu')], out: Annotated[NDArray[numpy.float32], dict(shape=(None, None), device='cpu')]) -> None:
    """out = x + y, all float32 [T, E]. `out` may be x or y."""

def add_bias(runtime: Runtime, x: Annotated[NDArray[numpy.float32], dict(shape=(None, None), device='cpu')], bias: Annotated[NDArray[numpy.float32], dict(shape=(None,), device='cpu')], out: Annotated[NDArray[numpy.float32], dict(shape=(None, None), device='cpu')]) -> None:
    """
    out = x + bias in each row; x and out float32 [T, E], bias [E]. `out` may be x.
    """

def glu(runtime: Runtime, gate: Annotated[NDArray[numpy.float32], dict(shape=(None, None), device='cpu')], up: Annotated[NDArray[numpy.float32], dict(shape=(None, None), device='cpu')], out: Annotated[NDArray[numpy.float32], dict(shape=(None, None), device='cpu')], kind: int = 0, limit: float = 0.0) -> None:
    """
    out = glu(gate, up), all float32 [T, F]. `out` may be gate or up. kind: a number of `GATED_UNITS`.
    """

def rms_norm(runtime: Runtime, x: Annotated[NDArray[numpy.float32], dict(shape=(None, None), device='cpu')], weight: Annotated[NDArray[numpy.float32], dict(shape=(None,), device='cpu')], eps: float, out: Annotated[NDArray[numpy.float32], dict(shape=(None, None), device='cpu')]) -> None:
    """
    out = x / sqrt(mean(x²) + eps) · weight; x and out float32 [T, E], weight [E].
    """

def inject_norm(runtime: Runtime, streams: Annotated[NDArray[numpy.float32], dict(shape=(None, None), device='cpu')] | None, update: Annotated[NDArray[numpy.float32], dict(shape=(None, None), device='cpu')], injection: Annotated[NDArray[numpy.float32], dict(shape=(None, None), device='cpu')] | None, weight: Annotated[NDArray[numpy.float32], dict(shape=(None,), device='cpu')], eps: float, total: Annotated[NDArray[numpy.float32], dict(shape=(None, None), device='cpu')], normed: Annotated[NDArray[numpy.float32], dict(shape=(None, None), device='cpu')]) -> None:
    """
    `Ops.inject_norm` of streams [T, C·E], update [T, E], injection [T, C] and weight [C·E], into total and normed [T, C·E], float32. `total` may be streams. With streams and injection None, all streams become the update.
    """

def scaled_silu(runtime: Runtime, x: Annotated[NDArray[numpy.float32], dict(shape=(None, None), device='cpu')], divisor: int, out: Annotated[NDArray[numpy.float32], dict(shape=(None, None), device='cpu')]) -> None:
    """out = silu(x / divisor), all float32 [T, F]. `out` may be x."""

def scale(runtime: Runtime, x: Annotated[NDArray[numpy.float32], dict(shape=(None, None), device='cpu')], factor: float, out: Annotated[NDArray[numpy.float32], dict(shape=(None, None), device='cpu')]) -> None:
    """out = x · factor, all float32 [T, E]. `out` may be x."""

def softcap(runtime: Runtime, x: Annotated[NDArray[numpy.float32], dict(shape=(None, None), device='cpu')], cap: float, out: Annotated[NDArray[numpy.float32], dict(shape=(None, None), device='cpu')]) -> None:
    """out = cap · tanh(x / cap), all float32 [T, V]. `out` may be x."""

def mix_streams(runtime: Runtime, normed: Annotated[NDArray[numpy.float32], dict(shape=(None, None), device='cpu')], gates: Annotated[NDArray[numpy.float32], dict(shape=(None, None), device='cpu')], out: Annotated[NDArray[numpy.float32], dict(shape=(None, None), device='cpu')]) -> None:
    """
    out [T, E] = the mean over C streams of normed · sigmoid(gates), both [T, C·E], float32.
    """

def rope_angles(runtime: Runtime, positions: Annotated[NDArray[numpy.int32], dict(shape=(None,), device='cpu')], theta: float, out: Annotated[NDArray[numpy.float32], dict(shape=(None, None, None), device='cpu')], factors: Annotated[NDArray[numpy.float64], dict(shape=(None,), device='cpu')] | None = None, magnitude: float = 1.0, block_size: int = 1) -> None:
    """
    cos and sin of position · theta^(−i / pairs) · factors[i], times magnitude, into out, float32 [T, pairs, 2]; of the first position of its block. positions int32 [T], factors float64 [pairs] or None for 1. ValueError when run with a negative position.
    """

def combine_experts(runtime: Runtime, routed: Annotated[NDArray[numpy.float32], dict(shape=(None, None, None), device='cpu')], topk_weights: Annotated[NDArray[numpy.float32], dict(shape=(None, None), device='cpu')], shared: Annotated[NDArray[numpy.float32], dict(shape=(None, None), device='cpu')] | None, shared_gate: Annotated[NDArray[numpy.float32], dict(shape=(None, None), device='cpu')] | None, out: Annotated[NDArray[numpy.float32], dict(shape=(None, None), device='cpu')], bias: Annotated[NDArray[numpy.float32], dict(shape=(None, None), device='cpu')] | None = None, ids: Annotated[NDArray[numpy.int32], dict(shape=(None, None), device='cpu')] | None = None) -> None:
    """
    out [T, E] = Σ_k topk_weights[:, k] · routed[:, k] in rank order + sigmoid(shared_gate) · shared; routed [T, K, E], topk_weights [T, K], shared [T, E], shared_gate [T, 1], float32. The shared expert has weight 1 if shared_gate is None; the sum is alone if both are. bias [experts, E] of each row's expert, int32 ids [T, K], is first added to routed.
    """

def top_log_probs(runtime: Runtime, logits: Annotated[NDArray[numpy.float32], dict(shape=(None, None), device='cpu')], ids: Annotated[NDArray[numpy.int32], dict(shape=(None, None), device='cpu')], log_probs: Annotated[NDArray[numpy.float32], dict(shape=(None, None), device='cpu')]) -> None:
    """
    The k greatest of each row of logits [T, V], float32, of equal ones the lowest ids first: ids int32 and log_probs float32 [T, k], contiguous; log_probs of a softmax over the row, NaN unless all logits are finite.
    """

def router(runtime: Runtime, x: Annotated[NDArray[numpy.float32], dict(shape=(None, None), device='cpu')], weight: Weight, topk_ids: Annotated[NDArray[numpy.int32], dict(shape=(None, None), device='cpu')], topk_weights: Annotated[NDArray[numpy.float32], dict(shape=(None, None), device='cpu')], rule: object | None = None) -> None:
    """
    `Ops.router`: x [T, E] float32, weight F32, F16 or BF16 [experts, E]; writes contiguous topk_ids int32 [T, K] and topk_weights float32 [T, K]. rule: a `ChoiceRule`, None for a renormalised softmax.
    """

class BatchRows:
    """`BatchRows` of kernels/ops.py, of arrays that others keep."""

    def __init__(self, segments: Annotated[NDArray[numpy.int32], dict(shape=(None,), device='cpu')], tables: Annotated[NDArray[numpy.int32], dict(shape=(None, None), device='cpu')], indices: Annotated[NDArray[numpy.int32], dict(shape=(None,), device='cpu')], parents: Annotated[NDArray[numpy.int32], dict(shape=(None,), device='cpu')], kept: Annotated[NDArray[numpy.int32], dict(shape=(None,), device='cpu')]) -> None:
        """int32 arrays: tables [segments, blocks], contiguous, the others [T]."""

def attention(runtime: Runtime, query_gate: Annotated[NDArray[numpy.float32], dict(shape=(None, None), device='cpu')], key: Annotated[NDArray[numpy.float32], dict(shape=(None, None), device='cpu')], value: Annotated[NDArray[numpy.float32], dict(shape=(None, None), device='cpu')], angles: Annotated[NDArray[numpy.float32], dict(shape=(None, None, None), device='cpu')], heads: object, k_cache: Annotated[NDArray, dict(shape=(None, None, None, None), device='cpu')], v_cache: Annotated[NDArray, dict(shape=(None, None, None, None), device='cpu')], positions: Annotated[NDArray[numpy.int32], dict(shape=(None,), device='cpu')], state_ids: Annotated[NDArray[numpy.int32], dict(shape=(None,), device='cpu')], out: Annotated[NDArray[numpy.float32], dict(shape=(None, None), device='cpu')], batch: BatchRows | None = None, gate: Annotated[NDArray[numpy.float32], dict(shape=(None, None), device='cpu')] | None = None, chosen: tuple[Annotated[NDArray[numpy.int32], dict(shape=(None, None), device='cpu')], int] | None = None) -> None:
    """
    `Ops.attention`: query_gate, key, value, angles and gate as `AttentionInputs`, angles [T, pairs, 2], out [T, H·D], float32; heads as `AttentionHeads`; caches [sequences, positions, G, row] contiguous, written, rows of D float16 or float32, or of a head's int8 as `CacheLayout` has them; positions and state_ids int32 [T]. With batch, the caches are [blocks, 256, G, row] and state_ids is not read. chosen: int32 words [T, n] and the positions of a block, as `ChosenBlocks`. ValueError when run with one outside the caches; then no row has been read or written out of bounds, but valid rows may have been appended.
    """

def gated_delta_net(runtime: Runtime, qkv: Annotated[NDArray[numpy.float32], dict(shape=(None, None), device='cpu')], z: Annotated[NDArray[numpy.float32], dict(shape=(None, None), device='cpu')], alpha: Annotated[NDArray[numpy.float32], dict(shape=(None, None), device='cpu')], beta: Annotated[NDArray[numpy.float32], dict(shape=(None, None), device='cpu')], conv_taps: Annotated[NDArray[numpy.float32], dict(shape=(None, None), device='cpu')], a: Annotated[NDArray[numpy.float32], dict(shape=(None,), device='cpu')], dt_bias: Annotated[NDArray[numpy.float32], dict(shape=(None,), device='cpu')], norm: Annotated[NDArray[numpy.float32], dict(shape=(None,), device='cpu')], key_head_ids: Annotated[NDArray[numpy.int32], dict(shape=(None,), device='cpu')], num_key_heads: int, eps: float, conv_state: Annotated[NDArray[numpy.float32], dict(shape=(None, None, None), order='C', device='cpu')], state: Annotated[NDArray[numpy.float32], dict(shape=(None, None, None, None), order='C', device='cpu')], state_ids: Annotated[NDArray[numpy.int32], dict(shape=(None,), device='cpu')], out: Annotated[NDArray[numpy.float32], dict(shape=(None, None), device='cpu')], batch: BatchRows | None = None, kept: tuple[Annotated[NDArray[numpy.float32], dict(shape=(None, None), device='cpu')], Annotated[NDArray[numpy.float32], dict(shape=(None, None), device='cpu')], Annotated[NDArray[numpy.float32], dict(shape=(None, None), device='cpu')]] | None = None, has_sigmoid_gate: bool = False) -> None:
    """
    `Ops.gated_delta_net`: qkv [T, C], z and out [T, NV·d], alpha and beta [T, NV], conv_taps [C, taps], a and dt_bias [NV], norm [d], float32; key_head_ids int32 [NV]; conv_state [states, taps − 1, C] and state [states, NV, d, d], contiguous float32, advanced; state_ids int32 [T]. conv_taps and key_head_ids are copied. With batch, rows of trees leave both states alone and are written to kept: qkv [R, C], alpha and beta [R, NV], contiguous float32. The output is gated by silu(z), or by sigmoid(z). ValueError when run with a state_id outside the states or whose rows are not adjacent; then nothing has changed.
    """

def commit_delta_net(runtime: Runtime, qkv: Annotated[NDArray[numpy.float32], dict(shape=(None, None), device='cpu')], alpha: Annotated[NDArray[numpy.float32], dict(shape=(None, None), device='cpu')], beta: Annotated[NDArray[numpy.float32], dict(shape=(None, None), device='cpu')], conv_taps: Annotated[NDArray[numpy.float32], dict(shape=(None, None), device='cpu')], a: Annotated[NDArray[numpy.float32], dict(shape=(None,), device='cpu')], dt_bias: Annotated[NDArray[numpy.float32], dict(shape=(None,), device='cpu')], norm: Annotated[NDArray[numpy.float32], dict(shape=(None,), device='cpu')], key_head_ids: Annotated[NDArray[numpy.int32], dict(shape=(None,), device='cpu')], num_key_heads: int, eps: float, conv_state: Annotated[NDArray[numpy.float32], dict(shape=(None, None, None), order='C', device='cpu')], state: Annotated[NDArray[numpy.float32], dict(shape=(None, None, None, None), order='C', device='cpu')], state_id: Annotated[NDArray[numpy.int32], dict(shape=(None,), device='cpu')], kept_ids: Annotated[NDArray[numpy.int32], dict(shape=(None,), device='cpu')], out: Annotated[NDArray[numpy.float32], dict(shape=(None, None), device='cpu')]) -> None:
    """
    `Ops.commit_delta_net`: advances the states of number state_id [1] as `gated_delta_net` does for a chain of the rows kept_ids int32 [T] of qkv [R, C], alpha and beta [R, NV], contiguous float32. Uses out [T, NV·d]. ValueError when run with a state or a row that does not exist; then nothing has changed.
    """

def commit_attention(runtime: Runtime, k_cache: Annotated[NDArray, dict(shape=(None, None, None, None), device='cpu')], v_cache: Annotated[NDArray, dict(shape=(None, None, None, None), device='cpu')] | None, first: Annotated[NDArray[numpy.int32], dict(shape=(None,), device='cpu')], sources: Annotated[NDArray[numpy.int32], dict(shape=(None,), device='cpu')], table: Annotated[NDArray[numpy.int32], dict(shape=(None,), device='cpu')]) -> None:
    """
    `Ops.commit_attention`: moves the row at index first[0] + sources[i] of a sequence, whose blocks of the caches [blocks, positions, G, row] table int32 [n] has, to index first[0] + i, for ascending sources int32 [T]. ValueError when run with an index or a block that does not exist; then nothing has changed.
    """

def choose_blocks(runtime: Runtime, query: Annotated[NDArray[numpy.float32], dict(shape=(None, None), device='cpu')], key: Annotated[NDArray[numpy.float32], dict(shape=(None, None), device='cpu')], angles: Annotated[NDArray[numpy.float32], dict(shape=(None, None, None), device='cpu')], block_angles: Annotated[NDArray[numpy.float32], dict(shape=(None, None, None), device='cpu')], heads: object, cache: Annotated[NDArray, dict(shape=(None, None, None, None), device='cpu')], positions: Annotated[NDArray[numpy.int32], dict(shape=(None,), device='cpu')], state_ids: Annotated[NDArray[numpy.int32], dict(shape=(None,), device='cpu')], out: Annotated[NDArray[numpy.int32], dict(shape=(None, None), device='cpu')], batch: BatchRows | None = None) -> None:
    """
    `Ops.choose_blocks`: query [T, H·D], key [T, D], angles and block_angles [T, pairs, 2], float32; heads as `IndexerHeads`; cache [sequences, positions, 1, D] of float16 or float32, contiguous, written; positions and state_ids int32 [T]; out int32 [T, words]. With batch, the cache is [blocks, 256, 1, D]. ValueError when run with a row outside the cache; then none has been read or written out of bounds.
    """

class NgramTable:
    """
    Rows of a table in a file, read by their place and kept by use in bounded memory.
    """

    def __init__(self, fd: int, offset: int, quant_type: int, num_rows: int, num_cols: int, row_bytes: int, cache_bytes: int) -> None:
        """
        The table at byte `offset` of the open descriptor `fd`, which may be closed afterwards. Raises OSError.
        """

    @property
    def num_cols(self) -> int: ...

    @property
    def row_bytes(self) -> int: ...

    @property
    def cache_bytes(self) -> int:
        """Memory of the rows that are kept."""

    @property
    def hits(self) -> int: ...

    @property
    def misses(self) -> int:
        """Rows that were read from the file."""

    @property
    def problem(self) -> int:
        """
        0, an error of the system while a row was read, or -1 if the file has become shorter. Results are then undefined.
        """

def ngram_ids(runtime: Runtime, token_ids: Annotated[NDArray[numpy.int32], dict(shape=(None,), device='cpu')], multipliers: Sequence[int], sizes: Sequence[int], offsets: Sequence[int], end_token: int, state: Annotated[NDArray[numpy.int32], dict(shape=(None, None), device='cpu')], state_ids: Annotated[NDArray[numpy.int32], dict(shape=(None,), device='cpu')], out: Annotated[NDArray[numpy.int32], dict(shape=(None, None), device='cpu')], batch: BatchRows | None = None, kept: Annotated[NDArray[numpy.int32], dict(shape=(None,), device='cpu')] | None = None, table: NgramTable | None = None) -> None:
    """
    `Ops.ngram_ids` of int32 token_ids [T], into contiguous int32 out [T, heads]. Advances state int32 [states, context], and writes rows of trees to kept int32 [R]. The rows of table are asked for. ValueError when run with a state or a row that does not exist.
    """

def ngram_rows(runtime: Runtime, table: NgramTable, ids: Annotated[NDArray[numpy.int32], dict(shape=(None, None), device='cpu')], out: Annotated[NDArray[numpy.float32], dict(shape=(None, None), device='cpu')]) -> None:
    """
    The rows of the table by contiguous int32 ids [T, heads], dequantised into float32 out [T, heads · columns]. ValueError when run with an id outside the table.
    """

def ngram_read_ahead(runtime: Runtime, table: NgramTable, ids: Annotated[NDArray[numpy.int32], dict(shape=(None, None), device='cpu')]) -> None:
    """
    Brings rows of the table by contiguous int32 ids [T, heads] into its memory.
    """

def ngram_gate(runtime: Runtime, key: Annotated[NDArray[numpy.float32], dict(shape=(None, None), device='cpu')], query: Annotated[NDArray[numpy.float32], dict(shape=(None, None), device='cpu')], value: Annotated[NDArray[numpy.float32], dict(shape=(None, None), device='cpu')], out: Annotated[NDArray[numpy.float32], dict(shape=(None, None), device='cpu')]) -> None:
    """
    `Ops.ngram_gate` of key and query [T, C·E] and value [T, E], into out [T, C·E], float32.
    """

def ngram_conv(runtime: Runtime, streams: Annotated[NDArray[numpy.float32], dict(shape=(None, None), device='cpu')], gated: Annotated[NDArray[numpy.float32], dict(shape=(None, None), device='cpu')], normed: Annotated[NDArray[numpy.float32], dict(shape=(None, None), device='cpu')], kernel: Annotated[NDArray[numpy.float32], dict(shape=(None, None), device='cpu')], dilation: int, state: Annotated[NDArray[numpy.float32], dict(shape=(None, None, None), order='C', device='cpu')], state_ids: Annotated[NDArray[numpy.int32], dict(shape=(None,), device='cpu')], out: Annotated[NDArray[numpy.float32], dict(shape=(None, None), device='cpu')], batch: BatchRows | None = None, kept: Annotated[NDArray[numpy.float32], dict(shape=(None, None), device='cpu')] | None = None) -> None:
    """
    `Ops.ngram_conv`: streams, gated, normed and out [T, W], a kernel [W, K], float32. Advances state [states, history, W], and writes normed rows of trees to kept [R, W]. The kernel is copied. ValueError when run with a state or a row that does not exist; then nothing has changed.
    """

def commit_ngram(runtime: Runtime, kept_ids: Annotated[NDArray[numpy.int32], dict(shape=(None,), device='cpu')], kept: Annotated[NDArray[numpy.float32], dict(shape=(None, None), device='cpu')], token_state: Annotated[NDArray[numpy.int32], dict(shape=(None, None), device='cpu')], state: Annotated[NDArray[numpy.float32], dict(shape=(None, None, None), order='C', device='cpu')], state_id: Annotated[NDArray[numpy.int32], dict(shape=(None,), device='cpu')], sources: Annotated[NDArray[numpy.int32], dict(shape=(None,), device='cpu')]) -> None:
    """
    `Ops.commit_ngram`: advances the states of number state_id [1] as a chain of the rows sources int32 [T] of kept_ids [R] and kept [R, W] would. ValueError when run with one that does not exist; then nothing has changed.
    """

class TokenChoice:
    """A row of logits, what determines the token after it, and that token."""

    def __init__(self, logits: Annotated[NDArray[numpy.float32], dict(shape=(None,), order='C', device='cpu', writable=False)], changed: Annotated[NDArray[numpy.float32], dict(shape=(None,), order='C', device='cpu', writable=False)] | None, *, temperature: float, top_k: int, top_p: float, min_p: float, repetition_penalty: float, presence_penalty: float, frequency_penalty: float, recent: Sequence[int], seed: int, position: int, biased: Sequence[int], biases: Sequence[float], allowed: Annotated[NDArray[numpy.uint32], dict(shape=(None,), order='C', device='cpu', writable=False)] | None, logprobs: int | None) -> None:
        """
        logits, changed: float32 [vocab], contiguous, which it keeps; with `changed` the token is chosen from these, which need not be finite. allowed: uint32 [ceil(vocab / 32)], which it keeps, a bit for each token that may be chosen; None: all may. ValueError for tokens outside of the vocabulary.
        """

    @property
    def token(self) -> int: ...

    @property
    def fault(self) -> int:
        """
        0, or how many logits are not finite, or -1 if the best one is not once all are changed.
        """

    @property
    def ranked(self) -> tuple[list[int], int, int]:
        """
        Of the logits: the likeliest tokens by rank, the rank of the chosen one, and the weight of all at temperature 1. Only with `logprobs`.
        """

def choose_tokens(choices: Sequence[TokenChoice]) -> None:
    """
    Chooses the token of each row, as decoding.sampling defines it. ValueError for rows of different vocabularies.
    """

class NgramServer:
    """
    A thread that reads rows of a table when asked through words in memory.
    """

    def __init__(self, runtime: Runtime, request: Annotated[NDArray[numpy.uint32], dict(shape=(1), order='C', device='cpu')], done: Annotated[NDArray[numpy.uint32], dict(shape=(1), order='C', device='cpu')], ids: Annotated[NDArray[numpy.int32], dict(shape=(None, None), order='C', device='cpu', writable=False)], out: Annotated[NDArray[numpy.uint8], dict(shape=(None, None), order='C', device='cpu')], table: NgramTable) -> None:
        """
        Over int32 ids [T, heads], -1 for none, and uint8 out [T, heads · bytes of a row], which are kept. A client zeroes `done`, then stores its rows to `request`; `done` becomes 1. `runtime` has the threads that read for a prompt.
        """

    def begin(self) -> None:
        """Looks for requests from now on."""

    def end(self) -> None:
        """Pauses: no request comes before the next `begin`."""

    def check(self) -> None:
        """
        Raises the first error of a request since the last call: ValueError, GenerationFault.
        """

class ExpertServer:
    """
    Threads that compute routed experts when asked through words in memory.
    """

    def __init__(self, runtime: Runtime, request: Annotated[NDArray[numpy.uint32], dict(shape=(1), order='C', device='cpu')], done: Annotated[NDArray[numpy.uint32], dict(shape=(1), order='C', device='cpu')], x: Annotated[NDArray[numpy.float32], dict(shape=(None, None), order='C', device='cpu', writable=False)], ids: Annotated[NDArray[numpy.int32], dict(shape=(None, None), order='C', device='cpu', writable=False)], out: Annotated[NDArray[numpy.float32], dict(shape=(None, None, None), order='C', device='cpu')], is_prefill: bool = False, ahead: Annotated[NDArray[numpy.uint32], dict(shape=(None,), order='C', device='cpu')] | None = None) -> None:
        """
        Over float32 x [T, E], int32 ids [T, K] and float32 out [T, K, E], which are kept. A client zeroes `done`, then stores (layer + 1) | rows << 16 to `request`; `done` becomes 1. Pairs of id -1 are left as they are. is_prefill: whether requests are those of prompts, which take few slots of a pool. ahead: uint32 words, at least one for each of K experts, in which the client may say what a layer will probably ask for.
        """

    def add_layer(self, gate: Weight, up: Weight, down: Weight, pool: ExpertPool | None = None, glu: ExpertGlu | None = None) -> int:
        """
        The experts of the next layer; returns its number. pool: the one that they are parts of, or None.
        """

    @property
    def awake_s(self) -> float:
        """
        Of a server for prompts: how long threads poll from `begin` and from each answer on, before they sleep. 0 at first. Others' threads poll until `end`.
        """

    @awake_s.setter
    def awake_s(self, arg: float, /) -> None: ...

    def begin(self) -> None:
        """Looks for requests from now on."""

    def end(self) -> None:
        """Pauses: no request comes before the next `begin`."""

    def expected(self) -> list:
        """
        (experts that the client expected, those of them that it asked for, all that it asked for with one row) of each layer so far.
        """

    def read_ahead_bytes(self) -> int:
        """Bytes of expected experts that were read ahead so far."""

    def work(self) -> list:
        """
        (requests, pairs, seconds from a request to its answer) of each layer so far.
        """

    def check(self) -> None:
        """
        Raises the first error of a request since the last call: ModelChangedError, ValueError, GenerationFault.
        """
