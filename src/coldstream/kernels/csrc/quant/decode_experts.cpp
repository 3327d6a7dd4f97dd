#include "quant/decode_experts.h"

#include <algorithm>

#include "quant/blocks.h"

namespace coldstream {

namespace {

constexpr int64_t max_slice = 64;  // weight rows of a task; bounds the values kept in private memory
constexpr int64_t slice_multiple = 4;

int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

// The tasks of a stage: as many weight rows of all jobs for each worker, one after the other, in one part for
// few jobs and in two for more, so that the others can help a worker that is late.
class Slices {
 public:
  Slices(int num_jobs, int64_t num_rows, int num_workers)
      : num_rows_(num_rows),
        units_of_job_(ceil_div(num_rows, slice_multiple)),
        units_(num_jobs * units_of_job_) {
    const int64_t fewest = ceil_div(units_ * slice_multiple, num_workers * max_slice);
    const int64_t parts = num_workers * std::max<int64_t>(num_jobs <= 2 ? 1 : 2, fewest);
    num_tasks_ = std::min(parts, ceil_div(units_, least_units));
  }

  // Calls visit(job, begin, end) for the rows that this worker takes, at most max_slice, until one returns
  // false.
  template <typename F>
  void for_each(Worker& w, F&& visit) const {
    for (int64_t task = w.take_near(num_tasks_); task < num_tasks_; task = w.take_near(num_tasks_)) {
      const int64_t end = (task + 1) * units_ / num_tasks_;
      for (int64_t unit = task * units_ / num_tasks_, next; unit < end; unit = next) {
        const int64_t job = unit / units_of_job_, first = job * units_of_job_;
        next = std::min(end, first + units_of_job_);
        const int64_t last_row = std::min((next - first) * slice_multiple, num_rows_);
        if (!visit(job, (unit - first) * slice_multiple, last_row)) return;
      }
    }
  }

 private:
  static constexpr int64_t least_units = 2;
  int64_t num_rows_, units_of_job_, units_, num_tasks_;
};

// The rows that a worker quantised last, in the forms that its weights need.
class LastRows {
 public:
  LastRows(const QuantKernels& kernels, const ActivationForms& forms, int64_t cols, std::byte* memory,
           size_t row_bytes)
      : kernels_(kernels), forms_(forms), cols_(cols), memory_(memory), row_bytes_(row_bytes) {}

  // out[r] = rows of `w` times x[r].
  void multiply(const WeightRows& w, const float* const* x, float* const* out, int count, std::byte* memory) {
    ActivationRow q[gemv_max_rows] = {};
    for (int r = 0; r < count; r++) {
      std::byte* at = memory_ + static_cast<size_t>(r) * row_bytes_;
      if (sources_[r] != x[r]) {
        sources_[r] = x[r];
        forms_.for_each(
            [&](ActivationForm form) { kernels_.quantize_row(x[r], cols_, forms_.row(at, cols_, form)); });
      }
      if (quant_is_integer(w.type)) q[r] = forms_.row(at, cols_, form_of(w.type));
    }
    coldstream::multiply(kernels_, w, {x, q, nullptr, out, count}, memory);
  }

 private:
  const QuantKernels& kernels_;
  const ActivationForms& forms_;
  const int64_t cols_;
  std::byte* const memory_;
  const size_t row_bytes_;
  const float* sources_[gemv_max_rows] = {};
};

}  // namespace

DecodeExpertsOp::DecodeExpertsOp(const QuantKernels& kernels, RoutedExpertsArgs args)
    : kernels_(kernels), args_(std::move(args)) {
  x_forms_.add(args_.gate.type);
  x_forms_.add(args_.up.type);
  h_forms_.add(args_.down.type);
}

size_t DecodeExpertsOp::row_bytes() const {
  return std::max(x_forms_.row_bytes(args_.gate.num_cols), h_forms_.row_bytes(args_.down.num_cols));
}

size_t DecodeExpertsOp::scratch_bytes() const {
  const int64_t cols = std::max(args_.gate.num_cols, args_.down.num_cols);
  return gemv_max_rows * (row_bytes() + 2 * max_slice * sizeof(float)) + multiply_bytes(kernels_, cols);
}

size_t DecodeExpertsOp::shared_bytes() const {
  return static_cast<size_t>(max_pairs * args_.gate.num_rows) * sizeof(float);
}

void DecodeExpertsOp::run(int stage, int rows, Worker& w) { stage == 0 ? gate_up(rows, w) : down(rows, w); }

DecodeExpertsOp::Work DecodeExpertsOp::list_work(int rows, Worker& w) const {
  Work found;
  found.num_jobs = 0;
  int count = 0;
  for (int32_t row = 0; row < rows; row++) {
    for (int32_t rank = 0; rank < args_.num_experts_per_tok; rank++) {
      const int32_t id = args_.topk_ids[row * args_.topk_stride + rank];
      if (id == not_here) continue;
      if (id < 0 || id >= args_.gate.num_matrices || count == max_pairs) {
        w.fail(count == max_pairs ? "more pairs than are few"
                                  : "an expert id lies outside the experts of the layer");
        return found;
      }
      found.pairs[count++] = {row, rank, id};
    }
  }
  std::stable_sort(found.pairs, found.pairs + count,
                   [](const Pair& a, const Pair& b) { return a.expert < b.expert; });
  for (int i = 0; i < count; i++) {
    Job* last = found.num_jobs == 0 ? nullptr : &found.jobs[found.num_jobs - 1];
    if (last != nullptr && found.pairs[i].expert == found.pairs[last->first].expert &&
        last->count < gemv_max_rows) {
      last->count++;
    } else {
      found.jobs[found.num_jobs++] = {i, 1};
    }
  }
  return found;
}

void DecodeExpertsOp::gate_up(int rows, Worker& w) const {
  const Work found = list_work(rows, w);
  const int64_t size = args_.gate.num_rows;
  auto* values = reinterpret_cast<float*>(w.memory->data() + gemv_max_rows * row_bytes());
  auto* memory = reinterpret_cast<std::byte*>(values + 2 * gemv_max_rows * max_slice);
  auto* hidden = reinterpret_cast<float*>(w.shared->data());
  LastRows last(kernels_, x_forms_, args_.gate.num_cols, w.memory->data(), row_bytes());
  const Slices slices(found.num_jobs, size, w.count);
  slices.for_each(w, [&](int64_t i, int64_t begin, int64_t end) {
    const Job& next = found.jobs[i];
    const Pair* pairs = found.pairs + next.first;
    const float* x[gemv_max_rows];
    float *gate[gemv_max_rows], *up[gemv_max_rows];
    for (int r = 0; r < next.count; r++) {
      x[r] = args_.x.row(pairs[r].row);
      gate[r] = values + r * max_slice;
      up[r] = values + (gemv_max_rows + r) * max_slice;
    }
    last.multiply(slice_of(args_.gate, pairs->expert, begin, end), x, gate, next.count, memory);
    last.multiply(slice_of(args_.up, pairs->expert, begin, end), x, up, next.count, memory);
    for (int r = 0; r < next.count; r++) {
      kernels_.swiglu(gate[r], up[r], end - begin, hidden + (next.first + r) * size + begin);
    }
    return true;
  });
}

void DecodeExpertsOp::down(int rows, Worker& w) const {
  const Work found = list_work(rows, w);
  const int64_t cols = args_.down.num_cols;
  auto* memory = w.memory->data() + gemv_max_rows * (row_bytes() + 2 * max_slice * sizeof(float));
  const auto* hidden = reinterpret_cast<const float*>(w.shared->data());
  LastRows last(kernels_, h_forms_, cols, w.memory->data(), row_bytes());
  const Slices slices(found.num_jobs, args_.down.num_rows, w.count);
  slices.for_each(w, [&](int64_t i, int64_t begin, int64_t end) {
    const Job& next = found.jobs[i];
    const Pair* pairs = found.pairs + next.first;
    const float* h[gemv_max_rows];
    float* out[gemv_max_rows];
    for (int r = 0; r < next.count; r++) {
      h[r] = hidden + (next.first + r) * cols;
      out[r] =
          args_.out + pairs[r].row * args_.out_row_stride + pairs[r].rank * args_.out_rank_stride + begin;
    }
    last.multiply(slice_of(args_.down, pairs->expert, begin, end), h, out, next.count, memory);
    return true;
  });
}

void ReadAheadOp::expect(const int32_t* ids, int count) {
  std::copy_n(ids, count, ids_);
  std::sort(ids_, ids_ + count);
  count_ = count;
}

void ReadAheadOp::run(int stage, int /*rows*/, Worker& w) {
  const auto read = [&](const Weight& weight, int64_t i, int64_t begin, int64_t end) {
    return read_ahead(weight.row(ids_[i], begin), static_cast<size_t>((end - begin) * weight.row_bytes));
  };
  const Slices slices(count_, stage == 0 ? gate_.num_rows : down_.num_rows, w.count);
  slices.for_each(w, [&](int64_t i, int64_t begin, int64_t end) {
    return stage == 0 ? read(gate_, i, begin, end) && read(up_, i, begin, end) : read(down_, i, begin, end);
  });
}

bool ReadAheadOp::read_ahead(const uint8_t* from, size_t num_bytes) const {
  constexpr size_t line = 64, at_once = 64 * line;
  for (size_t first = 0; first < num_bytes; first += at_once) {
    if (is_ended_()) return false;
    const size_t end = std::min(first + at_once, num_bytes);
    for (size_t i = first; i < end; i += line) __builtin_prefetch(from + i, 0, 2);
  }
  return true;
}

}  // namespace coldstream
