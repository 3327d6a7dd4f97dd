// The end of attention for few rows with any number of chunks: a row's chunks merged in ascending order, divided, rotated
// back, gated where there is a gate, and written as float32, as int8 or as both. A block of threads takes 256 columns of a
// row, that is a group of activations; a thread takes one.
#include "attention/merge.cuh"
#include "attention/rotation.cuh"

extern __shared__ float4 dynamic_shared[];

namespace coldstream {

constexpr int merge_batch = warp_size;  // chunks that are in shared memory together
constexpr int merge_threads = group_elements;
constexpr int merge_shared_bytes = 2 * merge_batch * group_elements * 4;

struct merge_batch_factors {
  float ours[merge_batch], theirs[merge_batch], denominators[merge_batch];
};

// The factors of the chunks from number `first` on, by one warp; `maximum` is that of the chunks before, then of
// these.
__device__ __forceinline__ void find_factors(const float2* stats, int first, int num_chunks, float& maximum,
                                             merge_batch_factors& factors) {
  const int lane = threadIdx.x % warp_size, chunk = first + lane;
  const float2 own = chunk < num_chunks ? stats[chunk] : make_float2(negative_infinity(), 0.0f);
  float after = own.x;
#pragma unroll
  for (int distance = 1; distance < warp_size; distance *= 2) {
    const float other = __shfl_up_sync(all_lanes, after, distance);
    if (lane >= distance) after = fmaxf(after, other);
  }
  if (first > 0) after = fmaxf(after, maximum);
  float before = __shfl_up_sync(all_lanes, after, 1);
  if (lane == 0) before = maximum;
  factors.ours[lane] = exact_exp(before - after);
  factors.theirs[lane] = exact_exp(own.x - after);
  factors.denominators[lane] = own.y;
  maximum = __shfl_sync(all_lanes, after, warp_size - 1);
}

template <int head_dim>
struct merger {
  static constexpr int most_heads = (group_elements + head_dim - 2) / head_dim + 1;  // that a group may meet
  static constexpr int num_warps = merge_threads / warp_size;
  static constexpr int heads_per_warp = (most_heads + num_warps - 1) / num_warps;
  static constexpr int pieces = group_elements / 4;  // of 16 bytes in the columns of a group

  const merge_arguments& a;
  // Two batches: one is merged while the next one is on its way.
  float (*const staged)[group_elements];  // [2 · merge_batch]
  merge_batch_factors (&factors)[2][most_heads];
  const int64_t row, first_place;  // the latter: of the row in `stats`
  const int num_columns, first_column, first_head, head;
  float maxima[heads_per_warp] = {};
  float numerator = 0.0f, denominator = 1.0f;

  __device__ __forceinline__ merger(const merge_arguments& arguments, float (*values)[group_elements],
                                    merge_batch_factors (&all_factors)[2][most_heads])
      : a(arguments),
        staged(values),
        factors(all_factors),
        row(blockIdx.y),
        first_place(row * a.num_heads * a.max_chunks),
        num_columns(a.num_heads * head_dim),
        first_column(blockIdx.x * group_elements),
        first_head(first_column / head_dim),
        head(min(first_column + int(threadIdx.x), num_columns - 1) / head_dim) {}

  // Queues the copies of the batch of chunks from number `first` on, and finds its factors.
  __device__ __forceinline__ void load(int first, int num_chunks) {
    const int piece = threadIdx.x % pieces, column = first_column + piece * 4, half = first / merge_batch % 2;
    const int count = min(merge_batch, num_chunks - first), warp = threadIdx.x / warp_size;
    if (column < num_columns) {
      const int64_t place = first_place + int64_t{column / head_dim} * a.max_chunks + first;
      const float* from = a.values + place * head_dim + column % head_dim;
      for (int i = threadIdx.x / pieces; i < count; i += merge_threads / pieces) {
        copy_async_16(&staged[half * merge_batch + i][piece * 4], from + int64_t{i} * head_dim);
      }
    }
    commit_copies();
    if (count <= 0) return;
#pragma unroll
    for (int i = 0; i < heads_per_warp; i++) {
      const int member = warp * heads_per_warp + i, of = first_head + member;
      if (member < most_heads && of < a.num_heads) {
        const float2* stats = a.stats + first_place + int64_t{of} * a.max_chunks;
        find_factors(stats, first, num_chunks, maxima[i], factors[half][member]);
      }
    }
  }

  __device__ __forceinline__ void merge_batch_of(int first, int num_chunks) {
    const int count = min(merge_batch, num_chunks - first), half = first / merge_batch % 2;
    load(first + merge_batch, num_chunks);
    wait_for_copies<1>();
    __syncthreads();
    const merge_batch_factors& own = factors[half][head - first_head];
#pragma unroll 4
    for (int i = 0; i < count; i++) {
      const float value = staged[half * merge_batch + i][threadIdx.x];
      if (first + i == 0) {
        numerator = value;
        denominator = own.denominators[i];
      } else {
        numerator = __fmaf_rn(value, own.theirs[i], numerator * own.ours[i]);
        denominator = __fmaf_rn(own.denominators[i], own.theirs[i], denominator * own.ours[i]);
      }
    }
    __syncthreads();
  }
};

// `rotate_head` undone, by the threads that hold a head's values next to each other, and its factor.
template <int head_dim>
__device__ __forceinline__ float head_rotated_back(float x, float (*staged)[group_elements]) {
  constexpr int size = head_dim & -head_dim;
  static_assert(size <= group_elements);
#pragma unroll
  for (int stride = 1; stride < size; stride *= 2) {
    float other;
    if (stride < warp_size) {
      other = __shfl_xor_sync(all_lanes, x, stride);
    } else {
      __syncthreads();
      staged[0][threadIdx.x] = x;
      __syncthreads();
      other = staged[0][threadIdx.x ^ stride];
    }
    x = rotated_with(x, other, threadIdx.x & stride);
  }
  return x * (1.0f / size);
}

template <int head_dim, bool has_gate>
__global__ void __launch_bounds__(merge_threads) attention_merge(const merge_arguments a) {
  __shared__ merge_batch_factors factors[2][merger<head_dim>::most_heads];
  float (*const staged)[group_elements] = reinterpret_cast<float (*)[group_elements]>(dynamic_shared);
  wait_for_previous_grid();
  release_next_grid();
  merger<head_dim> m(a, staged, factors);
  const int column = min(m.first_column + int(threadIdx.x), m.num_columns - 1), position = a.positions[m.row];
  float gate;
  if constexpr (has_gate) {
    const float* gates = a.query_gate + m.row * a.query_gate_stride + (2 * m.head + 1) * head_dim;
    gate = gates[column % head_dim];
  }
  const int first_chunk = first_position(position, a.window) / chunk_positions;
  // None of a row of no sequence.
  const int num_chunks = position < 0 ? 0 : min(position / chunk_positions - first_chunk + 1, a.max_chunks);
  m.load(0, num_chunks);
#pragma unroll 1
  for (int first = 0; first < num_chunks; first += merge_batch) m.merge_batch_of(first, num_chunks);
  float result = m.numerator * (1.0f / m.denominator);
  result = head_rotated_back<head_dim>(result, staged);
  if constexpr (has_gate) result *= exact_sigmoid(gate);
  const bool exists = m.first_column + int(threadIdx.x) < m.num_columns;
  if (a.out && exists) a.out[m.row * m.num_columns + column] = result;
  if (!a.codes) return;
  __syncthreads();
  staged[0][threadIdx.x] = result;
  __syncthreads();
  if (threadIdx.x >= warp_size) return;
  float share[8];
  load_share(staged[0], m.num_columns - m.first_column, share);
  const int padded = gridDim.x * group_elements;
  store_group(quantize_group(share), quant_row(a.codes, a.scales, a.sums, m.row, padded), blockIdx.x);
}

}  // namespace coldstream
