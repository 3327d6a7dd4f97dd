// The package's scalar device code as functions that ctypes can call.
#include "device.h"

#include "dequantize/values.cuh"

using namespace coldstream;

template <int type>
void load_block(Floats<type>, const uint8_t* block, float* out) {
  *out = load_float<type>(block, 0);
}

template <class Weights>
void load_block(Weights, const uint8_t* block, float* out) {
  for (int r = 0; r < Weights::elements / run_values; r++) {
    float values[run_values];
    load_run<Weights>(block, r, values);
    __builtin_memcpy(out + r * run_values, values, sizeof values);
  }
}

// Values of `count` blocks (floats) of the type that the file is compiled for.
extern "C" void dequantize_blocks(const uint8_t* blocks, int count, float* out) {
  for (int64_t i = 0; i < count; i++)
    load_block(SOURCE{}, blocks + i * SOURCE::bytes, out + i * SOURCE::elements);
}

extern "C" void swiglu(const float* gate, const float* up, int count, float* out) {
  for (int i = 0; i < count; i++) out[i] = exact_swiglu(gate[i], up[i]);
}

extern "C" void exp_of(const float* x, int count, float* out) {
  for (int i = 0; i < count; i++) out[i] = exact_exp(x[i]);
}

extern "C" void sigmoid(const float* x, int count, float* out) {
  for (int i = 0; i < count; i++) out[i] = exact_sigmoid(x[i]);
}

extern "C" void silu(const float* x, int count, float* out) {
  for (int i = 0; i < count; i++) out[i] = exact_silu(x[i]);
}

extern "C" void one_over_sqrt(const float* x, int count, float* out) {
  for (int i = 0; i < count; i++) out[i] = inverse_sqrt(x[i]);
}

// Sums of rows of eight, and of sixteen.
extern "C" void sum_eights(const float* x, int count, float* out) {
  for (int i = 0; i < count; i++) out[i] = sum_of_eight(x + 8 * i);
}

extern "C" void sum_sixteens(const float* x, int count, float* out) {
  for (int i = 0; i < count; i++) out[i] = sum_of_sixteen(x + 16 * i);
}
