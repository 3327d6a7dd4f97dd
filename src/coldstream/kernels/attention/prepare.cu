// The heads of new rows made ready: queries normed, rotated and scaled into a workspace, keys normed and
// rotated and values into the caches. Half a warp takes a head.
#include "attention/heads.cuh"
#include "attention/tile.cuh"

namespace coldstream {

struct prepare_arguments {
  const float *query_gate, *key, *value, *q_norm, *k_norm, *angles;
  const int32_t *positions, *slots;
  float* query;
  uint8_t *k_cache, *v_cache;
  cache_places places;
  int32_t query_gate_stride, key_stride, value_stride;  // elements between rows
  int32_t num_heads, num_kv_heads, rope_half;
  float eps;
};

constexpr int prepare_threads = 128;
constexpr int heads_per_block = prepare_threads / lanes_per_head;

template <class cache, int head_dim>
__global__ void __launch_bounds__(prepare_threads) attention_prepare(const prepare_arguments a) {
  __shared__ float heads[heads_per_block][head_dim];
  wait_for_previous_grid();
  release_next_grid();
  const int lane = threadIdx.x % lanes_per_head;
  float* head = heads[threadIdx.x / lanes_per_head];
  const int64_t row = blockIdx.x;
  const int wanted = blockIdx.y * heads_per_block + threadIdx.x / lanes_per_head;
  const auto [unit, kv_head, is_spare, is_query, is_value, x] = new_head::of<head_dim>(a, row, wanted);
  norm_head<head_dim>(x, is_query ? a.q_norm : a.k_norm, a.eps, lane, head);
  __syncwarp();
  const float* angles = a.angles + row * a.rope_half * 2;
  const float query_scale = inverse_sqrt(float(head_dim));
  uint8_t* cache_row = (is_value ? a.v_cache : a.k_cache) + a.slots[row] * a.places.slot_bytes +
                       a.positions[row] * a.places.position_bytes +
                       kv_head * int64_t{kv_tile<cache, head_dim>::row_chunks * 16};
  for (int i = 8 * lane; i < head_dim && !is_spare; i += 8 * lanes_per_head) {
    float values[8];
#pragma unroll
    for (int j = 0; j < 8; j++) {
      values[j] = is_value ? x[i + j] : rotated(head, angles, a.rope_half, i + j);
      if (is_query) values[j] *= query_scale;
    }
    if (is_query) {
      if constexpr (cache::is_turned) {
        turn_eight(values, i);
#pragma unroll
        for (int j = 0; j < 8; j++) values[j] *= 1.0f / turn_length;
      }
      float* out = a.query + (row * a.num_heads + unit) * head_dim;
      cache_f32::store_eight(reinterpret_cast<uint8_t*>(out), head_dim, i, values);
    } else if (a.slots[row] >= 0) {
      cache::store_eight(cache_row, head_dim, i, values);
    }
  }
}

}  // namespace coldstream
