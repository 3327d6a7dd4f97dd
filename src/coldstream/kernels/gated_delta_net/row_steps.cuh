// One token at a time for a block of 32 columns of a head's state: convolution, norms, gates and the delta
// rule, with the convolution's history and the state in registers.
#pragma once

#include "gated_delta_net/delta_rule.cuh"
#include "gated_delta_net/layer.cuh"

namespace coldstream {

// What one block works on.
template <int D>
struct OwnColumns {
  int head, key_head, column;  // the first of its columns within the head
  int state_id;

  __device__ int64_t state_offset(const DeltaLayer& layer) const {
    return (int64_t(state_id) * layer.num_value_heads + head) * D * D + column;
  }
};

// Channels that a block convolves: its query head, its key head, its own value columns. Thread t has number
// t, t + 128, … of them.
template <int D>
constexpr int block_channels = 2 * D + block_columns;

template <int D>
constexpr int thread_channels = (block_channels<D> + delta_threads - 1) / delta_threads;

template <int D>
__device__ __forceinline__ int channel_of(const OwnColumns<D>& own, const DeltaLayer& layer, int number) {
  if (number < D) return own.key_head * D + number;
  if (number < 2 * D) return (layer.num_key_heads + own.key_head) * D + number - D;
  return (2 * layer.num_key_heads + own.head) * D + own.column + number - 2 * D;
}

// The thread's channels: taps, and the inputs before the current row.
template <int D, int num_taps>
struct Channels {
  static constexpr int count = thread_channels<D>;
  int channel[count];
  float taps[count][num_taps];
  float history[count][num_taps - 1];
  float input[count];  // of the next row

  __device__ static bool exists(int j) { return threadIdx.x + j * delta_threads < block_channels<D>; }

  // What the previous kernels do not write.
  __device__ void load_taps(const OwnColumns<D>& own, const DeltaLayer& layer) {
#pragma unroll
    for (int j = 0; j < count; j++) {
      if (!exists(j)) continue;
      channel[j] = channel_of<D>(own, layer, threadIdx.x + j * delta_threads);
#pragma unroll
      for (int i = 0; i < num_taps; i++) taps[j][i] = layer.conv_taps[int64_t(channel[j]) * num_taps + i];
    }
  }

  __device__ float* kept(const DeltaStates& states, int state_id, int num_channels, int j) const {
    return states.conv_state + int64_t(state_id) * (num_taps - 1) * num_channels + channel[j];
  }

  __device__ void load(const DeltaStates& states, int state_id, int num_channels) {
#pragma unroll
    for (int j = 0; j < count; j++) {
      if (!exists(j)) continue;
#pragma unroll
      for (int i = 0; i < num_taps - 1; i++)
        history[j][i] = kept(states, state_id, num_channels, j)[i * num_channels];
    }
  }

  __device__ void load_inputs(const DeltaRows& rows, int row) {
#pragma unroll
    for (int j = 0; j < count; j++) {
      if (exists(j)) input[j] = rows.qkv[int64_t(row) * rows.qkv_stride + channel[j]];
    }
  }

  // Keeps the inputs of a row of a draft tree.
  __device__ void keep_inputs(float* kept_row, bool stores_key_head) const {
#pragma unroll
    for (int j = 0; j < count; j++) {
      const bool is_value = threadIdx.x + j * delta_threads >= 2 * D;
      if (exists(j) && (is_value || stores_key_head)) kept_row[channel[j]] = input[j];
    }
  }

  // Value channels belong to this block alone; those of the key head to the block that stores them.
  __device__ void store(const DeltaStates& states, int state_id, int num_channels,
                        bool stores_key_head) const {
#pragma unroll
    for (int j = 0; j < count; j++) {
      const bool is_value = threadIdx.x + j * delta_threads >= 2 * D;
      if (!exists(j) || !(is_value || stores_key_head)) continue;
#pragma unroll
      for (int i = 0; i < num_taps - 1; i++)
        kept(states, state_id, num_channels, j)[i * num_channels] = history[j][i];
    }
  }
};

// One row's vectors in shared memory.
template <int D>
struct Vectors {
  alignas(16) float q[vector_floats<D>];
  alignas(16) float k[vector_floats<D>];
  float v[block_columns];
  float raw[2 * D];  // query and key before their norm
};

struct MeetBlock {
  __device__ __forceinline__ void operator()() const { __syncthreads(); }
};

// Convolves and normalises the row whose inputs have been loaded into `vectors`. Two barriers of the threads;
// at the first one all have used their history.
template <int D, int num_taps, typename Meet = MeetBlock>
__device__ __forceinline__ void mix_row(Channels<D, num_taps>& channels, float eps, Vectors<D>& vectors,
                                        const Meet& meet = {}) {
  float mixed[thread_channels<D>];
#pragma unroll
  for (int j = 0; j < thread_channels<D>; j++) {
    if (!channels.exists(j)) continue;
    mixed[j] = convolve<num_taps>(channels.taps[j], channels.history[j], channels.input[j]);
    const int number = threadIdx.x + j * delta_threads;
    if (number < 2 * D) vectors.raw[number] = mixed[j];
  }
  meet();
  // Query in the lower half of every warp, key in the upper.
  const float sum = head_sum_of_squares<D>(vectors.raw + threadIdx.x % warp_size / 16 * D);
  const float scale = inverse_sqrt(sum + eps);
  const float q_scale = __shfl_sync(all_lanes, scale, 0), k_scale = __shfl_sync(all_lanes, scale, 16);
#pragma unroll
  for (int j = 0; j < thread_channels<D>; j++) {
    const int number = threadIdx.x + j * delta_threads;
    const int place = number % num_chains * chain_floats<D> + number % D / num_chains;
    if (number < D) {
      vectors.q[place] = mixed[j] * q_scale * inverse_sqrt(float(D));
    } else if (number < 2 * D) {
      vectors.k[place] = mixed[j] * k_scale;
    } else if (channels.exists(j)) {
      vectors.v[number - 2 * D] = mixed[j];
    }
  }
  meet();
}

// One token: advances the state and returns the output of the thread's column.
template <int D>
__device__ __forceinline__ float step(float (&state)[chain_keys<D>], const Vectors<D>& vectors,
                                      float2 gates) {
  const float predicted = sum_of_chains(predict<D>(state, vectors.k, gates.x));
  const float change = gates.y * (vectors.v[own_column()] - predicted);
  return sum_of_chains(update<D>(state, vectors.k, vectors.q, change));
}

// Value heads before `end` that read key head `key_head`, for a whole warp.
__device__ __forceinline__ int count_readers(const DeltaLayer& layer, int key_head, int end) {
  int heads = 0;
  for (int first = 0; first < end; first += warp_size) {
    const int head = first + threadIdx.x % warp_size;
    heads += __popc(__ballot_sync(all_lanes, head < end && layer.key_head_ids[head] == key_head));
  }
  return heads;
}

// Brings the block's part of the state near before it may be read: whatever else is done to it, the L2 cache
// has the latest.
template <int D>
__device__ __forceinline__ void prefetch_state(const float* block_state) {
  if (threadIdx.x < D) bring_near(block_state + threadIdx.x * D);
}

}  // namespace coldstream
