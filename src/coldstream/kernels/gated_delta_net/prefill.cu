// The gated DeltaNet of long chains in three launches: convolution, norms and gates of all tokens at once;
// the recurrence, a block for 32 columns of one head of one sequence; the norm and gate of all outputs at
// once. Rows of draft trees are left to decode.cu. Where the rows of a sequence change from one state to the
// next, the recurrence leaves the state in the first one's slot and goes on with the same registers.
#include "gated_delta_net/delta_rule.cuh"
#include "gated_delta_net/layer.cuh"
#include "gated_delta_net/walk.cuh"

using namespace coldstream;

constexpr int tile_rows = 16;    // of the first launch
constexpr int output_warps = 8;  // of the last launch

// Between the launches.
struct DeltaWorkspace {
  // [rows, 2 · NK, D]: query and key heads, normalised, each by chains: i at i % 4 · D / 4 + i / 4
  float* keys;
  float* values;  // [rows, NV, D]
  float2* gates;  // [rows, NV]: decay and write strength
  float* raw;     // [rows, NV · D]: outputs before the norm
  int2* spans;    // [num_spans]: a segment's first row and the one behind its last; all zero between calls
  int num_spans;
};

// Rows first … end − 1: gates of all heads, and where sequences begin and end.
__device__ __forceinline__ void prepare_gates(const DeltaLayer& layer, const DeltaRows& rows,
                                              DeltaWorkspace work, int first, int end) {
  for (int i = threadIdx.x; i < (end - first) * layer.num_value_heads; i += blockDim.x) {
    const int64_t row = first + i / layer.num_value_heads;
    const int head = i % layer.num_value_heads;
    work.gates[row * layer.num_value_heads + head] =
        open_gates(rows.alpha[row * rows.alpha_stride + head], rows.beta[row * rows.beta_stride + head],
                   layer.a[head], layer.dt_bias[head]);
  }
  for (int row = first + threadIdx.x; row < end; row += blockDim.x) {
    if (rows.state_ids[row] < 0 || rows.is_of_tree(row)) continue;
    int2* span = work.spans + rows.segments[row];
    if (rows.is_first(row)) span->x = row;
    if (rows.is_last(row)) span->y = row + 1;
  }
}

// The convolution of one channel over a tile, into x.
template <int num_taps>
__device__ __forceinline__ void convolve_tile(const DeltaRows& rows, const DeltaStates& states, int first,
                                              int end, int channel, int num_channels,
                                              const float (&taps)[num_taps], float (&x)[tile_rows]) {
  float history[num_taps - 1];
#pragma unroll
  for (int t = 0; t < tile_rows; t++) {
    if (first + t < end) x[t] = rows.qkv[int64_t(first + t) * rows.qkv_stride + channel];
  }
  load_history<num_taps>(rows, states, first, channel, num_channels, history);
  const bool is_one_sequence = rows.segments[first] == rows.segments[end - 1];
#pragma unroll
  for (int t = 0; t < tile_rows; t++) {
    const int row = first + t;
    if (row >= end) break;
    if (t > 0 && !is_one_sequence && rows.is_first(row)) {
      load_history<num_taps>(rows, states, row, channel, num_channels, history);
    }
    x[t] = convolve<num_taps>(taps, history, x[t]);
  }
}

// Normalises a tile of one query or key head; the thread has number threadIdx.x of D.
template <int D>
__device__ __forceinline__ void norm_tile(const float (&x)[tile_rows], float eps, float factor, int num_rows,
                                          float* out, int64_t row_stride) {
  __shared__ float tile[tile_rows][D];
  __shared__ float scales[tile_rows];
#pragma unroll
  for (int t = 0; t < tile_rows; t++) tile[t][threadIdx.x] = t < num_rows ? x[t] : 0.0f;
  __syncthreads();
  for (int t = threadIdx.x / 16; t < tile_rows; t += D / 16) {
    const float sum = head_sum_of_squares<D>(tile[t]);
    if (threadIdx.x % 16 == 0) scales[t] = inverse_sqrt(sum + eps);
  }
  __syncthreads();
  const int place = threadIdx.x % num_chains * chain_keys<D> + threadIdx.x / num_chains;
#pragma unroll
  for (int t = 0; t < tile_rows; t++) {
    if (t < num_rows) out[t * row_stride + place] = x[t] * scales[t] * factor;
  }
}

// grid (row tiles, 2 · NK + NV + 1), D threads: a head of channels a block, and the gates.
template <int D, int num_taps>
__global__ void __launch_bounds__(D)
    delta_prepare(DeltaLayer layer, DeltaRows rows, DeltaStates states, DeltaWorkspace work) {
  const int num_key_heads = layer.num_key_heads, num_value_heads = layer.num_value_heads;
  const int num_heads = 2 * num_key_heads + num_value_heads, head = blockIdx.y;
  const int channel = head * D + threadIdx.x;
  float taps[num_taps];
  if (head < num_heads) {
#pragma unroll
    for (int i = 0; i < num_taps; i++) taps[i] = layer.conv_taps[int64_t(channel) * num_taps + i];
  }
  const int first = blockIdx.x * tile_rows, end = min(first + tile_rows, rows.num_rows);
  release_next_grid();
  wait_for_previous_grid();
  if (head == num_heads) return prepare_gates(layer, rows, work, first, end);
  float x[tile_rows];
  convolve_tile<num_taps>(rows, states, first, end, channel, num_heads * D, taps, x);
  if (head < 2 * num_key_heads) {
    const float factor = head < num_key_heads ? inverse_sqrt(float(D)) : 1.0f;
    const int64_t stride = 2 * num_key_heads * D;
    norm_tile<D>(x, layer.eps, factor, end - first, work.keys + first * stride + head * D, stride);
    return;
  }
  float* out = work.values + (int64_t(first) * num_value_heads + head - 2 * num_key_heads) * D + threadIdx.x;
#pragma unroll
  for (int t = 0; t < tile_rows; t++) {
    if (first + t < end) out[int64_t(t) * num_value_heads * D] = x[t];
  }
}

// The row behind those from `first` on that have its state, of the rows up to `end`; the same number in all
// lanes of a warp. A lane reads several at a time, as each takes long to come.
__device__ __forceinline__ int state_end(const DeltaRows& rows, int first, int end) {
  constexpr int rows_each = 16;
  const int lane = threadIdx.x % warp_size, state_id = rows.state_ids[first];
  int found = end;
#pragma unroll 1
  for (int from = first + 1; from < end && found == end; from += rows_each * warp_size) {
#pragma unroll
    for (int i = rows_each - 1; i >= 0; i--) {
      const int row = min(from + i * warp_size + lane, end - 1);
      if (rows.state_ids[row] != state_id) found = row;
    }
#pragma unroll
    for (int apart = warp_size / 2; apart > 0; apart /= 2) {
      found = min(found, __shfl_xor_sync(all_lanes, found, apart));
    }
    found = __shfl_sync(all_lanes, found, 0);  // which tells the compiler that all lanes have the same
  }
  return found;
}

// The block's share of the last taps − 1 raw inputs of the rows of `span`, which begins with its sequence: of
// its value head, and of the query and key head of the same number. Those before the span are in the slot
// that it writes.
__device__ __forceinline__ void keep_inputs(const DeltaLayer& layer, const DeltaRows& rows,
                                            const DeltaStates& states, int state_id, int2 span, int head_size,
                                            int head, int column, int num_taps) {
  const int kind = threadIdx.x / warp_size;  // value, query, key, none
  if (kind > 2 || (kind > 0 && head >= layer.num_key_heads)) return;
  const int num_channels = (2 * layer.num_key_heads + layer.num_value_heads) * head_size;
  const int first_head = kind == 0 ? 2 * layer.num_key_heads : (kind - 1) * layer.num_key_heads;
  const int channel = (first_head + head) * head_size + column + threadIdx.x % warp_size;
  float* kept = states.conv_state + int64_t(state_id) * (num_taps - 1) * num_channels + channel;
  const int num_rows = span.y - span.x;
  for (int i = 0; i < num_taps - 1; i++) {
    const int back = num_taps - 1 - i;  // rows back from the end
    kept[i * num_channels] = back <= num_rows ? rows.qkv[int64_t(span.y - back) * rows.qkv_stride + channel]
                                              : kept[(i + num_rows) * num_channels];
  }
}

// grid (NV · D / 32, num_spans), 160 threads. Spans beyond the step's segments cost time, though their blocks
// do nothing: a launch of more blocks than run at once puts two that walk on one multiprocessor while others
// idle.
template <int D>
__global__ void __launch_bounds__(walk_threads, 1)
    delta_recurrence(DeltaLayer layer, DeltaRows rows, DeltaStates states, DeltaWorkspace work,
                     int num_taps) {
  __shared__ Tokens<D> tokens;
  constexpr int blocks_per_head = D / block_columns;
  const int head = blockIdx.x / blocks_per_head, column = blockIdx.x % blocks_per_head * block_columns;
  const int key_head = layer.key_head_ids[head], size = layer.num_value_heads * D;
  release_next_grid();
  wait_for_previous_grid();
  const int2 span = work.spans[blockIdx.y];
  if (span.y == 0) return;
  const int64_t key_stride = 2 * layer.num_key_heads * D;
  const float* q = work.keys + span.x * key_stride + key_head * D;
  const Sources from{q,
                     q + layer.num_key_heads * D,
                     work.values + int64_t(span.x) * size + head * D + column,
                     work.gates + int64_t(span.x) * layer.num_value_heads + head,
                     key_stride,
                     size,
                     layer.num_value_heads};
  if (own_warp() == delta_threads / warp_size) {
    int row = span.x;
    while (true) {
      const int end = state_end(rows, row, span.y);
      feed_tokens<D>(tokens, from.behind(row - span.x), end - row);
      if (end == span.y) return;
      meet_all_warps();  // the walking warps have read the last token: the ring is free
      row = end;
    }
  }
  const auto block_state = [&](int row) {
    return states.state + (int64_t(rows.state_ids[row]) * layer.num_value_heads + head) * D * D + column;
  };
  Walk<D> walk;
  load_state<D>(block_state(span.x), walk.state);
  const uint32_t chain = shared_address(tokens.ring[0].q + own_chain() * chain_floats<D>);
  const int to_value = shared_address(tokens.ring[0].v + own_column()) - chain;
  int row = span.x;
  // The compiler has to know that `end`, by which loops end, is the same in all lanes. Otherwise it has the
  // walk twice, the second time with shuffles for lanes that come apart.
  while (true) {
    const int end = state_end(rows, row, span.y);
    keep_inputs(layer, rows, states, rows.state_ids[row], {span.x, end}, D, head, column, num_taps);
    float* out = work.raw + int64_t(row) * size + head * D + column + own_column();
    walk_tokens<D>(walk, tokens, {fixed(chain), int(fixed(to_value))}, end - row, out, fixed(size));
    store_state<D>(block_state(row), walk.state);
    if (end == span.y) return;
    meet_all_warps();
    row = end;
  }
}

// grid (rows · groups / 8), 256 threads: a group of 256 output columns a warp.
template <int D>
__global__ void __launch_bounds__((output_warps * warp_size))
    delta_output(DeltaLayer layer, DeltaRows rows, DeltaStates states, DeltaOutputs out,
                 DeltaWorkspace work) {
  alignas(16) __shared__ float scratch[output_warps][group_elements];
  release_next_grid();
  wait_for_previous_grid();
  if (blockIdx.x == 0) {
    for (int i = threadIdx.x; i < work.num_spans; i += blockDim.x) work.spans[i] = {0, 0};
  }
  const int num_groups = out.padded / group_elements, warp = threadIdx.x / warp_size;
  const int64_t item = int64_t(blockIdx.x) * output_warps + warp;
  const int row = item / num_groups, group = item % num_groups;
  if (row >= rows.num_rows || rows.is_of_tree(row)) return;
  if (rows.state_ids[row] < 0) return clear_group<D>(layer, row, group, out);
  OutputFactors factors = load_factors<D>(layer, rows.z + int64_t(row) * rows.z_stride, group);
  open_factors(factors, layer);
  fetch_group(work.raw + int64_t(row) * layer.num_value_heads * D, group, layer.num_value_heads * D,
              scratch[warp]);
  finish_group<D>(scratch[warp], factors, layer, row, group, out);
}
