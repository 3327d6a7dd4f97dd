#include "quant/decode_experts.h"

#include <algorithm>

#include "quant/blocks.h"

namespace coldstream {

namespace {

constexpr int64_t max_slice = ExpertSlices::max_slice;

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
  const ExpertSlices slices(found.num_jobs, size, w.count);
  slices.for_each(w, [&](const ExpertSlices::Rows& rows) {
    const Job& next = found.jobs[rows.job];
    const Pair* pairs = found.pairs + next.first;
    const float* x[gemv_max_rows];
    float *gate[gemv_max_rows], *up[gemv_max_rows];
    for (int r = 0; r < next.count; r++) {
      x[r] = args_.x.row(pairs[r].row);
      gate[r] = values + r * max_slice;
      up[r] = values + (gemv_max_rows + r) * max_slice;
    }
    last.multiply(slice_of(args_.gate, pairs->expert, rows.begin, rows.end), x, gate, next.count, memory);
    last.multiply(slice_of(args_.up, pairs->expert, rows.begin, rows.end), x, up, next.count, memory);
    for (int r = 0; r < next.count; r++) {
      args_.glu.apply(kernels_, pairs->expert * size + rows.begin, rows.end - rows.begin, gate[r], up[r],
                      hidden + (next.first + r) * size + rows.begin);
    }
  });
}

void DecodeExpertsOp::down(int rows, Worker& w) const {
  const Work found = list_work(rows, w);
  const int64_t cols = args_.down.num_cols;
  auto* memory = w.memory->data() + gemv_max_rows * (row_bytes() + 2 * max_slice * sizeof(float));
  const auto* hidden = reinterpret_cast<const float*>(w.shared->data());
  LastRows last(kernels_, h_forms_, cols, w.memory->data(), row_bytes());
  const ExpertSlices slices(found.num_jobs, args_.down.num_rows, w.count);
  slices.for_each(w, [&](const ExpertSlices::Rows& rows) {
    const Job& next = found.jobs[rows.job];
    const Pair* pairs = found.pairs + next.first;
    const float* h[gemv_max_rows];
    float* out[gemv_max_rows];
    for (int r = 0; r < next.count; r++) {
      h[r] = hidden + (next.first + r) * cols;
      out[r] = args_.out + pairs[r].row * args_.out_row_stride + pairs[r].rank * args_.out_rank_stride +
               rows.begin;
    }
    last.multiply(slice_of(args_.down, pairs->expert, rows.begin, rows.end), h, out, next.count, memory);
  });
}

}  // namespace coldstream
