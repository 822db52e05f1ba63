// Engine: generation. Everything runs with the GIL released; it is taken once per finished
// trajectory of generate(), and never by the engine's own thread.
#include "banyan/rollout/engine.h"

#include <pybind11/functional.h>

#include "engine_convert.h"

namespace banyan::bindings {
namespace {

using rollout::Engine;
using Release = py::call_guard<py::gil_scoped_release>;

py::dict generate(Engine& engine,
                  const std::vector<py::dict>& rows,
                  const py::dict& params,
                  const std::function<void(py::dict)>& on_finished) {
  std::vector<rollout::Prompt> prompts;
  for (const py::dict& row : rows) prompts.push_back(prompt_from(row));
  const rollout::SamplingParams sampling = sampling_params(params);
  rollout::GenerateStats stats;
  {
    py::gil_scoped_release release;
    stats = engine.generate(
        prompts,
        sampling,
        [&](Trajectory&& trajectory) {
          py::gil_scoped_acquire acquire;
          on_finished(to_dict(trajectory));
        },
        [] {
          py::gil_scoped_acquire acquire;
          if (PyErr_CheckSignals() != 0) throw py::error_already_set();
          return false;
        });
  }
  return to_dict(stats);
}

std::string submit(Engine& engine, const py::dict& request) {
  rollout::Request wanted = request_from(request);
  py::gil_scoped_release release;
  return engine.submit(std::move(wanted));
}

// Events give their memory back to the engine with the next call of the thread.
py::list drain(Engine& engine) {
  static thread_local std::vector<rollout::Event> events;
  {
    py::gil_scoped_release release;
    engine.drain(events);
  }
  return to_list(events);
}

void pause(Engine& engine, const std::string& mode, double timeout) {
  const rollout::PauseMode wanted = pause_mode(mode);
  py::gil_scoped_release release;
  engine.pause(wanted, timeout);
}

int64_t sleep(Engine& engine, int32_t level, const std::string& mode, double timeout) {
  const rollout::PauseMode wanted = pause_mode(mode);
  py::gil_scoped_release release;
  return engine.sleep(level, wanted, timeout);
}

// RequestError: a ValueError with the attributes code, param, message and retry_after.
void bind_request_error(py::module_& module) {
  static PyObject* type = nullptr;
  type = PyErr_NewExceptionWithDoc("banyan._C.RequestError",
                                   "A request that the rollout engine does not take: code (400 "
                                   "never, 409 not in this state, 503 not now), param, message, "
                                   "retry_after (seconds; 0: unknown).",
                                   PyExc_ValueError,
                                   nullptr);
  if (type == nullptr) throw py::error_already_set();
  module.add_object("RequestError", py::reinterpret_borrow<py::object>(type));
  py::register_exception_translator([](std::exception_ptr error) {
    try {
      if (error) std::rethrow_exception(error);
    } catch (const rollout::RequestError& refused) {
      py::object value = py::reinterpret_borrow<py::object>(type)(refused.what());
      value.attr("code") = refused.code;
      value.attr("param") = refused.param;
      value.attr("message") = refused.what();
      value.attr("retry_after") = refused.retry_after;
      PyErr_SetObject(type, value.ptr());
    }
  });
}

}  // namespace

void bind_engine(py::module_& module) {
  bind_request_error(module);
  py::class_<Engine>(module, "Engine", "The rollout engine over a model, which it keeps alive.")
      .def(py::init([](models::CausalLM& model,
                       const py::dict& options,
                       std::vector<std::string> token_bytes) {
             return std::make_unique<Engine>(
                 model, engine_options(options), std::move(token_bytes));
           }),
           py::arg("model"),
           py::arg("options") = py::dict(),
           py::arg("token_bytes") = std::vector<std::string>(),
           py::keep_alive<1, 2>(),
           "`options`: fields of EngineOptions; `token_bytes`: the bytes of every id, for stop "
           "strings.")
      .def("generate",
           &generate,
           py::arg("prompts"),
           py::arg("params"),
           py::arg("on_finished"),
           "Generates every response of every prompt; `on_finished` gets each trajectory as it "
           "ends.")
      .def("start", &Engine::start, Release(), "Starts the thread that serves submitted requests.")
      .def("stop",
           &Engine::stop,
           py::arg("timeout") = 60.0,
           Release(),
           "Aborts what is left and ends the thread.")
      .def("submit",
           &submit,
           py::arg("request"),
           "Takes a request (fields of Request, `params` a dict) and returns its id.")
      .def("drain", &drain, "Everything that came out since the last call; never waits.")
      .def("event_fd", &Engine::event_fd, "Readable while drain() has something.")
      .def("abort",
           &Engine::abort,
           py::arg("ids") = std::vector<std::string>(),
           Release(),
           "Ends requests (none named: all) with what they have; the number of requests.")
      .def("pause",
           &pause,
           py::arg("mode") = "abort",
           py::arg("timeout") = 60.0,
           "abort, wait, keep or retract.")
      .def("resume", &Engine::resume, Release(), "A second one has no effect.")
      .def("sleep",
           &sleep,
           py::arg("level") = 1,
           py::arg("mode") = "abort",
           py::arg("timeout") = 60.0,
           "Gives memory back; the bytes, measured.")
      .def("wake",
           &Engine::wake,
           py::arg("tags") = std::vector<std::string>(),
           Release(),
           "weights, kv_cache (none: all); what is still asleep.")
      .def("update_weights_from_disk",
           &Engine::update_weights_from_disk,
           py::arg("directory"),
           py::arg("version"),
           py::arg("keep") = false,
           py::arg("timeout") = 600.0,
           Release(),
           "Verifies a directory's tensors, then switches between two passes.")
      .def("weights_changed",
           &Engine::weights_changed,
           py::arg("version"),
           Release(),
           "The model's own weights have changed.")
      .def("set_weight_version",
           &Engine::set_weight_version,
           py::arg("version"),
           Release(),
           "Labels the present weights.")
      .def("reset_prefix_cache",
           &Engine::reset_prefix_cache,
           py::arg("retract_running") = false,
           Release(),
           "Drops what is cached.")
      .def("weight_checksums",
           &Engine::weight_checksums,
           Release(),
           "SHA-256 of every parameter by its name.")
      .def(
          "stats",
          [](const Engine& engine) {
            rollout::EngineStats stats;
            {
              py::gil_scoped_release release;
              stats = engine.stats();
            }
            return to_dict(stats);
          },
          "Figures of this moment and counters.");
}

}  // namespace banyan::bindings
