// The n-gram embedding. Rows find those before them as rows of the gated DeltaNet do: in the batch, then in
// the state of their sequence. Rows of draft trees change no state, and keep what a commit needs.
#include "ops/ngram.h"

#include <algorithm>
#include <cmath>

namespace coldstream {

namespace {

constexpr int64_t task_columns = 1024;
constexpr const char* outside_table = "ngram: a row lies outside the table";

// Null, or what is wrong with the rows of one sequence.
const char* rows_fault(const RowLayout& layout, int32_t first, int32_t end, int64_t num_states,
                       int64_t num_kept) {
  for (int32_t row = first; row < end; row++) {
    if (layout.state_ids[row] < 0 || layout.state_ids[row] >= num_states)
      return "ngram: a row's state lies outside the states";
    if (layout.in_tree(row) && layout.batch.kept[row] >= num_kept)
      return "ngram: a row of a tree lies outside what is kept";
  }
  if (!layout.in_batch()) return nullptr;
  if (const char* fault = parents_fault(layout, first, end)) return fault;
  const int32_t next = state_end(layout, first, end);
  if (next < end && (layout.in_tree(first) || next - first < min_fork_rows))
    return "ngram: a tree, or the first rows of a chain, have two state_ids";
  return nullptr;
}

// The row `back` rows before one of a sequence whose rows begin at `first`; from −1 downwards those before
// the batch, the last one first.
int64_t row_before(const RowLayout& layout, int32_t first, int64_t row, int64_t back) {
  if (!layout.in_tree(row)) return row - back >= first ? row - back : row - back - first;
  for (; back > 0; back--) {
    const int32_t parent = layout.batch.parents[row];
    if (parent < 0) return -back;
    row = parent;
  }
  return row;
}

class NgramIdsOp : public Op {
 public:
  explicit NgramIdsOp(NgramIdsArguments arguments) : a_(std::move(arguments)) {}
  const char* name() const override { return "ngram_ids"; }
  // A few hundred instructions a row.
  bool runs_alone(int, int) const override { return true; }
  void run(int, int rows, Worker& w) override {
    if (w.take() != 0) return;
    for (int32_t first = 0, end; first < rows; first = end) {
      end = group_end(a_.layout, first, rows);
      if (const char* fault = rows_fault(a_.layout, first, end, a_.num_states, a_.num_kept))
        return w.fail(fault);
      for (int32_t row = first; row < end; row++) hash_row(first, row);
      for (int32_t row = first; row < end; row++) {
        if (a_.layout.in_tree(row)) a_.kept[a_.layout.batch.kept[row]] = a_.token_ids[row] + 1;
      }
      if (!a_.layout.in_tree(first)) advance(first, end);
    }
  }

 private:
  int64_t context() const { return static_cast<int64_t>(a_.hash.multipliers.size()) - 1; }
  int32_t* state(int32_t state_id) const { return a_.state + state_id * context(); }

  // One more than the id of the token `back` before a row, 0 for none.
  int32_t token_before(int32_t first, int64_t row, int64_t back) const {
    const int64_t found = row_before(a_.layout, first, row, back);
    if (found >= 0) return a_.token_ids[found] + 1;
    return found < -context() ? 0 : state(a_.layout.state_ids[first])[context() + found];
  }

  void hash_row(int32_t first, int32_t row) {
    const NgramHash& hash = a_.hash;
    int32_t* out = a_.out + row * static_cast<int64_t>(hash.sizes.size());
    uint64_t mixed = static_cast<uint64_t>(a_.token_ids[row]) * hash.multipliers[0];
    bool has_ended = false;
    int64_t head = 0;
    for (int64_t back = 1; back <= context(); back++) {
      const int32_t found = has_ended ? 0 : token_before(first, row, back);
      has_ended = found == 0 || found - 1 == hash.end_token;
      const int32_t token = has_ended ? hash.end_token : found - 1;
      mixed ^= static_cast<uint64_t>(token) * hash.multipliers[back];
      for (int64_t i = 0; i < hash.heads_per_order; i++, head++) {
        out[head] = static_cast<int32_t>(mixed % hash.sizes[head] + hash.offsets[head]);
        if (a_.table != nullptr) a_.table->will_need(out[head]);
      }
    }
  }

  // Leaves the last tokens in the slot of each state that the rows of a chain have.
  void advance(int32_t first, int32_t end) {
    for (int32_t row = first, last; row < end; row = last) {
      last = state_end(a_.layout, row, end);
      int32_t* to = state(a_.layout.state_ids[row]);
      // Ascending, so that tokens which move up are read before they are overwritten.
      for (int64_t i = 0; i < context(); i++) to[i] = token_before(first, last - 1, context() - 1 - i);
    }
  }

  const NgramIdsArguments a_;
};

class NgramRowsOp : public Op {
 public:
  NgramRowsOp(const QuantKernels& kernels, std::shared_ptr<NgramTable> table, const int32_t* ids,
              int64_t num_heads, OutputRows out)
      : kernels_(kernels), table_(std::move(table)), ids_(ids), num_heads_(num_heads), out_(out) {}
  const char* name() const override { return "ngram_rows"; }
  size_t scratch_bytes() const override { return static_cast<size_t>(table_->row_bytes); }
  void run(int, int rows, Worker& w) override {
    auto* row_bytes = reinterpret_cast<uint8_t*>(w.memory->data());
    for (int64_t i = w.take(); i < rows * num_heads_; i = w.take()) {
      float* out = out_.row(i / num_heads_) + i % num_heads_ * table_->num_cols;
      if (ids_[i] == -1) {
        std::fill_n(out, table_->num_cols, 0.0f);
        continue;
      }
      if (!read_ngram_bytes(*table_, ids_[i], row_bytes)) return w.fail(outside_table);
      kernels_.dequantize_row(table_->type, row_bytes, table_->num_cols, out);
    }
  }

 private:
  const QuantKernels& kernels_;
  const std::shared_ptr<NgramTable> table_;
  const int32_t* ids_;
  const int64_t num_heads_;
  const OutputRows out_;
};

class NgramBytesOp : public Op {
 public:
  NgramBytesOp(std::shared_ptr<NgramTable> table, const int32_t* ids, int64_t num_heads, uint8_t* out)
      : table_(std::move(table)), ids_(ids), num_heads_(num_heads), out_(out) {}
  const char* name() const override { return "ngram_bytes"; }
  int num_stages() const override { return 2; }
  size_t scratch_bytes() const override { return static_cast<size_t>(table_->row_bytes); }
  void run(int stage, int rows, Worker& w) override {
    if (stage == 0) {
      for (int64_t row = w.take(); row < rows; row = w.take()) {
        for (int64_t head = 0; head < num_heads_; head++) table_->will_need(ids_[row * num_heads_ + head]);
      }
      return;
    }
    auto* scratch = reinterpret_cast<uint8_t*>(w.memory->data());
    for (int64_t i = w.take(); i < rows * num_heads_; i = w.take()) {
      const bool exists =
          read_ngram_bytes(*table_, ids_[i], out_ == nullptr ? scratch : out_ + i * table_->row_bytes);
      if (!exists && out_ != nullptr) return w.fail(outside_table);
    }
  }

 private:
  const std::shared_ptr<NgramTable> table_;
  const int32_t* ids_;
  const int64_t num_heads_;
  uint8_t* const out_;
};

class NgramGateOp : public Op {
 public:
  NgramGateOp(const FloatKernels& kernels, InputRows key, InputRows query, InputRows value, OutputRows out,
              int64_t num_streams, int64_t size)
      : kernels_(kernels),
        key_(key),
        query_(query),
        value_(value),
        out_(out),
        num_streams_(num_streams),
        size_(size) {}
  const char* name() const override { return "ngram_gate"; }
  bool runs_alone(int, int rows) const override { return rows * num_streams_ * size_ <= small_work; }
  void run(int, int rows, Worker& w) override {
    const float root = __builtin_sqrtf(static_cast<float>(size_));
    for (int64_t i = w.take(); i < rows * num_streams_; i = w.take()) {
      const int64_t row = i / num_streams_, begin = i % num_streams_ * size_;
      float product = 0.0f;
      kernels_.product_f32(key_.row(row) + begin, size_, 1, query_.row(row) + begin, 1, &product, 1, size_);
      const float gate = product / root, distance = __builtin_sqrtf(std::max(std::fabs(gate), 1e-6f));
      const float logit = gate > 0.0f ? distance : gate < 0.0f ? -distance : 0.0f;
      kernels_.open_gate(value_.row(row), logit, out_.row(row) + begin, size_);
    }
  }

 private:
  const FloatKernels& kernels_;
  const InputRows key_, query_, value_;
  const OutputRows out_;
  const int64_t num_streams_, size_;
};

class NgramConvOp : public Op {
 public:
  NgramConvOp(const FloatKernels& kernels, NgramConvArguments arguments)
      : kernels_(kernels), a_(std::move(arguments)), firsts_(a_.capacity) {}
  const char* name() const override { return "ngram_conv"; }
  int num_stages() const override { return 2; }
  size_t scratch_bytes() const override { return sizeof(float) * task_columns; }
  bool runs_alone(int stage, int) const override { return stage == 0; }

  void run(int stage, int rows, Worker& w) override {
    if (stage == 0) {
      if (w.take() == 0) find_sequences(rows, w);
      return;
    }
    const int64_t num_tasks = (a_.width + task_columns - 1) / task_columns;
    for (int64_t task = w.take(); task < num_tasks; task = w.take()) {
      const int64_t begin = task * task_columns, count = std::min(task_columns, a_.width - begin);
      for (int32_t row = 0; row < rows; row++) convolve(row, begin, count, w);
      for (int32_t first = 0, end; first < rows; first = end) {
        end = group_end(a_.layout, first, rows);
        if (a_.layout.in_tree(first)) {
          for (int32_t row = first; row < end; row++)
            std::copy_n(a_.normed.row(row) + begin, count,
                        a_.kept + a_.layout.batch.kept[row] * a_.width + begin);
        } else {
          advance(first, end, begin, count);
        }
      }
    }
  }

 private:
  static constexpr int64_t max_taps = 16;

  void find_sequences(int rows, Worker& w) {
    for (int32_t first = 0, end; first < rows; first = end) {
      end = group_end(a_.layout, first, rows);
      if (const char* fault = rows_fault(a_.layout, first, end, a_.num_states, a_.num_kept))
        return w.fail(fault);
      std::fill(firsts_.begin() + first, firsts_.begin() + end, first);
    }
  }

  float* state_row(int32_t state_id, int64_t index) const {
    return a_.state + (state_id * a_.history() + index) * a_.width;
  }

  // Columns of the row `back` rows before one.
  const float* input_before(int64_t row, int64_t back, int64_t begin) const {
    const int32_t first = firsts_[row];
    const int64_t found = row_before(a_.layout, first, row, back);
    if (found >= 0) return a_.normed.row(found) + begin;
    return state_row(a_.layout.state_ids[first], a_.history() + found) + begin;
  }

  void convolve(int32_t row, int64_t begin, int64_t count, Worker& w) {
    const float* inputs[max_taps];
    for (int64_t j = 0; j < a_.num_taps; j++)
      inputs[j] = input_before(row, (a_.num_taps - 1 - j) * a_.dilation, begin);
    auto* added = reinterpret_cast<float*>(w.memory->data());
    kernels_.convolve(inputs, a_.taps.data() + begin, a_.width, a_.num_taps, added, count);
    kernels_.add(a_.gated.row(row) + begin, added, added, count);
    kernels_.add(a_.streams.row(row) + begin, added, a_.out.row(row) + begin, count);
  }

  void advance(int32_t first, int32_t end, int64_t begin, int64_t count) {
    for (int32_t row = first, last; row < end; row = last) {
      last = state_end(a_.layout, row, end);
      // Ascending, so that rows that move up within the state are read before they are overwritten.
      for (int64_t i = 0; i < a_.history(); i++) {
        const float* from = input_before(last - 1, a_.history() - 1 - i, begin);
        float* to = state_row(a_.layout.state_ids[row], i) + begin;
        if (from != to) std::copy_n(from, count, to);
      }
    }
  }

  const FloatKernels& kernels_;
  const NgramConvArguments a_;
  std::vector<int32_t> firsts_;  // by row: the first row of its sequence
};

class CommitNgramOp : public Op {
 public:
  explicit CommitNgramOp(const CommitNgramArguments& arguments) : a_(arguments) {}
  const char* name() const override { return "commit_ngram"; }
  bool runs_alone(int, int) const override { return true; }
  void run(int, int rows, Worker& w) override {
    if (w.take() != 0) return;
    if (*a_.state_id < 0 || *a_.state_id >= a_.num_states)
      return w.fail("commit_ngram: the state lies outside the states");
    for (int row = 0; row < rows; row++) {
      if (a_.sources[row] < 0 || a_.sources[row] >= a_.num_kept)
        return w.fail("commit_ngram: a row lies outside what is kept");
    }
    move_up(a_.ids + *a_.state_id * a_.context, a_.kept_ids, a_.context, 1, rows);
    move_up(a_.conv + *a_.state_id * a_.history * a_.width, a_.kept, a_.history, a_.width, rows);
  }

 private:
  // The last `length` of a state's rows and the path's, each of `width` values.
  template <typename T>
  void move_up(T* state, const T* kept, int64_t length, int64_t width, int rows) const {
    for (int64_t i = 0; i < length; i++) {
      const int64_t from = rows - length + i;
      const T* source = from >= 0 ? kept + a_.sources[from] * width : state + (length + from) * width;
      if (source != state + i * width) std::copy_n(source, width, state + i * width);
    }
  }

  const CommitNgramArguments a_;
};

}  // namespace

std::unique_ptr<Op> make_ngram_ids(NgramIdsArguments arguments) {
  return std::make_unique<NgramIdsOp>(std::move(arguments));
}

bool read_ngram_bytes(NgramTable& table, int32_t id, uint8_t* out) {
  if (id < -1 || id >= table.num_rows) return false;
  if (id < 0) {
    std::fill_n(out, table.row_bytes, uint8_t{0});
  } else {
    table.read(id, out);
  }
  return true;
}

std::unique_ptr<Op> make_ngram_rows(const QuantKernels& kernels, std::shared_ptr<NgramTable> table,
                                    const int32_t* ids, int64_t num_heads, OutputRows out) {
  return std::make_unique<NgramRowsOp>(kernels, std::move(table), ids, num_heads, out);
}

std::unique_ptr<Op> make_ngram_bytes(std::shared_ptr<NgramTable> table, const int32_t* ids, int64_t num_heads,
                                     uint8_t* out) {
  return std::make_unique<NgramBytesOp>(std::move(table), ids, num_heads, out);
}

std::unique_ptr<Op> make_ngram_gate(const FloatKernels& kernels, InputRows key, InputRows query,
                                    InputRows value, OutputRows out, int64_t num_streams, int64_t size) {
  return std::make_unique<NgramGateOp>(kernels, key, query, value, out, num_streams, size);
}

std::unique_ptr<Op> make_ngram_conv(const FloatKernels& kernels, NgramConvArguments arguments) {
  return std::make_unique<NgramConvOp>(kernels, std::move(arguments));
}

std::unique_ptr<Op> make_commit_ngram(const CommitNgramArguments& arguments) {
  return std::make_unique<CommitNgramOp>(arguments);
}

}  // namespace coldstream
