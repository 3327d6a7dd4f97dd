// The gated DeltaNet: causal convolution and gates, then the recurrence per (state, value head, block of
// value columns), then the gated norm. Every token takes the same step, in prefill as in decode.
//
// Rows of a draft tree do not change the state of their sequence: each starts from a copy of its parent's, in
// the worker's memory, or takes that copy over where no later row needs it, and its raw inputs are kept. A
// replay is a chain of accepted rows, from their kept inputs.
//
// Where the rows of a long chain change from one state to the next, the state is left behind in the slot of
// the first one, and goes on into that of the next.
#include <algorithm>
#include <utility>

#include "ops/float_ops.h"

namespace coldstream {

namespace {

constexpr int64_t max_taps = 16;
static_assert(min_fork_rows >= max_taps);  // so the inputs that a state is left with are rows of the batch
constexpr int64_t gate_rows_per_task = 16;
constexpr int64_t heads_per_task = 8;
// Chains of at most so many rows take their first step over whole rows of the state, which so come from
// memory in one stream.
constexpr int32_t max_step_rows = 16;
constexpr int64_t steps_per_worker = 4;  // from which on a task is all of a step

// The rows of one sequence: a chain, which advances its state, or a draft tree. state_id: of the first row,
// whose slot has the state before it.
struct StateRun {
  int32_t first_row, num_rows, state_id;
  bool is_tree;
};

struct Heads {
  int64_t begin, end;
  int64_t count() const { return end - begin; }
};

enum class StateUse : uint8_t { none, read, advanced };

class GatedDeltaNetOp : public Op {
 public:
  GatedDeltaNetOp(const FloatKernels& kernels, DeltaNetArguments arguments)
      : kernels_(kernels),
        a_(std::move(arguments)),
        runs_(a_.capacity),
        uses_(a_.num_states),
        slots_(a_.capacity),
        takes_over_(a_.capacity),
        is_step_(a_.capacity) {}

  const char* name() const override { return "gated_delta_net"; }
  int num_stages() const override { return 4; }
  size_t scratch_bytes() const override {
    const int64_t num_states = 1 + (a_.kept.num_rows > 0 && !a_.replayed ? max_tree_rows : 0);
    return sizeof(float) * num_states * block_floats();
  }
  size_t shared_bytes() const override {
    return sizeof(float) * a_.capacity * (a_.num_channels() + 2 * a_.num_value_heads);
  }

  bool runs_alone(int stage, int rows) const override {
    if (stage == 0) return true;
    if (stage == 1) return rows * a_.num_channels() <= small_work / 4;
    if (stage == 2) return false;
    return a_.replayed || rows_to_norm(rows) * a_.num_value_heads * a_.head_size <= small_work / 4;
  }

  void run(int stage, int rows, Worker& w) override {
    if (stage == 0) {
      plan_runs(rows, w);
    } else if (stage == 1) {
      convolve_heads(rows, w);
    } else if (stage == 2) {
      advance_states(rows, w);
    } else if (!a_.replayed && rows_to_norm(rows) > 0) {
      norm_heads(rows, w);
    }
  }

 private:
  int64_t num_heads() const { return a_.num_channels() / a_.head_size; }  // of queries, keys and values
  int64_t block_floats() const { return a_.head_size * kernels_.delta_columns; }

  // Shared memory: convolved heads [heads, rows, head_size], as the recurrence passes over all rows of a
  // head; then decay and beta [rows, value heads] each.
  float* convolved(const Worker& w, int rows, int64_t head, int64_t row) const {
    return reinterpret_cast<float*>(w.shared->data()) + (head * rows + row) * a_.head_size;
  }
  float* decay(const Worker& w, int rows, int64_t row) const {
    return convolved(w, rows, num_heads(), 0) + row * a_.num_value_heads;
  }
  float* beta(const Worker& w, int rows, int64_t row) const {
    return decay(w, rows, rows) + row * a_.num_value_heads;
  }

  void plan_runs(int32_t rows, Worker& w) {
    num_runs_ = num_steps_ = num_step_rows_ = 0;
    std::fill(uses_.begin(), uses_.end(), StateUse::none);
    std::fill_n(is_step_.begin(), rows, 0);
    for (int32_t first = 0, end; first < rows; first = end) {
      end = a_.replayed ? rows : group_end(a_.layout, first, rows);
      const StateRun run = {first, end - first, a_.layout.state_ids[first], a_.layout.in_tree(first)};
      if (const char* fault = run_fault(run)) return w.fail(fault);
      uses_[run.state_id] = run.is_tree ? StateUse::read : StateUse::advanced;
      if (const char* fault = mark_later_states(run)) return w.fail(fault);
      if (run.is_tree) plan_copies(run);
      if (run.num_rows <= max_step_rows && !run.is_tree && part_end(run, first) == end) {
        std::fill(is_step_.begin() + first, is_step_.begin() + end, 1);
        num_steps_++;
        num_step_rows_ += run.num_rows;
      }
      runs_[num_runs_++] = run;
    }
    std::stable_partition(runs_.begin(), runs_.begin() + num_runs_,
                          [&](const StateRun& run) { return !is_step_[run.first_row]; });
  }

  // Which copy of the state each row of a tree has: that of its parent if it is the parent's last child,
  // which comes after the others.
  void plan_copies(const StateRun& run) {
    int32_t last_child[max_tree_rows], num_slots = 0;
    const int32_t* parents = a_.layout.batch.parents;
    for (int32_t i = 0; i < run.num_rows; i++) {
      if (const int32_t parent = parents[run.first_row + i]; parent >= 0)
        last_child[parent - run.first_row] = i;
    }
    for (int32_t i = 0; i < run.num_rows; i++) {
      const int32_t row = run.first_row + i, parent = parents[row];
      takes_over_[row] = parent >= 0 && last_child[parent - run.first_row] == i;
      slots_[row] = takes_over_[row] ? slots_[parent] : num_slots++;
    }
  }

  // Whether a task of a step has whole heads, so that it norms them as well.
  bool norms_in_step() const { return kernels_.step_columns >= a_.head_size; }
  int64_t rows_to_norm(int64_t rows) const { return norms_in_step() ? rows - num_step_rows_ : rows; }

  bool is_state(int32_t state_id) const { return state_id >= 0 && state_id < a_.num_states; }

  // Null, or what is wrong with a run after those before it.
  const char* run_fault(const StateRun& run) const {
    if (!is_state(run.state_id)) return "gated_delta_net: a row's state lies outside the states";
    if (uses_[run.state_id] == StateUse::advanced ||
        (uses_[run.state_id] == StateUse::read && !run.is_tree)) {
      return "gated_delta_net: the rows of a state must be adjacent";
    }
    for (int32_t i = 0; a_.replayed && i < run.num_rows; i++) {
      if (a_.replayed[i] < 0 || a_.replayed[i] >= a_.kept.num_rows) {
        return "gated_delta_net: a replayed row lies outside the kept inputs";
      }
    }
    if (!a_.layout.in_batch()) return nullptr;
    for (int32_t row = run.first_row; row < run.first_row + run.num_rows; row++) {
      if (a_.layout.batch.kept[row] >= a_.kept.num_rows) {
        return "gated_delta_net: a row of a tree lies outside the kept inputs";
      }
    }
    return parents_fault(a_.layout, run.first_row, run.first_row + run.num_rows);
  }

  // The end of the rows from `row` of a run on that have its state.
  int32_t part_end(const StateRun& run, int32_t row) const {
    const int32_t end = run.first_row + run.num_rows;
    return a_.replayed ? end : state_end(a_.layout, row, end);
  }

  // Notes the states that a run goes on into behind its first one. Null, or what is wrong with them.
  const char* mark_later_states(const StateRun& run) {
    const int32_t end = run.first_row + run.num_rows;
    for (int32_t row = part_end(run, run.first_row); row < end; row = part_end(run, row)) {
      const int32_t state_id = a_.layout.state_ids[row], before = run.is_tree ? 0 : row - run.first_row;
      if (before < min_fork_rows)
        return "gated_delta_net: a tree, or the first rows of a chain, have two state_ids";
      if (!is_state(state_id)) return "gated_delta_net: a row's state lies outside the states";
      if (uses_[state_id] != StateUse::none) return "gated_delta_net: the rows of a state must be adjacent";
      uses_[state_id] = StateUse::advanced;
    }
    return nullptr;
  }

  // Whether tasks are all of a step: the states of many sequences come from far away, and are read in
  // the order in which they lie there.
  bool has_long_tasks(const Worker& w) const { return num_steps_ >= steps_per_worker * w.count; }

  void convolve_heads(int rows, Worker& w) {
    const int64_t num_apart = has_long_tasks(w) ? num_steps_ : 0;  // the last runs, each a task
    const int64_t num_runs = num_runs_ - num_apart,
                  num_rows = std::max<int64_t>(1, rows - (num_apart > 0 ? num_step_rows_ : 0));
    const int64_t heads = heads_of_task(num_rows, w.count);  // of the others' tasks
    const int64_t head_tasks = num_runs == 0 ? 0 : (num_heads() + heads - 1) / heads,
                  conv_tasks = head_tasks + num_apart;
    const int64_t num_tasks = conv_tasks + (rows + gate_rows_per_task - 1) / gate_rows_per_task;
    for (int64_t task = w.take(); task < num_tasks; task = w.take()) {
      if (task >= conv_tasks) {
        open_gates(rows, (task - conv_tasks) * gate_rows_per_task, w);
      } else if (task >= head_tasks) {
        convolve_run(rows, runs_[num_runs + task - head_tasks], {0, num_heads()}, w);
      } else {
        const Heads taken = {task * heads, std::min(task * heads + heads, num_heads())};
        for (int64_t i = 0; i < num_runs; i++) convolve_run(rows, runs_[i], taken, w);
      }
    }
  }

  // Heads of a task for all runs of several rows. Adjacent heads of a row are read faster than one, and every
  // worker has a few tasks.
  int64_t heads_of_task(int64_t num_rows, int num_workers) const {
    const int64_t of_small_work = small_work / 8 / (num_rows * a_.head_size),
                  of_a_share = num_heads() / (4 * num_workers);
    return std::max<int64_t>({1, of_small_work, std::min(of_a_share, heads_per_task)});
  }

  void convolve_run(int rows, const StateRun& run, Heads heads, Worker& w) {
    run.is_tree ? convolve_tree(rows, run, heads, w) : convolve_chain(rows, run, heads, w);
  }

  void open_gates(int rows, int64_t first, Worker& w) {
    for (int64_t row = first; row < std::min<int64_t>(first + gate_rows_per_task, rows); row++) {
      kernels_.delta_gates(a_.alpha.row(source(row)), a_.beta.row(source(row)), a_.a, a_.dt_bias,
                           decay(w, rows, row), beta(w, rows, row), a_.num_value_heads);
      if (!a_.layout.in_tree(row)) continue;
      const int64_t kept = a_.layout.batch.kept[row] * a_.num_value_heads;
      std::copy_n(a_.alpha.row(row), a_.num_value_heads, a_.kept.alpha + kept);
      std::copy_n(a_.beta.row(row), a_.num_value_heads, a_.kept.beta + kept);
    }
  }

  // The row of qkv, alpha and beta that a row reads.
  int64_t source(int64_t row) const { return a_.replayed ? a_.replayed[row] : row; }

  // Raw channels of the token `index` of a run; negative indices are in the state.
  const float* raw_input(const StateRun& run, int64_t index, int64_t channel) const {
    if (index >= 0) return a_.qkv.row(source(run.first_row + index)) + channel;
    return conv_row(run.state_id, index + a_.num_taps - 1) + channel;
  }
  float* conv_row(int64_t state_id, int64_t index) const {
    return a_.conv_state + (state_id * (a_.num_taps - 1) + index) * a_.num_channels();
  }

  // Heads of one row, from the raw channels of the tokens up to its own; inputs: at the first head.
  void convolve_heads_of(int rows, int64_t row, const float** inputs, Heads heads, Worker& w) {
    const float query_scale = 1.0f / __builtin_sqrtf(static_cast<float>(a_.head_size));
    for (int64_t head = heads.begin; head < heads.end; head++) {
      float* out = convolved(w, rows, head, row);
      kernels_.convolve(inputs, a_.taps.data() + head * a_.head_size, a_.num_channels(), a_.num_taps, out,
                        a_.head_size);
      if (head < 2 * a_.num_key_heads)
        kernels_.l2_norm(out, a_.eps, head < a_.num_key_heads ? query_scale : 1.0f, a_.head_size);
      for (int64_t j = 0; j < a_.num_taps; j++) inputs[j] += a_.head_size;
    }
  }

  void convolve_chain(int rows, const StateRun& run, Heads heads, Worker& w) {
    const int64_t channel = heads.begin * a_.head_size, count = heads.count() * a_.head_size;
    const int64_t taps = a_.num_taps;
    const float* inputs[max_taps];
    for (int64_t token = 0; token < run.num_rows; token++) {
      for (int64_t j = 0; j < taps; j++) inputs[j] = raw_input(run, token + j - (taps - 1), channel);
      convolve_heads_of(rows, run.first_row + token, inputs, heads, w);
    }
    const int32_t end = run.first_row + run.num_rows;
    for (int32_t row = run.first_row, last; row < end; row = last) {
      last = part_end(run, row);
      // Ascending, so that rows that move up within the state are read before they are overwritten.
      for (int64_t i = 0; i < taps - 1; i++) {
        const float* from = raw_input(run, last - run.first_row + i - (taps - 1), channel);
        float* to = conv_row(a_.layout.state_ids[row], i) + channel;
        if (from != to) std::copy_n(from, count, to);
      }
    }
  }

  void convolve_tree(int rows, const StateRun& run, Heads heads, Worker& w) {
    const int64_t channel = heads.begin * a_.head_size, taps = a_.num_taps;
    const float* inputs[max_taps];
    for (int64_t row = run.first_row; row < run.first_row + run.num_rows; row++) {
      int64_t ancestor = row, before = taps - 1;  // rows of the state that come before the path
      for (int64_t j = taps - 1; j >= 0; j--) {
        if (ancestor < 0) {
          inputs[j] = conv_row(run.state_id, --before) + channel;
        } else {
          inputs[j] = a_.qkv.row(ancestor) + channel;
          ancestor = a_.layout.batch.parents[ancestor];
        }
      }
      convolve_heads_of(rows, row, inputs, heads, w);
      std::copy_n(a_.qkv.row(row) + channel, heads.count() * a_.head_size,
                  a_.kept.qkv + a_.layout.batch.kept[row] * a_.num_channels() + channel);
    }
  }

  void advance_states(int rows, Worker& w) {
    const int64_t num_long = num_runs_ - num_steps_,
                  long_tasks = num_long * blocks_per_run(kernels_.delta_columns);
    const int64_t step_blocks = blocks_per_run(kernels_.step_columns), total = num_steps_ * step_blocks;
    const int64_t size = has_long_tasks(w) ? step_blocks : 1;  // of a task
    for (int64_t task = w.take(); task < long_tasks + (total + size - 1) / size; task = w.take()) {
      if (task < long_tasks) {
        advance_block(rows, task, w);
        continue;
      }
      const int64_t first = (task - long_tasks) * size, following = first + w.count * size;
      for (int64_t i = first; i < first + size; i++)
        step_block(rows, i, i + 1 < first + size ? i + 1 : following, w);
    }
  }

  int64_t blocks_per_head(int64_t columns) const { return (a_.head_size + columns - 1) / columns; }
  int64_t blocks_per_run(int64_t columns) const { return a_.num_value_heads * blocks_per_head(columns); }

  // Block `index` of those of all runs that are no steps.
  void advance_block(int rows, int64_t index, Worker& w) {
    const int64_t columns = kernels_.delta_columns;
    const StateRun& run = runs_[index / blocks_per_run(columns)];
    const DeltaBlock block = block_of(rows, run, index % blocks_per_run(columns), columns, w);
    run.is_tree ? walk_tree(block, run, columns, w) : walk_chain(block, run, index % blocks_per_run(columns));
  }

  // Block `index` of those of all steps. next: the one that this worker is likely to take after it.
  void step_block(int rows, int64_t index, int64_t next, Worker& w) {
    const int64_t columns = kernels_.step_columns, per_run = blocks_per_run(columns);
    const StateRun* steps = runs_.data() + num_runs_ - num_steps_;
    const StateRun& run = steps[index / per_run];
    const DeltaBlock block = block_of(rows, run, index % per_run, columns, w);
    DeltaBlock step = block.part(0, 1);
    if (next < num_steps_ * per_run)
      step.next_state = state_of(steps[next / per_run], next % per_run, columns);
    kernels_.delta_step(step);
    if (run.num_rows > 1) advance_near_state(block.part(1, run.num_rows - 1));
    if (a_.replayed || !norms_in_step()) return;
    for (int64_t row = 0; row < run.num_rows; row++) norm_head(run.first_row + row, index % per_run);
  }

  // The other rows of a step, whose state is in a cache by then.
  void advance_near_state(const DeltaBlock& block) {
    for (int64_t column = 0; column < block.num_columns; column += kernels_.delta_columns) {
      DeltaBlock part = block;
      part.num_columns = std::min(kernels_.delta_columns, block.num_columns - column);
      part.v += column;
      part.out += column;
      part.state += column;
      part.source = part.state;
      kernels_.delta_advance(part);
    }
  }

  // Of a block of a run's: of all columns of all heads.
  float* state_of(const StateRun& run, int64_t block, int64_t columns) const {
    const int64_t head = block / blocks_per_head(columns),
                  column = block % blocks_per_head(columns) * columns;
    return a_.state + (run.state_id * a_.num_value_heads + head) * a_.head_size * a_.head_size + column;
  }

  // block: block `index` of all rows of the run. One task passes from state to state, as each begins with the
  // last.
  void walk_chain(const DeltaBlock& block, const StateRun& run, int64_t index) {
    const float* source = block.state;
    const int32_t end = run.first_row + run.num_rows;
    for (int32_t row = run.first_row, last; row < end; row = last) {
      last = part_end(run, row);
      DeltaBlock part = block.part(row - run.first_row, last - row);
      part.source = source;
      part.state =
          state_of({row, last - row, a_.layout.state_ids[row], false}, index, kernels_.delta_columns);
      kernels_.delta_advance(part);
      source = part.state;
    }
  }

  // block: of all rows of the run. Rows that follow each other in one copy of the state advance it together.
  void walk_tree(const DeltaBlock& block, const StateRun& run, int64_t columns, Worker& w) {
    const int32_t* parents = a_.layout.batch.parents + run.first_row;
    const uint8_t* takes_over = takes_over_.data() + run.first_row;
    for (int64_t i = 0, end; i < run.num_rows; i = end) {
      for (end = i + 1; end < run.num_rows && takes_over[end] && parents[end] == run.first_row + end - 1;)
        end++;
      DeltaBlock step = block.part(i, end - i);
      step.source = step.state = copy_of(run.first_row + i, w);
      step.state_stride = columns;
      if (!takes_over[i]) {
        const float* from = parents[i] < 0 ? block.state : copy_of(parents[i], w);
        const int64_t stride = parents[i] < 0 ? block.state_stride : columns;
        for (int64_t key = 0; key < a_.head_size; key++) {
          std::copy_n(from + key * stride, block.num_columns, step.state + key * columns);
        }
      }
      kernels_.delta_advance(step);
    }
  }

  // Private memory: what delta_advance takes, then copies of the state [head_size, columns].
  float* copy_of(int64_t row, const Worker& w) const {
    return reinterpret_cast<float*>(w.memory->data()) + (1 + slots_[row]) * block_floats();
  }

  DeltaBlock block_of(int rows, const StateRun& run, int64_t index, int64_t columns, Worker& w) {
    const int64_t head = index / blocks_per_head(columns),
                  column = index % blocks_per_head(columns) * columns;
    const int64_t size = a_.head_size, key_head = a_.key_head_ids[head];
    const int64_t keys = a_.num_key_heads;
    return {
        .num_rows = run.num_rows,
        .head_size = size,
        .num_columns = std::min(columns, size - column),
        .q = convolved(w, rows, key_head, run.first_row),
        .k = convolved(w, rows, keys + key_head, run.first_row),
        .v = convolved(w, rows, 2 * keys + head, run.first_row) + column,
        .row_stride = size,
        .decay = decay(w, rows, run.first_row) + head,
        .beta = beta(w, rows, run.first_row) + head,
        .gate_stride = a_.num_value_heads,
        .source = state_of(run, index, columns),
        .state = state_of(run, index, columns),
        .state_stride = size,
        .out = a_.out.row(run.first_row) + head * size + column,
        .out_stride = a_.out.stride,
        .memory = reinterpret_cast<float*>(w.memory->data()),
        .next_state = nullptr,
    };
  }

  void norm_heads(int rows, Worker& w) {
    const int64_t tasks_per_row = (a_.num_value_heads + heads_per_task - 1) / heads_per_task;
    for (int64_t task = w.take(); task < rows * tasks_per_row; task = w.take()) {
      const int64_t row = task / tasks_per_row, first = task % tasks_per_row * heads_per_task;
      if (is_step_[row] && norms_in_step()) continue;
      for (int64_t head = first; head < std::min(first + heads_per_task, a_.num_value_heads); head++)
        norm_head(row, head);
    }
  }

  void norm_head(int64_t row, int64_t head) {
    float* out = a_.out.row(row) + head * a_.head_size;
    kernels_.gated_rms_norm(out, a_.norm, a_.eps, a_.z.row(row) + head * a_.head_size, a_.has_sigmoid_gate,
                            out, a_.head_size);
  }

  const FloatKernels& kernels_;
  const DeltaNetArguments a_;
  std::vector<StateRun> runs_;  // steps, as in decoding, behind all others
  std::vector<StateUse> uses_;
  std::vector<int32_t> slots_;       // by row of a tree: its copy of the state, in the worker's memory
  std::vector<uint8_t> takes_over_;  // by row of a tree: whether that copy was its parent's
  std::vector<uint8_t> is_step_;     // by row: whether its run is a step
  int64_t num_runs_ = 0, num_steps_ = 0, num_step_rows_ = 0;
};

}  // namespace

std::unique_ptr<Op> make_gated_delta_net(const FloatKernels& kernels, DeltaNetArguments arguments) {
  return std::make_unique<GatedDeltaNetOp>(kernels, std::move(arguments));
}

}  // namespace coldstream
