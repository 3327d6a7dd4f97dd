// Attention of a draft block's rows to the committed rows before it and to the rows of the block.
//
// A block of threads takes the queries of one key head, four for each of its warps at a time, and every so
// manieth part of the positions. The parts are merged by another launch.
#include "draft_block/values.cuh"

using namespace coldstream;

constexpr int warp_queries = 4;
// Positions of a part, so that it fits into shared memory with the queries of four warps, or of eight.
template <int D>
constexpr int part_positions = D > 128 ? 32 : 64;
constexpr int eight = 8;  // values of 16 bytes

extern __shared__ float4 dynamic_shared[];

struct DraftAttention {
  const float* queries;          // [rows, heads, dim], normed and rotated
  const Bfloat16Bits* kv;        // [rows, 2 · kv_heads, dim]: keys, normed and rotated, and values
  const DraftContext* contexts;  // by layer
  const int* length;             // of the context, the position of the block's first row
  float* parts;                  // [splits, rows · heads, dim + 2]: numerators, denominator, maximum
  int layer, rows, num_heads, num_kv_heads;
  int window;  // 0: none
  int is_causal;

  __device__ int group() const { return num_heads / num_kv_heads; }

  __device__ bool sees(int query, int key) const {  // positions
    const int ahead = key - query;
    if (is_causal && ahead > 0) return false;
    return window == 0 || (ahead > -window && ahead < window);
  }
  // The first position that any row of the block sees.
  __device__ int begin(int of_block) const { return window == 0 ? 0 : max(0, of_block - window + 1); }
};

// Parts of keys and values of one key head in shared memory, as bfloat16.
template <int D, int warps>
struct PartMemory {
  static constexpr int block_queries = warps * warp_queries;
  static constexpr int key_stride =
      D + eight;  // so that lanes that read 16 bytes of neighbouring rows read other banks
  alignas(16) Bfloat16Bits keys[part_positions<D> * key_stride];
  alignas(16) Bfloat16Bits values[part_positions<D> * D];
  alignas(16) float queries[block_queries * D];
  alignas(16) float weights[block_queries * part_positions<D>];
  int positions[part_positions<D>];  // negative: nothing is there
};

// The block's queries, times the scale of attention.
template <int D, int warps>
__device__ __forceinline__ void load_queries(const DraftAttention& a, int kv_head, int first,
                                             PartMemory<D, warps>& m) {
  constexpr int block_threads = warps * warp_size, block_queries = warps * warp_queries;
  const int count = a.rows * a.group();
  const float scale = inverse_sqrt(float(D));
  for (int i = threadIdx.x; i < block_queries * D / 4; i += block_threads) {
    const int at = i / (D / 4), column = i % (D / 4) * 4, query = first + at;
    float4 loaded = {0.0f, 0.0f, 0.0f, 0.0f};
    if (query < count) {
      const int row = query / a.group(), head = kv_head * a.group() + query % a.group();
      loaded = *reinterpret_cast<const float4*>(a.queries + (int64_t(row) * a.num_heads + head) * D + column);
    }
    *reinterpret_cast<float4*>(m.queries + at * D + column) = {scale * loaded.x, scale * loaded.y,
                                                               scale * loaded.z, scale * loaded.w};
  }
}

// Of one position: its key and value of one key head, null where nothing is.
struct Place {
  const Bfloat16Bits *key, *value;
};

template <int D>
__device__ __forceinline__ Place place_of(const DraftAttention& a, const DraftContext& context, int kv_head,
                                          int position, int length, int end) {
  if (position >= end) return {nullptr, nullptr};
  if (position >= length) {
    const Bfloat16Bits* key = a.kv + (int64_t(position - length) * 2 * a.num_kv_heads + kv_head) * D;
    return {key, key + a.num_kv_heads * D};
  }
  const int place = position % context.capacity;
  if (context.positions[place] != position) return {nullptr, nullptr};
  const int64_t at = (int64_t(place) * a.num_kv_heads + kv_head) * D;
  return {context.keys + at, context.values + at};
}

// The positions from `begin` on up to `end`, those from `length` on of the block itself. All loads of a
// thread are under way before the first of them is stored.
template <int D, int warps>
__device__ __forceinline__ void load_part(const DraftAttention& a, const DraftContext& context, int kv_head,
                                          int begin, int length, int end, PartMemory<D, warps>& m) {
  constexpr int block_threads = warps * warp_size, row_loads = D / eight;
  constexpr int count = part_positions<D> * row_loads / block_threads;
  static_assert(count * block_threads == part_positions<D> * row_loads, "each thread loads as much");
  const uint4 zeros = {0u, 0u, 0u, 0u};
  uint4 keys[count], values[count];
  bool exists[count];
#pragma unroll
  for (int i = 0; i < count; i++) {
    const int load = threadIdx.x + i * block_threads, column = load % row_loads * eight;
    const Place place = place_of<D>(a, context, kv_head, begin + load / row_loads, length, end);
    exists[i] = place.key != nullptr;
    keys[i] = exists[i] ? *reinterpret_cast<const uint4*>(place.key + column) : zeros;
    values[i] = exists[i] ? *reinterpret_cast<const uint4*>(place.value + column) : zeros;
  }
#pragma unroll
  for (int i = 0; i < count; i++) {
    const int load = threadIdx.x + i * block_threads, at = load / row_loads,
              column = load % row_loads * eight;
    *reinterpret_cast<uint4*>(m.keys + at * m.key_stride + column) = keys[i];
    *reinterpret_cast<uint4*>(m.values + at * D + column) = values[i];
    if (column == 0) m.positions[at] = exists[i] ? begin + at : -1;
  }
}

// Adds eight products for each of the warp's queries: of its values at `query`, D apart, with those of a key.
template <int D>
__device__ __forceinline__ void multiply_eight(const float* query, uint4 key, float (&sums)[warp_queries]) {
  const uint32_t words[4] = {key.x, key.y, key.z, key.w};
  float k[eight];
#pragma unroll
  for (int i = 0; i < 4; i++) k[2 * i] = low_half(words[i]), k[2 * i + 1] = high_half(words[i]);
#pragma unroll
  for (int q = 0; q < warp_queries; q++) {
    const float4 low = *reinterpret_cast<const float4*>(query + q * D);
    const float4 high = *reinterpret_cast<const float4*>(query + q * D + 4);
    const float v[eight] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
#pragma unroll
    for (int i = 0; i < eight; i++) sums[q] = __fmaf_rn(v[i], k[i], sums[q]);
  }
}

// What a warp has of its four queries: a lane holds columns lane, lane + 32, … of the numerators.
template <int D>
struct Running {
  static constexpr int lane_columns = D / warp_size, lane_positions = part_positions<D> / warp_size;
  float numerators[warp_queries][lane_columns] = {};
  float denominators[warp_queries] = {};
  float maxima[warp_queries] = {least, least, least, least};
  static constexpr float least = -1e30f;

  template <int warps>
  __device__ __forceinline__ void add(const DraftAttention& a, const PartMemory<D, warps>& m, float* weights,
                                      const int (&query_positions)[warp_queries]) {
    const int warp = threadIdx.x / warp_size, lane = threadIdx.x % warp_size;
    float scores[lane_positions][warp_queries] = {};
#pragma unroll 4
    for (int column = 0; column < D; column += eight) {
#pragma unroll
      for (int j = 0; j < lane_positions; j++) {
        const uint4 key =
            *reinterpret_cast<const uint4*>(m.keys + (lane + j * warp_size) * m.key_stride + column);
        multiply_eight<D>(m.queries + warp * warp_queries * D + column, key, scores[j]);
      }
    }
#pragma unroll
    for (int q = 0; q < warp_queries; q++) {
      float most = maxima[q];
      bool seen[lane_positions];
#pragma unroll
      for (int j = 0; j < lane_positions; j++) {
        const int position = m.positions[lane + j * warp_size];
        seen[j] = position >= 0 && a.sees(query_positions[q], position);
        if (seen[j]) most = fmaxf(most, scores[j][q]);
      }
      most = max_of_warp(most);
      const float kept = exact_exp(maxima[q] - most);
      float sum = 0.0f;
#pragma unroll
      for (int j = 0; j < lane_positions; j++) {
        const float weight = seen[j] ? exact_exp(scores[j][q] - most) : 0.0f;
        weights[q * part_positions<D> + lane + j * warp_size] = weight;
        sum += weight;
      }
      denominators[q] = denominators[q] * kept + sum_of_warp(sum);
      maxima[q] = most;
#pragma unroll
      for (int c = 0; c < lane_columns; c++) numerators[q][c] *= kept;
    }
    __syncwarp();
    for (int at = 0; at < part_positions<D>; at += 4) {
      float4 w[warp_queries];
#pragma unroll
      for (int q = 0; q < warp_queries; q++) {
        w[q] = *reinterpret_cast<const float4*>(weights + q * part_positions<D> + at);
      }
#pragma unroll
      for (int c = 0; c < lane_columns; c++) {
        float v[4];
#pragma unroll
        for (int i = 0; i < 4; i++) v[i] = bfloat16_to_float(m.values[(at + i) * D + c * warp_size + lane]);
#pragma unroll
        for (int q = 0; q < warp_queries; q++) {
          numerators[q][c] = __fmaf_rn(w[q].x, v[0], numerators[q][c]);
          numerators[q][c] = __fmaf_rn(w[q].y, v[1], numerators[q][c]);
          numerators[q][c] = __fmaf_rn(w[q].z, v[2], numerators[q][c]);
          numerators[q][c] = __fmaf_rn(w[q].w, v[3], numerators[q][c]);
        }
      }
    }
    __syncwarp();
  }
};

// grid (splits, kv heads, ceil(rows · group / block_queries)).
template <int D, int warps>
__global__ void __launch_bounds__((warps * warp_size))
    attend_draft(const __grid_constant__ DraftAttention a) {
  using Memory = PartMemory<D, warps>;
  Memory& m = *reinterpret_cast<Memory*>(dynamic_shared);
  wait_for_previous_grid();
  release_next_grid();
  const int kv_head = blockIdx.y, first = blockIdx.z * Memory::block_queries, length = *a.length;
  const int warp = threadIdx.x / warp_size, lane = threadIdx.x % warp_size;
  const DraftContext context = a.contexts[a.layer];
  load_queries(a, kv_head, first, m);
  int query_positions[warp_queries];
#pragma unroll
  for (int q = 0; q < warp_queries; q++)
    query_positions[q] = length + (first + warp * warp_queries + q) / a.group();
  Running<D> running;
  const int end = length + a.rows;
  for (int begin = a.begin(length) + blockIdx.x * part_positions<D>; begin < end;
       begin += gridDim.x * part_positions<D>) {
    __syncthreads();  // all warps have used the part before
    load_part(a, context, kv_head, begin, length, end, m);
    __syncthreads();
    running.add(a, m, m.weights + warp * warp_queries * part_positions<D>, query_positions);
  }
#pragma unroll
  for (int q = 0; q < warp_queries; q++) {
    const int query = first + warp * warp_queries + q;
    if (query >= a.rows * a.group()) continue;
    const int row = query / a.group(), head = kv_head * a.group() + query % a.group();
    float* part = a.parts + (int64_t(blockIdx.x) * a.rows * a.num_heads + row * a.num_heads + head) * (D + 2);
#pragma unroll
    for (int c = 0; c < running.lane_columns; c++) part[c * warp_size + lane] = running.numerators[q][c];
    if (lane == 0) part[D] = running.denominators[q], part[D + 1] = running.maxima[q];
  }
}

// grid (rows · heads), 32 threads: the parts of a row's head as one, 0 for a row that sees nothing.
// gates: of each row's heads, whose softplus multiplies the head; null: none.
template <int D>
__global__ void __launch_bounds__(warp_size)
    merge_draft(const float* parts, int splits, const float* gates, float* out) {
  wait_for_previous_grid();
  release_next_grid();
  const int64_t stride = int64_t(gridDim.x) * (D + 2);
  const float* part = parts + int64_t(blockIdx.x) * (D + 2);
  float most = Running<D>::least;
  for (int s = threadIdx.x; s < splits; s += warp_size) most = fmaxf(most, part[s * stride + D + 1]);
  most = max_of_warp(most);
  float sums[D / warp_size] = {}, total = 0.0f;
#pragma unroll 4
  for (int s = 0; s < splits; s++) {
    const float kept = exact_exp(part[s * stride + D + 1] - most);
    total = __fmaf_rn(kept, part[s * stride + D], total);
#pragma unroll
    for (int c = 0; c < D / warp_size; c++) {
      sums[c] = __fmaf_rn(kept, part[s * stride + c * warp_size + threadIdx.x], sums[c]);
    }
  }
  if (gates != nullptr) {
    const float gate = exact_softplus(gates[blockIdx.x]);
#pragma unroll
    for (int c = 0; c < D / warp_size; c++) sums[c] *= gate;
  }
#pragma unroll
  for (int c = 0; c < D / warp_size; c++) {
    out[int64_t(blockIdx.x) * D + c * warp_size + threadIdx.x] = total == 0.0f ? 0.0f : sums[c] / total;
  }
}
