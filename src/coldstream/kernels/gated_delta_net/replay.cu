// States brought to what a path of a draft tree has made of them, from its rows' kept inputs.
#include "gated_delta_net/row_steps.cuh"

using namespace coldstream;

// `CommittedPath` of kernels/ops.py, as far as it is needed here.
struct DeltaPath {
  const int32_t *state_id, *count;  // of one number
  const int32_t* kept;              // [count]
};

// What rows of trees have kept.
struct DeltaKept {
  const float *qkv, *alpha, *beta;  // [kept rows, channels], [kept rows, NV] twice
};

struct ReplayedLayer {
  DeltaLayer layer;
  DeltaKept kept;
  DeltaStates states;
};

constexpr int most_layers = 32;

// As many as the parameters of a launch hold. They do not depend on each other.
struct ReplayedLayers {
  ReplayedLayer at[most_layers];
};

// grid (NV · D / 32, layers), 128 threads: as `delta_decode`, without outputs. `readers` [layers, NK] is zero
// between launches.
template <int D, int num_taps>
__global__ void __launch_bounds__(delta_threads)
    delta_replay(const __grid_constant__ ReplayedLayers layers, const __grid_constant__ DeltaPath path,
                 uint32_t* readers) {
  const DeltaLayer& layer = layers.at[blockIdx.y].layer;
  const DeltaKept& kept = layers.at[blockIdx.y].kept;
  const DeltaStates& states = layers.at[blockIdx.y].states;
  readers += int64_t(blockIdx.y) * layer.num_key_heads;
  __shared__ Vectors<D> vectors;
  __shared__ bool stores_key_head;
  constexpr int blocks_per_head = D / block_columns;
  const int size = layer.num_value_heads * D, num_channels = 2 * layer.num_key_heads * D + size;
  const int head = blockIdx.x / blocks_per_head;
  wait_for_previous_grid();
  release_next_grid();
  const int count = *path.count, state_id = *path.state_id;
  if (count == 0 || state_id < 0) return;
  const int column = int(blockIdx.x) % blocks_per_head * block_columns;
  const OwnColumns<D> own{head, layer.key_head_ids[head], column, state_id};
  float* block_state = states.state + own.state_offset(layer);
  const DeltaRows rows{kept.qkv,
                       nullptr,
                       kept.alpha,
                       kept.beta,
                       num_channels,
                       0,
                       layer.num_value_heads,
                       layer.num_value_heads};
  const uint32_t num_readers = count_readers(layer, own.key_head, layer.num_value_heads) * blocks_per_head;
  const float a = layer.a[head], dt_bias = layer.dt_bias[head];
  Channels<D, num_taps> channels;
  channels.load_taps(own, layer);
  channels.load(states, state_id, num_channels);
  channels.load_inputs(rows, path.kept[0]);
  float state[chain_keys<D>];
  load_state<D>(block_state, state);
  for (int i = 0; i < count; i++) {
    const int64_t at = int64_t(path.kept[i]) * layer.num_value_heads + head;
    const float2 gates = open_gates(kept.alpha[at], kept.beta[at], a, dt_bias);
    mix_row<D, num_taps>(channels, layer.eps, vectors);
    // The history has been used; its place may be written by the last block that comes here.
    if (i == 0 && threadIdx.x == 0)
      stores_key_head = atomicInc(readers + own.key_head, num_readers - 1) == num_readers - 1;
    if (i + 1 < count) channels.load_inputs(rows, path.kept[i + 1]);
    step<D>(state, vectors, gates);
  }
  store_state<D>(block_state, state);
  __syncthreads();
  channels.store(states, state_id, num_channels, stores_key_head);
}
