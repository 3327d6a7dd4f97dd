// The end of decode's attention with any number of chunks: a row's chunks merged in ascending order,
// divided, rotated back, gated where there is a gate, and written as float32, as int8 or as both. A block of
// threads takes 256 columns of a row, that is a group of activations; a thread takes one. Heads of 512 are
// rotated as a whole: there a block takes two such groups, and a thread a column of each. With a choice,
// chunks of which a row sees nothing were not computed, and leave the sums as they are.
#include "attention/merge.cuh"
#include "attention/rotation.cuh"

extern __shared__ float4 dynamic_shared[];

namespace coldstream {

constexpr int merge_batch = warp_size;  // chunks that are merged between two barriers
constexpr int merge_threads = group_elements;
// Of a chunk: what the sums before it and its own are multiplied by, and its denominator.
struct __align__(16) MergeFactors {
  float ours, theirs, denominator, unused;
};

__device__ __forceinline__ float greatest_of_warp(float x) {
#pragma unroll
  for (int distance = 1; distance < warp_size; distance *= 2)
    x = fmaxf(x, __shfl_xor_sync(all_lanes, x, distance));
  return x;
}

// The factors of a batch of chunks, by one warp, whose lanes have the maximum and the denominator of one
// each; `maximum` is that of the chunks before, unless there are none. Both factors of the first chunk of all
// are 1. is_seen: false for a chunk without results, whose values are zeros; times minus zero they leave sums
// as they are, zeros of either sign too.
__device__ __forceinline__ void find_factors(float2 own, bool is_first, float maximum, bool is_seen,
                                             MergeFactors* factors) {
  const int lane = threadIdx.x % warp_size;
  float after = own.x;
#pragma unroll
  for (int distance = 1; distance < warp_size; distance *= 2) {
    const float other = __shfl_up_sync(all_lanes, after, distance);
    if (lane >= distance) after = fmaxf(after, other);
  }
  if (!is_first) after = fmaxf(after, maximum);
  float before = __shfl_up_sync(all_lanes, after, 1);
  if (lane == 0) before = is_first ? after : maximum;
  factors[lane] = {exact_exp(before - after), exact_exp(own.x - after), own.y, 0.0f};
  if (!is_seen) factors[lane] = {1.0f, -0.0f, 0.0f, 0.0f};
}

// `stages` batches of chunks, of one group of columns each, are in shared memory together: one is merged
// while the others are on their way. Factors are found for some batches at once, a warp for each of them and
// of the heads. Sinks are merged as a chunk behind the last one, with a denominator of 1 and without values.
template <int head_dim, bool has_sinks, int stages, bool is_chosen>
struct Merger {
  static constexpr int groups = groups_together<head_dim>;
  static constexpr int most_heads = (group_elements + head_dim - 2) / head_dim + 1;  // that a group may meet
  static constexpr int num_warps = merge_threads / warp_size;
  static constexpr int span = most_heads <= 2 ? 8 : most_heads <= 4 ? 4 : most_heads <= 8 ? 2 : 1;  // batches
  static constexpr int items_per_warp = (span * most_heads + num_warps - 1) / num_warps;
  static constexpr int pieces = group_elements / 4;              // of 16 bytes in the columns of a group
  static constexpr float no_results = is_chosen ? -0.0f : 0.0f;  // the denominator where there are none

  struct FactorsOfSpan {
    MergeFactors of[most_heads][span * merge_batch];
    float maxima[most_heads][span];  // of a batch
  };

  const MergeArguments& a;
  float (*const staged)[group_elements];  // [stages · merge_batch]
  FactorsOfSpan& factors;
  const int64_t row, first_place;  // the latter: of the row in `stats`
  const int num_columns, first_column, first_head, head, num_chunks;
  float maxima[items_per_warp];  // of the batches before the span, of an item's head
  // Minus zero: added to the first chunk's numbers they leave them as they are, zeros of either sign too.
  float numerators[groups], denominator = -0.0f;

  __device__ __forceinline__ Merger(const MergeArguments& arguments, float (*values)[group_elements],
                                    FactorsOfSpan& all_factors, int chunks)
      : a(arguments),
        staged(values),
        factors(all_factors),
        row(blockIdx.y),
        first_place(row * a.num_heads * a.max_chunks),
        num_columns(a.num_heads * head_dim),
        first_column(blockIdx.x * (groups * group_elements)),
        first_head(first_column / head_dim),
        head(min(first_column + int(threadIdx.x), num_columns - 1) / head_dim),
        num_chunks(chunks) {
    for (float& maximum : maxima) maximum = negative_infinity();
    for (float& numerator : numerators) numerator = -0.0f;
  }

  // Queues the copies of a group's columns of a batch of chunks; number: groups of the same batch follow each
  // other.
  __device__ __forceinline__ void load(int number) {
    const int batch = number / groups, own_column = first_column + number % groups * group_elements;
    const int piece = threadIdx.x % pieces, column = own_column + piece * 4, first = batch * merge_batch;
    const int count = min(merge_batch, num_chunks - first), stage = number % stages;
    if (column < num_columns) {
      const int64_t place = first_place + int64_t{column / head_dim} * a.max_chunks + first;
      const float* from = a.values + place * head_dim + column % head_dim;
      for (int i = threadIdx.x / pieces; i < count; i += merge_threads / pieces) {
        float* const to = &staged[stage * merge_batch + i][piece * 4];
        if (sees(first + i))
          copy_async_16(to, from + int64_t{i} * head_dim);
        else
          *reinterpret_cast<float4*>(to) = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
      }
    }
    commit_copies();
  }

  // Whether there are results of a chunk.
  __device__ __forceinline__ bool sees(int chunk) const {
    if constexpr (is_chosen)
      return sees_chunk(a.chosen, row, chunk);
    else
      return true;
  }

  // Of the batches of the span that begins with number `first`. No thread needs the span before any more.
  __device__ __forceinline__ void find_span(int first) {
    const int warp = __shfl_sync(all_lanes, int(threadIdx.x / warp_size), 0), lane = threadIdx.x % warp_size;
    float2 own[items_per_warp];
#pragma unroll
    for (int i = 0; i < items_per_warp; i++) {
      const int item = warp + i * num_warps, of = item / span, batch = item % span;
      const int chunk = (first + batch) * merge_batch + lane;
      own[i] = make_float2(negative_infinity(), no_results);
      if (of >= most_heads) continue;
      if (first_head + of < a.num_heads && chunk < num_chunks && sees(chunk))
        own[i] = a.stats[first_place + int64_t{first_head + of} * a.max_chunks + chunk];
      if constexpr (has_sinks) {
        if (first_head + of < a.num_heads && chunk == num_chunks)
          own[i] = make_float2(a.sinks[first_head + of], 1.0f);
      }
      const float best = greatest_of_warp(own[i].x);
      if (lane == 0) factors.maxima[of][batch] = best;
    }
    __syncthreads();
#pragma unroll
    for (int i = 0; i < items_per_warp; i++) {
      const int item = warp + i * num_warps, of = item / span, batch = item % span;
      if (of >= most_heads) continue;
      const float best = lane < span ? factors.maxima[of][lane] : negative_infinity();
      const float before = fmaxf(maxima[i], greatest_of_warp(lane < batch ? best : negative_infinity()));
      maxima[i] = fmaxf(maxima[i], greatest_of_warp(best));
      const bool is_seen = !is_chosen || __float_as_uint(own[i].y) != __float_as_uint(no_results);
      find_factors(own[i], first + batch == 0, before, is_seen, factors.of[of] + batch * merge_batch);
    }
    __syncthreads();
  }

  __device__ __forceinline__ void start() {
#pragma unroll
    for (int number = 0; number < stages - 1; number++) load(number);
  }

  // The denominator is added with the first group.
  template <int group>
  __device__ __forceinline__ void add(const MergeFactors& by, float value) {
    numerators[group] = __fmaf_rn(value, by.theirs, numerators[group] * by.ours);
    if (group == 0) denominator = __fmaf_rn(by.denominator, by.theirs, denominator * by.ours);
  }

  __device__ __forceinline__ void merge(int batch) {
    merge_group<0>(batch);
    if constexpr (groups == 2) merge_group<1>(batch);
  }

  template <int group>
  __device__ __forceinline__ void merge_group(int batch) {
    const int count = min(merge_batch, num_chunks - batch * merge_batch), number = batch * groups + group;
    load(number + stages - 1);
    if (group == 0 && batch % span == 0) find_span(batch);
    wait_for_copies<stages - 1>();
    __syncthreads();
    const float (*values)[group_elements] = staged + number % stages * merge_batch;
    const MergeFactors* const own = factors.of[head - first_head] + batch % span * merge_batch;
    if (count == merge_batch) {
#pragma unroll 8
      for (int i = 0; i < merge_batch; i++) add<group>(own[i], values[i][threadIdx.x]);
    } else {
#pragma unroll 1
      for (int i = 0; i < count; i++) add<group>(own[i], values[i][threadIdx.x]);
    }
    if constexpr (has_sinks) {
      if (num_chunks / merge_batch == batch) {
        const MergeFactors by = own[num_chunks % merge_batch];
        numerators[group] *= by.ours;
        if (group == 0) denominator = denominator * by.ours + by.theirs;
      }
    }
    __syncthreads();
  }
};

// The steps of `rotate_head` undone that are within a group of columns, by the threads that hold a head's
// values next to each other.
template <int size>
__device__ __forceinline__ float group_rotated_back(float x, float (*staged)[group_elements]) {
#pragma unroll
  for (int stride = 1; stride < size && stride < group_elements; stride *= 2) {
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
  return x;
}

// `rotate_head` undone for the thread's columns, and its factor.
template <int head_dim>
__device__ __forceinline__ void rotate_head_back(float (&x)[groups_together<head_dim>],
                                                 float (*staged)[group_elements]) {
  constexpr int size = head_dim & -head_dim;
#pragma unroll
  for (float& value : x) value = group_rotated_back<size>(value, staged);
  if constexpr (size > group_elements) rotate_own(x, 1);
#pragma unroll
  for (float& value : x) value *= 1.0f / size;
}

// is_chosen: whether rows see the blocks of `chosen` alone.
template <int head_dim, OutputGate gate, bool has_sinks, int stages, bool is_chosen = false>
__global__ void __launch_bounds__(merge_threads) attention_merge(const MergeArguments a) {
  using MergerOfHead = Merger<head_dim, has_sinks, stages, is_chosen>;
  __shared__ typename MergerOfHead::FactorsOfSpan factors;
  float (*const staged)[group_elements] = reinterpret_cast<float (*)[group_elements]>(dynamic_shared);
  const int position = a.positions[blockIdx.y];  // written before the previous launch began
  if constexpr (has_sinks) {
    constexpr int columns = groups_together<head_dim> * group_elements;
    const int head = blockIdx.x * columns / head_dim + threadIdx.x;
    if (threadIdx.x < MergerOfHead::most_heads && head < a.num_heads) bring_close(a.sinks + head);
  }
  wait_for_previous_grid();
  release_next_grid();
  const int first_chunk = first_position(position, a.window) / chunk_positions;
  // None of a row of no sequence.
  const int num_chunks = position < 0 ? 0 : min(position / chunk_positions - first_chunk + 1, a.max_chunks);
  const int num_merged = has_sinks && num_chunks > 0 ? num_chunks + 1 : num_chunks;
  MergerOfHead m(a, staged, factors, num_chunks);
  m.start();
  constexpr int groups = MergerOfHead::groups;
  HeadEnd<head_dim, gate, 1> ends[groups];
  int columns[groups];
#pragma unroll
  for (int group = 0; group < groups; group++) {
    columns[group] = min(m.first_column + group * group_elements + int(threadIdx.x), m.num_columns - 1);
    ends[group].load(a, m.row, columns[group]);
  }
#pragma unroll 1
  for (int batch = 0; batch * merge_batch < num_merged; batch++) m.merge(batch);
  float results[groups];
#pragma unroll
  for (int group = 0; group < groups; group++)
    results[group] = num_chunks > 0 ? m.numerators[group] * (1.0f / m.denominator) : 0.0f;
  rotate_head_back<head_dim>(results, staged);
#pragma unroll
  for (int group = 0; group < groups; group++) {
    float of_group[1] = {results[group]};
    ends[group].apply(of_group);
    results[group] = of_group[0];
    const bool exists = m.first_column + group * group_elements + int(threadIdx.x) < m.num_columns;
    if (a.out && exists) a.out[m.row * m.num_columns + columns[group]] = results[group];
  }
  if (!a.codes) return;
  __syncthreads();
#pragma unroll
  for (int group = 0; group < groups; group++) staged[group][threadIdx.x] = results[group];
  __syncthreads();
  if (threadIdx.x >= groups * warp_size) return;
  const int own = groups == 1 ? 0 : threadIdx.x / warp_size;  // the warp's group
  float share[8];
  load_share(staged[own], m.num_columns - m.first_column - own * group_elements, share);
  const int padded = gridDim.x * groups * group_elements;
  store_group(quantize_group(share), quant_row(a.codes, a.scales, a.sums, m.row, padded),
              blockIdx.x * groups + own);
}

}  // namespace coldstream
