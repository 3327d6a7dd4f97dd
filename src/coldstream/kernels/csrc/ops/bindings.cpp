#include "bindings.h"

#include "ops/float_ops.h"

namespace coldstream {

namespace {

using namespace nb::literals;

using array_1d = nb::ndarray<float, nb::ndim<1>, nb::device::cpu>;
using array_3d = nb::ndarray<float, nb::ndim<3>, nb::device::cpu>;
using ids_1d = nb::ndarray<int32_t, nb::ndim<1>, nb::device::cpu>;
using ids_2d = nb::ndarray<int32_t, nb::ndim<2>, nb::device::cpu>;
using cache_4d = nb::ndarray<nb::ndim<4>, nb::device::cpu>;
using state_3d = nb::ndarray<float, nb::ndim<3>, nb::c_contig, nb::device::cpu>;
using state_4d = nb::ndarray<float, nb::ndim<4>, nb::c_contig, nb::device::cpu>;

[[noreturn]] void refuse(const std::string& message) { throw std::invalid_argument(message); }

template <typename A>
int64_t size_of(const A& array, size_t dim) {
  return static_cast<int64_t>(array.shape(dim));
}

std::string shape_text(const std::vector<int64_t>& shape) {
  std::string text;
  for (int64_t size : shape) text += (text.empty() ? "" : ", ") + std::to_string(size);
  return "[" + text + "]";
}

// The array must have this shape, unit stride in its last dimension, and rows that do not overlap.
template <typename A>
void check(const A& array, const char* name, const std::vector<int64_t>& shape) {
  std::vector<int64_t> actual;
  for (size_t i = 0; i < array.ndim(); i++) actual.push_back(size_of(array, i));
  if (actual != shape) {
    refuse(std::string(name) + " must be " + shape_text(shape) + ", not " + shape_text(actual));
  }
  int64_t extent = 1;
  for (size_t i = array.ndim(); i-- > 0;) {
    const bool last = i + 1 == array.ndim();
    if (shape[i] > 1 && (last ? array.stride(i) != 1 : array.stride(i) < extent)) {
      refuse(std::string(name) + " must have unit stride in its last dimension and rows that do not overlap");
    }
    extent = last ? shape[i] : array.stride(i) * shape[i];
  }
}

template <typename A>
void check_contiguous(const A& array, const char* name, const std::vector<int64_t>& shape) {
  check(array, name, shape);
  int64_t extent = 1;
  for (size_t i = array.ndim(); i-- > 0; extent *= shape[i]) {
    if (shape[i] > 1 && array.stride(i) != extent) refuse(std::string(name) + " must be contiguous");
  }
}

input_rows input(const array_2d& array, const char* name, int64_t rows, int64_t cols) {
  check(array, name, {rows, cols});
  return {array.data(), array.stride(0)};
}

output_rows output(const array_2d& array, const char* name, int64_t rows, int64_t cols) {
  check(array, name, {rows, cols});
  return {array.data(), array.stride(0)};
}

const float* vector(const array_1d& array, const char* name, int64_t size) {
  check(array, name, {size});
  return array.data();
}

const int32_t* ids(const ids_1d& array, const char* name, int64_t size) {
  check(array, name, {size});
  return array.data();
}

void check_head_size(int64_t size, const char* what) {
  if (size < 1 || size > 4096) {
    refuse(std::string(what) + " must be in 1 … 4096, not " + std::to_string(size));
  }
}

template <typename... A>
void submit_with(runtime& rt, std::unique_ptr<op> next, int64_t rows, const A&... arrays) {
  if (rows > INT32_MAX / 1024) refuse(std::to_string(rows) + " rows are more than one call takes");
  submit(rt, std::move(next), static_cast<int>(rows), {keep(arrays)...});
}

const float_kernels& kernels_of(const runtime& rt) { return float_kernels_for(rt.active_tier()); }

void add(runtime& rt, const array_2d& x, const array_2d& y, const array_2d& out) {
  const int64_t rows = size_of(x, 0), size = size_of(x, 1);
  auto next = make_add(kernels_of(rt), input(x, "x", rows, size), input(y, "y", rows, size),
                       output(out, "out", rows, size), size);
  submit_with(rt, std::move(next), rows, x, y, out);
}

void swiglu(runtime& rt, const array_2d& gate, const array_2d& up, const array_2d& out) {
  const int64_t rows = size_of(gate, 0), size = size_of(gate, 1);
  auto next = make_swiglu(kernels_of(rt), input(gate, "gate", rows, size), input(up, "up", rows, size),
                          output(out, "out", rows, size), size);
  submit_with(rt, std::move(next), rows, gate, up, out);
}

void rms_norm(runtime& rt, const array_2d& x, const array_1d& weight, float eps, const array_2d& out) {
  const int64_t rows = size_of(x, 0), size = size_of(x, 1);
  auto next = make_rms_norm(kernels_of(rt), input(x, "x", rows, size), vector(weight, "weight", size), eps,
                            output(out, "out", rows, size), size);
  submit_with(rt, std::move(next), rows, x, weight, out);
}

void rope_angles(runtime& rt, const ids_1d& positions, double theta, const array_3d& out) {
  const int64_t rows = size_of(positions, 0), num_pairs = size_of(out, 1);
  check(positions, "positions", {rows});
  check_contiguous(out, "out", {rows, num_pairs, 2});
  submit_with(rt, make_rope_angles(positions.data(), 2 * num_pairs, theta, {out.data(), 2 * num_pairs}), rows,
              positions, out);
}

void combine_experts(runtime& rt, const array_3d& routed, const array_2d& topk_weights,
                     const array_2d& shared, const array_2d& shared_gate, const array_2d& out) {
  const int64_t rows = size_of(routed, 0), k = size_of(routed, 1), size = size_of(routed, 2);
  check(routed, "routed", {rows, k, size});
  const combine_arguments arguments = {
      .routed = routed.data(),
      .row_stride = routed.stride(0),
      .rank_stride = routed.stride(1),
      .num_experts_per_tok = k,
      .size = size,
      .weights = input(topk_weights, "topk_weights", rows, k),
      .shared = input(shared, "shared", rows, size),
      .shared_gate = input(shared_gate, "shared_gate", rows, 1),
      .out = output(out, "out", rows, size),
  };
  submit_with(rt, make_combine_experts(kernels_of(rt), arguments), rows, routed, topk_weights, shared,
              shared_gate, out);
}

// Whether the caches are float16; they must be of one type and shape, and contiguous.
bool check_caches(const cache_4d& k_cache, const cache_4d& v_cache) {
  const bool half =
      k_cache.dtype() == nb::dlpack::dtype{static_cast<uint8_t>(nb::dlpack::dtype_code::Float), 16, 1};
  if ((!half && k_cache.dtype() != nb::dtype<float>()) || v_cache.dtype() != k_cache.dtype()) {
    refuse("k_cache and v_cache must both be float16 or both float32");
  }
  const std::vector<int64_t> shape = {size_of(k_cache, 0), size_of(k_cache, 1), size_of(k_cache, 2),
                                      size_of(k_cache, 3)};
  check_contiguous(k_cache, "k_cache", shape);
  check_contiguous(v_cache, "v_cache", shape);
  return half;
}

void attention(runtime& rt, const array_2d& query_gate, const array_2d& key, const array_2d& value,
               const array_1d& q_norm, const array_1d& k_norm, float eps, const array_3d& angles,
               const cache_4d& k_cache, const cache_4d& v_cache, const ids_1d& positions, const ids_1d& slots,
               const array_2d& out) {
  const bool half = check_caches(k_cache, v_cache);
  const int64_t rows = size_of(key, 0), kv_heads = size_of(k_cache, 2), size = size_of(k_cache, 3);
  check_head_size(size, "the head size of k_cache");
  const int64_t heads = size_of(out, 1) / size, num_pairs = size_of(angles, 1);
  if (kv_heads < 1 || heads < 1 || heads % kv_heads != 0 || heads / kv_heads > 1024) {
    refuse(std::to_string(heads) + " query heads cannot share " + std::to_string(kv_heads) +
           " key/value heads");
  }
  if (2 * num_pairs > size) refuse("angles rotate more dimensions than a head has");
  check_contiguous(angles, "angles", {rows, num_pairs, 2});
  const attention_arguments arguments = {
      .capacity = rows,
      .num_heads = heads,
      .num_kv_heads = kv_heads,
      .head_size = size,
      .num_rope_pairs = num_pairs,
      .query_gate = input(query_gate, "query_gate", rows, heads * 2 * size),
      .key = input(key, "key", rows, kv_heads * size),
      .value = input(value, "value", rows, kv_heads * size),
      .q_norm = vector(q_norm, "q_norm", size),
      .k_norm = vector(k_norm, "k_norm", size),
      .eps = eps,
      .angles = {angles.data(), 2 * num_pairs},
      .k_cache = k_cache.data(),
      .v_cache = v_cache.data(),
      .half_cache = half,
      .num_slots = size_of(k_cache, 0),
      .num_positions = size_of(k_cache, 1),
      .places = {ids(positions, "positions", rows), ids(slots, "slots", rows)},
      .out = output(out, "out", rows, heads * size),
  };
  submit_with(rt, make_attention(kernels_of(rt), arguments), rows, query_gate, key, value, q_norm, k_norm,
              angles, k_cache, v_cache, positions, slots, out);
}

// [channels, taps] as one contiguous row per tap.
std::vector<float> taps_by_tap(const array_2d& conv_taps) {
  const int64_t channels = size_of(conv_taps, 0), taps = size_of(conv_taps, 1);
  std::vector<float> result(channels * taps);
  for (int64_t c = 0; c < channels; c++) {
    for (int64_t j = 0; j < taps; j++) {
      result[j * channels + c] = conv_taps.data()[c * conv_taps.stride(0) + j];
    }
  }
  return result;
}

std::vector<int32_t> checked_key_heads(const ids_1d& key_head_ids, int64_t num_value_heads,
                                       int64_t num_key_heads) {
  const int32_t* heads = ids(key_head_ids, "key_head_ids", num_value_heads);
  for (int64_t i = 0; i < num_value_heads; i++) {
    if (heads[i] < 0 || heads[i] >= num_key_heads) {
      refuse("key_head_ids[" + std::to_string(i) + "] is " + std::to_string(heads[i]) + ", but there are " +
             std::to_string(num_key_heads) + " key heads");
    }
  }
  return {heads, heads + num_value_heads};
}

void gated_delta_net(runtime& rt, const array_2d& qkv, const array_2d& z, const array_2d& alpha,
                     const array_2d& beta, const array_2d& conv_taps, const array_1d& a,
                     const array_1d& dt_bias, const array_1d& norm, const ids_1d& key_head_ids,
                     int64_t num_key_heads, float eps, const state_3d& conv_state, const state_4d& state,
                     const ids_1d& slots, const array_2d& out) {
  const int64_t rows = size_of(qkv, 0), channels = size_of(qkv, 1), num_slots = size_of(state, 0);
  const int64_t heads = size_of(state, 1), size = size_of(state, 2), taps = size_of(conv_taps, 1);
  check_head_size(size, "the head size of state");
  if (heads < 1 || num_key_heads < 1) {
    refuse("gated_delta_net needs at least one key head and one value head");
  }
  if (taps < 1 || taps > 16) refuse("conv_taps must have 1 … 16 taps, not " + std::to_string(taps));
  if (num_key_heads > channels || (2 * num_key_heads + heads) * size != channels) {
    refuse("qkv has " + std::to_string(channels) + " channels, but 2 · " + std::to_string(num_key_heads) +
           " key and " + std::to_string(heads) + " value heads of " + std::to_string(size) +
           " need another number");
  }
  check(state, "state", {num_slots, heads, size, size});
  check(conv_state, "conv_state", {num_slots, taps - 1, channels});
  check(conv_taps, "conv_taps", {channels, taps});
  delta_net_arguments arguments = {
      .capacity = rows,
      .num_key_heads = num_key_heads,
      .num_value_heads = heads,
      .head_size = size,
      .num_taps = taps,
      .qkv = input(qkv, "qkv", rows, channels),
      .z = input(z, "z", rows, heads * size),
      .alpha = input(alpha, "alpha", rows, heads),
      .beta = input(beta, "beta", rows, heads),
      .taps = taps_by_tap(conv_taps),
      .a = vector(a, "a", heads),
      .dt_bias = vector(dt_bias, "dt_bias", heads),
      .norm = vector(norm, "norm", size),
      .key_head_ids = checked_key_heads(key_head_ids, heads, num_key_heads),
      .eps = eps,
      .conv_state = conv_state.data(),
      .state = state.data(),
      .num_slots = num_slots,
      .places = {nullptr, ids(slots, "slots", rows)},
      .out = output(out, "out", rows, heads * size),
  };
  submit_with(rt, make_gated_delta_net(kernels_of(rt), std::move(arguments)), rows, qkv, z, alpha, beta, a,
              dt_bias, norm, conv_state, state, slots, out);
}

void check_router_weight(const weight& matrix) {
  const bool is_f32 = matrix.type == quant_type::f32;
  if (!is_f32 && matrix.type != quant_type::f16 && matrix.type != quant_type::bf16) {
    refuse("router weights must be F32, F16 or BF16: dequantise others to F32");
  }
  if (matrix.num_matrices != 1) refuse("a router weight is one matrix, not a stack");
  if (reinterpret_cast<uintptr_t>(matrix.data) % (is_f32 ? 4 : 2) != 0) {
    refuse("a router weight must be aligned");
  }
}

void router(runtime& rt, const array_2d& x, const weight& matrix, const ids_2d& topk_ids,
            const array_2d& topk_weights) {
  const int64_t rows = size_of(x, 0), k = size_of(topk_ids, 1);
  check_router_weight(matrix);
  if (k < 1 || k > matrix.num_rows) {
    refuse("cannot choose " + std::to_string(k) + " of " + std::to_string(matrix.num_rows) + " experts");
  }
  check_contiguous(topk_ids, "topk_ids", {rows, k});
  check_contiguous(topk_weights, "topk_weights", {rows, k});
  const router_arguments arguments = {
      .capacity = rows,
      .x = input(x, "x", rows, matrix.num_cols),
      .matrix = matrix,
      .num_experts_per_tok = k,
      .topk_ids = topk_ids.data(),
      .topk_weights = topk_weights.data(),
  };
  submit_with(rt, make_router(kernels_of(rt), arguments), rows, x, topk_ids, topk_weights);
}

void bind_row_ops(nb::module_& m) {
  m.def("add", add, "runtime"_a, nb::arg("x").noconvert(), nb::arg("y").noconvert(),
        nb::arg("out").noconvert(), "out = x + y, all float32 [T, E]. `out` may be x or y.");
  m.def("swiglu", swiglu, "runtime"_a, nb::arg("gate").noconvert(), nb::arg("up").noconvert(),
        nb::arg("out").noconvert(), "out = silu(gate) · up, all float32 [T, F]. `out` may be gate or up.");
  m.def("rms_norm", rms_norm, "runtime"_a, nb::arg("x").noconvert(), nb::arg("weight").noconvert(), "eps"_a,
        nb::arg("out").noconvert(),
        "out = x / sqrt(mean(x²) + eps) · weight; x and out float32 [T, E], weight [E].");
  m.def("rope_angles", rope_angles, "runtime"_a, nb::arg("positions").noconvert(), "theta"_a,
        nb::arg("out").noconvert(),
        "cos and sin of position · theta^(−i / pairs) into out, float32 [T, pairs, 2]; positions int32 [T]. "
        "ValueError "
        "when run with a negative position.");
  m.def("combine_experts", combine_experts, "runtime"_a, nb::arg("routed").noconvert(),
        nb::arg("topk_weights").noconvert(), nb::arg("shared").noconvert(),
        nb::arg("shared_gate").noconvert(), nb::arg("out").noconvert(),
        "out [T, E] = Σ_k topk_weights[:, k] · routed[:, k] in rank order + sigmoid(shared_gate) · shared; "
        "routed "
        "[T, K, E], topk_weights [T, K], shared [T, E], shared_gate [T, 1], float32.");
}

void bind_mixers(nb::module_& m) {
  m.def("attention", attention, "runtime"_a, nb::arg("query_gate").noconvert(), nb::arg("key").noconvert(),
        nb::arg("value").noconvert(), nb::arg("q_norm").noconvert(), nb::arg("k_norm").noconvert(), "eps"_a,
        nb::arg("angles").noconvert(), nb::arg("k_cache").noconvert(), nb::arg("v_cache").noconvert(),
        nb::arg("positions").noconvert(), nb::arg("slots").noconvert(), nb::arg("out").noconvert(),
        "`Ops.attention`: query_gate [T, H·2·D], key and value [T, G·D], q_norm and k_norm [D], angles [T, "
        "pairs, 2], "
        "out [T, H·D], float32; caches [slots, positions, G, D] contiguous float16 or float32, written; "
        "positions and "
        "slots int32 [T]. ValueError when run with one outside the caches; then no row has been read or "
        "written out of "
        "bounds, but valid rows may have been appended.");
  m.def("gated_delta_net", gated_delta_net, "runtime"_a, nb::arg("qkv").noconvert(), nb::arg("z").noconvert(),
        nb::arg("alpha").noconvert(), nb::arg("beta").noconvert(), nb::arg("conv_taps").noconvert(),
        nb::arg("a").noconvert(), nb::arg("dt_bias").noconvert(), nb::arg("norm").noconvert(),
        nb::arg("key_head_ids").noconvert(), "num_key_heads"_a, "eps"_a, nb::arg("conv_state").noconvert(),
        nb::arg("state").noconvert(), nb::arg("slots").noconvert(), nb::arg("out").noconvert(),
        "`Ops.gated_delta_net`: qkv [T, C], z and out [T, NV·d], alpha and beta [T, NV], conv_taps [C, "
        "taps], a and "
        "dt_bias [NV], norm [d], float32; key_head_ids int32 [NV]; conv_state [slots, taps − 1, C] and state "
        "[slots, NV, d, d], contiguous float32, advanced; slots int32 [T]. conv_taps and key_head_ids are "
        "copied. "
        "ValueError when run with a slot outside the states or whose rows are not adjacent; then nothing has "
        "changed.");
  m.def("router", router, "runtime"_a, nb::arg("x").noconvert(), "weight"_a, nb::arg("topk_ids").noconvert(),
        nb::arg("topk_weights").noconvert(),
        "`Ops.router`: x [T, E] float32, weight F32, F16 or BF16 [experts, E]; writes contiguous topk_ids "
        "int32 [T, K] "
        "and topk_weights float32 [T, K].");
}

}  // namespace

void bind_ops(nb::module_& m) {
  bind_row_ops(m);
  bind_mixers(m);
}

}  // namespace coldstream
