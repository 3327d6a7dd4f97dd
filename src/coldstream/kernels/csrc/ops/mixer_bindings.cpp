#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>

#include <algorithm>
#include <optional>
#include <string>
#include <tuple>

#include "ops/binding_checks.h"
#include "ops/cache_places.h"

namespace coldstream {

namespace {

using namespace nb::literals;

using Cache4d = nb::ndarray<nb::ndim<4>, nb::device::cpu>;
using State4d = nb::ndarray<float, nb::ndim<4>, nb::c_contig, nb::device::cpu>;

void check_head_size(int64_t size, const char* what) {
  if (size < 1 || size > 4096) {
    refuse(std::string(what) + " must be in 1 … 4096, not " + std::to_string(size));
  }
}

// The type of caches of heads of `size`; they must be of one type and shape, and contiguous.
CacheType check_caches(const Cache4d& k_cache, const Cache4d& v_cache, int64_t size) {
  const nb::dlpack::dtype half = {static_cast<uint8_t>(nb::dlpack::dtype_code::Float), 16, 1};
  const bool is_integer = k_cache.dtype() == nb::dtype<int8_t>();
  if ((!is_integer && k_cache.dtype() != half && k_cache.dtype() != nb::dtype<float>()) ||
      v_cache.dtype() != k_cache.dtype()) {
    refuse("k_cache and v_cache must both be float16, both float32 or both int8");
  }
  const std::vector<int64_t> shape = {size_of(k_cache, 0), size_of(k_cache, 1), size_of(k_cache, 2),
                                      size_of(k_cache, 3)};
  check_contiguous(k_cache, "k_cache", shape);
  check_contiguous(v_cache, "v_cache", shape);
  for (const CacheType type : {CacheType::i16, CacheType::i8, CacheType::i4, CacheType::i3}) {
    if (is_integer && holds_integers(type, size) && shape[3] == cache_row_elements(type, size)) return type;
  }
  if (is_integer || shape[3] != size) {
    refuse("rows of " + std::to_string(shape[3]) + " elements in k_cache hold no heads of " +
           std::to_string(size));
  }
  return k_cache.dtype() == half ? CacheType::f16 : CacheType::f32;
}

using OptionalKept = std::optional<std::tuple<Array2d, Array2d, Array2d>>;

KeptInputs kept_of(const OptionalKept& kept, int64_t channels, int64_t heads) {
  if (!kept) return {};
  const auto& [qkv, alpha, beta] = *kept;
  const int64_t num_rows = size_of(qkv, 0);
  check_contiguous(qkv, "kept qkv", {num_rows, channels});
  check_contiguous(alpha, "kept alpha", {num_rows, heads});
  check_contiguous(beta, "kept beta", {num_rows, heads});
  return {qkv.data(), alpha.data(), beta.data(), num_rows};
}

OutputGate output_gate_of(const nb::object& attention_heads) {
  const auto name = field<std::string>(attention_heads, "output_gate");
  if (name == "none") return OutputGate::none;
  if (name == "query") return OutputGate::query;
  if (name == "head") return OutputGate::head;
  if (name == "element") return OutputGate::element;
  refuse("output_gate " + name + " is none of: none, query, head, element");
}

// The rows of `gate`, which comes with kinds that have a projection of their own, and with no others.
InputRows gate_of(const std::optional<Array2d>& gate, OutputGate kind, int64_t rows, int64_t heads,
                  int64_t size) {
  const bool is_own = kind == OutputGate::head || kind == OutputGate::element;
  if (gate.has_value() != is_own) refuse(is_own ? "gate is missing" : "gate belongs to another output_gate");
  return is_own ? input(*gate, "gate", rows, kind == OutputGate::head ? heads : heads * size) : InputRows{};
}

// Words [rows, n] and the positions of a block, if rows do not see all; for sequences of `positions` at most.
ChosenBlocks chosen_of(const std::optional<std::tuple<Ids2d, int64_t>>& chosen, int64_t rows,
                       int64_t positions) {
  if (!chosen) return {};
  const auto& [words, block_size] = *chosen;
  const int64_t num_words = size_of(words, 1);
  check_block_size(block_size);
  check_contiguous(words, "the words of chosen", {rows, num_words});
  if (num_words * 32 * block_size < positions) {
    refuse(std::to_string(num_words) + " words of chosen blocks are too few for " +
           std::to_string(positions) + " positions");
  }
  return {words.data(), num_words, block_size};
}

void attention(Runtime& rt, const Array2d& query_gate, const Array2d& key, const Array2d& value,
               const Array3d& angles, const nb::object& attention_heads, const Cache4d& k_cache,
               const Cache4d& v_cache, const Ids1d& positions, const Ids1d& state_ids, const Array2d& out,
               const BatchRows* batch, const std::optional<Array2d>& gate,
               const std::optional<std::tuple<Ids2d, int64_t>>& chosen) {
  const auto q_norm = field<std::optional<Array1d>>(attention_heads, "q_norm");
  const auto k_norm = field<std::optional<Array1d>>(attention_heads, "k_norm");
  if (q_norm.has_value() != k_norm.has_value()) refuse("q_norm and k_norm come together");
  const auto window = field<std::optional<int64_t>>(attention_heads, "window");
  const auto q_bias = field<std::optional<Array1d>>(attention_heads, "q_bias");
  const auto k_bias = field<std::optional<Array1d>>(attention_heads, "k_bias");
  const auto v_bias = field<std::optional<Array1d>>(attention_heads, "v_bias");
  if (q_bias.has_value() != k_bias.has_value() || q_bias.has_value() != v_bias.has_value()) {
    refuse("q_bias, k_bias and v_bias come together");
  }
  const auto sinks = field<std::optional<Array1d>>(attention_heads, "sinks");
  const auto scale = field<std::optional<float>>(attention_heads, "scale", true);
  const int64_t rows = size_of(key, 0), kv_heads = size_of(k_cache, 2);
  const int64_t size = size_of(key, 1) / std::max<int64_t>(kv_heads, 1);
  check_head_size(size, "the head size of key");
  const CacheType type = check_caches(k_cache, v_cache, size);
  const int64_t heads = size_of(out, 1) / size, num_pairs = size_of(angles, 1);
  if (kv_heads < 1 || heads < 1 || heads % kv_heads != 0 || heads / kv_heads > 1024) {
    refuse(std::to_string(heads) + " query heads cannot share " + std::to_string(kv_heads) +
           " key/value heads");
  }
  if (batch != nullptr && size_of(k_cache, 1) != attention_chunk) {
    refuse("a batch needs caches in blocks of " + std::to_string(attention_chunk) + " positions, not " +
           std::to_string(size_of(k_cache, 1)));
  }
  if (window && *window < 1) refuse("a window of " + std::to_string(*window) + " positions holds nothing");
  if (2 * num_pairs > size) refuse("angles rotate more dimensions than a head has");
  check_contiguous(angles, "angles", {rows, num_pairs, 2});
  const OutputGate output_gate = output_gate_of(attention_heads);
  AttentionArguments arguments = {
      .capacity = rows,
      .num_heads = heads,
      .num_kv_heads = kv_heads,
      .head_size = size,
      .num_rope_pairs = num_pairs,
      .query_gate =
          input(query_gate, "query_gate", rows, (output_gate == OutputGate::query ? 2 : 1) * heads * size),
      .output_gate = output_gate,
      .gate = gate_of(gate, output_gate, rows, heads, size),
      .key = input(key, "key", rows, kv_heads * size),
      .value = input(value, "value", rows, kv_heads * size),
      .q_bias = q_bias ? vector(*q_bias, "q_bias", heads * size) : nullptr,
      .k_bias = k_bias ? vector(*k_bias, "k_bias", kv_heads * size) : nullptr,
      .v_bias = v_bias ? vector(*v_bias, "v_bias", kv_heads * size) : nullptr,
      .q_norm = q_norm ? vector(*q_norm, "q_norm", size) : nullptr,
      .k_norm = k_norm ? vector(*k_norm, "k_norm", size) : nullptr,
      .v_norm = std::vector<float>(field<bool>(attention_heads, "v_norm") ? size : 0, 1.0f),
      .sinks = sinks ? vector(*sinks, "sinks", heads) : nullptr,
      .eps = field<float>(attention_heads, "eps", true),
      .scale = scale ? *scale : 1.0f / __builtin_sqrtf(static_cast<float>(size)),
      .angles = {angles.data(), 2 * num_pairs},
      .k_cache = k_cache.data(),
      .v_cache = v_cache.data(),
      .type = type,
      .num_pieces = size_of(k_cache, 0),
      .num_positions = size_of(k_cache, 1),
      .window = std::min<int64_t>(window.value_or(0), INT32_MAX),
      .chosen = {},
      .layout = layout_of(ids(positions, "positions", rows), ids(state_ids, "state_ids", rows), batch, rows),
      .out = output(out, "out", rows, heads * size),
  };
  const CachePlaces places = {arguments.layout, arguments.num_pieces, arguments.num_positions};
  arguments.chosen = chosen_of(chosen, rows, places.max_positions());
  submit_with(rt, make_attention(kernels_of(rt), arguments), rows, query_gate, key, value,
              q_norm.value_or(Array1d()), k_norm.value_or(Array1d()), sinks.value_or(Array1d()),
              q_bias.value_or(Array1d()), k_bias.value_or(Array1d()), v_bias.value_or(Array1d()), angles,
              k_cache, v_cache, positions, state_ids, out, gate ? *gate : query_gate);
}

// [channels, taps] as one contiguous row per tap.
std::vector<float> taps_by_tap(const Array2d& conv_taps) {
  const int64_t channels = size_of(conv_taps, 0), taps = size_of(conv_taps, 1);
  std::vector<float> result(channels * taps);
  for (int64_t c = 0; c < channels; c++) {
    for (int64_t j = 0; j < taps; j++) {
      result[j * channels + c] = conv_taps.data()[c * conv_taps.stride(0) + j];
    }
  }
  return result;
}

std::vector<int32_t> checked_key_heads(const Ids1d& key_head_ids, int64_t num_value_heads,
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

// Weights and states of a gated DeltaNet, as the bindings take them.
struct DeltaNetParts {
  const Array2d& conv_taps;
  const Array1d& a;
  const Array1d& dt_bias;
  const Array1d& norm;
  const Ids1d& key_head_ids;
  int64_t num_key_heads;
  float eps;
  const State3d& conv_state;
  const State4d& state;
};

// Arguments without rows; `channels` of qkv.
DeltaNetArguments checked(const DeltaNetParts& parts, int64_t channels) {
  const int64_t num_states = size_of(parts.state, 0), heads = size_of(parts.state, 1),
                size = size_of(parts.state, 2);
  const int64_t taps = size_of(parts.conv_taps, 1), num_key_heads = parts.num_key_heads;
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
  check(parts.state, "state", {num_states, heads, size, size});
  check(parts.conv_state, "conv_state", {num_states, taps - 1, channels});
  check(parts.conv_taps, "conv_taps", {channels, taps});
  DeltaNetArguments result = {};
  result.num_key_heads = num_key_heads;
  result.num_value_heads = heads;
  result.head_size = size;
  result.num_taps = taps;
  result.taps = taps_by_tap(parts.conv_taps);
  result.a = vector(parts.a, "a", heads);
  result.dt_bias = vector(parts.dt_bias, "dt_bias", heads);
  result.norm = vector(parts.norm, "norm", size);
  result.key_head_ids = checked_key_heads(parts.key_head_ids, heads, num_key_heads);
  result.eps = parts.eps;
  result.conv_state = parts.conv_state.data();
  result.state = parts.state.data();
  result.num_states = num_states;
  return result;
}

void gated_delta_net(Runtime& rt, const Array2d& qkv, const Array2d& z, const Array2d& alpha,
                     const Array2d& beta, const Array2d& conv_taps, const Array1d& a, const Array1d& dt_bias,
                     const Array1d& norm, const Ids1d& key_head_ids, int64_t num_key_heads, float eps,
                     const State3d& conv_state, const State4d& state, const Ids1d& state_ids,
                     const Array2d& out, const BatchRows* batch, const OptionalKept& kept,
                     bool has_sigmoid_gate) {
  const int64_t rows = size_of(qkv, 0), channels = size_of(qkv, 1);
  DeltaNetArguments arguments =
      checked({conv_taps, a, dt_bias, norm, key_head_ids, num_key_heads, eps, conv_state, state}, channels);
  const int64_t heads = arguments.num_value_heads, size = arguments.head_size;
  arguments.capacity = rows;
  arguments.has_sigmoid_gate = has_sigmoid_gate;
  arguments.qkv = input(qkv, "qkv", rows, channels);
  arguments.z = input(z, "z", rows, heads * size);
  arguments.alpha = input(alpha, "alpha", rows, heads);
  arguments.beta = input(beta, "beta", rows, heads);
  arguments.layout = layout_of(nullptr, ids(state_ids, "state_ids", rows), batch, rows);
  arguments.kept = kept_of(kept, channels, heads);
  arguments.out = output(out, "out", rows, heads * size);
  submit_with(rt, make_gated_delta_net(kernels_of(rt), std::move(arguments)), rows, qkv, z, alpha, beta, a,
              dt_bias, norm, conv_state, state, state_ids, out);
}

void commit_delta_net(Runtime& rt, const Array2d& qkv, const Array2d& alpha, const Array2d& beta,
                      const Array2d& conv_taps, const Array1d& a, const Array1d& dt_bias, const Array1d& norm,
                      const Ids1d& key_head_ids, int64_t num_key_heads, float eps, const State3d& conv_state,
                      const State4d& state, const Ids1d& state_id, const Ids1d& kept_ids,
                      const Array2d& out) {
  const int64_t rows = size_of(kept_ids, 0), channels = size_of(qkv, 1);
  DeltaNetArguments arguments =
      checked({conv_taps, a, dt_bias, norm, key_head_ids, num_key_heads, eps, conv_state, state}, channels);
  const int64_t heads = arguments.num_value_heads;
  arguments.capacity = rows;
  arguments.kept = kept_of(std::tuple(qkv, alpha, beta), channels, heads);
  arguments.qkv = {qkv.data(), channels};
  arguments.alpha = {alpha.data(), heads};
  arguments.beta = {beta.data(), heads};
  arguments.layout = {nullptr, ids(state_id, "state_id", 1)};
  arguments.replayed = ids(kept_ids, "kept_ids", rows);
  arguments.out = output(out, "out", rows, heads * arguments.head_size);
  submit_with(rt, make_gated_delta_net(kernels_of(rt), std::move(arguments)), rows, qkv, alpha, beta, a,
              dt_bias, norm, conv_state, state, state_id, kept_ids, out);
}

void commit_attention(Runtime& rt, const Cache4d& k_cache, const std::optional<Cache4d>& v_cache,
                      const Ids1d& first, const Ids1d& sources, const Ids1d& table) {
  const int64_t rows = size_of(sources, 0), blocks = size_of(k_cache, 0), positions = size_of(k_cache, 1);
  const std::vector<int64_t> shape = {blocks, positions, size_of(k_cache, 2), size_of(k_cache, 3)};
  check_contiguous(k_cache, "k_cache", shape);
  if (v_cache) {
    check_contiguous(*v_cache, "v_cache", shape);
    if (k_cache.dtype() != v_cache->dtype()) refuse("k_cache and v_cache must be of one type");
  }
  const int64_t table_blocks = size_of(table, 0);
  const MoveRowsArguments arguments = {
      .caches = {static_cast<std::byte*>(k_cache.data()),
                 v_cache ? static_cast<std::byte*>(v_cache->data()) : nullptr},
      .num_blocks = blocks,
      .num_positions = positions,
      .row_bytes = shape[2] * shape[3] * static_cast<int64_t>(k_cache.itemsize()),
      .first = ids(first, "first", 1),
      .sources = ids(sources, "sources", rows),
      .table = ids(table, "table", table_blocks),
      .table_blocks = table_blocks,
  };
  submit_with(rt, make_move_rows(arguments), rows, k_cache, v_cache.value_or(k_cache), first, sources, table);
}

}  // namespace

void bind_mixers(nb::module_& m) {
  nb::class_<BatchRows>(m, "BatchRows", "`BatchRows` of kernels/ops.py, of arrays that others keep.")
      .def(
          "__init__",
          [](BatchRows* self, const Ids1d& segments, const Ids2d& tables, const Ids1d& indices,
             const Ids1d& parents,
             const Ids1d& kept) { new (self) BatchRows{segments, tables, indices, parents, kept}; },
          nb::arg("segments").noconvert(), nb::arg("tables").noconvert(), nb::arg("indices").noconvert(),
          nb::arg("parents").noconvert(), nb::arg("kept").noconvert(),
          "int32 arrays: tables [segments, blocks], contiguous, the others [T].");
  m.def(
      "attention", attention, "runtime"_a, nb::arg("query_gate").noconvert(), nb::arg("key").noconvert(),
      nb::arg("value").noconvert(), nb::arg("angles").noconvert(), "heads"_a, nb::arg("k_cache").noconvert(),
      nb::arg("v_cache").noconvert(), nb::arg("positions").noconvert(), nb::arg("state_ids").noconvert(),
      nb::arg("out").noconvert(), nb::arg("batch").none() = nb::none(),
      nb::arg("gate").noconvert().none() = nb::none(), nb::arg("chosen").noconvert().none() = nb::none(),
      "`Ops.attention`: query_gate, key, value, angles and gate as `AttentionInputs`, "
      "angles [T, pairs, 2], out [T, H·D], float32; heads as `AttentionHeads`; caches [sequences, positions, G, row] contiguous, written, rows of D float16 or "
      "float32, or of a head's int8 as `CacheLayout` has them; "
      "positions and "
      "state_ids int32 [T]. With batch, the caches are [blocks, 256, G, row] and state_ids is not read. chosen: "
      "int32 words [T, n] and the positions of a block, as `ChosenBlocks`. "
      "ValueError when run with one outside the caches; then no row has been read or "
      "written out of "
      "bounds, but valid rows may have been appended.");
  m.def(
      "gated_delta_net", gated_delta_net, "runtime"_a, nb::arg("qkv").noconvert(), nb::arg("z").noconvert(),
      nb::arg("alpha").noconvert(), nb::arg("beta").noconvert(), nb::arg("conv_taps").noconvert(),
      nb::arg("a").noconvert(), nb::arg("dt_bias").noconvert(), nb::arg("norm").noconvert(),
      nb::arg("key_head_ids").noconvert(), "num_key_heads"_a, "eps"_a, nb::arg("conv_state").noconvert(),
      nb::arg("state").noconvert(), nb::arg("state_ids").noconvert(), nb::arg("out").noconvert(),
      nb::arg("batch").none() = nb::none(), nb::arg("kept").noconvert().none() = nb::none(),
      "has_sigmoid_gate"_a = false,
      "`Ops.gated_delta_net`: qkv [T, C], z and out [T, NV·d], alpha and beta [T, NV], conv_taps [C, "
      "taps], a and "
      "dt_bias [NV], norm [d], float32; key_head_ids int32 [NV]; conv_state [states, taps − 1, C] and state "
      "[states, NV, d, d], contiguous float32, advanced; state_ids int32 [T]. conv_taps and key_head_ids are "
      "copied. With batch, rows of trees leave both states alone and are written to kept: qkv [R, C], alpha and "
      "beta [R, NV], contiguous float32. The output is gated by silu(z), or by sigmoid(z). "
      "ValueError when run with a state_id outside the states or whose rows are not adjacent; then nothing has "
      "changed.");
  m.def(
      "commit_delta_net", commit_delta_net, "runtime"_a, nb::arg("qkv").noconvert(),
      nb::arg("alpha").noconvert(), nb::arg("beta").noconvert(), nb::arg("conv_taps").noconvert(),
      nb::arg("a").noconvert(), nb::arg("dt_bias").noconvert(), nb::arg("norm").noconvert(),
      nb::arg("key_head_ids").noconvert(), "num_key_heads"_a, "eps"_a, nb::arg("conv_state").noconvert(),
      nb::arg("state").noconvert(), nb::arg("state_id").noconvert(), nb::arg("kept_ids").noconvert(),
      nb::arg("out").noconvert(),
      "`Ops.commit_delta_net`: advances the states of number state_id [1] as `gated_delta_net` does for a chain of "
      "the rows kept_ids int32 [T] of qkv [R, C], alpha and beta [R, NV], contiguous float32. Uses out [T, NV·d]. "
      "ValueError when run with a state or a row that does not exist; then nothing has changed.");
  m.def(
      "commit_attention", commit_attention, "runtime"_a, nb::arg("k_cache").noconvert(),
      nb::arg("v_cache").noconvert().none(), nb::arg("first").noconvert(), nb::arg("sources").noconvert(),
      nb::arg("table").noconvert(),
      "`Ops.commit_attention`: moves the row at index first[0] + sources[i] of a sequence, whose blocks of the "
      "caches [blocks, positions, G, row] table int32 [n] has, to index first[0] + i, for ascending sources "
      "int32 [T]. ValueError when run with an index or a block that does not exist; then nothing has changed.");
}

}  // namespace coldstream
