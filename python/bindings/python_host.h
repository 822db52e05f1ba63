// A run's host in Python: each call takes the GIL and calls the method of the same name.
#pragma once

#include <torch/csrc/utils/pybind.h>

#include <string>
#include <utility>

#include "banyan/core/host.h"

namespace banyan::bindings {

namespace py = pybind11;

// The methods of RunHost, below an interface that extends it.
template <typename Interface>
class PythonRunHost : public Interface {
 public:
  explicit PythonRunHost(py::object host) : host_(std::move(host)) {}

  void log(int64_t step, const Metrics& metrics) override {
    py::gil_scoped_acquire acquire;
    host_.attr("log")(step, metrics);
  }
  void say(const std::string& line) override {
    py::gil_scoped_acquire acquire;
    host_.attr("say")(line);
  }
  bool should_stop() override {
    py::gil_scoped_acquire acquire;
    if (PyErr_CheckSignals() != 0) throw py::error_already_set();
    return host_.attr("should_stop")().cast<bool>();
  }
  std::string save_state() override {
    py::gil_scoped_acquire acquire;
    return host_.attr("save_state")().cast<std::string>();
  }
  void load_state(const std::string& state) override {
    py::gil_scoped_acquire acquire;
    host_.attr("load_state")(state);
  }

 protected:
  py::object host_;
};

}  // namespace banyan::bindings
