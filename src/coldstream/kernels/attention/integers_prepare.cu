// Prepares heads of new rows for attention over integers: queries are normed, rotated by their positions and
// by a Hadamard matrix, and rounded into a workspace; keys likewise, and values, into the caches. Half a warp
// takes a head.
#include "attention/heads.cuh"
#include "attention/integers_packing.cuh"
#include "attention/integers_tile.cuh"
#include "attention/rotation.cuh"

namespace coldstream {

struct PrepareIntegersArguments {
  const float *query_gate, *key, *value;
  const float *q_bias, *k_bias, *v_bias;  // [H · D] and [G · D], or null
  const float *q_norm, *k_norm;           // [D], or null
  const float* angles;
  int8_t* query;        // [T, H, 2, D]
  float* query_scales;  // [T, H]
  uint8_t *k_cache, *v_cache;
  BatchRows rows;
  CacheStrides strides;
  int32_t query_gate_stride, key_stride, value_stride;  // elements between rows
  int32_t num_heads, num_kv_heads, rope_half;
  int32_t v_norm;  // whether values are normed
  float eps, query_scale;
};

constexpr int prepare_threads = 128;
constexpr int heads_per_block = prepare_threads / lanes_per_head;

// A lane's numbers of a head: lane, lane + 16, ….
template <int head_dim>
using LaneNumbers = float[head_dim / lanes_per_head];

// The Walsh–Hadamard transform of each of the largest blocks that the head can be split into, in place.
template <int head_dim>
__device__ __forceinline__ void rotate_head(LaneNumbers<head_dim>& x) {
  constexpr int size = head_dim & -head_dim;
#pragma unroll
  for (int stride = 1; stride < lanes_per_head; stride *= 2) rotate_lanes(x, stride);
#pragma unroll
  for (int step = 1; step < size / lanes_per_head; step *= 2) rotate_own(x, step);
}

// Rounds a head into the codes of a cache row; returns the scale. to: null for a row of no sequence. codes:
// scratch [head_dim] of the half warp.
template <int bits, int head_dim>
__device__ __forceinline__ float store_codes(const LaneNumbers<head_dim>& x, int lane, uint8_t* to,
                                             uint8_t* codes) {
  uint32_t greatest = 0;
#pragma unroll
  for (const float value : x) greatest = max(greatest, magnitude(value));
#pragma unroll
  for (int distance = lanes_per_head / 2; distance > 0; distance /= 2)
    greatest = max(greatest, __shfl_xor_sync(all_lanes, greatest, distance));
  const PlaneScale by = scale_of_codes<bits>(greatest);
  if constexpr (bits >= 8) {
    if (!to) return by.scale;
#pragma unroll
    for (int i = 0; i < head_dim / lanes_per_head; i++) {
      const int code = code_of(x[i], by), at = i * lanes_per_head + lane;
      to[at] = uint8_t(bits == 8 ? code : high_plane(code));
      if (bits == 16) to[head_dim + at] = uint8_t(low_plane(code));
    }
  } else {
    // `codes` may take the place of numbers that other lanes have read.
    __syncwarp();
#pragma unroll
    for (int i = 0; i < head_dim / lanes_per_head; i++)
      codes[i * lanes_per_head + lane] = packed_code<bits>(x[i], by);
    __syncwarp();
    if (!to) return by.scale;
    uint32_t* const words = reinterpret_cast<uint32_t*>(to);
    for (int i = lane; i < CacheRow<bits, head_dim>::code_bytes / 4; i += lanes_per_head)
      words[i] = packed_word<bits, head_dim>(codes, i);
  }
  return by.scale;
}

// Has so many floats in the first-level cache when the half warp reads them.
__device__ __forceinline__ void bring_numbers_close(const float* numbers, int count, int lane) {
  constexpr int per_sector = 32 / sizeof(float);
  for (int i = lane * per_sector; i < count; i += lanes_per_head * per_sector) bring_close(numbers + i);
}

template <int bits, int head_dim, bool has_gate>
__global__ void __launch_bounds__(prepare_threads)
    attention_prepare_integers(const PrepareIntegersArguments a) {
  __shared__ float heads[heads_per_block][head_dim];
  const int lane = threadIdx.x % lanes_per_head;
  float* const head = heads[threadIdx.x / lanes_per_head];
  const int64_t row = blockIdx.x;
  const int wanted = blockIdx.y * heads_per_block + threadIdx.x / lanes_per_head;
  constexpr int query_width = has_gate ? 2 * head_dim : head_dim;
  const auto [unit, kv_head, is_spare, is_query, is_value, x] =
      NewHead::of<head_dim, query_width>(a, row, wanted);
  const bool has_norm = is_value ? a.v_norm != 0 : a.q_norm != nullptr;
  // There are none beside gates that come with queries.
  const float* const bias = has_gate ? nullptr : is_query ? a.q_bias : is_value ? a.v_bias : a.k_bias;
  const float* const weight = is_query ? a.q_norm : is_value ? nullptr : a.k_norm;
  const NewNorm norm = {bias ? bias + (is_query ? unit : kv_head) * head_dim : nullptr, has_norm, weight,
                        a.eps};
  // Weights, and what was written before the previous launch began, are there before that launch has ended.
  if (norm.bias) bring_numbers_close(norm.bias, head_dim, lane);
  if (norm.weight) bring_numbers_close(norm.weight, head_dim, lane);
  const int segment = a.rows.segments[row], index = a.rows.indices[row];
  const bool is_kept = !is_query && !is_spare && a.rows.positions[row] >= 0;
  const int block =
      is_kept ? a.rows.tables[int64_t{segment} * a.rows.table_stride + index / chunk_positions] : 0;
  const float* angles = a.angles + row * a.rope_half * 2;
  wait_for_previous_grid();
  release_next_grid();
  if (!is_value) bring_numbers_close(angles, 2 * a.rope_half, lane);
  norm_head<head_dim>(x, norm, lane, head);
  __syncwarp();
  LaneNumbers<head_dim> values;
#pragma unroll
  for (int i = 0; i < head_dim / lanes_per_head; i++) {
    const int at = i * lanes_per_head + lane;
    values[i] = is_value ? head[at] : rotated(head, angles, a.rope_half, at);
    if (is_query) values[i] *= a.query_scale;
  }
  rotate_head<head_dim>(values);
  if (is_query) {
    constexpr float factor = 1.0f / (head_dim & -head_dim);
#pragma unroll
    for (float& value : values) value *= factor;
  }
  const int64_t pair = row * a.num_heads + unit;
  using RowType = CacheRow<bits, head_dim>;
  uint8_t* to = nullptr;
  if (is_kept) {
    to = (is_value ? a.v_cache : a.k_cache) + block * a.strides.block_bytes +
         index % chunk_positions * a.strides.position_bytes + int64_t{kv_head} * RowType::bytes;
  }
  // A warp may hold a query and a key, so that all lanes execute both ways of the conditional branch.
  uint8_t* const codes = reinterpret_cast<uint8_t*>(head);
  uint8_t* const query = reinterpret_cast<uint8_t*>(a.query + pair * 2 * head_dim);
  const float of_query =
      store_codes<16, head_dim>(values, lane, is_query && !is_spare ? query : nullptr, codes);
  const float of_cache = store_codes<bits, head_dim>(values, lane, to, codes);
  if (is_query && !is_spare && lane == 0) a.query_scales[pair] = of_query;
  // The scale, followed by zeros.
  if (to && lane < (RowType::bytes - RowType::code_bytes) / 4)
    reinterpret_cast<float*>(to + RowType::code_bytes)[lane] = lane == 0 ? of_cache : 0.0f;
}

}  // namespace coldstream
