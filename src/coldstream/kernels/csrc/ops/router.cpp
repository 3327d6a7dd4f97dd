// The router: logits of all experts, then each row's softmax and choice.
#include <algorithm>

#include "ops/float_ops.h"

namespace coldstream {

namespace {

constexpr int64_t ROWS_PER_TASK = 32;
constexpr int64_t EXPERTS_PER_TASK = 16;
constexpr int64_t CHOICE_WORK = 8;  // floats of simple work that an expert's probability and rank cost

class router_op : public op {
 public:
  router_op(const float_kernels& kernels, const router_arguments& arguments)
      : kernels_(kernels), a_(arguments) {}
  const char* name() const override { return "router"; }
  int num_stages() const override { return 2; }
  size_t shared_bytes() const override { return sizeof(float) * a_.capacity * a_.matrix.num_rows; }

  bool runs_alone(int stage, int rows) const override {
    return rows * a_.matrix.num_rows * (stage == 0 ? a_.matrix.num_cols : CHOICE_WORK) <= SMALL_WORK;
  }

  void run(int stage, int rows, worker& w) override {
    if (stage == 0) {
      compute_logits(rows, w);
    } else {
      choose_experts(rows, w);
    }
  }

 private:
  float* logits(const worker& w, int64_t row) const {
    return reinterpret_cast<float*>(w.shared->data()) + row * a_.matrix.num_rows;
  }

  void compute_logits(int rows, worker& w) {
    const int64_t num_experts = a_.matrix.num_rows;
    const int64_t expert_tasks = (num_experts + EXPERTS_PER_TASK - 1) / EXPERTS_PER_TASK;
    const int64_t row_tasks = (rows + ROWS_PER_TASK - 1) / ROWS_PER_TASK;
    for (int64_t task = w.take(); task < row_tasks * expert_tasks; task = w.take()) {
      const int64_t row = task / expert_tasks * ROWS_PER_TASK,
                    expert = task % expert_tasks * EXPERTS_PER_TASK;
      multiply(row, std::min(ROWS_PER_TASK, rows - row), expert,
               std::min(EXPERTS_PER_TASK, num_experts - expert), w);
    }
  }

  void multiply(int64_t row, int64_t num_rows, int64_t expert, int64_t num_experts, worker& w) {
    const int64_t n = a_.matrix.num_cols, out_stride = a_.matrix.num_rows;
    const uint8_t* matrix = a_.matrix.data + expert * a_.matrix.row_bytes;
    const float* x = a_.x.row(row);
    float* out = logits(w, row) + expert;
    if (a_.matrix.type == quant_type::f32) {
      kernels_.product_f32(x, a_.x.stride, num_rows, reinterpret_cast<const float*>(matrix), num_experts, out,
                           out_stride, n);
    } else if (a_.matrix.type == quant_type::f16) {
      kernels_.product_f16(x, a_.x.stride, num_rows, reinterpret_cast<const float16*>(matrix), num_experts,
                           out, out_stride, n);
    } else {
      kernels_.product_bf16(x, a_.x.stride, num_rows, reinterpret_cast<const bfloat16*>(matrix), num_experts,
                            out, out_stride, n);
    }
  }

  void choose_experts(int rows, worker& w) {
    const int64_t k = a_.num_experts_per_tok;
    for (int64_t row = w.take(); row < rows; row = w.take()) {
      kernels_.softmax_topk(logits(w, row), a_.matrix.num_rows, k, a_.topk_ids + row * k,
                            a_.topk_weights + row * k);
    }
  }

  const float_kernels& kernels_;
  const router_arguments a_;
};

}  // namespace

std::unique_ptr<op> make_router(const float_kernels& kernels, const router_arguments& arguments) {
  return std::make_unique<router_op>(kernels, arguments);
}

}  // namespace coldstream
