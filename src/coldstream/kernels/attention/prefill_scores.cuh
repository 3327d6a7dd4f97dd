// Prefill, half of a block's threads: scores of the rows as a product of tiles with the head's dimensions
// outermost, and the weights that they give the values.
#pragma once

#include "attention/prefill_weights.cuh"

namespace coldstream {

template <class shape>
struct prefill_scorer {
  using stage_type = typename shape::stage_type;
  // A thread takes neighbouring rows and the positions `position_lane` + 8 j.
  static constexpr int score_rows = shape::num_rows * position_lanes / role_threads;
  using weigher_type = weigher<shape::num_rows, score_rows>;
  static constexpr int ahead = 2;  // dimensions whose operands are on their way

  const prefill_arguments& a;
  typename shape::shared_memory& shared;
  const int thread, row_lane, position_lane;

  __device__ __forceinline__ prefill_scorer(const prefill_arguments& arguments,
                                            typename shape::shared_memory& memory)
      : a(arguments),
        shared(memory),
        thread(thread_of_role<role_threads>()),
        row_lane(row_lane_of(thread)),
        position_lane(position_lane_of(thread)) {}

  struct score_operands {
    float q[score_rows], k[weigher_type::positions];

    __device__ __forceinline__ void load(const float* query, const float* key) {
#pragma unroll
      for (int r = 0; r < score_rows; r += 4) {
        if constexpr (score_rows % 4 == 0) {
          *reinterpret_cast<float4*>(q + r) = *reinterpret_cast<const float4*>(query + r);
        } else {
#pragma unroll
          for (int i = 0; i < score_rows; i++) q[i] = query[i];
        }
      }
      *reinterpret_cast<float4*>(k) = *reinterpret_cast<const float4*>(key);
      *reinterpret_cast<float4*>(k + 4) = *reinterpret_cast<const float4*>(key + block_positions / 2);
    }
  };

  // Adds part `part` of the head's dimensions to the scores of rows score_rows · row_lane + r and positions
  // position_lane + 8 j. What the next dimension takes is on its way while one is computed.
  __device__ __forceinline__ void score(float (&scores)[score_rows][weigher_type::positions],
                                        const float* keys, int part) const {
    constexpr int key_dims = stage_type::key_dims, num_rows = shape::num_rows;
    const int first = part * (key_dims / 8);
    const int num_eights = min(key_dims, shape::head_dim - part * key_dims) / 8;
    const float* q = shared.queries + first * shape::query_floats + row_lane * score_rows;
    const float* k = keys + 4 * position_lane;
    score_operands operands[2 * ahead];
#pragma unroll
    for (int i = 0; i < ahead; i++) operands[i].load(q + i * num_rows, k + i * block_positions);
#pragma unroll 1
    for (int eight = 0; eight < num_eights;
         eight++, q += shape::query_floats, k += stage_type::eight_floats) {
#pragma unroll
      for (int i = 0; i < 8; i++) {
        const int dim = i + ahead;
        operands[dim % (2 * ahead)].load(q + dim / 8 * shape::query_floats + dim % 8 * num_rows,
                                         k + dim / 8 * stage_type::eight_floats + dim % 8 * block_positions);
        const score_operands& now = operands[i % (2 * ahead)];
#pragma unroll
        for (int r = 0; r < score_rows; r++) {
#pragma unroll
          for (int j = 0; j < weigher_type::positions; j++) {
            scores[r][j] = __fmaf_rn(now.q[r], now.k[j], scores[r][j]);
          }
        }
      }
    }
  }

  __device__ __forceinline__ void run(const prefill_span& span) {
    const int64_t stride = a.places.position_bytes;
    weigher_type weigh;
    weigh.begin(thread, shared.lasts);
    int begin = span.first_block(), current = 0;
    {
      stage_type next;
      next.fetch_keys(span.keys + begin * stride, stride, 0, span.first - begin, span.end - begin);
      next.store_keys(shared.keys[0]);
    }
    wait_at(barrier_of_scores, role_threads);
#pragma unroll 1
    for (int block = 0; begin < span.end; block++, begin += block_positions) {
      float scores[score_rows][weigher_type::positions];
#pragma unroll
      for (int r = 0; r < score_rows; r++) {
#pragma unroll
        for (int j = 0; j < weigher_type::positions; j++) scores[r][j] = 0.0f;
      }
#pragma unroll 1
      for (int part = 0; part < stage_type::key_parts; part++, current ^= 1) {
        const bool is_last = part + 1 == stage_type::key_parts;
        const int from = is_last ? begin + block_positions : begin;
        stage_type next;
        next.fetch_keys(span.keys + from * stride, stride, is_last ? 0 : part + 1, span.first - from,
                        span.end - from);
        score(scores, shared.keys[current], part);
        next.store_keys(shared.keys[current ^ 1]);
        wait_at(barrier_of_scores, role_threads);
      }
      auto& to = shared.weights[block % 2];
      const int chunk = begin / chunk_positions * chunk_positions;
      if (block >= 2) wait_at(barrier_empty + block % 2, 2 * role_threads);
      weigh(scores, begin, chunk, a.window, shared.lasts, to);
      if (span.ends_chunk(begin)) weigh.merge(chunk, a.window, to);
      arrive_at(barrier_full + block % 2, 2 * role_threads);
    }
  }
};

}  // namespace coldstream
