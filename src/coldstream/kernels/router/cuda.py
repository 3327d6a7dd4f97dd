"""The router in CUDA C++: GEMV and choice in one launch, or the choice alone behind a GEMM."""

import ctypes
from dataclasses import dataclass
from pathlib import Path

from coldstream.kernels.arithmetic.quantised import QuantActivations, padded_cols
from coldstream.kernels.cuda.array import DeviceArray, check_array
from coldstream.kernels.cuda.limits import device_limits, overlaps, shared_per_block
from coldstream.kernels.cuda.program import CudaProgram
from coldstream.kernels.cuda.structs import declared_in
from coldstream.kernels.experts.partition import Hints, Sharing
from coldstream.kernels.experts.shapes import MAX_RANKS
from coldstream.kernels.ops import GATINGS, PLAIN_RULE, ChoiceRule
from coldstream.kernels.rms_norm.cuda import Norm, norm_outputs

MAX_TOKENS = 8  # in the single launch
MAX_CHOSEN = MAX_RANKS
EXPERTS_PER_LANE = (1, 4, 8, 16, 32)
WARP_SIZE = 32
MAX_EXPERTS = EXPERTS_PER_LANE[-1] * WARP_SIZE
THREADS = 512
NUM_WARPS = THREADS // WARP_SIZE
MAX_WEIGHT_ROWS_PER_BLOCK = (
    8  # of the weight: fewer blocks meet sooner, and their weights are asked for early
)
LEAST_BLOCKS = 16  # as far as there are rows: smaller blocks find room beside those of the launch in front
CHOOSE_THREADS = 256
TOKENS_PER_BLOCK = CHOOSE_THREADS // WARP_SIZE  # for the choice alone
ROW_PADDING = 16  # floats after each row of the weight
COLUMN_MULTIPLE = 128  # of the columns in a block's shared memory
MOST_SHARED_BYTES = 97 * 1024  # that a block takes of its device's
STATIC_BYTES = 2048  # that it has beside them

# Behind the other arguments of an instance: the choice of a softmax and that of a rule. The second ones have
# nothing to share out and no later layer.
_RULES = ("", ", true")
_RULES_ALONE = (", false, true", ", true, true")

PROGRAM = CudaProgram(
    Path(__file__).with_name("router.cu"),
    (
        *(
            f"router_gemv<{aligned}, {n}, {norms}{rule}>"
            for aligned, norms in (("true", "false"), ("false", "false"), ("true", "true"))
            for n in EXPERTS_PER_LANE
            for rule in (*_RULES, *_RULES_ALONE)
        ),
        *(f"router_choose<{n}{rule}>" for n in EXPERTS_PER_LANE for rule in _RULES),
    ),
)

_NUMBERS = {gating: number for number, gating in GATINGS.items()}


@declared_in("router/choose.cuh")
class _ChoiceRule(ctypes.Structure): ...


def _rule_of(rule: ChoiceRule, num_experts: int) -> _ChoiceRule:
    """For kernels. ValueError for vectors or groups that do not fit so many experts."""
    spec = rule.spec
    for name in ("bias", "selection_bias", "expert_scale"):
        if (vector := getattr(rule, name)) is not None:
            check_array(name, vector, "float32")
            if tuple(vector.shape) != (num_experts,) or not vector.is_contiguous():
                raise ValueError(f"{name} of shape {tuple(vector.shape)} for {num_experts} experts")
    groups, used = spec.num_groups, spec.num_used_groups
    if (
        groups < 1
        or num_experts % groups
        or (groups > 1 and num_experts < 2 * groups)
        or not 1 <= used <= groups
    ):
        raise ValueError(f"{num_experts} experts in {groups} groups, of which {used} are used")
    return _ChoiceRule(
        bias=_address(rule.bias),
        selection_bias=_address(rule.selection_bias),
        expert_scale=_address(rule.expert_scale),
        scale=spec.scale,
        gating=_NUMBERS[spec.gating],
        is_normalised=spec.normalised,
        num_groups=groups,
        num_used_groups=used,
    )


@declared_in("router/router.cu")
class _Shares(ctypes.Structure): ...


@declared_in("router/router.cu")
class _Weights(ctypes.Structure): ...


@declared_in("router/router.cu")
class _Ahead(ctypes.Structure): ...


@declared_in("router/router.cu")
class _Results(ctypes.Structure): ...


@declared_in("router/norms.cuh")
class _Norming(ctypes.Structure): ...


@dataclass(frozen=True)
class NormBefore:
    """The norm of a sum that a router's launch computes first: `add_rms_norm_cuda` for the router's x.

    x, update: float32 [T, E]; total [T, E] is none of them. weight: float32 [E]. quantised: the norm's codes,
    which are written beside the router's x. bias: float32 [E], added to update first. is_unweighted: the
    router, which has a rule, multiplies the norm without its weights; the norm with them is written all the
    same.
    """

    x: DeviceArray
    update: DeviceArray
    total: DeviceArray
    weight: DeviceArray
    eps: float
    quantised: QuantActivations
    bias: DeviceArray | None = None
    is_unweighted: bool = False

    @staticmethod
    def is_supported(num_tokens: int, cols: int) -> bool:
        """Whether rows of `cols` values stay in shared memory as a whole, and can be read four at a time."""
        if not 0 < num_tokens <= MAX_TOKENS or cols % 4:
            return False
        padded = padded_cols(cols)
        return bool(_share_out(num_tokens, padded)[0].chunk >= padded)

    def argument(self, out: DeviceArray) -> _Norming:
        """For the kernel, with the router's x as `out`. ValueError for tensors that it cannot take."""
        shape, rows = self.x.shape, (self.x, self.update, self.total, out)
        vectors = (self.weight,) if self.bias is None else (self.weight, self.bias)
        if any(each.shape != shape for each in rows) or any(v.numel() != shape[1] for v in vectors):
            raise ValueError(f"a norm of rows {tuple(shape)} by {[v.numel() for v in vectors]} weights")
        is_whole = all(each.is_contiguous() and each.data_ptr() % 16 == 0 for each in (*rows, *vectors))
        padded = padded_cols(shape[1])
        has_codes = tuple(self.quantised.q.shape) == (shape[0], padded)
        if not is_whole or not self.is_supported(*shape) or not has_codes:
            raise ValueError(f"rows {tuple(shape)} are not normed in a router's launch")
        return _Norming(
            x=self.x.data_ptr(),
            update=self.update.data_ptr(),
            bias=_address(self.bias),
            sum=self.total.data_ptr(),
            norm=Norm(weight=self.weight.data_ptr(), cols=shape[1], padded=padded, eps=self.eps),
            out=norm_outputs(shape[0], shape[1], out, self.quantised),
            is_unweighted=self.is_unweighted,
        )


@dataclass(frozen=True)
class Ahead:
    """A later layer's router, applied to the same x to guess its choice.

    weight: float32, of the same shape as this layer's, contiguous. ids: int32 [T, K]. Workspace: logits
    float32 [T, experts], weights float32 [T, K]. hints: where the guess for a single token goes to the CPU,
    which a launch of its own does not send.
    """

    weight: DeviceArray
    ids: DeviceArray
    logits: DeviceArray
    weights: DeviceArray
    hints: Hints | None = None
    rule: ChoiceRule = PLAIN_RULE  # of the later layer; plain if that of the launch's layer is

    def alone(self, arrivals: DeviceArray) -> "RouterBuffers":
        """What a launch for the later layer only writes."""
        return RouterBuffers(self.ids, self.weights, None, self.logits, arrivals)

    def check(self, shape: tuple[int, ...], topk_ids: DeviceArray, rule: ChoiceRule) -> None:
        """ValueError unless this fits a router of `shape` that chooses by `rule`."""
        if self.rule.is_plain != rule.is_plain:
            raise ValueError("a later layer that chooses by another kind of rule")
        outputs = (self.ids, self.weights)
        if self.weight.shape != shape or any(each.shape != topk_ids.shape for each in outputs):
            raise ValueError(f"a router of {tuple(self.weight.shape)} beside one of {tuple(shape)}")
        if not all(each.is_contiguous() for each in (self.weight, *outputs)):
            raise ValueError("what a later layer may choose must be contiguous")


@dataclass(frozen=True)
class RouterBuffers:
    """What a router's launch writes. Workspace: logits; arrivals, which are 0 at first and left 0."""

    topk_ids: DeviceArray  # int32 [T, K]
    topk_weights: DeviceArray  # float32 [T, K]
    shared_gate: DeviceArray | None  # float32 [T, 1], the product, without sigmoid
    logits: DeviceArray  # float32 [T, experts]
    arrivals: DeviceArray  # int32 [1]

    def argument(self) -> _Results:
        """What is written, for the kernel."""
        return _Results(
            logits=self.logits.data_ptr(),
            shared_gate=_address(self.shared_gate),
            ids=self.topk_ids.data_ptr(),
            weights=self.topk_weights.data_ptr(),
            count=self.topk_ids.shape[1],
        )


def router_gemv_cuda(
    x: DeviceArray,
    weight: DeviceArray,
    shared_weight: DeviceArray | None,
    buffers: RouterBuffers,
    sharing: Sharing | None = None,
    ahead: Ahead | None = None,
    norm: NormBefore | None = None,
    rule: ChoiceRule = PLAIN_RULE,
) -> None:
    """Products, and the choice by `rule`, for up to 8 tokens.

    With `sharing`, also shares the chosen experts of a single token out like `partition_experts_cuda`; if it
    is `begin_of` one, notes when the router begins. With `ahead`, also writes its guess.
    With `norm`, first writes x, and what else that says.

    x float32 [T, E] with any row stride; weight float32 [experts, E] and the shared expert's gate
    shared_weight [1, E], contiguous. Writes `buffers`. K ≤ 16, experts ≤ 1024. ValueError otherwise.
    """
    (num_tokens, cols), num_experts = x.shape, weight.shape[0]
    _check_gemv(x, shared_weight, buffers, sharing)
    per_lane = _experts_per_lane(num_experts, buffers.topk_ids, buffers.topk_weights)
    if num_tokens == 0:
        return
    if ahead is not None:
        ahead.check(weight.shape, buffers.topk_ids, rule)
    beside = ahead
    if _scratch_bytes(2 * num_tokens, per_lane) > device_limits().shared_per_block:
        beside = None  # it has a launch of its own
    aligned = _is_aligned(x, weight, shared_weight, None if beside is None else beside.weight)
    if norm is not None and not aligned:
        raise ValueError("a router with a norm before it needs weights that are aligned to 16 bytes")
    num_routers = 1 if beside is None else 2
    num_rows = num_routers * num_experts + 1
    shares, shared_bytes = _share_out(num_tokens, cols if norm is None else padded_cols(cols), num_rows)
    scratch_bytes = _scratch_bytes(num_routers * num_tokens, per_lane)
    rest = _name_of(rule, is_alone=sharing is None and beside is None)
    instance = f"router_gemv<{str(aligned).lower()}, {per_lane}, {str(norm is not None).lower()}{rest}>"
    PROGRAM.kernel(instance).launch(
        (-(-num_rows // shares.num_rows), 1, 1),
        THREADS,
        (
            x,
            x.stride(0),
            shares,
            _Weights(
                experts=weight.data_ptr(), shared=_address(shared_weight), num_experts=num_experts, cols=cols
            ),
            buffers.argument(),
            buffers.arrivals,
            sharing or Sharing(),
            _ahead_of(beside),
            _Norming() if norm is None else norm.argument(x),
            _rule_of(rule, num_experts),
        ),
        shared_bytes=max(shared_bytes, scratch_bytes),
        overlap=True,
    )
    if ahead is not None and beside is None:
        router_gemv_cuda(x, ahead.weight, None, ahead.alone(buffers.arrivals), rule=ahead.rule)


def router_choose_cuda(
    logits: DeviceArray,
    topk_ids: DeviceArray,
    topk_weights: DeviceArray,
    positions: DeviceArray | None = None,
    rule: ChoiceRule = PLAIN_RULE,
) -> None:
    """`choose_experts_exact` for float32 logits [T, experts] with any row stride.

    Writes int32 topk_ids and float32 topk_weights, [T, K]. K ≤ 16, experts ≤ 1024. positions: int32 [T]; rows
    with a negative one choose what the first row does. ValueError otherwise.
    """
    if positions is not None:
        check_array("positions", positions, "int32")
        if positions.shape != logits.shape[:1]:
            raise ValueError(f"positions {tuple(positions.shape)} for {len(logits)} rows")
    num_tokens, num_experts = logits.shape
    per_lane = _experts_per_lane(num_experts, topk_ids, topk_weights)
    outputs = topk_ids, topk_weights, topk_ids.shape[1]
    args = (logits, logits.stride(0), num_tokens, num_experts, positions, *outputs)
    PROGRAM.kernel(f"router_choose<{per_lane}{_name_of(rule)}>").launch(
        (-(-num_tokens // TOKENS_PER_BLOCK), 1, 1),
        CHOOSE_THREADS,
        (*args, _rule_of(rule, num_experts)),
        shared_bytes=_scratch_bytes(TOKENS_PER_BLOCK, per_lane),
        overlap=overlaps(num_tokens),
    )


def _check_gemv(
    x: DeviceArray, shared_weight: DeviceArray | None, buffers: RouterBuffers, sharing: Sharing | None
) -> None:
    num_tokens = x.shape[0]
    gates = shared_weight, buffers.shared_gate
    if num_tokens > MAX_TOKENS or (gates[0] is None) != (gates[1] is None) or x.stride(1) != 1:
        raise ValueError(f"not a router's arguments: {num_tokens} tokens (at most {MAX_TOKENS})")
    if sharing is not None and sharing.request and num_tokens != 1:
        raise ValueError(f"pairs of {num_tokens} tokens are shared out by a launch of their own")


def _is_aligned(x: DeviceArray, *weights: DeviceArray | None) -> bool:
    """Whether each row of x and of the weights can be read 16 bytes at a time."""
    addresses = [each.data_ptr() for each in (x, *weights) if each is not None]
    return all(address % 16 == 0 for address in addresses) and (x.shape[1] | x.stride(0)) % 4 == 0


def _experts_per_lane(num_experts: int, topk_ids: DeviceArray, topk_weights: DeviceArray) -> int:
    """The smallest instance for so many experts."""
    count = topk_ids.shape[1]
    is_contiguous = topk_ids.is_contiguous() and topk_weights.is_contiguous()
    if not 1 <= count <= min(MAX_CHOSEN, num_experts) or not is_contiguous:
        raise ValueError(f"cannot choose {count} of {num_experts} experts (at most {MAX_CHOSEN})")
    available = device_limits().shared_per_block
    supported = [n for n in EXPERTS_PER_LANE if _scratch_bytes(MAX_TOKENS, n) <= available]
    fitting = [n for n in supported if n * WARP_SIZE >= num_experts]
    if not fitting:
        raise ValueError(f"{num_experts} experts, but at most {supported[-1] * WARP_SIZE} are supported")
    return fitting[0]


def _share_out(num_tokens: int, cols: int, num_rows: int = MAX_EXPERTS) -> tuple[_Shares, int]:
    """The share of a block, and its shared memory in bytes. num_rows: of all weights."""
    available = min(MOST_SHARED_BYTES, shared_per_block(MOST_SHARED_BYTES + STATIC_BYTES) - STATIC_BYTES)
    whole = -(-cols // COLUMN_MULTIPLE) * COLUMN_MULTIPLE

    def columns(weight_rows: int) -> int:
        most = (available // 4 - weight_rows * ROW_PADDING) // (weight_rows + num_tokens)
        return min(most // COLUMN_MULTIPLE * COLUMN_MULTIPLE, whole)

    # A warp takes one token and two rows. Fewer rows that stay whole load all their weights early.
    enough = max(2, num_rows // LEAST_BLOCKS // 2 * 2)
    most_rows = min(MAX_WEIGHT_ROWS_PER_BLOCK, NUM_WARPS // num_tokens * 2, enough)
    weight_rows = next((rows for rows in range(most_rows, 0, -2) if columns(rows) == whole), most_rows)
    chunk = columns(weight_rows)
    return _Shares(num_tokens=num_tokens, num_rows=weight_rows, chunk=chunk), 4 * (
        (weight_rows + num_tokens) * chunk + weight_rows * ROW_PADDING
    )


def _scratch_bytes(num_tokens: int, per_lane: int) -> int:
    """Shared memory of the choice: a number for each expert and each chosen one."""
    return 8 * num_tokens * (per_lane * WARP_SIZE + MAX_CHOSEN)


def _name_of(rule: ChoiceRule, *, is_alone: bool = False) -> str:
    return (_RULES_ALONE if is_alone else _RULES)[not rule.is_plain]


def _ahead_of(ahead: Ahead | None) -> _Ahead:
    if ahead is None:
        return _Ahead()
    return _Ahead(
        experts=ahead.weight.data_ptr(),
        logits=ahead.logits.data_ptr(),
        ids=ahead.ids.data_ptr(),
        weights=ahead.weights.data_ptr(),
        rule=_rule_of(ahead.rule, len(ahead.weight)),
        hints=ahead.hints if ahead.hints and len(ahead.ids) == 1 else Hints(),
    )


def _address(tensor: DeviceArray | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()
