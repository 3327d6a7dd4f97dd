#include "bindings.h"

#include <nanobind/stl/pair.h>

#include <system_error>

#include "runtime/mapped_file.h"
#include "runtime/runtime.h"
#include "runtime/touch_pages.h"

namespace coldstream {

namespace {

using namespace nb::literals;

// The Python classes of our errors; never freed, like the module's translator.
struct ErrorClasses {
  nb::object model_changed, generation_fault;
};

void translate(const std::exception_ptr& error, void* payload) {
  const auto* classes = static_cast<const ErrorClasses*>(payload);
  try {
    std::rethrow_exception(error);
  } catch (const ModelChangedError& e) {
    PyErr_SetString(classes->model_changed.ptr(), e.what());
  } catch (const ForkedError& e) {
    PyErr_SetString(classes->generation_fault.ptr(), e.what());
  } catch (const std::system_error& e) {
    PyErr_SetObject(PyExc_OSError, nb::make_tuple(e.code().value(), e.what()).ptr());
  }
}

void bind_errors() {
  const nb::module_ errors = nb::module_::import_("coldstream.errors");
  auto* classes = new ErrorClasses{errors.attr("ModelChangedError"), errors.attr("GenerationFault")};
  nb::register_exception_translator(translate, classes);
}

Tier tier_from_argument(const std::string& name) {
  return name == "auto" ? tier_best() : tier_from_name(name.c_str());
}

std::vector<std::string> supported_tiers() {
  std::vector<std::string> names;
  for (Tier t : tiers) {
    if (tier_supported(t)) names.push_back(tier_name(t));
  }
  return names;
}

void bind_touch_pages(nb::module_& m) {
  m.def(
      "touch_pages",
      [](Runtime& rt, std::shared_ptr<MappedFile> file, uint64_t offset, uint64_t num_bytes) {
        if (rt.capturing()) throw std::invalid_argument("touch_pages has no rows and cannot be captured");
        submit(rt, std::make_unique<TouchPages>(std::move(file), offset, num_bytes), 1, {});
      },
      "runtime"_a, "file"_a, "offset"_a, "num_bytes"_a,
      "Reads one byte of every page of the range, on all threads. Raises ModelChangedError when a page is "
      "gone.");
}

}  // namespace

void bind_runtime(nb::module_& m) {
  bind_errors();
  m.def("supported_tiers", supported_tiers, "Names of the tiers this machine can run, from generic upwards.");

  nb::class_<MappedFile>(m, "MappedFile", "A file mapped read-only; only ops read it.")
      .def(nb::init<int, uint64_t, std::string>(), "fd"_a, "size"_a, "name"_a = "the model file",
           "Maps the first `size` bytes of the open descriptor `fd`, which may be closed afterwards; `name` "
           "is what "
           "errors call the file. Raises OSError, or ModelChangedError if the file is shorter.")
      .def_prop_ro("size", &MappedFile::size)
      .def_prop_ro(
          "address", [](const MappedFile& file) { return reinterpret_cast<uintptr_t>(file.data()); },
          "Where it is mapped: for registering with a device, not for reading.")
      .def("read_ahead", &MappedFile::read_ahead, "offset"_a, "num_bytes"_a,
           nb::call_guard<nb::gil_scoped_release>(),
           "Asks the system to read the range soon. Returns nothing: it is no proof that the bytes can be "
           "read, which touch_pages gives. Raises ValueError for a range outside the mapping.");

  nb::class_<Graph>(m, "Graph",
                    "Ops over fixed buffers, captured once and run many times. The buffers must outlive it.")
      .def_prop_ro("num_ops", &Graph::num_ops)
      .def_prop_ro("capacity", &Graph::capacity)
      .def_prop_ro("scratch_bytes", &Graph::scratch_bytes,
                   "Memory of the threads that a run takes at most; graphs of a runtime share it.")
      .def("run", &Graph::run, "rows"_a, nb::call_guard<nb::gil_scoped_release>(),
           "Runs all ops on the first `rows` rows of their buffers. Raises ValueError for rows outside 1 … "
           "capacity or "
           "data out of range, ModelChangedError when the model file shrank, GenerationFault after a fork.")
      .def("profile", &Graph::profile, "rows"_a, nb::call_guard<nb::gil_scoped_release>(),
           "The same as run; returns (op name, seconds) in order.");

  nb::class_<Runtime>(m, "Runtime", "A thread pool, a tier, and the capture of ops into graphs.")
      .def(
          "__init__",
          [](Runtime* self, int threads, const std::string& name) {
            new (self) Runtime(threads, tier_from_argument(name));
          },
          "threads"_a, "tier"_a = "auto",
          "`threads` workers, the calling thread included. ValueError for a tier that is unknown or that "
          "this machine "
          "cannot run.")
      .def_prop_ro("tier", [](const Runtime& self) { return tier_name(self.active_tier()); })
      .def_prop_ro("threads", &Runtime::threads)
      .def_prop_rw("active_threads", &Runtime::active_threads, &Runtime::activate_threads,
                   "How many threads take part in the runs that begin from now on; the others sleep.")
      .def_prop_ro("stays_awake", &Runtime::stays_awake,
                   "Whether its threads poll between two runs, and do not sleep.")
      .def_prop_ro("capturing", &Runtime::capturing)
      .def("begin_capture", &Runtime::begin_capture, "capacity"_a,
           "From now on ops called with this runtime are recorded, not run; their arrays must have "
           "`capacity` rows.")
      .def("end_capture", &Runtime::end_capture, "Ends the capture and returns its Graph.");

  bind_touch_pages(m);
}

}  // namespace coldstream
