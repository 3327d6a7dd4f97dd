// Ops that treat each row, or each part of a row, by itself.
#include <algorithm>
#include <cmath>

#include "ops/float_ops.h"

namespace coldstream {

namespace {

// Least work of a task, so that taking it costs little in comparison.
constexpr int64_t task_floats = 4096;

// Calls f(row) for this worker's share of the rows.
template <typename F>
void for_each_row(Worker& w, int rows, int64_t size, F f) {
  const int64_t rows_per_task = std::max<int64_t>(1, task_floats / std::max<int64_t>(1, size));
  for (int64_t first = w.take() * rows_per_task; first < rows; first = w.take() * rows_per_task) {
    for (int64_t row = first; row < std::min<int64_t>(first + rows_per_task, rows); row++) f(row);
  }
}

// Calls f(row, begin, count) for this worker's share of the pieces of all rows.
template <typename F>
void for_each_piece(Worker& w, int rows, int64_t size, F f) {
  const int64_t pieces = std::max<int64_t>(1, (size + task_floats - 1) / task_floats);
  for_each_row(w, static_cast<int>(rows * pieces), std::min(size, task_floats), [&](int64_t index) {
    const int64_t begin = index % pieces * task_floats;
    f(index / pieces, begin, std::min(task_floats, size - begin));
  });
}

using BinaryKernel = void (*)(const float*, const float*, float*, int64_t);

class BinaryOp : public Op {
 public:
  BinaryOp(const char* name, BinaryKernel kernel, InputRows x, InputRows y, OutputRows out, int64_t size)
      : name_(name), kernel_(kernel), x_(x), y_(y), out_(out), size_(size) {}
  const char* name() const override { return name_; }
  bool runs_alone(int, int rows) const override { return rows * size_ <= small_work; }
  void run(int, int rows, Worker& w) override {
    for_each_piece(w, rows, size_, [&](int64_t row, int64_t begin, int64_t count) {
      kernel_(x_.row(row) + begin, y_.row(row) + begin, out_.row(row) + begin, count);
    });
  }

 private:
  const char* name_;
  BinaryKernel kernel_;
  InputRows x_, y_;
  OutputRows out_;
  int64_t size_;
};

class GluOp : public Op {
 public:
  GluOp(const FloatKernels& kernels, const Glu& unit, InputRows gate, InputRows up, OutputRows out,
        int64_t size)
      : kernels_(kernels), unit_(unit), gate_(gate), up_(up), out_(out), size_(size) {}
  const char* name() const override { return "glu"; }
  bool runs_alone(int, int rows) const override { return rows * size_ <= small_work; }
  void run(int, int rows, Worker& w) override {
    for_each_piece(w, rows, size_, [&](int64_t row, int64_t begin, int64_t count) {
      kernels_.glu(unit_, gate_.row(row) + begin, up_.row(row) + begin, out_.row(row) + begin, count);
    });
  }

 private:
  const FloatKernels& kernels_;
  const Glu unit_;
  InputRows gate_, up_;
  OutputRows out_;
  int64_t size_;
};

class RmsNormOp : public Op {
 public:
  RmsNormOp(const FloatKernels& kernels, InputRows x, const float* weight, float eps, OutputRows out,
            int64_t size)
      : kernels_(kernels), x_(x), weight_(weight), eps_(eps), out_(out), size_(size) {}
  const char* name() const override { return "rms_norm"; }
  bool runs_alone(int, int rows) const override { return rows * size_ <= small_work; }
  void run(int, int rows, Worker& w) override {
    for_each_row(w, rows, size_,
                 [&](int64_t row) { kernels_.rms_norm(x_.row(row), weight_, eps_, out_.row(row), size_); });
  }

 private:
  const FloatKernels& kernels_;
  InputRows x_;
  const float* weight_;
  float eps_;
  OutputRows out_;
  int64_t size_;
};

class InjectNormOp : public Op {
 public:
  InjectNormOp(const FloatKernels& kernels, const InjectArguments& arguments)
      : kernels_(kernels), a_(arguments) {}
  const char* name() const override { return "inject_norm"; }
  bool runs_alone(int, int rows) const override { return rows * a_.num_streams * a_.size <= small_work; }
  void run(int, int rows, Worker& w) override {
    for_each_row(w, static_cast<int>(rows * a_.num_streams), a_.size, [&](int64_t index) {
      const int64_t row = index / a_.num_streams, stream = index % a_.num_streams, begin = stream * a_.size;
      float* total = a_.total.row(row) + begin;
      if (a_.streams.data == nullptr) {
        std::copy_n(a_.update.row(row), a_.size, total);
      } else {
        kernels_.inject(a_.streams.row(row) + begin, a_.update.row(row), a_.injection.row(row) + stream,
                        static_cast<float>(a_.num_streams), total, a_.size);
      }
      kernels_.rms_norm(total, a_.weight + begin, a_.eps, a_.normed.row(row) + begin, a_.size);
    });
  }

 private:
  const FloatKernels& kernels_;
  const InjectArguments a_;
};

class ScalarOp : public Op {
 public:
  ScalarOp(const char* name, ScalarKernel kernel, InputRows x, float number, OutputRows out, int64_t size)
      : name_(name), kernel_(kernel), x_(x), number_(number), out_(out), size_(size) {}
  const char* name() const override { return name_; }
  bool runs_alone(int, int rows) const override { return rows * size_ <= small_work; }
  void run(int, int rows, Worker& w) override {
    for_each_piece(w, rows, size_, [&](int64_t row, int64_t begin, int64_t count) {
      kernel_(x_.row(row) + begin, number_, out_.row(row) + begin, count);
    });
  }

 private:
  const char* name_;
  ScalarKernel kernel_;
  InputRows x_;
  float number_;
  OutputRows out_;
  int64_t size_;
};

class MixStreamsOp : public Op {
 public:
  MixStreamsOp(const FloatKernels& kernels, InputRows normed, InputRows gates, OutputRows out,
               int64_t num_streams, int64_t size)
      : kernels_(kernels),
        normed_(normed),
        gates_(gates),
        out_(out),
        num_streams_(num_streams),
        size_(size) {}
  const char* name() const override { return "mix_streams"; }
  bool runs_alone(int, int rows) const override { return rows * num_streams_ * size_ <= small_work; }
  void run(int, int rows, Worker& w) override {
    for_each_piece(w, rows, size_, [&](int64_t row, int64_t begin, int64_t count) {
      kernels_.mix_streams(normed_.row(row) + begin, gates_.row(row) + begin, size_, num_streams_,
                           out_.row(row) + begin, count);
    });
  }

 private:
  const FloatKernels& kernels_;
  InputRows normed_, gates_;
  OutputRows out_;
  int64_t num_streams_, size_;
};

class RopeAnglesOp : public Op {
 public:
  RopeAnglesOp(const RopeArguments& rope, const int32_t* positions, OutputRows out)
      : positions_(positions), magnitude_(rope.magnitude), block_size_(rope.block_size), out_(out) {
    for (int64_t i = 0; i < rope.num_dims / 2; i++) {
      const double exponent = -2.0 * static_cast<double>(i) / static_cast<double>(rope.num_dims);
      const double frequency = std::pow(rope.theta, exponent);
      frequencies_.push_back(rope.factors == nullptr ? frequency : frequency * rope.factors[i]);
    }
  }
  const char* name() const override { return "rope_angles"; }
  bool runs_alone(int, int rows) const override { return rows * work_of_row() <= small_work; }
  void run(int, int rows, Worker& w) override {
    for_each_row(w, rows, work_of_row(), [&](int64_t row) {
      if (positions_[row] < 0) return w.fail("rope_angles: negative position");
      float* out = out_.row(row);
      const int32_t position = positions_[row] / block_size_ * block_size_;
      for (double frequency : frequencies_) {
        const double angle = position * frequency;
        *out++ = static_cast<float>(magnitude_ * std::cos(angle));
        *out++ = static_cast<float>(magnitude_ * std::sin(angle));
      }
    });
  }

 private:
  // A sine and a cosine cost as much as some tens of floats in other ops.
  int64_t work_of_row() const { return static_cast<int64_t>(frequencies_.size()) * 32; }

  const int32_t* positions_;
  const double magnitude_;
  const int32_t block_size_;
  std::vector<double> frequencies_;
  OutputRows out_;
};

class CombineOp : public Op {
 public:
  CombineOp(const FloatKernels& kernels, const CombineArguments& arguments)
      : kernels_(kernels), a_(arguments) {}
  const char* name() const override { return "combine_experts"; }
  bool runs_alone(int, int rows) const override {
    return rows * (a_.num_experts_per_tok + 1) * a_.size <= small_work;
  }
  void run(int, int rows, Worker& w) override {
    for_each_piece(w, rows, a_.size, [&](int64_t row, int64_t begin, int64_t count) {
      kernels_.combine(a_.routed + row * a_.row_stride + begin, a_.rank_stride, a_.weights.row(row),
                       a_.num_experts_per_tok, a_.shared.data ? a_.shared.row(row) + begin : nullptr,
                       a_.shared_gate.data ? a_.shared_gate.row(row) : nullptr, bias_of(row, begin),
                       a_.out.row(row) + begin, count);
    });
  }

 private:
  ExpertBias bias_of(int64_t row, int64_t begin) const {
    if (a_.bias == nullptr) return {};
    return {a_.bias + begin, a_.size, a_.ids + row * a_.num_experts_per_tok};
  }

  const FloatKernels& kernels_;
  CombineArguments a_;
};

class TopLogProbsOp : public Op {
 public:
  TopLogProbsOp(const FloatKernels& kernels, InputRows logits, int64_t size, int64_t k, int32_t* ids,
                float* log_probs)
      : kernels_(kernels), logits_(logits), size_(size), k_(k), ids_(ids), log_probs_(log_probs) {}
  const char* name() const override { return "top_log_probs"; }
  bool runs_alone(int, int rows) const override { return rows == 1 || rows * size_ <= small_work; }
  void run(int, int rows, Worker& w) override {
    for (int64_t row = w.take(); row < rows; row = w.take())
      choose(logits_.row(row), ids_ + row * k_, log_probs_ + row * k_);
  }

 private:
  void choose(const float* logits, int32_t* ids, float* values) const {
    // As in choose_experts: the best so far, sorted, and only a greater one displaces.
    int64_t count = 0;
    for (int64_t i = 0; i < size_; i++) {
      if (count == k_ && !(logits[i] > values[k_ - 1])) continue;
      int64_t place = count < k_ ? count++ : k_ - 1;
      for (; place > 0 && logits[i] > values[place - 1]; place--) {
        values[place] = values[place - 1];
        ids[place] = ids[place - 1];
      }
      values[place] = logits[i];
      ids[place] = static_cast<int32_t>(i);
    }
    // Infinite and NaN logits make the sum NaN, or the difference to it.
    const float maximum = values[0], sum = std::log(kernels_.sum_exp(logits, maximum, size_));
    for (int64_t i = 0; i < k_; i++) values[i] = values[i] - maximum - sum;
  }

  const FloatKernels& kernels_;
  InputRows logits_;
  int64_t size_, k_;
  int32_t* ids_;
  float* log_probs_;
};

class MoveRowsOp : public Op {
 public:
  explicit MoveRowsOp(const MoveRowsArguments& arguments) : a_(arguments) {}
  const char* name() const override { return "move_rows"; }
  // A few rows that mostly stay where they are.
  bool runs_alone(int, int) const override { return true; }
  void run(int, int rows, Worker& w) override {
    if (w.take() != 0) return;
    if (const char* fault = fault_of(rows)) return w.fail(fault);
    for (int row = 0; row < rows; row++) {
      if (a_.sources[row] == row) continue;
      const int64_t from = offset(a_.sources[row]), to = offset(row);
      for (std::byte* cache : a_.caches) {
        if (cache != nullptr) std::copy_n(cache + from, a_.row_bytes, cache + to);
      }
    }
  }

 private:
  const char* fault_of(int rows) const {
    for (int row = 0; row < rows; row++) {
      const int64_t index = static_cast<int64_t>(*a_.first) + a_.sources[row];
      if (*a_.first < 0 || a_.sources[row] < row || index / a_.num_positions >= a_.table_blocks) {
        return "commit_attention: a row lies outside its sequence";
      }
      for (int64_t at : {index, static_cast<int64_t>(*a_.first) + row}) {
        const int32_t block = a_.table[at / a_.num_positions];
        if (block < 0 || block >= a_.num_blocks) return "commit_attention: a block lies outside the caches";
      }
    }
    return nullptr;
  }
  int64_t offset(int64_t row) const {
    const int64_t index = *a_.first + row;
    return (a_.table[index / a_.num_positions] * a_.num_positions + index % a_.num_positions) * a_.row_bytes;
  }

  const MoveRowsArguments a_;
};

}  // namespace

std::unique_ptr<Op> make_top_log_probs(const FloatKernels& kernels, InputRows logits, int64_t size, int64_t k,
                                       int32_t* ids, float* log_probs) {
  return std::make_unique<TopLogProbsOp>(kernels, logits, size, k, ids, log_probs);
}

std::unique_ptr<Op> make_move_rows(const MoveRowsArguments& arguments) {
  return std::make_unique<MoveRowsOp>(arguments);
}

std::unique_ptr<Op> make_add(const FloatKernels& kernels, InputRows x, InputRows y, OutputRows out,
                             int64_t size) {
  return std::make_unique<BinaryOp>("add", kernels.add, x, y, out, size);
}

std::unique_ptr<Op> make_glu(const FloatKernels& kernels, const Glu& unit, InputRows gate, InputRows up,
                             OutputRows out, int64_t size) {
  return std::make_unique<GluOp>(kernels, unit, gate, up, out, size);
}

std::unique_ptr<Op> make_rms_norm(const FloatKernels& kernels, InputRows x, const float* weight, float eps,
                                  OutputRows out, int64_t size) {
  return std::make_unique<RmsNormOp>(kernels, x, weight, eps, out, size);
}

std::unique_ptr<Op> make_inject_norm(const FloatKernels& kernels, const InjectArguments& arguments) {
  return std::make_unique<InjectNormOp>(kernels, arguments);
}

std::unique_ptr<Op> make_scalar(const char* name, ScalarKernel kernel, InputRows x, float number,
                                OutputRows out, int64_t size) {
  return std::make_unique<ScalarOp>(name, kernel, x, number, out, size);
}

std::unique_ptr<Op> make_mix_streams(const FloatKernels& kernels, InputRows normed, InputRows gates,
                                     OutputRows out, int64_t num_streams, int64_t size) {
  return std::make_unique<MixStreamsOp>(kernels, normed, gates, out, num_streams, size);
}

std::unique_ptr<Op> make_rope_angles(const RopeArguments& rope, const int32_t* positions, OutputRows out) {
  return std::make_unique<RopeAnglesOp>(rope, positions, out);
}

std::unique_ptr<Op> make_combine_experts(const FloatKernels& kernels, const CombineArguments& arguments) {
  return std::make_unique<CombineOp>(kernels, arguments);
}

}  // namespace coldstream
