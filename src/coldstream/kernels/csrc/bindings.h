// Shared by the binding files. Arrays are never converted: every argument says .noconvert().
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <memory>
#include <utility>

#include "runtime/runtime.h"

namespace nb = nanobind;

namespace coldstream {

// float32 rows with unit stride along the last dimension; the row stride may be larger than the row.
using Array2d = nb::ndarray<float, nb::ndim<2>, nb::device::cpu>;

// Keeps a Python object alive for as long as C++ holds the result; releases it with the GIL held.
inline std::shared_ptr<void> keep(nb::object object) {
  return {object.release().ptr(), [](void* p) {
            nb::gil_scoped_acquire gil;
            Py_DECREF(static_cast<PyObject*>(p));
          }};
}

// For an ndarray argument.
template <typename... A>
std::shared_ptr<void> keep(const nb::ndarray<A...>& array) {
  auto* held = new nb::ndarray<A...>(array);
  return {static_cast<void*>(held), [](void* p) {
            nb::gil_scoped_acquire gil;
            delete static_cast<nb::ndarray<A...>*>(p);
          }};
}

// Hands an op to the runtime: recorded under capture, otherwise run at once without the GIL.
inline void submit(Runtime& rt, std::unique_ptr<Op> next, int rows,
                   std::vector<std::shared_ptr<void>> owners) {
  if (rt.capturing()) {
    rt.submit(std::move(next), rows, std::move(owners));
  } else {
    nb::gil_scoped_release unlocked;
    rt.submit(std::move(next), rows, std::move(owners));
  }
}

void bind_runtime(nb::module_& m);  // Runtime, Graph, MappedFile, touch_pages, supported_tiers
void bind_quant(nb::module_& m);    // Weight, linear, embed, routed_experts, quantize_activations, dequantize
void bind_expert_pool(nb::module_& m);  // ExpertPool
void bind_ops(nb::module_& m);     // rms_norm, add, glu, rope_angles, router, combine_experts and bind_mixers
void bind_mixers(nb::module_& m);  // attention, gated_delta_net
void bind_indexer(nb::module_& m);  // choose_blocks
void bind_ngram(nb::module_& m);    // NgramTable, ngram_ids, ngram_rows, ngram_gate, ngram_conv, commit_ngram

void bind_sampler(nb::module_& m);  // TokenChoice, choose_tokens
void bind_hybrid(nb::module_& m);   // ExpertServer

}  // namespace coldstream
