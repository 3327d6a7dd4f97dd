// The layers of a token, or of some tokens, in one launch: every block stays, and does what a list of its own
// says. Weights are random, all numbers are integers, and sums modulo 2^32 are exact, so that a step that
// does not wait for what it reads has another result; one_token_reference.py defines it. one_token_program.py
// makes the lists.
//
// A block has eight warps that compute (consumers), one that waits for other blocks' counters and brings
// inputs near (the poller), and one for each ring of stages, which copies pieces of weights ahead of their
// use (producers). No wait is without an end: once the launch's time is over, every wait fails, the block
// goes through the rest of its list without waiting, and the report says who waited first.
#include "persistent/streams.cuh"

extern __shared__ float4 dynamic_shared[];

namespace coldstream {

constexpr int max_sums = 128, head_size = 128;
constexpr int consumer_warps = 8, poller_warp = consumer_warps, token_warps = consumer_warps + 1 + max_rings;
constexpr int num_consumers = consumer_warps * warp_size;
constexpr int state_columns = 32;  // of a piece of a head's recurrent state
constexpr int stamp_words = 8;

// What a kernel is compiled for: parts, who waits for counters, and how inputs come near.
constexpr int has_waits = 1, has_copies = 2, has_products = 4;
enum Poll { poll_by_thread, poll_by_warp, poll_by_cluster };
enum Fetch { fetch_by_loads, fetch_by_copy };

enum Op { op_matrix, op_mixer, op_norm, op_combine };
enum Load { load_none, load_quantised, load_bytes, load_sums };
enum Epilogue { store_sums, add_residual, multiply_pairs, sum_ranks, store_joint_sums };
enum StateFrom { state_late, state_early, state_by_ring };

// One phase of a block. Counters are those of the layer, negative ones of the layer before; places are words
// of `activations`.
struct Step {
  int op;
  int wait;  // for this counter
  int target;
  int raise;
  int load;
  int source;
  int groups;  // of inputs, each quantised by itself
  int group_words;
  int epilogue;
  int out;
  int out_stride;  // between the outputs of two experts
  int residual;
  int ring;  // of its pieces
  int first_piece;
  int num_pieces;
  int first_row;  // of outputs that the whole block sums, or of a mixer the piece of the state
  int num_rows;
  int stream_out;    // of sums of experts that a reader makes: where the block's own rows go
  int needs_choice;  // the weights of the chosen experts
  int chooses;       // the counter that the last block raises here, when it has chosen the experts
  int num_raisers;   // of `raise`
};

// What a stage of a ring holds: some rows of a matrix, of one or more experts.
struct Piece {
  int wait;  // before its address is known
  int target;
  int offset;  // bytes from the layer's weights, or from its states
  int copies;
  int copy_bytes;
  int expert_bytes;  // from an expert to the next
  int rank;          // of the first expert among the chosen ones; -1 for none
  int rows;          // of each copy
  int row_bytes;
  int lanes;      // that share a row
  int lane_bits;  // log2 of those within a warp
  int per_pair;   // 2^16 over the pairs of rows of a copy, rounded up
  int first_row;  // of the matrix
  int slot;       // of the first expert's inputs and outputs
  int is_state;
  int only_near;  // asked into the second-level cache, for no stage
};

// Where a block's lists for a kind of layer begin, and how long they are.
struct BlockLists {
  int first_step;
  int num_steps;
  int first_piece[max_rings];
  int num_pieces[max_rings];
};

// A launch, for all blocks.
struct Program {
  const Step* steps;
  const Piece* pieces;
  const BlockLists* lists;  // [blocks, kinds]
  int num_layers;           // of a token
  int num_tokens;
  int num_kinds;
  int num_counters;  // of a layer
  int num_slots;     // of stamps in a layer: the most steps of a block, and one for its producers
  int counter_stride;
  int counter_splits;
  int cluster;
  int backoff_ns;
  int num_experts;
  int stored_experts;  // of a layer, without the shared one, which comes behind them
  int stored_a_rank;   // of which a rank has some for itself; 0: all experts are stored
  int ranks;           // chosen experts, and the shared one
  int logits;          // places in `activations`
  int choice;          // ids, then weights; -1: readers choose
  int state_from;
  int state_bytes;  // of a layer
  int head_ratio;   // heads of values for one of keys
  int proj;         // inputs of the mixer: its place, and where its parts begin
  int keys;
  int values;
  int gates;
  int alphas;
  int betas;
  int stages[max_rings];
  int stage_bytes[max_rings];
  int raw_bytes;
  int x_bytes;
  int list_bytes;
  int64_t layer_bytes;
  uint64_t limit_ns;
};

struct TokenMemory {
  const uint8_t* weights;
  int* activations;
  uint8_t* states;
  uint32_t* counters;
  // How many threads waited without end, and the first counter of all layers that one of them waited for.
  uint32_t* report;
  uint32_t* stamps;
  uint64_t* clocks;  // of a block: time and cycles at its begin and its end
};

struct FilledWords {
  uint64_t count;
};

// The same for all threads of a block.
struct Places {
  uint32_t rings[max_rings];
  uint32_t raw;
  uint8_t* x;
  const BlockLists* lists;
  const Step* steps;
  const Piece* pieces;
};

struct alignas(16) Barriers {
  RingBarriers rings[max_rings];
  uint8_t go[bulk_barrier_bytes];
  uint8_t idle[bulk_barrier_bytes];
  uint8_t signal[bulk_barrier_bytes];
};

struct Scratch {
  int greatest[consumer_warps];
  int sums[max_sums];
  int columns[consumer_warps][state_columns];
  int weights[warp_size];
  int is_last;
};

__device__ Counters counters_of(const Program& p, const TokenMemory& m) {
  return {m.counters, p.num_counters, p.counter_splits, p.counter_stride, p.backoff_ns};
}

// The chosen experts by a warp: lane r gets the id of rank r and its weight. Equal logits go to the lower id.
__device__ int choose(const Program& p, const int* logits, int& weight) {
  constexpr int most = 8;
  const int lane = threadIdx.x % warp_size;
  int own[most];
#pragma unroll
  for (int j = 0; j < most; j++)
    own[j] = lane + j * warp_size < p.num_experts ? __ldcg(logits + lane + j * warp_size) : int(0x80000000);
  int id = p.num_experts;
  weight = 4;  // of the shared expert, behind the chosen ones
#pragma unroll 1
  for (int rank = 0; rank < p.ranks - 1; rank++) {
    int best = int(0x80000000), where = 0;
#pragma unroll
    for (int j = most - 1; j >= 0; j--)
      if (own[j] >= best) best = own[j], where = j;
    const int greatest = greatest_of_lanes(best);
    const uint32_t mine = best == greatest ? uint32_t(lane + where * warp_size) : 0xffffu;
    const int found = int(least_of_lanes(mine));
    if (lane == rank) id = found, weight = 1 + (greatest >> 8 & 7);
#pragma unroll
    for (int j = 0; j < most; j++)
      if (found == lane + j * warp_size) own[j] = int(0x80000000);
  }
  return id;
}

// What is left of a magnitude in seven bits.
__device__ int shift_for(int greatest) {
  int shift = 0;
  while (greatest >> shift >= 128) shift++;
  return shift;
}

__device__ int magnitude(int4 v) {
  const auto of = [](int i) { return i ^ (i >> 31); };
  return max(max(of(v.x), of(v.y)), max(of(v.z), of(v.w)));
}

__device__ uint32_t quantised(int4 v, int shift) {
  const auto byte = [shift](int i) { return uint32_t(i >> shift) & 255u; };
  return byte(v.x) | byte(v.y) << 8 | byte(v.z) << 16 | byte(v.w) << 24;
}

__device__ uint32_t* stamps_at(const Program& p, const TokenMemory& m, int layer, int slot) {
  return m.stamps + (int64_t(layer * p.num_slots + slot) * gridDim.x + blockIdx.x) * stamp_words;
}

// ---- producers

template <int parts, bool has_stamps>
__device__ void produce(const Program& p, const TokenMemory& m, const Places& at, Barriers& barriers,
                        int ring, Watch watch) {
  const int lane = threadIdx.x % warp_size;
  const Counters counters = counters_of(p, m);
  FilledRing filled = {barriers.rings[ring], at.rings[ring], p.stages[ring], p.stage_bytes[ring]};
  for (int layer = 0; layer < p.num_layers * p.num_tokens && !watch.failed; layer++) {
    const BlockLists& lists = at.lists[layer % p.num_kinds];
    const uint8_t* const weights = m.weights + layer % p.num_layers * p.layer_bytes;
    const uint8_t* const states = m.states + int64_t(layer % p.num_layers) * p.state_bytes;
    watch.layer = layer;
    int id = p.stored_experts;  // of the rank that is the lane's number
    bool has_ids = false, is_first = true;
    for (int i = 0; i < lists.num_pieces[ring]; i++) {
      const Piece piece = at.pieces[lists.first_piece[ring] + i];
      if ((parts & has_waits) && !wait_counter<true>(counters, piece.wait, piece.target, watch)) break;
      if (piece.rank >= 0 && !has_ids) {
        if (has_stamps && lane == 0) stamps_at(p, m, layer, p.num_slots - 1)[2 * ring] = cycles();
        int unused;
        if (p.choice < 0)
          id = choose(p, m.activations + p.logits, unused);
        else if (lane < p.ranks - 1)
          id = __ldcg(m.activations + p.choice + lane);
        // An expert that exists, also where nobody has waited for the answer.
        if (lane < p.ranks - 1)
          id = p.stored_a_rank ? lane * p.stored_a_rank + int(uint32_t(id) % uint32_t(p.stored_a_rank))
                               : int(uint32_t(id) % uint32_t(p.num_experts));
        else
          id = p.stored_experts;
        has_ids = true;
      }
      const int own_id = __shfl_sync(all_lanes, id, piece.rank < 0 ? 0 : min(piece.rank + lane, p.ranks - 1));
      const uint8_t* from = (piece.is_state ? states : weights) + piece.offset;
      if (piece.rank >= 0) from += int64_t(own_id) * piece.expert_bytes;
      if (piece.only_near) {
        if ((parts & has_copies) && lane < piece.copies) bring_piece_near(from, piece.copy_bytes);
        continue;
      }
      if (!filled.wait(watch)) break;
      const uint32_t full = filled.full(), to = filled.stage();
      if (lane == 0) {
        if (piece.is_state) order_with_copies();
        expect_bytes(full, piece.copies * piece.copy_bytes);
        if (has_stamps && piece.rank >= 0 && is_first)
          stamps_at(p, m, layer, p.num_slots - 1)[2 * ring + 1] = cycles();
      }
      is_first = is_first && piece.rank < 0;
      __syncwarp();
      if (lane < piece.copies) copy_bulk(to + lane * piece.copy_bytes, from, piece.copy_bytes, full);
      __syncwarp();
      filled.advance();
    }
  }
  filled.drain(watch);
}

// ---- the poller

template <int parts, int poll, int fetch>
__device__ void look_out(const Program& p, const TokenMemory& m, const Places& at, Barriers& barriers,
                         Watch watch) {
  const int lane = threadIdx.x % warp_size;
  const bool is_leader = poll != poll_by_cluster || rank_in_cluster() == 0;
  const uint32_t go = shared_address(barriers.go), idle = shared_address(barriers.idle);
  const uint32_t signal = shared_address(barriers.signal);
  int phase = 0, signal_phase = 0;
  for (int layer = 0; layer < p.num_layers * p.num_tokens; layer++) {
    const BlockLists& lists = at.lists[layer % p.num_kinds];
    watch.layer = layer;
    for (int i = 0; i < lists.num_steps; i++, phase ^= 1) {
      const Step& step = at.steps[lists.first_step + i];
      if ((parts & has_waits) && step.wait != no_counter && !is_leader) {
        wait_phase(signal, signal_phase, watch);
        signal_phase ^= 1;
      } else if (parts & has_waits) {
        wait_counter<true>(counters_of(p, m), step.wait, step.target, watch);
        if (poll == poll_by_cluster && step.wait != no_counter && lane > 0 && lane < p.cluster)
          arrive_at_peer(signal, lane);
      }
      // Inputs of the step before have been read, so that there is room for these.
      wait_phase(idle, phase ^ 1, watch);
      watch.failed = __any_sync(all_lanes, watch.failed);
      if (lane == 0 && fetch == fetch_by_copy && step.load == load_quantised && !watch.failed) {
        const int bytes = step.groups * step.group_words * 4;
        order_with_copies();
        expect_bytes(go, bytes);
        copy_bulk(at.raw, m.activations + step.source, bytes, go);
      } else if (lane == 0) {
        arrive_barrier(go);
      }
      __syncwarp();
    }
  }
}

// ---- consumers

__device__ __forceinline__ void meet_consumers() { meet_at<num_consumers>(1); }

struct Consumer {
  const Program& p;
  const TokenMemory& m;
  const Places& at;
  Barriers& barriers;
  Scratch& scratch;
  Watch watch;
  Place first, second, third;  // of the rings
  uint32_t waited = 0;         // cycles for bytes
  uint32_t first_there = 0;    // when the first bytes of a step were there

  __device__ int warp() const { return threadIdx.x / warp_size; }
  __device__ int lane() const { return threadIdx.x % warp_size; }
  __device__ Place place(int ring) const { return ring == 0 ? first : ring == 1 ? second : third; }

  // The stage that is next in a ring, once its bytes are there.
  template <int parts, bool has_stamps>
  __device__ uint8_t* next_stage(int ring, bool is_first) {
    const Place now = place(ring);
    if constexpr ((parts & has_copies) != 0) {
      const uint32_t before = has_stamps ? cycles() : 0;
      wait_phase(shared_address(barriers.rings[ring].full[now.stage]), now.phase, watch);
      if constexpr (has_stamps) {
        const uint32_t after = cycles();
        waited += after - before;
        if (is_first) first_there = after;
      }
    }
    return shared_at(at.rings[ring] + now.stage * p.stage_bytes[ring]);
  }

  template <int parts>
  __device__ void free_stage(int ring) {
    Place now = place(ring);
    __syncwarp();
    if ((parts & has_copies) && lane() == 0)
      arrive_barrier(shared_address(barriers.rings[ring].empty[now.stage]));
    now.advance(p.stages[ring]);
    if (ring == 0)
      first = now;
    else if (ring == 1)
      second = now;
    else
      third = now;
  }

  // The greatest of what all consumers have.
  __device__ int greatest_of_block(int greatest) {
    greatest = greatest_of_lanes(greatest);
    if (lane() == 0) scratch.greatest[warp()] = greatest;
    meet_consumers();
    for (int i = 0; i < consumer_warps; i++) greatest = max(greatest, scratch.greatest[i]);
    return greatest;
  }

  // Each group by a warp, or one group by all.
  __device__ void quantise(const Step& step, const int4* from, bool is_shared) {
    constexpr int most = 4;
    const int quads = step.group_words / 4;
    const bool alone = step.groups == 1;
    const int begin = alone ? threadIdx.x : lane(), stride = alone ? num_consumers : warp_size;
    for (int group = alone ? 0 : warp(); group < step.groups; group += consumer_warps) {
      int4 v[most];
      int greatest = 0;
#pragma unroll
      for (int j = 0; j < most; j++) {
        const int i = begin + j * stride;
        v[j] = i >= quads  ? int4{0, 0, 0, 0}
               : is_shared ? from[group * quads + i]
                           : __ldcg(from + group * quads + i);
      }
#pragma unroll
      for (int j = 0; j < most; j++) greatest = max(greatest, magnitude(v[j]));
      greatest = alone ? greatest_of_block(greatest) : greatest_of_lanes(greatest);
      const int shift = shift_for(greatest);
      uint32_t* to = reinterpret_cast<uint32_t*>(at.x) + group * quads;
#pragma unroll
      for (int j = 0; j < most; j++)
        if (begin + j * stride < quads) to[begin + j * stride] = quantised(v[j], shift);
    }
  }

  // A word of the stream behind the experts: half of what was there, and the experts' rows by weight.
  __device__ int combined(const Step& step, int word) const {
    int sum = 0;
#pragma unroll 3
    for (int rank = 0; rank < p.ranks; rank++)
      sum +=
          scratch.weights[rank] * (__ldcg(m.activations + step.source + rank * step.group_words + word) >> 6);
    return (__ldcg(m.activations + step.residual + word) >> 1) + (sum >> 5);
  }

  // The sum of the experts' rows, quantised; the block's own part is also written.
  __device__ void sum_and_quantise(const Step& step) {
    constexpr int most = 8;
    int v[most], greatest = 0;
#pragma unroll
    for (int j = 0; j < most; j++) {
      const int word = threadIdx.x + j * num_consumers;
      v[j] = word < step.group_words ? combined(step, word) : 0;
      greatest = max(greatest, v[j] ^ (v[j] >> 31));
      if (word >= step.first_row && word < step.first_row + step.num_rows)
        __stcg(m.activations + step.stream_out + word, v[j]);
    }
    const int shift = shift_for(greatest_of_block(greatest));
#pragma unroll
    for (int j = 0; j < most; j++)
      if (int(threadIdx.x) + j * num_consumers < step.group_words)
        at.x[threadIdx.x + j * num_consumers] = uint8_t(v[j] >> shift);
  }

  // The weights of the chosen experts, and inputs as bytes. Ends with the consumers together.
  template <int fetch>
  __device__ void load(const Step& step) {
    if (threadIdx.x < max_sums) scratch.sums[threadIdx.x] = 0;
    if (step.needs_choice && warp() == consumer_warps - 1) {
      int weight = 4;
      if (p.choice < 0)
        choose(p, m.activations + p.logits, weight);
      else if (lane() < p.ranks - 1)
        weight = __ldcg(m.activations + p.choice + p.ranks + lane());
      scratch.weights[lane()] = weight;
    }
    if (step.load == load_sums) {
      meet_consumers();
      sum_and_quantise(step);
    }
    const int4* from = reinterpret_cast<const int4*>(m.activations + step.source);
    if (step.load == load_quantised) {
      const bool is_near = fetch == fetch_by_copy;
      quantise(step, is_near ? reinterpret_cast<const int4*>(shared_at(at.raw)) : from, is_near);
    }
    if (step.load == load_bytes)
      for (int i = threadIdx.x; i < step.groups * step.group_words / 16; i += num_consumers)
        reinterpret_cast<int4*>(at.x)[i] = __ldcg(from + i);
    meet_consumers();
  }

  // What becomes of the sums of two rows.
  __device__ void finish(const Step& step, int row, int slot, int y0, int y1) {
    int* const out = m.activations + step.out + slot * step.out_stride;
    if (step.epilogue == store_sums) {
      __stcg(out + row, y0);
      __stcg(out + row + 1, y1);
    } else if (step.epilogue == add_residual) {
      const int* residual = m.activations + step.residual + row;
      __stcg(out + row, (__ldcg(residual) >> 1) + (y0 >> 6));
      __stcg(out + row + 1, (__ldcg(residual + 1) >> 1) + (y1 >> 6));
    } else if (step.epilogue == multiply_pairs) {
      __stcg(out + row / 2, (y0 >> 11) * (y1 >> 11));
    } else if (step.epilogue == sum_ranks) {
      atomicAdd(&scratch.sums[row - step.first_row], scratch.weights[slot] * (y0 >> 6));
      atomicAdd(&scratch.sums[row + 1 - step.first_row], scratch.weights[slot] * (y1 >> 6));
    } else {
      atomicAdd(&scratch.sums[row - step.first_row], y0);
      atomicAdd(&scratch.sums[row + 1 - step.first_row], y1);
    }
  }

  // Two rows of a piece at a time by some lanes, as many of these groups as the block has; a row by all lanes
  // of all warps if `lanes` is more than a warp.
  template <int parts>
  __device__ void multiply(const Step& step, const Piece piece, const uint8_t* stage) {
    const int bits = piece.lane_bits, width = 1 << bits, own = lane() & (width - 1);
    const bool is_wide = piece.lanes > warp_size;
    const int at_once = is_wide ? 1 : num_consumers >> bits;
    const int half = step.group_words / 32, vectors = parts & has_copies ? piece.row_bytes / 16 : 0;
    const int begin = is_wide ? int(threadIdx.x) : own, stride = is_wide ? num_consumers : width;
    const int pairs = piece.copies * piece.rows / 2, in_copy = piece.rows / 2;
    for (int group = is_wide ? 0 : warp() << (5 - bits); group < pairs; group += at_once) {
      const int asked = group + (is_wide ? 0 : lane() >> bits), pair = min(asked, pairs - 1);
      const int copy = pair * piece.per_pair >> 16, row = 2 * (pair - copy * in_copy);
      const int slot = piece.slot + copy;
      const uint8_t* rows = stage + copy * piece.copy_bytes + row * piece.row_bytes;
      const int4* const low =
          reinterpret_cast<const int4*>(at.x + (step.groups > 1 ? slot * step.group_words : 0));
      int y0 = 0, y1 = 0;
      for (int v = begin; v < vectors; v += stride) {
        const int4 a = reinterpret_cast<const int4*>(rows)[v];
        const int4 b = reinterpret_cast<const int4*>(rows + piece.row_bytes)[v];
        if constexpr ((parts & has_products) != 0) {
          const int place = v & (half - 1);
          add_products(y0, y1, a, b, low[place], low[half + place]);
        } else {
          y0 += a.x ^ a.y ^ a.z ^ a.w, y1 += b.x ^ b.y ^ b.z ^ b.w;
        }
      }
      for (int mask = width / 2; mask > 0; mask /= 2) {
        y0 += __shfl_xor_sync(all_lanes, y0, mask);
        y1 += __shfl_xor_sync(all_lanes, y1, mask);
      }
      if (own == 0 && asked < pairs) finish(step, piece.first_row + row, slot, y0, y1);
    }
  }

  // Signed four-bit weights, sixteen times their value, times bytes: the low four bits of each byte meet the
  // first half of the inputs, the high ones the second.
  static __device__ __forceinline__ void add_products(int& y0, int& y1, int4 a, int4 b, int4 low, int4 high) {
    const auto add = [](int& y, int w, int x_low, int x_high) {
      y = __dp4a(w << 4 & int(0xf0f0f0f0), x_low, y);
      y = __dp4a(w & int(0xf0f0f0f0), x_high, y);
    };
    add(y0, a.x, low.x, high.x), add(y1, b.x, low.x, high.x);
    add(y0, a.y, low.y, high.y), add(y1, b.y, low.y, high.y);
    add(y0, a.z, low.z, high.z), add(y1, b.z, low.z, high.z);
    add(y0, a.w, low.w, high.w), add(y1, b.w, low.w, high.w);
  }

  template <int parts, bool has_stamps>
  __device__ void run_matrix(const Step& step) {
    for (int i = 0; i < step.num_pieces; i++) {
      const uint8_t* stage = next_stage<parts, has_stamps>(step.ring, i == 0);
      multiply<parts>(step, at.pieces[step.first_piece + i], stage);
      free_stage<parts>(step.ring);
    }
    if (step.epilogue != sum_ranks && step.epilogue != store_joint_sums) return;
    meet_consumers();
    if (int(threadIdx.x) >= step.num_rows) return;
    const int row = step.first_row + threadIdx.x, sum = scratch.sums[threadIdx.x];
    const bool is_sum = step.epilogue == sum_ranks;
    __stcg(m.activations + step.out + row,
           is_sum ? (__ldcg(m.activations + step.residual + row) >> 1) + (sum >> 5) : sum);
  }

  // A piece of a head's state: all rows, some columns. Rows r, r + 32, … and four columns are a thread's.
  struct State {
    uint4 rows[4];
  };

  __device__ uint4* state_of(const Step& step) const {
    const int64_t piece = int64_t(watch.layer % p.num_layers) * p.state_bytes +
                          int64_t(step.first_row) * head_size * state_columns * 4;
    return reinterpret_cast<uint4*>(m.states + piece);
  }

  static __device__ State state_from(const uint4* from, bool is_shared) {
    State found;
#pragma unroll
    for (int j = 0; j < 4; j++) {
      const uint4* own = from + threadIdx.x + j * num_consumers;
      found.rows[j] = is_shared ? *own : __ldcg(own);
    }
    return found;
  }

  static __device__ __forceinline__ void advance(uint32_t& state, uint32_t& sum, int k, int v, int q) {
    state = uint32_t(int(state) >> 1) + uint32_t(k) * uint32_t(v);
    sum += uint32_t(int(state) >> 8) * uint32_t(q);
  }

  template <int parts, bool has_stamps>
  __device__ void run_mixer(const Step& step, State state) {
    if (step.num_rows == 0) return;
    const int pieces_a_head = head_size / state_columns;
    const int head = step.first_row / pieces_a_head, column = step.first_row % pieces_a_head * state_columns;
    const int quad = threadIdx.x % 8, row = threadIdx.x / 8;
    const int* const proj = m.activations + p.proj;
    const int* const keys = proj + p.keys + head / p.head_ratio * head_size;
    const int* const queries = proj + head / p.head_ratio * head_size;
    const int4 v = __ldcg(reinterpret_cast<const int4*>(proj + p.values + head * head_size + column) + quad);
    int k[4], q[4];
#pragma unroll
    for (int j = 0; j < 4; j++) k[j] = __ldcg(keys + row + 32 * j), q[j] = __ldcg(queries + row + 32 * j);
    if ((parts & has_copies) && p.state_from == state_late) state = state_from(state_of(step), false);
    if ((parts & has_copies) && p.state_from == state_by_ring) {
      state = state_from(reinterpret_cast<uint4*>(next_stage<parts, has_stamps>(step.ring, true)), true);
      free_stage<parts>(step.ring);
    }
    uint32_t sums[4] = {0, 0, 0, 0};
#pragma unroll
    for (int j = 0; j < 4; j++) {
      const int key = k[j] >> 12, query = q[j] >> 12;
      advance(state.rows[j].x, sums[0], key, v.x >> 12, query);
      advance(state.rows[j].y, sums[1], key, v.y >> 12, query);
      advance(state.rows[j].z, sums[2], key, v.z >> 12, query);
      advance(state.rows[j].w, sums[3], key, v.w >> 12, query);
      if (parts & has_copies) __stcg(state_of(step) + threadIdx.x + j * num_consumers, state.rows[j]);
    }
#pragma unroll
    for (int i = 0; i < 4; i++) {
      for (int mask = 8; mask < warp_size; mask *= 2) sums[i] += __shfl_xor_sync(all_lanes, sums[i], mask);
      if (lane() < 8) scratch.columns[warp()][4 * lane() + i] = int(sums[i]);
    }
    meet_consumers();
    if (threadIdx.x >= state_columns) return;
    uint32_t sum = 0;
    for (int i = 0; i < consumer_warps; i++) sum += uint32_t(scratch.columns[i][threadIdx.x]);
    const int place = head * head_size + column + threadIdx.x;
    const int alpha = __ldcg(proj + p.alphas + head), beta = __ldcg(proj + p.betas + head);
    const uint32_t gate = uint32_t(__ldcg(proj + p.gates + place) >> 6) * uint32_t(alpha >> 12 | 1);
    __stcg(m.activations + step.out + place, int(sum + gate + uint32_t(beta)));
  }

  __device__ void run_combine(const Step& step) {
    const int row = step.first_row + threadIdx.x;
    if (int(threadIdx.x) < step.num_rows) __stcg(m.activations + step.out + row, combined(step, row));
  }

  // Inputs as bytes, for readers that do not quantise.
  __device__ void run_norm(const Step& step) {
    for (int i = threadIdx.x; i < step.group_words / 4; i += num_consumers)
      __stcg(m.activations + step.out + i, reinterpret_cast<const int*>(at.x)[i]);
  }

  // What the block wrote can be read by whoever sees the counter. The last block that comes here may choose.
  template <int parts>
  __device__ void raise(const Step& step) {
    meet_consumers();
    if (!(parts & has_waits) || step.raise == no_counter) return;
    const Counters counters = counters_of(p, m);
    if (step.chooses == no_counter) {
      if (threadIdx.x > 0) return;
      order_with_copies();
      counters.raise(watch.layer, step.raise);
      return;
    }
    if (threadIdx.x == 0)
      scratch.is_last = int(add_and_look(counters.at(watch.layer * p.num_counters + step.raise), 1)) ==
                        step.num_raisers - 1;
    meet_consumers();
    if (!scratch.is_last || warp() > 0) return;
    int weight;
    const int id = choose(p, m.activations + p.logits, weight);
    if (lane() < p.ranks) {
      __stcg(m.activations + p.choice + lane(), id);
      __stcg(m.activations + p.choice + p.ranks + lane(), weight);
    }
    __syncwarp();
    if (lane() == 0) add_release(counters.at(watch.layer * p.num_counters + step.chooses), 1);
  }

  template <int parts, int poll>
  __device__ void wait(const Step& step, int phase) {
    if constexpr (poll != poll_by_thread) {
      wait_phase(shared_address(barriers.go), phase, watch);
    } else if constexpr ((parts & has_waits) != 0) {
      if (threadIdx.x == 0) wait_counter<false>(counters_of(p, m), step.wait, step.target, watch);
      meet_consumers();
    }
  }

  template <int parts, int poll, int fetch, bool has_stamps>
  __device__ void run_step(const Step& step, int slot, int phase) {
    const uint32_t begins = has_stamps ? cycles() : 0;
    State state = {};
    const bool is_mixer = step.op == op_mixer && step.num_rows > 0;
    if ((parts & has_copies) && is_mixer && p.state_from == state_early)
      state = state_from(state_of(step), false);
    wait<parts, poll>(step, phase);
    const uint32_t goes = has_stamps ? cycles() : 0;
    load<fetch>(step);
    if (poll != poll_by_thread && lane() == 0) arrive_barrier(shared_address(barriers.idle));
    const uint32_t loaded = has_stamps ? cycles() : 0;
    waited = 0, first_there = loaded;
    if (step.op == op_matrix) run_matrix<parts, has_stamps>(step);
    if (step.op == op_mixer) run_mixer<parts, has_stamps>(step, state);
    if (step.op == op_combine) run_combine(step);
    if (step.op == op_norm) run_norm(step);
    const uint32_t computed = has_stamps ? cycles() : 0;
    raise<parts>(step);
    if (has_stamps && threadIdx.x == 0) {
      uint4* to = reinterpret_cast<uint4*>(stamps_at(p, m, watch.layer, slot));
      to[0] = {begins, goes, loaded, first_there};
      to[1] = {computed, cycles(), waited, uint32_t(step.raise)};
    }
  }
};

template <int parts, int poll, int fetch, bool has_stamps>
__device__ void consume(const Program& p, const TokenMemory& m, const Places& at, Barriers& barriers,
                        Scratch& scratch, const Watch& watch) {
  Consumer own = {p, m, at, barriers, scratch, watch};
  int phase = 0;
  for (int layer = 0; layer < p.num_layers * p.num_tokens; layer++) {
    own.watch.layer = layer;
    const BlockLists& lists = at.lists[layer % p.num_kinds];
    for (int i = 0; i < lists.num_steps; i++, phase ^= 1)
      own.template run_step<parts, poll, fetch, has_stamps>(at.steps[lists.first_step + i], i, phase);
  }
}

// ---- a launch

// Copies the block's lists to shared memory: they are read for every layer.
__device__ Places place_all(const Program& p) {
  Places at;
  uint32_t next = shared_address(dynamic_shared);
  for (int ring = 0; ring < max_rings; ring++) {
    at.rings[ring] = next;
    next += p.stages[ring] * p.stage_bytes[ring];
  }
  at.raw = next;
  at.x = shared_at(next + p.raw_bytes);
  int* to = reinterpret_cast<int*>(at.x + p.x_bytes);
  const BlockLists* lists = p.lists + blockIdx.x * p.num_kinds;
  const BlockLists& last = lists[p.num_kinds - 1];
  const int num_steps = last.first_step + last.num_steps - lists->first_step;
  const int first_piece = lists->first_piece[0];
  const int num_pieces = last.first_piece[max_rings - 1] + last.num_pieces[max_rings - 1] - first_piece;
  const auto copy = [&to](const void* from, int bytes) {
    int* const begin = to;
    for (int i = threadIdx.x; i < bytes / 4; i += blockDim.x) begin[i] = static_cast<const int*>(from)[i];
    to += bytes / 4;
    return begin;
  };
  at.lists = reinterpret_cast<BlockLists*>(copy(lists, p.num_kinds * int(sizeof(BlockLists))));
  at.steps = reinterpret_cast<Step*>(copy(p.steps + lists->first_step, num_steps * int(sizeof(Step))));
  at.pieces = reinterpret_cast<Piece*>(copy(p.pieces + first_piece, num_pieces * int(sizeof(Piece))));
  at.steps -= lists->first_step;
  at.pieces -= first_piece;
  return at;
}

// Time and cycles at a moment when the device's clock, which is coarse, goes on.
__device__ void note_clock(uint64_t* to) {
  const uint64_t before = now_ns();
  uint64_t now = before;
  while (now == before) now = now_ns();
  to[1] = cycles();
  to[0] = now;
}

}  // namespace coldstream

using namespace coldstream;

template <int parts, int poll, int fetch, bool has_stamps>
__global__ void __launch_bounds__(token_warps* warp_size, 1)
    one_token(const __grid_constant__ Program p, const __grid_constant__ TokenMemory m) {
  __shared__ Barriers barriers;
  __shared__ Scratch scratch;
  __shared__ Places at;
  const Watch watch = {now_ns() + p.limit_ns, m.report, false, 0};
  const int warp = threadIdx.x / warp_size;
  if (threadIdx.x == 0) {
    for (int ring = 0; ring < max_rings; ring++) barriers.rings[ring].init(consumer_warps);
    init_bulk_barrier(shared_address(barriers.go), 1);
    init_bulk_barrier(shared_address(barriers.idle), consumer_warps);
    init_bulk_barrier(shared_address(barriers.signal), 1);
    publish_barriers();
  }
  const Places placed = place_all(p);
  if (threadIdx.x == 0) at = placed;
  if (has_stamps && threadIdx.x == 0) note_clock(m.clocks + blockIdx.x * 4);
  __syncthreads();
  if (p.cluster > 1) meet_in_cluster();
  if (warp < consumer_warps) {
    consume<parts, poll, fetch, has_stamps>(p, m, at, barriers, scratch, watch);
  } else if (warp == poller_warp) {
    if (poll != poll_by_thread) look_out<parts, poll, fetch>(p, m, at, barriers, watch);
  } else if (parts & has_copies) {
    produce<parts, has_stamps>(p, m, at, barriers, warp - poller_warp - 1, watch);
  }
  __syncwarp();
  if (has_stamps && threadIdx.x == 0) note_clock(m.clocks + blockIdx.x * 4 + 2);
  if (p.cluster > 1) meet_in_cluster();
}

// The weights of all layers: a word is a mixture of its index.
__global__ void fill_weights(uint32_t* weights, FilledWords filled) {
  const uint64_t stride = uint64_t(gridDim.x) * blockDim.x;
  for (uint64_t i = uint64_t(blockIdx.x) * blockDim.x + threadIdx.x; i < filled.count; i += stride) {
    uint32_t x = uint32_t(i * 0x9e3779b1u) ^ uint32_t(i >> 32);
    x = (x ^ x >> 16) * 0x85ebca6bu;
    weights[i] = x ^ x >> 13;
  }
}
