#include "quant/few_experts.h"

#include <algorithm>

#include "quant/blocks.h"

namespace coldstream {

namespace {

constexpr int64_t max_slice = 64;    // weight rows of a task; bounds the values kept in private memory
constexpr int64_t slice_multiple = 4;

int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

// The row that a worker quantised last, in the forms that its weights need.
class last_row {
 public:
  last_row(const quant_kernels& kernels, const activation_forms& forms, int64_t cols, std::byte* memory)
      : kernels_(kernels), forms_(forms), cols_(cols), memory_(memory) {}

  // out = rows of `w` times x.
  void multiply(const weight_rows& w, const float* x, float* out, std::byte* memory) {
    if (source_ != x) {
      source_ = x;
      forms_.for_each([&](activation_form form) {
        kernels_.quantize_row(x, cols_, forms_.row(memory_, cols_, form));
      });
    }
    activation_row q{};
    if (quant_is_integer(w.type)) q = forms_.row(memory_, cols_, form_of(w.type));
    coldstream::multiply(kernels_, w, {&x, &q, nullptr, &out, 1}, memory);
  }

 private:
  const quant_kernels& kernels_;
  const activation_forms& forms_;
  const int64_t cols_;
  std::byte* const memory_;
  const float* source_ = nullptr;
};

}  // namespace

few_experts_op::few_experts_op(const quant_kernels& kernels, routed_experts_args args)
    : kernels_(kernels), args_(std::move(args)) {
  x_forms_.add(args_.gate.type);
  x_forms_.add(args_.up.type);
  h_forms_.add(args_.down.type);
}

size_t few_experts_op::row_bytes() const {
  return std::max(x_forms_.row_bytes(args_.gate.num_cols), h_forms_.row_bytes(args_.down.num_cols));
}

size_t few_experts_op::scratch_bytes() const {
  const int64_t cols = std::max(args_.gate.num_cols, args_.down.num_cols);
  return row_bytes() + 2 * max_slice * sizeof(float) + multiply_bytes(kernels_, cols);
}

size_t few_experts_op::shared_bytes() const {
  return static_cast<size_t>(max_pairs * args_.gate.num_rows) * sizeof(float);
}

void few_experts_op::run(int stage, int rows, worker& w) { stage == 0 ? gate_up(rows, w) : down(rows, w); }

int few_experts_op::list_pairs(int rows, worker& w, pair (&pairs)[max_pairs]) const {
  int count = 0;
  for (int32_t row = 0; row < rows; row++) {
    for (int32_t rank = 0; rank < args_.num_experts_per_tok; rank++) {
      const int32_t id = args_.topk_ids[row * args_.topk_stride + rank];
      if (id == not_here) continue;
      if (id < 0 || id >= args_.gate.num_matrices) {
        w.fail("an expert id lies outside the experts of the layer");
        return 0;
      }
      pairs[count++] = {row, rank, id};
    }
  }
  return count;
}

// Calls run_slice(number of the pair, begin, end) for the slices of `num_rows` weight rows of every pair:
// about one slice per worker for few pairs, two for more.
template <typename F>
void few_experts_op::for_each_slice(int num_pairs, int64_t num_rows, worker& w, F&& run_slice) const {
  const int64_t num_shares = w.count * (num_pairs <= 2 ? 1 : 2);
  const int64_t share = ceil_div(num_pairs * num_rows, num_shares * slice_multiple) * slice_multiple;
  const int64_t slice = std::clamp<int64_t>(share, 2 * slice_multiple, max_slice);
  const int64_t slices = ceil_div(num_rows, slice);
  for (int64_t task = w.take(); task < num_pairs * slices; task = w.take()) {
    const int64_t begin = task % slices * slice;
    run_slice(task / slices, begin, std::min(begin + slice, num_rows));
  }
}

void few_experts_op::gate_up(int rows, worker& w) const {
  pair pairs[max_pairs];
  const int num_pairs = list_pairs(rows, w, pairs);
  const int64_t size = args_.gate.num_rows;
  auto* values = reinterpret_cast<float*>(w.memory->data() + row_bytes());
  auto* memory = reinterpret_cast<std::byte*>(values + 2 * max_slice);
  float *const gate = values, *const up = values + max_slice;
  auto* hidden = reinterpret_cast<float*>(w.shared->data());
  last_row last(kernels_, x_forms_, args_.gate.num_cols, w.memory->data());
  for_each_slice(num_pairs, size, w, [&](int64_t i, int64_t begin, int64_t end) {
    const float* x = args_.x.row(pairs[i].row);
    last.multiply(slice_of(args_.gate, pairs[i].expert, begin, end), x, gate, memory);
    last.multiply(slice_of(args_.up, pairs[i].expert, begin, end), x, up, memory);
    kernels_.swiglu(gate, up, end - begin, hidden + i * size + begin);
  });
}

void few_experts_op::down(int rows, worker& w) const {
  pair pairs[max_pairs];
  const int num_pairs = list_pairs(rows, w, pairs);
  const int64_t cols = args_.down.num_cols;
  auto* memory = w.memory->data() + row_bytes() + 2 * max_slice * sizeof(float);
  const auto* hidden = reinterpret_cast<const float*>(w.shared->data());
  last_row last(kernels_, h_forms_, cols, w.memory->data());
  for_each_slice(num_pairs, args_.down.num_rows, w, [&](int64_t i, int64_t begin, int64_t end) {
    const float* h = hidden + i * cols;
    float* out = args_.out + pairs[i].row * args_.out_row_stride + pairs[i].rank * args_.out_rank_stride + begin;
    last.multiply(slice_of(args_.down, pairs[i].expert, begin, end), h, out, memory);
  });
}

}  // namespace coldstream
