// finetune: training on given text with a Python host.
#include "banyan/train/finetune.h"

#include <cstring>

#include "banyan/core/error.h"
#include "banyan/train/finetune_json.h"
#include "banyan/train/finetune_layout.h"
#include "banyan/train/objective.h"
#include "convert.h"
#include "python_host.h"
#include "ranks.h"

namespace banyan::bindings {
namespace {

// A one-dimensional buffer (array, bytes, NumPy) of elements as large as T.
template <typename T>
std::vector<T> values_of(const py::handle& value) {
  const py::buffer_info info = value.cast<py::buffer>().request();
  BANYAN_CHECK(info.ndim == 1 && info.itemsize == sizeof(T) && info.strides[0] == sizeof(T),
               "[examples] wanted a plain buffer of ",
               sizeof(T),
               "-byte elements");
  std::vector<T> out(static_cast<size_t>(info.size));
  if (!out.empty()) std::memcpy(out.data(), info.ptr, out.size() * sizeof(T));
  return out;
}

// [[(tokens, scored), ...] per row], tokens int32 and scored uint8.
std::vector<train::Example> examples_from(const py::object& rows) {
  std::vector<train::Example> out;
  for (const py::handle& row : rows) {
    train::Example& example = out.emplace_back();
    for (const py::handle& item : row) {
      const auto pair = item.cast<py::tuple>();
      Sample& sample = example.emplace_back();
      sample.tokens = values_of<int32_t>(pair[0]);
      sample.scored = values_of<uint8_t>(pair[1]);
      BANYAN_CHECK(!sample.tokens.empty() && sample.tokens.size() == sample.scored.size(),
                   "[examples] wanted as many mask entries as tokens, got ",
                   sample.scored.size(),
                   " and ",
                   sample.tokens.size());
    }
  }
  return out;
}

class PythonFinetuneHost final : public PythonRunHost<train::FinetuneHost> {
 public:
  using PythonRunHost::PythonRunHost;

  std::vector<int64_t> next_rows(int64_t count) override {
    py::gil_scoped_acquire acquire;
    return host_.attr("next_rows")(count).cast<std::vector<int64_t>>();
  }
  std::vector<train::Example> examples(const std::vector<int64_t>& rows, bool validation) override {
    py::gil_scoped_acquire acquire;
    return examples_from(host_.attr("examples")(rows, validation));
  }
};

py::dict run_finetune(const std::string& config_json,
                      const py::object& host,
                      const py::object& ranks) {
  const FinetuneConfig config = train::finetune_config_from_json(config_json);
  PythonFinetuneHost python_host(host);
  const std::shared_ptr<parallel::Groups> groups = groups_from(ranks);
  train::TrainSummary summary;
  {
    py::gil_scoped_release release;
    summary = train::finetune(config, python_host, groups.get());
  }
  py::dict out;
  out["first_step"] = summary.first_step;
  out["last_step"] = summary.last_step;
  out["checkpoint"] = summary.checkpoint;
  out["stopped_early"] = summary.stopped_early;
  return out;
}

// Loss, metrics and gradients (in model.grads()) of one batch, without an optimizer step.
py::dict run_gradients(models::CausalLM& model,
                       const std::string& config_json,
                       const py::object& host,
                       const std::vector<int64_t>& rows) {
  const FinetuneConfig config = train::finetune_config_from_json(config_json);
  PythonFinetuneHost python_host(host);
  train::BatchResult result;
  {
    py::gil_scoped_release release;
    parallel::Groups alone;
    const train::Layout layout = train::finetune_layout(config, trie::CostModel(), alone);
    const auto objective = train::make_objective(config, layout, model, python_host, alone);
    model.params().ensure_grads();
    model.params().zero_grads();
    std::vector<train::Example> examples = python_host.examples(rows, /*validation=*/false);
    const double weight = objective->weight(examples);
    result = objective->train(rows, std::move(examples), weight);
  }
  py::dict out;
  out["loss"] = result.loss;
  out["weight"] = result.weight;
  out["logical_tokens"] = result.logical_tokens;
  out["unique_tokens"] = result.unique_tokens;
  out["computed_tokens"] = result.computed_tokens;
  for (const auto& [name, metric] : result.metrics) out[py::str(name)] = algo::value_of(metric);
  return out;
}

}  // namespace

void bind_finetune(py::module_& module) {
  module.def("finetune",
             &run_finetune,
             py::arg("config_json"),
             py::arg("host"),
             py::arg("ranks") = py::none(),
             "Trains on given text; `host` has the methods of train/finetune_host.h, `ranks` are "
             "those of ranks.h (none: this process alone).");
  module.def(
      "finetune_mesh",
      [](const std::string& config_json) {
        return to_dict(train::finetune_mesh(train::finetune_config_from_json(config_json)));
      },
      py::arg("config_json"),
      "Sizes of the axes along which the processes of such a run work together: {'tp': 1, ...}.");
  module.def("finetune_gradients",
             &run_gradients,
             py::arg("model"),
             py::arg("config_json"),
             py::arg("host"),
             py::arg("rows"),
             "Loss and gradients of one batch of examples, without an optimizer step.");
}

}  // namespace banyan::bindings
