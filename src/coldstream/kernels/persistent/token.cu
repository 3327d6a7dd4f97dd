// The layers of a token in one launch: every block stays, and does what a list of its own says. Results are
// the bits of the launches of one row, whose device functions do the arithmetic. program.py makes the lists,
// and simulator.py checks them.
//
// A block has warps that compute (consumers), and one for each ring of stages, which copies pieces of
// weights ahead of their use (producers). Who fills the ring of the chosen experts also chooses them, for its
// block.
#include "cuda/products_gemv.cuh"
#include "gated_delta_net/row_steps.cuh"
#include "persistent/token.cuh"
#include "persistent/words.cuh"
#include "rms_norm/expert_sum.cuh"
#include "rms_norm/norm_row.cuh"
#include "router/choose.cuh"

extern __shared__ float4 dynamic_shared[];

namespace coldstream {

constexpr int experts_a_lane = 8;
constexpr int delta_size = 128, conv_kernel = 4, key_channels = 2 * delta_size;

struct Choosing {
  int ids[most_chosen];
  float weights[most_chosen];
  uint64_t scratch[scratch_numbers<experts_a_lane>];
};

// At so many bytes of the block's dynamic shared memory. From places of that kind the compiler knows that it
// is shared memory, which it does not of pointers that were stored.
template <class T>
__device__ __forceinline__ T* in_shared(int place) {
  return reinterpret_cast<T*>(reinterpret_cast<uint8_t*>(dynamic_shared) + place);
}

// The same for all threads of a block: places in its dynamic shared memory.
struct TokenPlaces {
  int rings[max_rings];
  int rows, layers, shapes, lists, steps, pieces;

  __device__ __forceinline__ const LayerWeights& layer(int i) const {
    return in_shared<LayerWeights>(layers)[i];
  }
  __device__ __forceinline__ const BlockLists& list(int kind) const {
    return in_shared<BlockLists>(lists)[kind];
  }
  __device__ __forceinline__ const Step& step(int i) const { return in_shared<Step>(steps)[i]; }
  __device__ __forceinline__ const Piece& piece(int i) const { return in_shared<Piece>(pieces)[i]; }
  __device__ __forceinline__ const MatrixShape& shape(int i) const {
    return in_shared<MatrixShape>(shapes)[i];
  }
};

// ---- producers

template <bool by_words>
struct Producer {
  const TokenProgram& p;
  const TokenPlaces& at;
  Choosing& choosing;
  FilledRing ring;
  Watch watch;

  // The chosen expert whose rank is the lane's number.
  __device__ int choose() {
    const float* logits = p.activations + watch.layer * p.layer_words + p.logits;
    if constexpr (by_words) {
      for (int i = threadIdx.x % warp_size; i < p.num_experts; i += warp_size) look(logits + i, watch);
      watch.failed = __any_sync(all_lanes, watch.failed);
    }
    const Choice choice = {choosing.ids, choosing.weights, p.chosen};
    const int id = choose_experts<experts_a_lane>(logits, p.num_experts, choosing.scratch, choice);
    __syncwarp();
    return id;
  }

  __device__ bool copy(const Piece& piece, const LayerWeights& layer, int id) {
    const int lane = threadIdx.x % warp_size;
    const uint8_t* from = layer.matrices[piece.matrix] + piece.offset + lane * int64_t(piece.from_stride);
    const int own_id = __shfl_sync(all_lanes, id, (max(piece.rank, 0) + lane) % warp_size);
    if (piece.rank >= 0) from += int64_t(own_id) * piece.expert_bytes;
    if (!ring.wait(watch)) return false;
    const uint32_t full = ring.full();
    if (lane == 0) expect_bytes(full, piece.copies * piece.copy_bytes);
    __syncwarp();
    if (lane < piece.copies) copy_bulk(ring.stage() + lane * piece.to_stride, from, piece.copy_bytes, full);
    __syncwarp();
    ring.advance();
    return true;
  }

  __device__ void run(int number) {
    for (int layer = 0; layer < p.num_layers && !watch.failed; layer++) {
      const LayerWeights& weights = at.layer(layer);
      const BlockLists& lists = at.list(weights.kind);
      watch.layer = layer;
      int id = 0;
      bool has_ids = false;
      for (int i = 0; i < lists.num_pieces[number]; i++) {
        const Piece& piece = at.piece(lists.first_piece[number] + i);
        if (!by_words && !wait_counter<true>(p.counters, piece.wait, piece.target, watch)) break;
        if (piece.rank >= 0 && !has_ids) id = choose(), has_ids = true;
        if (!copy(piece, weights, id)) break;
      }
    }
    ring.drain(watch);
  }
};

// ---- consumers

// The sum of a row of the unit at `rows_at`; see LaneRow for whose row that is. A call, as its code is long.
// codes_at: the quantised inputs of `groups` groups; values_at: the same as floats.
template <Types types>
__device__ __noinline__ float unit_sum(int shape_at, int rows_at, int codes_at, int groups, int values_at) {
  const MatrixShape* const shape = in_shared<MatrixShape>(shape_at);
  const uint8_t* const rows = in_shared<uint8_t>(rows_at);
  const Inputs x = {shared_row(in_shared<uint8_t>(codes_at), groups), in_shared<float>(values_at), 0, 1,
                    nullptr};
  float sum[1] = {0.0f};
#pragma unroll 1
  for (int pass = 0; pass < shape->num_passes; pass++) {
    const Staged staged = {rows + pass * shape->pass_bytes, 0, shape->stage_stride, 0};
    add_pass<types, 1, 0>(staged, *shape, pass, x, sum);
  }
  if (is_float<types>(shape->type))
    sum_up_values(sum);
  else
    sum[0] = sum_up_groups(sum[0], shape->spread);
  return sum[0];
}

template <Types types, bool by_words, bool has_stamps, int consumer_warps>
struct Consumer {
  static constexpr int num_consumers = consumer_warps * warp_size;

  const TokenProgram& p;
  const TokenPlaces& at;
  RingBarriers* barriers;
  const Choosing& choosing;
  Vectors<delta_size>& vectors;
  Watch watch;
  Place first, second, third;  // of the rings
  int turn = 0;                // of the step's units, which warps take in turn
  Stamps stamps = {};

  __device__ static void meet_consumers() { meet_at<num_consumers>(1); }
  __device__ int warp() const { return threadIdx.x / warp_size; }
  __device__ int lane() const { return threadIdx.x % warp_size; }
  __device__ Place place(int ring) const { return ring == 0 ? first : ring == 1 ? second : third; }
  __device__ const LayerWeights& weights() const { return at.layer(watch.layer); }
  __device__ bool is_own_turn() { return turn++ % consumer_warps == warp(); }
  // In the activations of the layer, or of the next one.
  __device__ float* place_of(int word, int behind = 0) const {
    return p.activations + (watch.layer + behind) * p.layer_words + word;
  }
  __device__ void put(float* to, float x) const {
    // A number of those bits is another NaN.
    if constexpr (by_words)
      store_relaxed(to, is_written(x) ? x : __uint_as_float(0x7fffffffu));
    else
      __stcg(to, x);
  }

  // Floats or vectors that other blocks have written, or will write.
  template <typename T, int count>
  __device__ void take(const T* const (&from)[count], T (&x)[count]) {
    if constexpr (by_words) look(from, x, p.is_patient, watch);
#pragma unroll
    for (int i = 0; i < count && !by_words; i++) x[i] = __ldcg(from[i]);
    if constexpr (has_stamps) stamps.sees = cycles();
  }

  // The place of a ring's stage, so many behind its next one, once its bytes are there.
  __device__ int stage(int ring, int behind = 0) {
    Place now = place(ring);
    for (int i = 0; i < behind; i++) now.advance(p.stages[ring]);
    const uint32_t before = has_stamps ? cycles() : 0;
    wait_phase(shared_address(barriers[ring].full[now.stage]), now.phase, watch);
    if constexpr (has_stamps) stamps.waited += cycles() - before;
    return at.rings[ring] + now.stage * p.stage_bytes[ring];
  }

  __device__ void leave_stage(int ring) {
    Place now = place(ring);
    __syncwarp();
    if (lane() == 0) arrive_barrier(shared_address(barriers[ring].empty[now.stage]));
    now.advance(p.stages[ring]);
    if (ring == 0)
      first = now;
    else if (ring == 1)
      second = now;
    else
      third = now;
  }

  // ---- inputs

  __device__ float* raw() const { return in_shared<float>(at.rows + p.rows.raw); }
  __device__ float* normed() const { return in_shared<float>(at.rows + p.rows.normed); }
  __device__ float* outputs() const { return in_shared<float>(at.rows + p.rows.outputs); }
  __device__ uint8_t* codes() const { return in_shared<uint8_t>(at.rows + p.rows.codes); }
  __device__ float* kept() const { return in_shared<float>(at.rows + p.rows.kept); }

  // The norm of a row, as floats and quantised.
  __device__ void load_norm_of(const Step& step) {
    constexpr int at_once = 2;
    const Norm norm = {weights().vectors[step.vector], p.hidden, p.hidden, p.eps};
    const float4* const from = reinterpret_cast<const float4*>(place_of(step.source));
    float* const raw = this->raw();
    meet_consumers();  // others may still read the row before
    for (int first = threadIdx.x; first < p.hidden / 4; first += at_once * num_consumers) {
      const int second = first + num_consumers < p.hidden / 4 ? first + num_consumers : first;
      const float4* const places[at_once] = {from + first, from + second};
      float4 x[at_once];
      take(places, x);
      reinterpret_cast<float4*>(raw)[first] = x[0];
      reinterpret_cast<float4*>(raw)[second] = x[1];
    }
    meet_consumers();
    const float scale = inverse_norm(norm, raw);
    const SharedRow row = shared_row(codes(), p.hidden / group_elements);
    for (int group = warp(); group < row.groups; group += consumer_warps) {
      const Eight x = load_eight<true>(raw, group, p.hidden);
      const Eight w = load_eight<true>(norm.weight, group, p.hidden);
      float y[8];
      scale_eight(x, scale, w, y);
      store_eight<true>(normed(), group, p.hidden, y);
      keep_group<group_elements>(row, group, quantize_group(y));
    }
  }

  __device__ int hidden_codes(int slot) const {
    return at.rows + p.rows.hidden + slot * (p.ffn / group_elements * row_bytes_of_group);
  }

  // The hidden rows of all chosen experts and the shared one, quantised.
  __device__ void load_hidden_of(const Step& step) {
    constexpr int at_once = consumer_warps > 8 ? 2 : 3;  // groups of a warp
    const int groups = p.ffn / group_elements, total = (p.chosen + 1) * groups;
    const int per_group = ((1 << 16) + groups - 1) / groups;
    const float4* const from = reinterpret_cast<const float4*>(place_of(step.source)) + 2 * lane();
    for (int first = warp(); first < total; first += at_once * consumer_warps) {
      const float4* places[2 * at_once];
      float4 x[2 * at_once];
#pragma unroll
      for (int i = 0; i < at_once; i++) {
        const int group = min(first + i * consumer_warps, total - 1);
        places[2 * i] = from + group * (group_elements / 4);
        places[2 * i + 1] = places[2 * i] + 1;
      }
      take(places, x);
#pragma unroll
      for (int i = 0; i < at_once; i++) {
        const int at_group = first + i * consumer_warps;
        if (at_group >= total) break;
        const int slot = at_group * per_group >> 16, group = at_group - slot * groups;
        const float4 low = x[2 * i], high = x[2 * i + 1];
        const float y[8] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
        keep_group<group_elements>(shared_row(in_shared<uint8_t>(hidden_codes(slot)), groups), group,
                                   quantize_group(y));
      }
    }
  }

  __device__ DeltaLayer delta_layer() const {
    const float* const* vectors = weights().vectors;
    return {vectors[conv_taps], vectors[ssm_a], vectors[ssm_dt_bias],
            vectors[ssm_norm],  nullptr,        p.key_heads,
            p.value_heads,      p.eps,          0};
  }
  __device__ int num_channels() const { return (2 * p.key_heads + p.value_heads) * delta_size; }

  // The mixer's outputs, normed by head, times the gates, and quantised.
  __device__ void load_mixed_of(const Step& step) {
    const DeltaLayer layer = delta_layer();
    float* const raw = normed() + warp() * group_elements;
    for (int group = warp(); group < step.groups; group += consumer_warps) {
      const int first = group * group_elements + 8 * lane();
      const float4* const mixed = reinterpret_cast<const float4*>(place_of(step.source + first));
      const float4* const z = reinterpret_cast<const float4*>(place_of(p.proj + num_channels() + first));
      const float4* const places[4] = {mixed, mixed + 1, z, z + 1};
      float4 x[4];
      take(places, x);
      reinterpret_cast<float4*>(raw)[2 * lane()] = x[0];
      reinterpret_cast<float4*>(raw)[2 * lane() + 1] = x[1];
      __syncwarp();
      OutputFactors factors = {load_eight(layer.norm + 8 * lane() % delta_size), {x[2], x[3]}};
      open_factors(factors, layer);
      const Eight y = finished_columns<delta_size>(raw, factors, layer.eps);
      keep_group<group_elements>(shared_row(codes(), step.groups), group, quantize_eight(y));
      __syncwarp();
    }
  }

  // A mixer's outputs that an earlier launch has written, quantised, and the stream that they change.
  __device__ void load_row_of(const Step& step) {
    const float4* const stream = reinterpret_cast<const float4*>(place_of(0));
    meet_consumers();  // others may still read the row before
    for (int i = threadIdx.x; i < p.hidden / 4; i += num_consumers) {
      const float4* const places[1] = {stream + i};
      float4 x[1];
      take(places, x);
      reinterpret_cast<float4*>(raw())[i] = x[0];
    }
    for (int group = warp(); group < step.groups; group += consumer_warps) {
      const float4* const row =
          reinterpret_cast<const float4*>(place_of(step.source + group * group_elements)) + 2 * lane();
      const float4* const places[2] = {row, row + 1};
      float4 x[2];
      take(places, x);
      keep_group<group_elements>(shared_row(codes(), step.groups), group, quantize_eight({x[0], x[1]}));
    }
  }

  // Ends with the consumers together.
  __device__ void load(const Step& step) {
    if (step.load == load_row) load_row_of(step);
    if (step.load == load_mixed) load_mixed_of(step);
    if (step.load == load_norm) load_norm_of(step);
    if (step.load == load_hidden) load_hidden_of(step);
    meet_consumers();
    // All blocks have written what they made of the inputs before the token's.
    if (step.load == load_mixed && step.keeps_key) keep_key(step.key_head);
  }

  // ---- products

  // Calls finish(row, sum) in the lanes that have a row of a unit.
  template <typename Finish>
  __device__ void finish_unit(const MatrixShape& shape, int first_row, float sum, Finish&& finish) {
    const LaneRow own(shape);
    const bool is_values = is_float<types>(shape.type);
    if (is_values ? lane() == 0 : own.writes) finish(first_row + (is_values ? 0 : own.row), sum);
  }

  __device__ int place_of_shape(int shape) const { return at.shapes + shape * int(sizeof(MatrixShape)); }

  // Of a unit whose inputs are the step's row.
  __device__ float unit_of_row(const Step& step, int shape, int rows) const {
    return unit_sum<types>(place_of_shape(shape), rows, at.rows + p.rows.codes, step.groups,
                           at.rows + p.rows.normed);
  }

  __device__ void run_products(const Step& step) {
    for (int i = 0; i < step.num_pieces; i++) {
      const Piece& piece = at.piece(step.first_piece + i);
      const MatrixShape& shape = at.shape(piece.shape);
      const int rows = stage(step.ring);
      for (int row = 0; row < piece.rows; row += shape.unit_rows) {
        if (!is_own_turn()) continue;
        const float sum = unit_of_row(step, piece.shape, rows + row * shape.stage_stride);
        finish_unit(shape, piece.first_row + row, sum, [&](int r, float y) {
          put(place_of(step.out + r), step.op == op_add ? raw()[r] + y : y);
        });
      }
      leave_stage(step.ring);
    }
  }

  // Pieces of gate and up in turn, of the same rows.
  __device__ void run_gate_up(const Step& step) {
    for (int i = 0; i < step.num_pieces; i += 2) {
      const Piece& piece = at.piece(step.first_piece + i);
      const MatrixShape& gate_shape = at.shape(piece.shape);
      const Piece& up_piece = at.piece(step.first_piece + i + 1);
      const MatrixShape& up_shape = at.shape(up_piece.shape);
      const int gates = stage(step.ring);
      const int ups = stage(step.ring, 1);
      float* const out = place_of(step.out + piece.slot * p.ffn);
      for (int row = 0; row < piece.rows; row += gate_shape.unit_rows) {
        if (!is_own_turn()) continue;
        const float gate = unit_of_row(step, piece.shape, gates + row * gate_shape.stage_stride);
        const float up = unit_of_row(step, up_piece.shape, ups + row * up_shape.stage_stride);
        finish_unit(gate_shape, piece.first_row + row, up,
                    [&](int r, float y) { put(out + r, exact_swiglu(gate, y)); });
      }
      leave_stage(step.ring);
      leave_stage(step.ring);
    }
  }

  // ---- the mixer

  // A piece of a head's state, by the threads that the recurrence has.
  __device__ void run_mix(const Step& step) {
    if (step.num_rows == 0 || threadIdx.x >= delta_threads) return;
    constexpr int D = delta_size;
    const DeltaLayer layer = delta_layer();
    const DeltaStates states = {weights().conv_state, weights().state};
    const OwnColumns<D> own = {step.first_row / D, step.key_head, step.first_row % D, 0};
    Channels<D, conv_kernel> channels;
    channels.load_taps(own, layer);
    channels.load(states, 0, num_channels());
    float* const block_state = states.state + own.state_offset(layer);
    float state[chain_keys<D>];
    load_state<D>(block_state, state);
    const float a = layer.a[own.head], dt_bias = layer.dt_bias[own.head];
    const int alphas = p.proj + num_channels() + p.value_heads * D;
    constexpr int count = Channels<D, conv_kernel>::count;
    const float* places[count + 2];
    float numbers[count + 2];
#pragma unroll
    for (int j = 0; j < count; j++)
      places[j] = place_of(p.proj + channels.channel[channels.exists(j) ? j : 0]);
    places[count] = place_of(alphas + own.head);
    places[count + 1] = place_of(alphas + p.value_heads + own.head);
    take(places, numbers);
#pragma unroll
    for (int j = 0; j < count; j++) channels.input[j] = numbers[j];
    const float2 gates = open_gates(numbers[count], numbers[count + 1], a, dt_bias);
    mix_row<D, conv_kernel>(channels, layer.eps, vectors, [] { meet_at<delta_threads>(2); });
    const float output = coldstream::step<D>(state, vectors, gates);
    if (own_chain() == 0) put(place_of(step.out + step.first_row + own_column()), output);
    store_state<D>(block_state, state);
    channels.store(states, 0, num_channels(), false);
    if (!step.keeps_key) return;
#pragma unroll
    for (int j = 0; j < 2; j++)
#pragma unroll
      for (int i = 0; i < conv_kernel - 1; i++)
        kept()[i * key_channels + j * delta_threads + threadIdx.x] = channels.history[j][i];
  }

  __device__ float number_at(int word) {
    return by_words ? look(place_of(word), watch) : __ldcg(place_of(word));
  }

  // The inputs of the block's key head, once no other block reads the ones before.
  __device__ void keep_key(int key_head) {
    if (threadIdx.x >= key_channels) return;
    const int number = threadIdx.x;
    const int channel = number < delta_size ? key_head * delta_size + number
                                            : (p.key_heads + key_head) * delta_size + number - delta_size;
#pragma unroll
    for (int i = 0; i < conv_kernel - 1; i++)
      weights().conv_state[i * num_channels() + channel] = kept()[i * key_channels + number];
  }

  // The same rows of all experts, whose sum is added to the residual.
  __device__ void run_down(const Step& step) {
    for (int i = 0; i < step.num_pieces; i++) {
      const Piece& piece = at.piece(step.first_piece + i);
      const MatrixShape& shape = at.shape(piece.shape);
      const int rows = stage(step.ring);
      for (int part = 0; part < piece.copies; part++) {
        const int slot = piece.slot + part;
        for (int row = 0; row < piece.rows; row += shape.unit_rows) {
          if (!is_own_turn()) continue;
          const float sum = unit_sum<types>(place_of_shape(piece.shape),
                                            rows + part * piece.to_stride + row * shape.stage_stride,
                                            hidden_codes(slot), p.ffn / group_elements, 0);
          finish_unit(shape, row, sum, [&](int r, float y) {
            if (r < piece.rows) outputs()[slot * max_down_rows + r] = y;
          });
        }
      }
      leave_stage(step.ring);
    }
    meet_consumers();
    const int i = 4 * threadIdx.x;
    if (i >= step.num_rows) return;
    const float gate = number_at(p.logits + p.num_experts);
    const Experts experts = {outputs(), choosing.weights, p.chosen, outputs() + p.chosen * max_down_rows,
                             &gate,     nullptr,          nullptr};
    // The row of the norm is the residual.
    const float4 sum = load_four<true>(raw(), step.first_row + i, p.hidden) +
                       combine_experts<true, gated_shared>(experts, i, max_down_rows);
    float* const to = place_of(step.out + step.first_row + i, 1);
    put(to, sum.x), put(to + 1, sum.y), put(to + 2, sum.z), put(to + 3, sum.w);
  }

  // What the block wrote can be read by whoever sees the counter.
  __device__ void raise(const Step& step) {
    if (by_words) return;
    meet_consumers();
    if (threadIdx.x == 0 && step.raise != no_counter) p.counters.raise(watch.layer, step.raise);
  }

  __device__ void run() {
    for (int layer = 0; layer < p.num_layers; layer++) {
      watch.layer = layer;
      const BlockLists& lists = at.list(weights().kind);
      for (int i = 0; i < lists.num_steps; i++) {
        const Step& step = at.step(lists.first_step + i);
        if constexpr (has_stamps) stamps = {cycles()};
        if (!by_words) {
          if (threadIdx.x == 0) wait_counter<false>(p.counters, step.wait, step.target, watch);
          meet_consumers();
        }
        load(step);
        if constexpr (has_stamps) stamps.loaded = cycles();
        turn = 0;
        if (step.op == op_products || step.op == op_add) run_products(step);
        if (step.op == op_mix) run_mix(step);
        if (step.op == op_gate_up) run_gate_up(step);
        if (step.op == op_down) run_down(step);
        raise(step);
        if (has_stamps && threadIdx.x == 0) {
          stamps.ends = cycles();
          const int place = (layer * p.num_slots + i) * gridDim.x + blockIdx.x;
          reinterpret_cast<Stamps*>(p.stamps)[place] = stamps;
        }
      }
    }
  }
};

// Copies what is read in every layer to shared memory.
__device__ TokenPlaces place_all(const TokenProgram& p) {
  TokenPlaces at;
  int next = 0;
  for (int ring = 0; ring < max_rings; ring++) {
    at.rings[ring] = next;
    next += p.stages[ring] * p.stage_bytes[ring];
  }
  at.rows = next;
  next += p.rows.lists;
  const BlockLists* lists = p.lists + blockIdx.x * p.num_kinds;
  const BlockLists& last = lists[p.num_kinds - 1];
  const int num_steps = last.first_step + last.num_steps - lists->first_step;
  const int first_piece = lists->first_piece[0];
  const int num_pieces = last.first_piece[max_rings - 1] + last.num_pieces[max_rings - 1] - first_piece;
  const auto copy = [&next](const void* from, int bytes) {
    const int begin = next;
    for (int i = threadIdx.x; i < bytes / 4; i += blockDim.x)
      in_shared<int>(begin)[i] = static_cast<const int*>(from)[i];
    next += bytes;
    return begin;
  };
  at.layers = copy(p.layers, p.num_layers * int(sizeof(LayerWeights)));
  at.lists = copy(lists, p.num_kinds * int(sizeof(BlockLists)));
  at.shapes = copy(p.shapes, p.num_shapes * int(sizeof(MatrixShape)));
  at.steps = copy(p.steps + lists->first_step, num_steps * int(sizeof(Step)));
  at.pieces = copy(p.pieces + first_piece, num_pieces * int(sizeof(Piece)));
  // By the numbers that lists have.
  at.steps -= lists->first_step * int(sizeof(Step));
  at.pieces -= first_piece * int(sizeof(Piece));
  return at;
}

}  // namespace coldstream

using namespace coldstream;

// grid: at most a block for each multiprocessor, all of which run at once. by_words: activations are
// `unwritten_bits` before, and who reads them waits for them; otherwise blocks wait for counters.
template <Types types, bool by_words, bool has_stamps, int consumer_warps>
__global__ void __launch_bounds__(((consumer_warps + max_rings) * warp_size), 1)
    token_layers(const __grid_constant__ TokenProgram p) {
  __shared__ RingBarriers barriers[max_rings];
  __shared__ Choosing choosing;
  __shared__ Vectors<delta_size> vectors;
  __shared__ TokenPlaces at;
  const Watch watch = {now_ns() + p.limit_ns, p.report, false, 0};
  const int warp = threadIdx.x / warp_size;
  if (threadIdx.x == 0) {
    for (int ring = 0; ring < max_rings; ring++) barriers[ring].init(consumer_warps);
    publish_barriers();
  }
  const TokenPlaces placed = place_all(p);
  if (threadIdx.x == 0) at = placed;
  __syncthreads();
  if (warp < consumer_warps) {
    Consumer<types, by_words, has_stamps, consumer_warps>{p, at, barriers, choosing, vectors, watch}.run();
    return;
  }
  const int ring = warp - consumer_warps;
  const FilledRing filled = {barriers[ring], shared_address(dynamic_shared) + at.rings[ring], p.stages[ring],
                             p.stage_bytes[ring]};
  Producer<by_words>{p, at, choosing, filled, watch}.run(ring);
}
