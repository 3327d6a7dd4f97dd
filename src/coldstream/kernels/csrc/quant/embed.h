// Rows of a table by token id, as float32.
#pragma once

#include "quant/linear.h"

namespace coldstream {

class EmbedOp : public Op {
 public:
  EmbedOp(const QuantKernels& kernels, Weight table, const int32_t* token_ids, FloatRowsOut out)
      : kernels_(kernels), table_(std::move(table)), token_ids_(token_ids), out_(out) {}
  const char* name() const override { return "embed"; }
  bool runs_alone(int, int rows) const override { return rows * table_.num_cols <= small_work; }
  void run(int, int rows, Worker& w) override {
    for (int64_t t = w.take(); t < rows; t = w.take()) {
      const int64_t id = token_ids_[t];
      if (id < 0 || id >= table_.num_rows) {
        w.fail("a token id lies outside the vocabulary");
      } else {
        kernels_.dequantize_row(table_.type, table_.data + id * table_.row_bytes, table_.num_cols,
                                out_.row(t));
      }
    }
  }

 private:
  const QuantKernels& kernels_;
  Weight table_;
  const int32_t* token_ids_;
  FloatRowsOut out_;
};

// All rows of all matrices of a weight, one after the other.
class DequantizeOp : public Op {
 public:
  DequantizeOp(const QuantKernels& kernels, Weight w, float* out)
      : kernels_(kernels), weight_(std::move(w)), out_(out) {}
  const char* name() const override { return "dequantize"; }
  void run(int, int, Worker& w) override {
    for (int64_t i = w.take(); i < weight_.num_matrices * weight_.num_rows; i = w.take()) {
      const uint8_t* row = weight_.data + i / weight_.num_rows * weight_.matrix_bytes +
                           i % weight_.num_rows * weight_.row_bytes;
      kernels_.dequantize_row(weight_.type, row, weight_.num_cols, out_ + i * weight_.num_cols);
    }
  }

 private:
  const QuantKernels& kernels_;
  Weight weight_;
  float* out_;
};

}  // namespace coldstream
