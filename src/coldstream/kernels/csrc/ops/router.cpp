// The router: logits of all experts, then each row's choice.
#include <algorithm>

#include "ops/float_ops.h"

namespace coldstream {

namespace {

constexpr int64_t rows_per_task = 32;
constexpr int64_t experts_per_task = 16;
constexpr int64_t choice_work = 8;  // floats of simple work that an expert's score and rank cost

class RouterOp : public Op {
 public:
  RouterOp(const FloatKernels& kernels, const RouterArguments& arguments)
      : kernels_(kernels), a_(arguments) {}
  const char* name() const override { return "router"; }
  int num_stages() const override { return 2; }
  size_t shared_bytes() const override { return sizeof(float) * a_.capacity * row_floats(); }

  bool runs_alone(int stage, int rows) const override {
    return rows * a_.matrix.num_rows * (stage == 0 ? a_.matrix.num_cols : choice_work) <= small_work;
  }

  void run(int stage, int rows, Worker& w) override {
    if (stage == 0) {
      compute_logits(rows, w);
    } else {
      choose_experts(rows, w);
    }
  }

 private:
  // A row has its logits, and behind them the memory that the choice needs.
  int64_t row_floats() const {
    const int64_t num_experts = a_.matrix.num_rows;
    return num_experts + (a_.rule.has_scores() ? num_experts + a_.rule.num_groups : 0);
  }

  float* logits(const Worker& w, int64_t row) const {
    return reinterpret_cast<float*>(w.shared->data()) + row * row_floats();
  }

  void compute_logits(int rows, Worker& w) {
    const int64_t num_experts = a_.matrix.num_rows;
    const int64_t expert_tasks = (num_experts + experts_per_task - 1) / experts_per_task;
    const int64_t row_tasks = (rows + rows_per_task - 1) / rows_per_task;
    for (int64_t task = w.take(); task < row_tasks * expert_tasks; task = w.take()) {
      const int64_t row = task / expert_tasks * rows_per_task,
                    expert = task % expert_tasks * experts_per_task;
      multiply(row, std::min(rows_per_task, rows - row), expert,
               std::min(experts_per_task, num_experts - expert), w);
    }
  }

  void multiply(int64_t row, int64_t num_rows, int64_t expert, int64_t num_experts, Worker& w) {
    const int64_t n = a_.matrix.num_cols, out_stride = row_floats();
    const uint8_t* matrix = a_.matrix.data + expert * a_.matrix.row_bytes;
    const float* x = a_.x.row(row);
    float* out = logits(w, row) + expert;
    if (a_.matrix.type == QuantType::f32) {
      kernels_.product_f32(x, a_.x.stride, num_rows, reinterpret_cast<const float*>(matrix), num_experts, out,
                           out_stride, n);
    } else if (a_.matrix.type == QuantType::f16) {
      kernels_.product_f16(x, a_.x.stride, num_rows, reinterpret_cast<const Float16*>(matrix), num_experts,
                           out, out_stride, n);
    } else {
      kernels_.product_bf16(x, a_.x.stride, num_rows, reinterpret_cast<const Bfloat16*>(matrix), num_experts,
                            out, out_stride, n);
    }
  }

  void choose_experts(int rows, Worker& w) {
    const int64_t k = a_.num_experts_per_tok, num_experts = a_.matrix.num_rows;
    for (int64_t row = w.take(); row < rows; row = w.take()) {
      kernels_.choose_experts(a_.rule, logits(w, row), logits(w, row) + num_experts, num_experts, k,
                              a_.topk_ids + row * k, a_.topk_weights + row * k);
    }
  }

  const FloatKernels& kernels_;
  const RouterArguments a_;
};

}  // namespace

std::unique_ptr<Op> make_router(const FloatKernels& kernels, const RouterArguments& arguments) {
  return std::make_unique<RouterOp>(kernels, arguments);
}

}  // namespace coldstream
