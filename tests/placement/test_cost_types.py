"""What types of weights cost: their bytes or their instructions, whichever take longer."""

import json
from dataclasses import asdict, fields, replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_cost import H200

from coldstream.gguf.quant_types import QuantType
from coldstream.kernels.experts.shapes import EXPERT_ROWS, MEASURED_TYPE
from coldstream.kernels.linear.cpu_rates import PRODUCT_ROWS
from coldstream.kernels.mixer_rates import MixerRates
from coldstream.placement.cost import (
    CPU_LAYER_OPS,
    CPU_STEP_CALLS,
    DENSE_LAUNCHES,
    EXPERT_LAUNCHES,
    ROW_BUS_BYTES,
    ExpertRates,
    decode_seconds,
    decode_seconds_on_cpu,
    miss_times,
    miss_times_of,
    rates_of_experts,
)
from coldstream.placement.forecast import decode_ceiling, prefill_ceiling
from coldstream.placement.gpu_types import GPU_TIMES
from coldstream.placement.hardware import Hardware
from coldstream.placement.prompt_cost import CPU_ROW_OPS, prefill_seconds, prefill_seconds_on_cpu
from coldstream.placement.rates import CPU_SHARE, Rates
from coldstream.placement.sizes import ModelSizes, Products, WindowedLayers

LAYERS, EXPERTS, CHOSEN = 3, 8, 2
EXPERT_VALUES, DENSE_VALUES = 3 * 2**20, 2**24
READ = CPU_SHARE * H200.read_bytes_per_s
EXPERT_RATES = tuple(2e11 / (1 + rows / 8) for rows in EXPERT_ROWS)

# Experts of the measured type are where others' times start from.
types = st.sampled_from([kind for kind in QuantType if kind.block_elements > 1 and kind is not MEASURED_TYPE])


def products(quant_type: QuantType, num_values: int) -> Products:
    return Products(quant_type, num_values, quant_type.row_bytes(num_values))


def model_of(dense: QuantType, *experts: QuantType) -> ModelSizes:
    """The matrices of an expert have equal sizes and these types."""
    each = tuple(products(kind, EXPERT_VALUES // len(experts)) for kind in experts)
    expert_bytes = sum(part.num_bytes for part in each)
    whole = products(dense, DENSE_VALUES)
    return ModelSizes(
        "f", EXPERTS, CHOSEN, (expert_bytes,) * LAYERS, whole.num_bytes, whole.num_bytes, 0, 0,
        DENSE_VALUES + CHOSEN * LAYERS * EXPERT_VALUES, EXPERT_VALUES, 0,
        dense_products=(whole,), expert_products=(each,) * LAYERS,
    )  # fmt: skip


def rates_with(**per_s: float) -> Rates:
    """Weights that are multiplied a second by one row, 1e15 of other types; more by more rows."""
    rows = [[scale * per_s.get(kind.name, 1e15) for scale in (1, 3, 7)] for kind in QuantType]
    return replace(H200, product_values_per_s=tuple(map(tuple, rows)), expert_bytes_per_s=EXPERT_RATES)


def decode(model: ModelSizes, rates: Rates) -> float:
    """Seconds of a token's weights, all in RAM."""
    return decode_seconds_on_cpu(model, rates, (1.0,) * LAYERS) - between(rates.mixer_rates)


def between(mixers: MixerRates) -> float:
    """Seconds of a token's operations beside their bytes, one of them the head's, and of Python."""
    return (LAYERS * CPU_LAYER_OPS + 1) * mixers.op_s + CPU_STEP_CALLS * mixers.call_s


def test_a_small_type_with_many_instructions_is_as_slow_as_they_are() -> None:
    """The file of Q2_K that was forecast twenty times as fast as it ran."""
    model, other = (model_of(kind, kind) for kind in (QuantType.Q2_K, QuantType.Q4_K))
    values = DENSE_VALUES + CHOSEN * LAYERS * EXPERT_VALUES
    assert decode(model, rates_with(Q2_K=3e9)) == pytest.approx(values / 3e9)
    assert decode(model, rates_with(Q2_K=3e9)) > 10 * decode(other, rates_with(Q2_K=3e9))
    assert decode(model, rates_with()) == pytest.approx(QuantType.Q2_K.row_bytes(values) / READ)


def test_each_type_takes_its_own_longer_time() -> None:
    model = model_of(QuantType.Q8_0, QuantType.Q2_K, QuantType.Q4_K, QuantType.Q6_K)
    part = CHOSEN * LAYERS * EXPERT_VALUES // 3
    by_bytes = QuantType.Q8_0.row_bytes(DENSE_VALUES) + QuantType.Q4_K.row_bytes(part)
    rates = rates_with(Q2_K=3e9, Q6_K=5e9)
    assert decode(model, rates) == pytest.approx(by_bytes / READ + part / 3e9 + part / 5e9)


def test_bytes_that_no_product_reads_count_as_well() -> None:
    model = model_of(QuantType.Q4_K, QuantType.Q4_K)
    more = replace(model, dense_token_bytes=model.dense_token_bytes + 10**9)
    assert decode(more, rates_with()) - decode(model, rates_with()) == pytest.approx(1e9 / READ)


def test_without_rates_or_types_bytes_alone_count() -> None:
    model = model_of(QuantType.Q2_K, QuantType.Q2_K)
    num_bytes = model.dense_token_bytes + CHOSEN * sum(model.expert_bytes)
    untyped = replace(model, dense_products=(), expert_products=())
    for sizes, rates in ((model, H200), (untyped, rates_with(Q2_K=1e6))):
        assert decode(sizes, rates) == pytest.approx(num_bytes / READ)


@given(types, types, st.floats(1e8, 1e12), st.floats(1, 100))
def test_more_instructions_make_nothing_faster(
    kind: QuantType, other: QuantType, per_s: float, times: float
) -> None:
    model, nothing = model_of(other, kind, other), np.zeros((LAYERS, EXPERTS), bool)
    slow, fast = (rates_with(**{kind.name: rate}) for rate in (per_s, per_s * times))
    for seconds in (
        lambda rates: decode(model, rates),
        lambda rates: decode_seconds(model, rates, (0.5,) * LAYERS),
        lambda rates: prefill_seconds_on_cpu(model, rates, ~nothing, None, 512, 512),
        lambda rates: prefill_seconds(model, rates, nothing, None, 512, 512),
        lambda rates: miss_times_of(model, rates).cpu[-1],
    ):
        assert seconds(slow) >= seconds(fast) * (1 - 1e-3)  # of a prompt, up to one expert more or less


@given(st.floats(1e9, 1e13))
def test_experts_of_the_measured_type_are_as_they_were_measured(per_s: float) -> None:
    part = products(QuantType.Q4_K, EXPERT_VALUES)
    found = rates_of_experts(rates_with(Q4_K=per_s), part.num_bytes, (part,))
    assert found.expert_bytes_per_s == pytest.approx(EXPERT_RATES)
    assert found.cpu_bytes_per_s == pytest.approx(per_s * 144 / 256)


def test_experts_of_another_type_are_in_proportion_to_it() -> None:
    """Four times the instructions and half the bytes: memory is no longer what decides."""
    slow = products(QuantType.IQ2_XS, EXPERT_VALUES)
    found = rates_of_experts(rates_with(Q4_K=1e12, IQ2_XS=2.5e10), slow.num_bytes, (slow,))
    bytes_of_q4 = QuantType.Q4_K.row_bytes(EXPERT_VALUES)
    by_memory, by_instructions = bytes_of_q4 / READ, EXPERT_VALUES / 2.5e10
    assert by_instructions > by_memory
    seconds_of_q4 = bytes_of_q4 / EXPERT_RATES[0]
    expected = slow.num_bytes / (seconds_of_q4 * by_instructions / by_memory)
    assert found.expert_bytes_per_s[0] == pytest.approx(expected)


def test_a_prompt_is_multiplied_at_the_rate_of_its_rows() -> None:
    """Dense weights see all 512 rows; an expert sees its share of the pairs."""
    model = model_of(QuantType.Q4_K, QuantType.Q3_K)
    resident = np.ones((LAYERS, EXPERTS), bool)
    rates = rates_with(Q4_K=1e9, Q3_K=1e8)
    rows = 512 * CHOSEN / EXPERTS
    assert rows > PRODUCT_ROWS[-1]
    dense, experts = 512 * DENSE_VALUES / 7e9, 512 * CHOSEN * LAYERS * EXPERT_VALUES / 7e8
    found = prefill_seconds_on_cpu(model, rates, resident, None, 512, 512)
    assert found == pytest.approx(dense + experts, rel=1e-2)


def test_rates_between_measured_numbers_of_rows() -> None:
    rates = rates_with(Q4_K=1e9)
    first, last = PRODUCT_ROWS[0], PRODUCT_ROWS[-1]
    assert rates.product_seconds(QuantType.Q4_K, 10**9, first) == pytest.approx(1)
    assert rates.product_seconds(QuantType.Q4_K, 10**9, 2 * last) == pytest.approx(2 * last / 7)
    between = [rates.product_seconds(QuantType.Q4_K, 10**9, rows) for rows in range(first, last)]
    assert between == sorted(between)


def on_gpu(
    model: ModelSizes, vram_bytes_per_s: float, product_ops_per_s: float = 1e30
) -> tuple[float, float]:
    """Seconds of a token and of a prompt of 512, all resident; launches take no part."""
    rates = [
        replace(rates_with(), vram_bytes_per_s=memory, product_ops_per_s=ops)
        for memory, ops in ((vram_bytes_per_s, product_ops_per_s), (1e30, 1e30))
    ]
    resident = np.ones((LAYERS, EXPERTS), bool)
    tokens = [decode_seconds(model, each, (1.0,) * LAYERS) for each in rates]
    prompts = [prefill_seconds(model, each, resident, None, 512, 512) for each in rates]
    return tokens[0] - tokens[1], prompts[0] - prompts[1]


@given(types, types)
def test_a_gpu_takes_the_measured_multiple_for_a_type(dense: QuantType, experts: QuantType) -> None:
    """In a token and in a prompt: of dense weights by their own kernels' ratio, of experts by theirs."""

    def seconds(*kinds: QuantType) -> tuple[float, float]:
        token, prompt = on_gpu(model_of(*kinds), 1e9), on_gpu(model_of(*kinds), 1e30, 1e9)
        return token[0], prompt[1]

    same, other = seconds(MEASURED_TYPE, MEASURED_TYPE), seconds(QuantType.Q6_K, MEASURED_TYPE)
    found, q6 = seconds(dense, experts), GPU_TIMES[QuantType.Q6_K]
    for number, (of_dense, of_experts, of_q6) in enumerate(
        (
            (GPU_TIMES[dense].row, GPU_TIMES[experts].experts_row, q6.row),
            (GPU_TIMES[dense].prompt, GPU_TIMES[experts].experts_prompt, q6.prompt),
        )
    ):
        dense_s = (other[number] - same[number]) / (of_q6 - 1)  # of weights of the measured type
        assert 0 < dense_s < same[number]
        assert found[number] == pytest.approx(of_dense * dense_s + of_experts * (same[number] - dense_s))


def test_a_dense_model_on_a_gpu_has_types_too() -> None:
    model, same = (
        replace(model_of(MEASURED_TYPE, kind), num_experts=1, num_experts_per_tok=1, is_dense=True)
        for kind in (QuantType.IQ3_S, MEASURED_TYPE)
    )
    rates = rates_with()
    further = decode_seconds(model, rates, (1.0,) * LAYERS) - decode_seconds(same, rates, (1.0,) * LAYERS)
    slower = LAYERS * (GPU_TIMES[QuantType.IQ3_S].row - 1)
    bytes_s = MEASURED_TYPE.row_bytes(EXPERT_VALUES) / (rates.shares.vram * rates.vram_bytes_per_s)
    assert further == pytest.approx(slower * (bytes_s + EXPERT_LAUNCHES * rates.shares.launch_s))


@given(types, types)
def test_instructions_of_a_type_lengthen_its_whole_launches(dense: QuantType, experts: QuantType) -> None:
    """Where memory takes no time, as in time measured beside the measured type, what is fixed grows too."""
    fast = replace(rates_with(), vram_bytes_per_s=1e30)
    found, same = (
        decode_seconds(model_of(*kinds), fast, (1.0,) * LAYERS)
        for kinds in ((dense, experts), (MEASURED_TYPE, MEASURED_TYPE))
    )
    slower = DENSE_LAUNCHES * (GPU_TIMES[dense].row - 1)
    slower += EXPERT_LAUNCHES * (GPU_TIMES[experts].experts_row - 1)
    assert found - same == pytest.approx(LAYERS * slower * fast.shares.launch_s, abs=1e-12)


@given(types, st.floats(1e9, 1e11))
def test_one_row_reads_over_the_bus_no_faster_than_it_multiplies(kind: QuantType, link: float) -> None:
    """So that small types, and those of more instructions, do not fill a fast link; copies do."""
    rates = replace(rates_with(), link_bytes_per_s=link, link_beside_read=link)
    times, num_bytes = miss_times_of(model_of(kind, kind), rates), kind.row_bytes(EXPERT_VALUES)
    by_bytes = num_bytes / (rates.shares.bus_beside * link)
    by_pace = GPU_TIMES[kind].experts_row * MEASURED_TYPE.row_bytes(EXPERT_VALUES) / ROW_BUS_BYTES
    assert times.row_bus == pytest.approx(1e9 * max(by_bytes, by_pace), rel=1e-3)
    assert times.bus == pytest.approx(1e9 * num_bytes / (rates.shares.staged * link), rel=1e-3)


@given(types, types, st.floats(1e8, 1e12))
def test_what_follows_from_a_type_is_no_rate_of_a_machine(
    kind: QuantType, other: QuantType, per_s: float
) -> None:
    """A machine's rates are the same after a forecast for any model, and numbers that JSON can write."""
    rates = rates_with(**{kind.name: per_s})
    before = json.dumps(asdict(rates), allow_nan=False)
    decode_seconds(model_of(kind, other), rates, (0.5,) * LAYERS)
    assert json.dumps(asdict(rates), allow_nan=False) == before
    part = products(other, EXPERT_VALUES)
    of_experts = rates_of_experts(rates, part.num_bytes, (part,))
    own = {field.name for field in fields(of_experts)} - {field.name for field in fields(rates)}
    assert (type(of_experts), own) == (ExpertRates, {"row_bus_bytes_per_s"})


@pytest.mark.parametrize("share", [0.5, 0.9])
def test_weights_in_ram_take_a_cpu_what_products_were_measured_to_reach(share: float) -> None:
    """Not what threads reach that only read."""
    machine = Hardware("a CPU", ("avx2",), 8, 4, 2**36, 2**35, read_bytes_per_s=4e10)
    measured, assumed = Rates.of(replace(machine, row_bytes_per_s=share * 4e10)), Rates.of(machine)
    assert measured.row_share == pytest.approx(share)
    assert assumed.row_share == CPU_SHARE
    assert "row_bytes_per_s" in assumed.assumed
    assert "row_bytes_per_s" not in measured.assumed
    fast = ((1e18,) * len(PRODUCT_ROWS),) * len(QuantType)
    model = model_of(QuantType.Q8_0, QuantType.Q8_0)
    seconds = [decode(model, replace(rates, product_values_per_s=fast)) for rates in (measured, assumed)]
    assert seconds[0] / seconds[1] == pytest.approx(CPU_SHARE / share, rel=1e-3)


MIXERS = MixerRates(2e-6, 2e-5, 6e9, 6e10, 3e10, 1e10, 2e10)
FREE = MixerRates(1e-30, 1e-30, *(1e30,) * 5)
BETWEEN = replace(
    model_of(QuantType.Q8_0, QuantType.Q4_K),
    kv_token_bytes=1000,
    state_bytes=4000,
    attention_width=512,
    hidden_size=64,
    windows=(WindowedLayers(100, 256, 0.5),),
)


def test_a_text_on_a_cpu_takes_time_for_its_keys_and_for_the_heads_that_meet_them() -> None:
    machine = rates_with()

    def seconds(mixers: MixerRates, context: int) -> float:
        rates = replace(machine, mixers=mixers)
        return decode_seconds_on_cpu(BETWEEN, rates, (1.0,) * LAYERS, context)

    keys, elements = (1000 + 100) / 2 * 1000, 1000.5 * 256 + 100 * 256
    expected = keys / MIXERS.cached_bytes_per_s + elements / MIXERS.row_pairs_per_s
    expected += between(MIXERS)
    assert seconds(MIXERS, 1000) - seconds(FREE, 1000) == pytest.approx(expected, rel=1e-2)


def test_a_prompt_on_a_cpu_takes_time_between_products() -> None:
    machine = rates_with()

    def seconds(mixers: MixerRates) -> float:
        resident = np.ones((LAYERS, EXPERTS), np.bool_)
        return prefill_seconds_on_cpu(BETWEEN, replace(machine, mixers=mixers), resident, None, 80, 80)

    pairs = BETWEEN.attention_elements(0, 80) / MIXERS.pairs_per_s
    states = 80 * 1000 / MIXERS.state_values_per_s
    values = 80 * LAYERS * 64 * (CPU_ROW_OPS + CHOSEN) / MIXERS.row_values_per_s
    slow = replace(machine, product_values_per_s=((1e9,) * 3,) * len(QuantType))
    machine = slow  # so that products, and not bytes, bound it
    assert seconds(MIXERS) - seconds(FREE) == pytest.approx(pairs + states + values, rel=1e-6)


def test_a_prompt_on_a_cpu_has_one_row_that_meets_the_head() -> None:
    whole = model_of(QuantType.Q8_0, QuantType.Q4_K)
    with_head = replace(whole, head=replace(whole.dense_products[0], num_values=DENSE_VALUES // 2))
    slow = replace(H200, mixers=FREE, product_values_per_s=((1e9,) * 3,) * len(QuantType))
    resident = np.ones((LAYERS, EXPERTS), np.bool_)
    each, last = (prefill_seconds_on_cpu(of, slow, resident, None, 80, 80) for of in (whole, with_head))
    assert each - last == pytest.approx(79 * DENSE_VALUES / 2 / 1e9)


def test_the_network_of_a_dense_layer_takes_the_measured_products_of_its_types() -> None:
    """Of the 27B on 16 cores, 16, 32 and 64 rows took 4.5, 5.9 and 8.0 ms (docs/notes/dense-layers.md)."""
    network = products(QuantType.Q4_K, 287_800_000 // 256 * 256)
    machine = replace(H200, product_values_per_s=((2.7e11, 9.26e11, 2.13e12),) * len(QuantType))
    times = miss_times(network.num_bytes, machine, is_layer=True, products=(network,))
    for rows, measured_s in ((16, 4.5e-3), (32, 5.9e-3), (64, 8.0e-3)):
        assert 1e-9 * times.cpu[rows - 1] == pytest.approx(measured_s, rel=0.1)


def test_no_forecast_of_a_cpu_is_beyond_what_was_seen_of_it() -> None:
    """Also where a product reads faster than the loop that only reads, and where the head is most of it."""
    whole = model_of(QuantType.Q8_0, QuantType.Q4_K)
    model = replace(whole, head=replace(whole.dense_products[0], num_values=DENSE_VALUES * 9 // 10))
    machine = rates_with(Q8_0=4e11, Q4_K=3e11)
    machine = replace(machine, mixers=FREE, row_bytes_per_s=2 * machine.read_bytes_per_s)
    machine = replace(machine, product_values_per_s=tuple((2e11, 3e11, 4e11) for _ in QuantType))
    resident, rates = np.ones((LAYERS, EXPERTS), np.bool_), (1.0,) * LAYERS
    decode_s = decode_seconds_on_cpu(model, machine, rates)
    assert 1 / decode_s <= decode_ceiling(model, machine, rates, "ram")
    prompt_s = prefill_seconds_on_cpu(model, machine, resident, None, 512, 512)
    assert 512 / prompt_s <= prefill_ceiling(model, machine, resident, None, 512, 512, "ram")
