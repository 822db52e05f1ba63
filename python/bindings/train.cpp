// train: the training run with a Python host; accumulate_gradients: one planned update without
// optimizer.
#include <ATen/ops/full.h>

#include "banyan/core/error.h"
#include "banyan/train/checks.h"
#include "banyan/train/config_json.h"
#include "banyan/train/critic.h"
#include "banyan/train/parallel_keys.h"
#include "banyan/train/trainer.h"
#include "banyan/train/update.h"
#include "convert.h"
#include "python_generator.h"
#include "python_host.h"
#include "ranks.h"

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
  std::vector<std::vector<int32_t>> reward_model_tokens(const std::vector<Trajectory>& trajectories,
                                                        bool validation) override {
    py::gil_scoped_acquire acquire;
    const py::object tokens = host_.attr("reward_model_tokens")(dicts(trajectories), validation);
    if (tokens.is_none()) return Host::reward_model_tokens(trajectories, validation);
    return tokens.cast<std::vector<std::vector<int32_t>>>();
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

py::dict run_train(const std::string& config_json,
                   const py::object& host,
                   const py::object& generator,
                   const py::object& ranks) {
  const Config config = train::config_from_json(config_json);
  PythonHost python_host(host);
  train::GeneratorFactory make_generator;
  if (!generator.is_none()) {
    make_generator = [&generator](models::CausalLM& actor) {
      return std::make_unique<PythonGenerator>(generator, actor);
    };
  }
  const std::shared_ptr<parallel::Groups> groups = groups_from(ranks);
  train::TrainSummary summary;
  {
    py::gil_scoped_release release;
    summary = train::train(config, python_host, make_generator, groups.get());
  }
  py::dict out;
  out["first_step"] = summary.first_step;
  out["last_step"] = summary.last_step;
  out["checkpoint"] = summary.checkpoint;
  out["stopped_early"] = summary.stopped_early;
  return out;
}

// A batch of given trajectories; every list has one entry per trajectory, or none at all.
train::Batch batch_from(const std::vector<py::dict>& trajectories) {
  train::Batch batch;
  for (const py::dict& trajectory : trajectories) {
    batch.trajectories.push_back(trajectory_from(trajectory));
  }
  batch.scores.resize(trajectories.size());
  return batch;
}

void check_lists(const char* what, const train::TokenLists& lists, const train::Batch& batch) {
  if (lists.empty()) return;
  BANYAN_CHECK(static_cast<int64_t>(lists.size()) == batch.size(),
               "[accumulate_gradients] ",
               what,
               ": wanted one per trajectory (",
               batch.size(),
               "), got ",
               lists.size());
  for (int64_t i = 0; i < batch.size(); ++i) {
    BANYAN_CHECK(lists[i].dim() == 1 && lists[i].size(0) == batch.num_tokens(i),
                 "[accumulate_gradients] ",
                 what,
                 ": wanted one number per masked token of trajectory ",
                 i,
                 " (",
                 batch.num_tokens(i),
                 "), got ",
                 lists[i].sizes());
  }
}

std::vector<int64_t> all_of(const train::Batch& batch) {
  std::vector<int64_t> all;
  for (int64_t i = 0; i < batch.size(); ++i) all.push_back(i);
  return all;
}

train::Layout layout_of(const Config& config) { return {config.sharing.mode != "off", {}}; }

// One mini-batch of given trajectories: loss and metrics out, gradients in model.grads().
py::dict run_accumulate(models::CausalLM& model,
                        const std::string& config_json,
                        const std::vector<py::dict>& trajectories,
                        const std::vector<py::object>& advantages,
                        const std::vector<at::Tensor>& old_log_probs,
                        const std::vector<at::Tensor>& ref_log_probs,
                        const std::vector<at::Tensor>& weights,
                        const py::object& ranks) {
  const Config config = train::config_from_json(config_json);
  train::check_config(config);
  train::Batch batch = batch_from(trajectories);
  batch.old_log_prob = old_log_probs;
  batch.ref_log_prob = ref_log_probs;
  batch.weight = weights;
  for (int64_t i = 0; i < batch.size() && i < static_cast<int64_t>(advantages.size()); ++i) {
    batch.advantage.push_back(
        py::isinstance<py::float_>(advantages[i])
            ? at::full({batch.num_tokens(i)}, advantages[i].cast<double>(), at::kDouble)
            : advantages[i].cast<at::Tensor>());
  }
  BANYAN_CHECK(advantages.size() == trajectories.size(),
               "[accumulate_gradients] advantages: wanted one per trajectory (",
               batch.size(),
               "), got ",
               advantages.size());
  check_lists("advantages", batch.advantage, batch);
  check_lists("old_log_probs", batch.old_log_prob, batch);
  check_lists("ref_log_probs", batch.ref_log_prob, batch);
  check_lists("weights", batch.weight, batch);
  const std::shared_ptr<parallel::Groups> groups = groups_from(ranks);
  train::Layout layout = layout_of(config);
  train::set_ranks(config, *groups, layout);
  train::UpdateResult result;
  {
    py::gil_scoped_release release;
    result = train::accumulate_gradients(
        config, batch, {.samples = all_of(batch), .step = 1}, layout, model);
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
  if (result.routers) {
    py::dict routers;
    routers["balance"] = result.routers->balance;
    routers["z"] = result.routers->z;
    routers["max_load"] = result.routers->max_load;
    routers["loss"] = result.routers->loss;
    out["routers"] = routers;
  }
  return out;
}

// The critic's loss on given trajectories; gradients in model.grads().
py::dict run_accumulate_value(models::CausalLM& model,
                              const std::string& config_json,
                              const std::vector<py::dict>& trajectories,
                              const std::vector<at::Tensor>& values,
                              const std::vector<at::Tensor>& returns) {
  const Config config = train::config_from_json(config_json);
  train::Batch batch = batch_from(trajectories);
  batch.value = values;
  batch.returns = returns;
  BANYAN_CHECK(!values.empty() && !returns.empty(),
               "[accumulate_gradients] values and returns: wanted one per trajectory, got none");
  check_lists("values", batch.value, batch);
  check_lists("returns", batch.returns, batch);
  train::CriticUpdate update;
  {
    py::gil_scoped_release release;
    update =
        train::accumulate_value_gradients(config, batch, all_of(batch), layout_of(config), model);
  }
  py::dict out;
  out["loss"] = update.loss;
  out["clipped_tokens"] = update.clipped_tokens;
  out["value_sum"] = update.value_sum;
  out["num_tokens"] = update.num_tokens;
  return out;
}

}  // namespace

void bind_train(py::module_& module) {
  module.def("train",
             &run_train,
             py::arg("config_json"),
             py::arg("host"),
             py::arg("generator") = py::none(),
             py::arg("ranks") = py::none(),
             "Runs the training loop; `host` has the methods of core/host.h, `generator` those of "
             "python_generator.h (none: the built-in engine), `ranks` are those of ranks.h (none: "
             "this process alone).");
  module.def(
      "mesh_shape",
      [](const std::string& config_json) {
        return to_dict(train::mesh_shape(train::config_from_json(config_json)));
      },
      py::arg("config_json"),
      "Sizes of the axes along which the processes of a run work together: {'tp': 1, ...}.");
  module.def(
      "total_steps",
      [](const std::string& config_json) {
        return train::total_steps(train::config_from_json(config_json));
      },
      py::arg("config_json"),
      "Steps of the whole run.");
  module.def(
      "accumulate_gradients",
      &run_accumulate,
      py::arg("model"),
      py::arg("config_json"),
      py::arg("trajectories"),
      py::arg("advantages"),
      py::arg("old_log_probs") = std::vector<at::Tensor>(),
      py::arg("ref_log_probs") = std::vector<at::Tensor>(),
      py::arg("weights") = std::vector<at::Tensor>(),
      py::arg("ranks") = py::none(),
      "Loss and gradients of one mini-batch, without an optimizer step. Advantages are one "
      "number or one tensor per trajectory, the others tensors [masked tokens]. With `ranks` "
      "each process is given the whole mini-batch and computes its part of it.");
  module.def("accumulate_value_gradients",
             &run_accumulate_value,
             py::arg("model"),
             py::arg("config_json"),
             py::arg("trajectories"),
             py::arg("values"),
             py::arg("returns"),
             "Loss and gradients of the critic (a model with a value head) on one mini-batch; "
             "tensors [masked tokens] per trajectory.");
}

}  // namespace banyan::bindings
