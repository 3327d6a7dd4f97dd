// Prefill, the other half of a block's threads: the numerators as a product of tiles with the positions
// outermost, the merge of chunks, and the results.
#pragma once

#include "attention/prefill_block.cuh"

namespace coldstream {

template <class shape>
struct prefill_mixer {
  using stage_type = typename shape::stage_type;
  using weights_type = block_weights<shape::num_rows>;
  // A thread takes `mix_rows` neighbouring rows and two quads of columns, half a head apart.
  static constexpr int column_lanes = shape::head_quads / 2;
  static constexpr int mix_lanes =
      smaller(power_of_two_up_to(role_threads / column_lanes), shape::num_rows / 4);
  static constexpr int mix_rows = shape::num_rows / mix_lanes;
  static constexpr int together = 4;  // places

  const prefill_arguments& a;
  typename shape::shared_memory& shared;
  const int thread, mix_lane, column_lane;
  float numerators[mix_rows][8];
  int least_last, greatest_last;  // of the rows of `numerators`

  __device__ __forceinline__ prefill_mixer(const prefill_arguments& arguments,
                                           typename shape::shared_memory& memory)
      : a(arguments),
        shared(memory),
        thread(thread_of_role<role_threads>()),
        mix_lane(thread / column_lanes),
        column_lane(thread % column_lanes) {
    least_last = 0x7fffffff, greatest_last = -1;
    for (int i = 0; i < mix_rows && mix_lane < mix_lanes; i++) {
      const int last = shared.lasts[mix_lane * mix_rows + i];
      if (last >= 0) least_last = min(least_last, last), greatest_last = max(greatest_last, last);
    }
  }

  // Weights and values of a place, a row of `values`.
  struct mix_operands {
    float e[mix_rows], v[8];
  };
  __device__ __forceinline__ void load_place(const float* values, const weights_type& weights, int place,
                                             mix_operands& to) const {
    const float4* value_quads = reinterpret_cast<const float4*>(values) + column_lane;
    *reinterpret_cast<float4*>(to.v) = value_quads[0];
    *reinterpret_cast<float4*>(to.v + 4) = value_quads[column_lanes];
    const float* from = weights.weights + place * weights_type::place_floats + mix_lane * mix_rows;
#pragma unroll
    for (int i = 0; i < mix_rows; i += 4) {
      *reinterpret_cast<float4*>(to.e + i) = *reinterpret_cast<const float4*>(from + i);
    }
  }

  // Places first … end − 1 for the rows that see them.
  __device__ __forceinline__ void mix_some(const float* values, const weights_type& weights, int begin,
                                           int first, int end) {
#pragma unroll 1
    for (int place = first; place < end; place++) {
      mix_operands now;
      load_place(values + place * shape::head_dim, weights, place, now);
#pragma unroll
      for (int r = 0; r < mix_rows; r++) {
        const int last = shared.lasts[mix_lane * mix_rows + r], position = begin + place;
        const bool seen = position <= last && position >= first_position(last, a.window);
#pragma unroll
        for (int c = 0; c < 8; c++) {
          const float sum = __fmaf_rn(now.e[r], now.v[c], numerators[r][c]);
          numerators[r][c] = seen ? sum : numerators[r][c];
        }
      }
    }
  }

  // Places that all rows see, a multiple of `together`. The next one's operands come while one is computed.
  __device__ __forceinline__ void mix_all(const float* values, const weights_type& weights, int first,
                                          int end) {
    if (first >= end) return;
    mix_operands operands[2];
    load_place(values + first * shape::head_dim, weights, first, operands[0]);
#pragma unroll 1
    for (int place = first; place < end; place += together) {
#pragma unroll
      for (int i = 0; i < together; i++) {
        const mix_operands& now = operands[i % 2];
        load_place(values + (place + i + 1) * shape::head_dim, weights, place + i + 1, operands[(i + 1) % 2]);
#pragma unroll
        for (int r = 0; r < mix_rows; r++) {
#pragma unroll
          for (int c = 0; c < 8; c++) numerators[r][c] = __fmaf_rn(now.e[r], now.v[c], numerators[r][c]);
        }
      }
    }
  }

  __device__ __forceinline__ void correct(const weights_type& weights) {
#pragma unroll
    for (int i = 0; i < mix_rows / 4; i++) {
      const float4 c = reinterpret_cast<const float4*>(weights.corrections)[mix_lane * (mix_rows / 4) + i];
      const float factors[4] = {c.x, c.y, c.z, c.w};
#pragma unroll
      for (int r = 0; r < 4; r++) {
#pragma unroll
        for (int k = 0; k < 8; k++) numerators[4 * i + r][k] *= factors[r];
      }
    }
  }

  // Part `part` of the block at `begin`.
  __device__ __forceinline__ void mix(const float* values, const weights_type& weights, int begin,
                                      int part) {
    if (greatest_last < begin || mix_lane >= mix_lanes) return;
    if (part == 0) correct(weights);
    const int part_begin = part * stage_type::value_positions;
    const int part_end = part_begin + stage_type::value_positions;
    values -= part_begin * shape::head_dim;
    // From `first` on some row sees a position, from `all_first` to `all_end` every row does.
    const int first = max(first_position(least_last, a.window) - begin, part_begin);
    const int end = min(greatest_last + 1 - begin, part_end);
    const int all_first = max(first_position(greatest_last, a.window) - begin, part_begin);
    const int num_all = max(min(least_last + 1 - begin, part_end) - all_first, 0);
    const int all_end = all_first + num_all / together * together;
    mix_some(values, weights, begin, first, min(all_first, end));
    mix_all(values, weights, all_first, all_end);
    mix_some(values, weights, begin, max(first, all_end), end);
  }

  __device__ __forceinline__ float4* out_of(int row) const {
    return reinterpret_cast<float4*>(a.out) + int64_t{shared.places[row]} * shape::head_quads + column_lane;
  }

  // Numerators of the chunk into `out`, merged with what is there.
  __device__ __forceinline__ void merge(const weights_type& weights, int chunk_begin) {
    constexpr int batch = 4;
#pragma unroll
    for (int from = 0; from < mix_rows; from += batch) {
      asm volatile("" ::: "memory");  // else all batches are read first, and do not fit
      float4 before[batch][2];
#pragma unroll
      for (int r = 0; r < batch; r++) {
        const int row = mix_lane * mix_rows + from + r;
        const int last = shared.lasts[row];
        const bool is_merged = first_position(last, a.window) < chunk_begin && last >= chunk_begin;
#pragma unroll
        for (int half = 0; half < 2; half++) {
          before[r][half] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
          if (is_merged) before[r][half] = out_of(row)[half * column_lanes];
        }
      }
#pragma unroll
      for (int r = 0; r < batch; r++) {
        const int row = mix_lane * mix_rows + from + r;
        const int last = shared.lasts[row], first = first_position(last, a.window);
        if (last < chunk_begin || first >= chunk_begin + chunk_positions) continue;
        const float ours = weights.ours[row], theirs = weights.theirs[row];
#pragma unroll
        for (int half = 0; half < 2; half++) {
          const float* n = numerators[from + r] + 4 * half;
          float4 x = make_float4(n[0], n[1], n[2], n[3]);
          if (first < chunk_begin) {
            x.x = __fmaf_rn(x.x, theirs, before[r][half].x * ours);
            x.y = __fmaf_rn(x.y, theirs, before[r][half].y * ours);
            x.z = __fmaf_rn(x.z, theirs, before[r][half].z * ours);
            x.w = __fmaf_rn(x.w, theirs, before[r][half].w * ours);
          }
          out_of(row)[half * column_lanes] = x;
        }
      }
    }
  }

  // Results of the rows whose last chunk this is, from what this thread has left in `out`.
  __device__ __forceinline__ void finish(const weights_type& weights, int chunk_begin) {
    constexpr int batch = 4;
#pragma unroll 1
    for (int from = mix_lane * mix_rows; from < (mix_lane + 1) * mix_rows; from += batch) {
      float4 sums[2 * batch], gates[2 * batch];
#pragma unroll
      for (int i = 0; i < 2 * batch; i++) {
        const int row = from + i / 2, half = i % 2 * column_lanes;
        const int64_t token = shared.places[row] / a.num_heads, head = shared.places[row] % a.num_heads;
        const float* gate = a.query_gate + token * a.query_gate_stride + (2 * head + 1) * shape::head_dim +
                            4 * (column_lane + half);
        sums[i] = out_of(row)[half];
        gates[i] = make_float4(gate[0], gate[1], gate[2], gate[3]);
      }
#pragma unroll
      for (int i = 0; i < 2 * batch; i++) {
        const int row = from + i / 2, last = shared.lasts[row];
        if (last < chunk_begin || last >= chunk_begin + chunk_positions) continue;
        const float inverse = weights.inverses[row];
        const float4 x = sums[i], gate = gates[i];
        if constexpr (shape::is_turned) {
          // finish.cu turns them back and gates them.
          out_of(row)[i % 2 * column_lanes] =
              make_float4(x.x * inverse, x.y * inverse, x.z * inverse, x.w * inverse);
        } else {
          out_of(row)[i % 2 * column_lanes] =
              make_float4(x.x * inverse * exact_sigmoid(gate.x), x.y * inverse * exact_sigmoid(gate.y),
                          x.z * inverse * exact_sigmoid(gate.z), x.w * inverse * exact_sigmoid(gate.w));
        }
      }
    }
  }

  __device__ __forceinline__ void clear() {
#pragma unroll
    for (int r = 0; r < mix_rows; r++) {
#pragma unroll
      for (int c = 0; c < 8; c++) numerators[r][c] = 0.0f;
    }
  }

  __device__ __forceinline__ void run(const prefill_span& span) {
    const int64_t stride = a.places.position_bytes;
    const int num_blocks = span.num_blocks();
    int begin = span.first_block(), current = 0;
    {
      stage_type next;
      next.fetch_values(span.values + begin * stride, stride, 0, span.first - begin, span.end - begin);
      next.store_values(shared.values[0]);
    }
    wait_at(barrier_of_values, role_threads);
    clear();
#pragma unroll 1
    for (int block = 0; block < num_blocks; block++, begin += block_positions) {
      const weights_type& weights = shared.weights[block % 2];
      wait_at(barrier_full + block % 2, 2 * role_threads);
#pragma unroll 1
      for (int part = 0; part < stage_type::value_parts; part++, current ^= 1) {
        const bool is_last = part + 1 == stage_type::value_parts;
        const int from = is_last ? begin + block_positions : begin;
        stage_type next;
        next.fetch_values(span.values + from * stride, stride, is_last ? 0 : part + 1, span.first - from,
                          span.end - from);
        mix(shared.values[current], weights, begin, part);
        next.store_values(shared.values[current ^ 1]);
        wait_at(barrier_of_values, role_threads);
      }
      if (span.ends_chunk(begin) && mix_lane < mix_lanes) {
        const int chunk = begin / chunk_positions * chunk_positions;
        merge(weights, chunk);
        if (least_last < chunk + chunk_positions) finish(weights, chunk);
        clear();
      }
      if (block + 2 < num_blocks) arrive_at(barrier_empty + block % 2, 2 * role_threads);
    }
  }
};

}  // namespace coldstream
