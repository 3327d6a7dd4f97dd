#include "bindings.h"

#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <optional>
#include <tuple>

#include "quant/expert_pool.h"
#include "runtime/mapped_file.h"

namespace coldstream {

namespace {

using namespace nb::literals;

using FileList = std::vector<std::pair<int, std::string>>;
using PartList = std::vector<std::tuple<int, uint64_t, uint64_t>>;

std::shared_ptr<ExpertPool> make_pool(const FileList& files, const std::vector<PartList>& layers,
                                      int num_experts, int num_threads) {
  std::vector<int> descriptors;
  std::vector<std::string> names;
  for (const auto& [descriptor, name] : files) {
    descriptors.push_back(descriptor);
    names.push_back(name);
  }
  std::vector<std::vector<ExpertPool::Part>> parts;
  for (const PartList& layer : layers) {
    auto& into = parts.emplace_back();
    for (const auto& [file, offset, bytes] : layer) {
      if (file < 0 || file >= static_cast<int>(files.size())) {
        throw std::invalid_argument("a part lies in file " + std::to_string(file) + " of " +
                                    std::to_string(files.size()));
      }
      into.push_back({file, offset, bytes});
    }
  }
  auto reader = std::make_unique<FileReader>(descriptors, std::move(names), num_threads);
  return std::make_shared<ExpertPool>(std::move(reader), std::move(parts), num_experts);
}

nb::ndarray<nb::numpy, int64_t, nb::ndim<1>> to_array(const std::vector<int64_t>& values) {
  auto* copy = new std::vector<int64_t>(values);
  nb::capsule owner(copy, [](void* p) noexcept { delete static_cast<std::vector<int64_t>*>(p); });
  return {copy->data(), {copy->size()}, owner};
}

void set_pool_order(ExpertPool& pool, int size_class,
                    nb::ndarray<const int64_t, nb::ndim<1>, nb::c_contig, nb::device::cpu> order) {
  pool.set_order(size_class, std::vector<int>(order.data(), order.data() + order.size()));
}

void preload(ExpertPool& pool, int layer, const std::vector<int32_t>& experts) {
  const char* problem = pool.preload(layer, experts);
  if (pool.reader().failed()) throw ModelChangedError(pool.reader().failure());
  if (problem != nullptr) throw std::invalid_argument(problem);
}

std::optional<std::vector<uintptr_t>> hold(ExpertPool& pool, int layer, int32_t expert) {
  std::vector<uintptr_t> parts;
  for (const uint8_t* part : pool.hold(layer, expert)) parts.push_back(reinterpret_cast<uintptr_t>(part));
  return parts.empty() ? std::nullopt : std::make_optional(parts);
}

std::optional<std::pair<int, std::vector<uintptr_t>>> reserve(ExpertPool& pool, int layer, int32_t expert,
                                                              size_t num_worse) {
  const auto found = pool.reserve(layer, expert, num_worse);
  if (!found) return std::nullopt;
  std::vector<uintptr_t> parts;
  for (uint8_t* part : found->parts) parts.push_back(reinterpret_cast<uintptr_t>(part));
  return std::make_pair(found->slot, parts);
}

}  // namespace

void bind_expert_pool(nb::module_& m) {
  nb::class_<ExpertPool>(m, "ExpertPool",
                         "Experts in a bounded part of memory, read from their file as they are needed.")
      .def(nb::new_(&make_pool), "files"_a, "layers"_a, "num_experts"_a, "num_threads"_a,
           "files: (descriptor, name for errors) of each; the descriptors are not kept. layers: for each, "
           "the (file, offset, bytes) of the matrices of its first expert; those of the others follow at "
           "intervals of `bytes`. Raises OSError.")
      .def_prop_ro("slot_bytes", &ExpertPool::slot_bytes, "Bytes of a slot, for each size of slots.")
      .def("class_of", &ExpertPool::class_of, "layer"_a, "Index into slot_bytes.")
      .def("allocate", &ExpertPool::allocate, "num_slots"_a, "num_staging"_a,
           "Allocates num_slots slots of each size. A step of prefill uses at most num_staging of them for "
           "experts that are not expected to be needed again.")
      .def(
          "owners", [](const ExpertPool& pool, int size_class) { return to_array(pool.owners(size_class)); },
          "size_class"_a, "int64 [slots] of layer · experts + expert, or -1 for a free slot; a copy.")
      .def("set_order", set_pool_order, "size_class"_a, nb::arg("order").noconvert(),
           "int64 indices of slots, in the order in which they are to be given to other experts.")
      .def(
          "preload", preload, "layer"_a, "experts"_a, nb::call_guard<nb::gil_scoped_release>(),
          "Between steps: reads these experts of a layer into free slots. Raises ValueError if there are too few, "
          "ModelChangedError if the file cannot be read.")
      .def(
          "memory",
          [](const ExpertPool& pool) {
            const auto [begin, num_bytes] = pool.memory();
            return std::make_pair(reinterpret_cast<uintptr_t>(begin), num_bytes);
          },
          "The address of all slots, and their bytes.")
      .def(
          "hold", hold, "layer"_a, "expert"_a,
          "The addresses of an expert's matrices, which stays where it is until `release`. None, with nothing "
          "held, if it is not in memory or too few slots would be left for other experts.")
      .def("release", &ExpertPool::release, "layer"_a, "expert"_a,
           "Ends one `hold` of an expert. Raises ValueError if there is none.")
      .def(
          "reserve", reserve, "layer"_a, "expert"_a, "num_worse"_a,
          "(slot, addresses of the matrices) of a place for an expert that is not in memory, until `deliver`: "
          "a free one, or that of one of the first num_worse in the order. None if there is no such place.")
      .def("deliver", &ExpertPool::deliver, "layer"_a, "expert"_a, "slot"_a, "is_whole"_a,
           "Ends `reserve`. is_whole: whether the bytes are there; otherwise the slot is free again. Raises "
           "ValueError for a slot that is not reserved.")
      .def(
          "keep", &ExpertPool::keep, "layer"_a,
          "From now on the layer's experts give their slots to no other. There must be slots for all of them.")
      .def("clear", &ExpertPool::clear, nb::call_guard<nb::gil_scoped_release>(),
           "Forgets all experts in memory that are not held, as after a change of the file.")
      .def("begin_step", &ExpertPool::begin_step, "is_prefill"_a, nb::call_guard<nb::gil_scoped_release>(),
           "Before each run of a graph. Ends what a failed run has left.")
      .def(
          "used", [](const ExpertPool& pool) { return to_array(pool.used()); },
          "int64 numbers of the experts that the step has used, a copy.")
      .def_prop_ro(
          "is_direct", [](ExpertPool& pool) { return pool.reader().is_direct(); },
          "Whether all files are read past the page cache.")
      .def(
          "count",
          [](ExpertPool& pool) {
            const auto [hits, misses, wait_s] = pool.count();
            const auto [bytes, retries] = pool.reader().count();
            return std::make_tuple(hits, misses, wait_s, bytes, retries);
          },
          "(hits, misses, seconds waited, bytes read, reads tried again) since the pool was made.");
}

}  // namespace coldstream
