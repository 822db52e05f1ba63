// A Python object that C++ owns from any thread.
#pragma once

#include <torch/csrc/utils/pybind.h>

#include <memory>

namespace banyan::bindings {

namespace py = pybind11;

// Lives until its last C++ owner is gone, whoever that is and whenever: without the GIL, or after
// the interpreter has ended (then it is left alone).
using Callable = std::shared_ptr<py::object>;

inline Callable hold(py::object function) {
  return {new py::object(std::move(function)), [](py::object* held) {
            if (Py_IsInitialized() == 0) return;
            const py::gil_scoped_acquire acquire;
            delete held;
          }};
}

}  // namespace banyan::bindings
