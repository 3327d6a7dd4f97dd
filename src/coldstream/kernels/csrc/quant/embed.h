// Rows of a table by token id, as float32.
#pragma once

#include "quant/linear.h"

namespace coldstream {

class embed_op : public op {
 public:
  embed_op(const quant_kernels& kernels, weight table, const int32_t* token_ids, float_rows_out out)
      : kernels_(kernels), table_(std::move(table)), token_ids_(token_ids), out_(out) {}
  const char* name() const override { return "embed"; }
  bool runs_alone(int, int rows) const override { return rows * table_.num_cols <= SMALL_WORK; }
  void run(int, int rows, worker& w) override {
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
  const quant_kernels& kernels_;
  weight table_;
  const int32_t* token_ids_;
  float_rows_out out_;
};

// All rows of all matrices of a weight, one after the other.
class dequantize_op : public op {
 public:
  dequantize_op(const quant_kernels& kernels, weight w, float* out)
      : kernels_(kernels), weight_(std::move(w)), out_(out) {}
  const char* name() const override { return "dequantize"; }
  void run(int, int, worker& w) override {
    for (int64_t i = w.take(); i < weight_.num_matrices * weight_.num_rows; i = w.take()) {
      const uint8_t* row = weight_.data + i / weight_.num_rows * weight_.matrix_bytes +
                           i % weight_.num_rows * weight_.row_bytes;
      kernels_.dequantize_row(weight_.type, row, weight_.num_cols, out_ + i * weight_.num_cols);
    }
  }

 private:
  const quant_kernels& kernels_;
  weight weight_;
  float* out_;
};

}  // namespace coldstream
