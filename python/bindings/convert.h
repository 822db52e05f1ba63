// Python values to the core's structs and back. Wrong types become Python TypeErrors through
// pybind11.
#pragma once

#include <torch/csrc/utils/pybind.h>

#include <string>

#include "banyan/core/device.h"
#include "banyan/core/host.h"
#include "banyan/core/sample.h"

namespace banyan::bindings {

namespace py = pybind11;

const char* finish_name(FinishReason finish);
py::dict to_dict(const Trajectory& trajectory);
Trajectory trajectory_from(const py::dict& value);
py::dict to_dict(const Score& score);
Score score_from(const py::dict& value);

// Entry `key` of `options` as T, or `fallback` if absent.
template <typename T>
T get_or(const py::dict& options, const char* key, T fallback) {
  return options.contains(key) ? options[key].cast<T>() : fallback;
}

void bind_model(py::module_& module);
void bind_engine(py::module_& module);
void bind_sampling(py::module_& module);
void bind_ranks(py::module_& module);
void bind_sharded(py::module_& module);
void bind_train(py::module_& module);
void bind_trie_view(py::module_& module);
void bind_finetune(py::module_& module);
void bind_algo(py::module_& module);
void bind_user_function(py::module_& module);
void bind_library(py::module_& module);
void bind_feature(py::module_& module);
void bind_bench(py::module_& module);

}  // namespace banyan::bindings
