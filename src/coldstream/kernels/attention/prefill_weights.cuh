// Prefill, from the scores of a block of positions to the weights of its values.
#pragma once

#include "attention/prefill_block.cuh"

namespace coldstream {

// `exact_exp` of what is at most zero or NaN, in fewer instructions.
__device__ __forceinline__ float exact_exp_up_to_zero(float x) {
  asm("max.NaN.f32 %0, %0, %1;" : "+f"(x) : "f"(least_exponent));
  return exact_exp_within(x);
}

// Threads that share rows: each has the positions of two of the sixteen accumulators of a row's sum.
constexpr int position_lanes = 8;

// Lanes i and i ^ 1 read the same keys, i and i ^ 2 the same queries: only so 16 bytes a lane come in two
// passes and not in four.
__device__ __forceinline__ int position_lane_of(int thread) { return thread / 2 % position_lanes; }
__device__ __forceinline__ int row_lane_of(int thread) { return thread / 16 * 2 + thread % 2; }

// A thread has scores of `rows` neighbouring rows, and keeps the running maximum and denominator of one.
template <int num_rows, int rows>
struct weigher {
  static constexpr int positions = block_positions / position_lanes;
  static constexpr int lanes_of_row = position_lanes / rows;  // that keep the same row

  int row, last, position_lane;
  float maximum, denominator;                // of the chunk
  float merged_maximum, merged_denominator;  // of the chunks before

  __device__ __forceinline__ void begin(int thread, const int* lasts) {
    position_lane = position_lane_of(thread);
    row = row_lane_of(thread) * rows + position_lane / lanes_of_row;
    last = lasts[row];
    maximum = denominator = 0.0f;
  }

  // Element r of x, combined over the eight threads, in those that keep row r: halves of the rows go to
  // halves of the lanes, in the order of a sum's tree.
  template <class combine>
  __device__ __forceinline__ float scatter(float (&x)[rows], combine both) const {
    int count = rows;
#pragma unroll
    for (int distance = position_lanes / 2; distance > 0; distance /= 2) {
      count /= 2;
      if (count > 0) {
        const bool is_upper = position_lane & distance;
#pragma unroll
        for (int r = 0; r < count; r++) {
          const float sent = is_upper ? x[r] : x[r + count], kept = is_upper ? x[r + count] : x[r];
          x[r] = both(kept, __shfl_xor_sync(all_lanes, sent, 2 * distance));
        }
      } else {
        x[0] = both(x[0], __shfl_xor_sync(all_lanes, x[0], 2 * distance));
      }
    }
    return x[0];
  }

  // Scores of the block at `begin` become weights; the chunk's running maxima and denominators go on.
  __device__ __forceinline__ void operator()(float (&scores)[rows][positions], int begin, int chunk_begin,
                                             int window, const int* lasts, block_weights<num_rows>& to) {
    const bool sees_all =
        last < 0 || (begin + block_positions - 1 <= last && begin >= first_position(last, window));
    uint32_t seen[rows];
    if (__all_sync(all_lanes, sees_all)) {
      take<false>(scores, seen, begin, chunk_begin, window, to);
    } else {
#pragma unroll
      for (int r = 0; r < rows; r++) {
        const int end = lasts[row / rows * rows + r], first = first_position(end, window);
        seen[r] = 0;
#pragma unroll
        for (int j = 0; j < positions; j++) {
          const int position = begin + position_lane + position_lanes * j;
          if (position >= first && position <= end) seen[r] |= 1u << j;
        }
      }
      take<true>(scores, seen, begin, chunk_begin, window, to);
    }
  }

  template <bool masked>
  __device__ __forceinline__ void take(float (&scores)[rows][positions], const uint32_t (&seen)[rows],
                                       int begin, int chunk_begin, int window, block_weights<num_rows>& to) {
    float greatest[rows];
#pragma unroll
    for (int r = 0; r < rows; r++) {
      greatest[r] = negative_infinity();
#pragma unroll
      for (int j = 0; j < positions; j++) {
        if (!masked || seen[r] >> j & 1) greatest[r] = fmaxf(greatest[r], scores[r][j]);
      }
    }
    float greatest_of_row = scatter(greatest, [](float x, float y) { return fmaxf(x, y); });
    const int first = first_position(last, window);
    const bool started = max(first, chunk_begin) < begin;
    const bool used = begin <= last && begin + block_positions > first;
    if (started) greatest_of_row = fmaxf(maximum, greatest_of_row);
    const float correction = started && used ? exact_exp_up_to_zero(maximum - greatest_of_row) : 1.0f;
    to.corrections[row] = correction;
    float totals[rows];
#pragma unroll
    for (int r = 0; r < rows; r++) {
      const float m = __shfl_sync(all_lanes, greatest_of_row, (threadIdx.x & 17) + 2 * r * lanes_of_row);
#pragma unroll
      for (int j = 0; j < positions; j++) {
        const float e = exact_exp_up_to_zero(scores[r][j] - m);
        scores[r][j] = !masked || seen[r] >> j & 1 ? e : 0.0f;
      }
      float sums[2] = {scores[r][0], scores[r][1]};
#pragma unroll
      for (int j = 2; j < positions; j++) sums[j % 2] += scores[r][j];
      totals[r] = sums[0] + sums[1];
    }
    store(scores, to.weights);
    const float total = scatter(totals, [](float x, float y) { return x + y; });
    if (used) {
      maximum = greatest_of_row;
      denominator = started ? __fmaf_rn(denominator, correction, total) : total;
    }
  }

  // The chunk at `chunk_begin` joins what its row has merged.
  __device__ __forceinline__ void merge(int chunk_begin, int window, block_weights<num_rows>& to) {
    merge_factors factors = {0.0f, 1.0f};
    if (first_position(last, window) < chunk_begin) {
      factors = factors_of(merged_maximum, maximum);
      merged_maximum = fmaxf(merged_maximum, maximum);
      merged_denominator = __fmaf_rn(denominator, factors.theirs, merged_denominator * factors.ours);
    } else {
      merged_maximum = maximum;
      merged_denominator = denominator;
    }
    to.ours[row] = factors.ours;
    to.theirs[row] = factors.theirs;
    to.inverses[row] = 1.0f / merged_denominator;
  }

  __device__ __forceinline__ void store(const float (&scores)[rows][positions], float* weights) const {
    const int first = row / rows * rows;
#pragma unroll
    for (int j = 0; j < positions; j++) {
      const int place = position_lane + position_lanes * j;
      float* to = weights + place * block_weights<num_rows>::place_floats + first;
      if constexpr (rows == 4) {
        *reinterpret_cast<float4*>(to) =
            make_float4(scores[0][j], scores[1][j], scores[2][j], scores[3][j]);
      } else {
#pragma unroll
        for (int r = 0; r < rows; r++) to[r] = scores[r][j];
      }
    }
  }
};

}  // namespace coldstream
