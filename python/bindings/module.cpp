// The extension module banyan._C: convert, release the GIL, call, translate errors. No logic, no
// defaults of the configuration.
#include <ATen/Parallel.h>

#include "banyan/core/error.h"
#include "banyan/core/threads.h"
#include "banyan/kernels/cpu/gemm.h"
#include "convert.h"

PYBIND11_MODULE(_C, module) {
  namespace py = pybind11;
  module.doc() = "banyan's C++ core.";
  module.attr("torch_version") = BANYAN_TORCH_VERSION;
  py::register_exception_translator([](std::exception_ptr error) {
    try {
      if (error) std::rethrow_exception(error);
    } catch (const banyan::FileError& file) {
      PyErr_SetString(PyExc_OSError, file.what());
    }
  });
  module.def(
      "capabilities",
      [] {
        py::dict out;
        out["gemm_kernel"] = banyan::kernels::gemm_kernel_name();
        out["native_gemm"] = banyan::kernels::native_gemm_available();
        out["num_threads"] = at::get_num_threads();
        return out;
      },
      "Which kernels this processor runs.");
  module.def("set_num_threads", &at::set_num_threads, py::arg("num_threads"));
  module.def(
      "default_num_threads",
      [] { return banyan::choose_threads(banyan::thread_facts()); },
      "Threads that training takes: the cores of this process, shared with the other local ranks.");
  banyan::bindings::bind_ranks(module);
  banyan::bindings::bind_model(module);
  banyan::bindings::bind_sampling(module);
  banyan::bindings::bind_engine(module);
  banyan::bindings::bind_sharded(module);
  banyan::bindings::bind_train(module);
  banyan::bindings::bind_trie_view(module);
  banyan::bindings::bind_finetune(module);
  banyan::bindings::bind_algo(module);
  banyan::bindings::bind_user_function(module);
  banyan::bindings::bind_library(module);
  banyan::bindings::bind_feature(module);
  banyan::bindings::bind_bench(module);
}
