// The gated DeltaNet of short chains and of draft trees in one launch. A block advances 32 columns of one
// head's state; the blocks of a group of 256 output columns then finish it together.
#include "gated_delta_net/gather.cuh"
#include "gated_delta_net/row_steps.cuh"

using namespace coldstream;

// Sequences overtake each other where a multiprocessor holds several blocks.
constexpr int blocks_per_multiprocessor = 3;

// Zeros for a row of no sequence, by the first block of each group.
template <int D>
__device__ __forceinline__ void clear_row(const DeltaLayer& layer, int row, const DeltaOutputs& out) {
  wait_for_previous_grid();
  release_next_grid();
  const int group = blockIdx.x / group_blocks;
  if (blockIdx.x % group_blocks == 0 && threadIdx.x < warp_size) clear_group<D>(layer, row, group, out);
}

// A row's gates of one head, kept for a commit of its draft tree.
__device__ __forceinline__ void keep_gates(const DeltaRows& rows, int row, int num_heads, int head) {
  const int64_t to = int64_t(rows.kept[row]) * num_heads + head;
  rows.kept_alpha[to] = rows.alpha[int64_t(row) * rows.alpha_stride + head];
  rows.kept_beta[to] = rows.beta[int64_t(row) * rows.beta_stride + head];
}

// grid (groups · 8, rows), 128 threads: of chains the blocks of the first row, of trees those of the leaves
// do something. `raw` and `arrivals` are workspace. has_trees: whether there may be trees. Without
// computes_chains, rows of chains and of no sequence are left alone. Reads what rows are before it waits:
// nothing in flight may write that.
template <int D, int num_taps, bool has_trees>
__global__ void __launch_bounds__(delta_threads, blocks_per_multiprocessor) GATHER_CLUSTER
    delta_decode(DeltaLayer layer, DeltaRows rows, DeltaStates states, DeltaOutputs out, float* raw,
                 Arrivals arrivals, int computes_chains) {
  __shared__ Vectors<D> vectors;
  __shared__ bool stores_key_head;
  __shared__ int path[has_trees ? max_tree_rows : 1];
  constexpr int blocks_per_head = D / block_columns;
  const int size = layer.num_value_heads * D, num_channels = 2 * layer.num_key_heads * D + size;
  const int head = blockIdx.x / blocks_per_head, first = blockIdx.y, state_id = rows.state_ids[first];
  const bool is_of_tree = has_trees && rows.is_of_tree(first);
  if (!is_of_tree && has_trees && !computes_chains) return;
  if (state_id < 0) return clear_row<D>(layer, first, out);
  Route route{first, 0, 0, nullptr};
  if (is_of_tree)
    route = route_to_leaf(rows, first, path);
  else
    route.count = count_rows(rows, first);
  if (route.count == 0 || head >= layer.num_value_heads) return;
  const int column = int(blockIdx.x) % blocks_per_head * block_columns;
  const OwnColumns<D> own{head, layer.key_head_ids[head], column, state_id};
  float* block_state = states.state + own.state_offset(layer);
  prefetch_state<D>(block_state);
  Channels<D, num_taps> channels;
  channels.load_taps(own, layer);
  const float a = layer.a[head], dt_bias = layer.dt_bias[head];
  const uint32_t num_readers = count_readers(layer, own.key_head, layer.num_value_heads) * blocks_per_head;
  const bool is_first_reader = is_of_tree && own.column == 0 && count_readers(layer, own.key_head, head) == 0;
  Gather<D> gather(layer, raw, arrivals.finished, first, head * D + own.column);

  wait_for_previous_grid();
  release_next_grid();
  float state[chain_keys<D>];
  uint32_t ticket = 0;
  auto bring = [&](int i) {
    const int row = route.row(i);
    channels.load_inputs(rows, row);
    if (!has_trees || !is_of_tree || i < route.first_owned) return;
    channels.keep_inputs(rows.kept_qkv + int64_t(rows.kept[row]) * num_channels, is_first_reader);
    if (column == 0 && threadIdx.x == 0) keep_gates(rows, row, layer.num_value_heads, head);
  };
  auto advance = [&](int i) {
    const int row = route.row(i);
    const float2 gates = open_gates(rows.alpha[int64_t(row) * rows.alpha_stride + head],
                                    rows.beta[int64_t(row) * rows.beta_stride + head], a, dt_bias);
    mix_row<D, num_taps>(channels, layer.eps, vectors);
    // The history has been used; its place may be written by the last block that comes here.
    if (i == 0 && threadIdx.x == 0 && !is_of_tree) {
      ticket = atomicInc(arrivals.readers + first * layer.num_key_heads + own.key_head, num_readers - 1);
    }
    if (i + 1 < route.count) bring(i + 1);
    return step<D>(state, vectors, gates);
  };
  bring(0);
  channels.load(states, state_id, num_channels);
  load_state<D>(block_state, state);
  if (has_trees) {
    for (int i = 0; i < route.first_owned; i++) advance(i);
  }
  for (int part = route.first_owned; part < route.count; part += gather.gathered_rows()) {
    const int end = min(route.count, part + gather.gathered_rows());
    if (part > route.first_owned) gather.begin_again();
    gather.begin(layer, rows, route, part, end);
    for (int i = part; i < end; i++) gather.put(route, part, i, advance(i));
    gather.announce();
    if (end == route.count && !is_of_tree) store_state<D>(block_state, state);
    gather.finish(layer, rows, route, part, end, out);
  }
  if (is_of_tree) return;
  if (threadIdx.x == 0) stores_key_head = ticket == num_readers - 1;
  __syncthreads();
  channels.store(states, state_id, num_channels, stores_key_head);
}
