// train: the training run with a Python host; accumulate_gradients: one planned update without
// optimizer.
#include <ATen/ops/full.h>

#include "banyan/core/error.h"
#include "banyan/train/config_json.h"
#include "banyan/train/trainer.h"
#include "banyan/train/update.h"
#include "convert.h"
#include "python_host.h"

namespace banyan::bindings {
namespace {

std::vector<PromptRow> rows_from(const py::object& value) {
  std::vector<PromptRow> rows;
  for (const py::handle& item : value) {
    const auto row = item.cast<py::dict>();
    rows.push_back({row["row"].cast<int64_t>(), row["tokens"].cast<std::vector<int32_t>>()});
  }
  return rows;
}

template <typename T>
py::list dicts(const std::vector<T>& values) {
  py::list out;
  for (const T& value : values) out.append(to_dict(value));
  return out;
}

// Host in Python: each call takes the GIL, converts and calls the method of the same name.
class PythonHost final : public PythonRunHost<Host> {
 public:
  using PythonRunHost::PythonRunHost;

  std::vector<PromptRow> next_prompts(int64_t num_rows) override {
    py::gil_scoped_acquire acquire;
    return rows_from(host_.attr("next_prompts")(num_rows));
  }
  std::vector<PromptRow> validation_prompts() override {
    py::gil_scoped_acquire acquire;
    return rows_from(host_.attr("validation_prompts")());
  }
  void submit(const Trajectory& trajectory, bool validation) override {
    py::gil_scoped_acquire acquire;
    host_.attr("submit")(to_dict(trajectory), validation);
  }
  std::vector<Score> poll() override {
    py::gil_scoped_acquire acquire;
    std::vector<Score> scores;
    for (const py::handle& item : host_.attr("poll")())
      scores.push_back(score_from(item.cast<py::dict>()));
    return scores;
  }
  void on_samples(int64_t step,
                  bool validation,
                  const std::vector<Trajectory>& trajectories,
                  const std::vector<Score>& scores) override {
    py::gil_scoped_acquire acquire;
    host_.attr("on_samples")(step, validation, dicts(trajectories), dicts(scores));
  }
  Metrics validation_metrics(const std::vector<Trajectory>& trajectories,
                             const std::vector<Score>& scores) override {
    py::gil_scoped_acquire acquire;
    return host_.attr("validation_metrics")(dicts(trajectories), dicts(scores)).cast<Metrics>();
  }
};

py::dict run_train(const std::string& config_json, const py::object& host) {
  const Config config = train::config_from_json(config_json);
  PythonHost python_host(host);
  train::TrainSummary summary;
  {
    py::gil_scoped_release release;
    summary = train::train(config, python_host);
  }
  py::dict out;
  out["first_step"] = summary.first_step;
  out["last_step"] = summary.last_step;
  out["checkpoint"] = summary.checkpoint;
  out["stopped_early"] = summary.stopped_early;
  return out;
}

// One mini-batch of given trajectories: loss and metrics out, gradients in model.grads().
py::dict run_accumulate(models::CausalLM& model,
                        const std::string& config_json,
                        const std::vector<py::dict>& trajectories,
                        const std::vector<double>& advantages,
                        const std::vector<at::Tensor>& old_log_probs,
                        const std::vector<at::Tensor>& ref_log_probs) {
  const Config config = train::config_from_json(config_json);
  train::check_update_config(config);
  train::Batch batch;
  std::vector<int64_t> all;
  for (const py::dict& trajectory : trajectories) {
    all.push_back(static_cast<int64_t>(all.size()));
    batch.trajectories.push_back(trajectory_from(trajectory));
  }
  const auto check_size = [&](const char* what, size_t size, bool may_be_empty) {
    BANYAN_CHECK(size == all.size() || (may_be_empty && size == 0),
                 "[accumulate_gradients] ",
                 what,
                 ": wanted one per trajectory (",
                 all.size(),
                 "), got ",
                 size);
  };
  check_size("advantages", advantages.size(), /*may_be_empty=*/false);
  check_size("old_log_probs", old_log_probs.size(), /*may_be_empty=*/true);
  check_size("ref_log_probs", ref_log_probs.size(), /*may_be_empty=*/true);
  batch.scores.resize(all.size());
  for (int64_t i = 0; i < batch.size(); ++i) {
    batch.advantage.push_back(at::full({batch.num_tokens(i)}, advantages[i], at::kDouble));
  }
  batch.old_log_prob = old_log_probs;
  batch.ref_log_prob = ref_log_probs;
  train::UpdateResult result;
  {
    py::gil_scoped_release release;
    result = train::accumulate_gradients(config, batch, all, model);
  }
  py::dict out;
  out["loss"] = result.loss.loss;
  out["pg_loss"] = result.loss.pg_loss;
  out["kl_loss"] = result.loss.kl_loss;
  out["entropy_loss"] = result.loss.entropy_loss;
  out["logical_tokens"] = result.logical_tokens;
  out["unique_tokens"] = result.unique_tokens;
  out["computed_tokens"] = result.computed_tokens;
  out["num_blocks"] = result.num_blocks;
  out["recomputed_tokens"] = result.walk.num_recomputed;
  out["peak_live_tokens"] = result.walk.peak_live_tokens;
  out["peak_activation_bytes"] = result.walk.peak_activation_bytes;
  out["peak_carry_bytes"] = result.walk.peak_carry_bytes;
  out["log_prob"] = result.log_prob;
  return out;
}

}  // namespace

void bind_train(py::module_& module) {
  module.def("train",
             &run_train,
             py::arg("config_json"),
             py::arg("host"),
             "Runs the training loop; `host` has the methods of core/host.h.");
  module.def("accumulate_gradients",
             &run_accumulate,
             py::arg("model"),
             py::arg("config_json"),
             py::arg("trajectories"),
             py::arg("advantages"),
             py::arg("old_log_probs") = std::vector<at::Tensor>(),
             py::arg("ref_log_probs") = std::vector<at::Tensor>(),
             "Loss and gradients of one mini-batch, without an optimizer step.");
}

}  // namespace banyan::bindings
