#include "python_generator.h"

#include <set>
#include <utility>

#include "banyan/core/error.h"
#include "banyan/train/walk.h"
#include "banyan/trie/plan.h"
#include "convert.h"

namespace banyan::bindings {
namespace {

py::list rows_from(const std::vector<rollout::Prompt>& prompts) {
  py::list rows;
  for (const rollout::Prompt& prompt : prompts) {
    py::dict row;
    row["row"] = prompt.row;
    row["tokens"] = prompt.tokens;
    row["n"] = prompt.n;
    row["first_index"] = prompt.first_index;
    row["original_prompt"] = prompt.original_prompt;
    rows.append(row);
  }
  return rows;
}

// What a training run asks for; the rest of SamplingParams has no key there.
py::dict params_dict(const rollout::SamplingParams& params) {
  py::dict out;
  out["temperature"] = params.temperature;
  out["top_p"] = params.top_p;
  out["top_k"] = params.top_k;
  out["min_p"] = params.min_p;
  out["repetition_penalty"] = params.repetition_penalty;
  out["presence_penalty"] = params.presence_penalty;
  out["frequency_penalty"] = params.frequency_penalty;
  out["max_tokens"] = params.max_tokens;
  out["min_tokens"] = params.min_tokens;
  out["eos_ids"] = params.eos_ids;
  out["stop_token_ids"] = params.stop_token_ids;
  out["ignore_eos"] = params.ignore_eos;
  out["seed"] = params.seed;
  out["step"] = params.step;
  return out;
}

// The responses that are still to come. An error names one that nobody asked for, came twice or
// never came.
class Awaited {
 public:
  explicit Awaited(const std::vector<rollout::Prompt>& prompts) {
    for (const rollout::Prompt& prompt : prompts) {
      for (int32_t index = 0; index < prompt.n; ++index)
        left_.insert({prompt.row, prompt.first_index + index});
    }
  }

  void take(const Trajectory& trajectory) {
    BANYAN_CHECK(left_.erase({trajectory.row, trajectory.index}) == 1,
                 "[generator] response ",
                 trajectory.index,
                 " of row ",
                 trajectory.row,
                 ": wanted one that is still to come");
    const size_t length = trajectory.response.size();
    BANYAN_CHECK(trajectory.rollout_log_probs.size() == length,
                 "[generator] response ",
                 trajectory.index,
                 " of row ",
                 trajectory.row,
                 ": wanted one log-probability per token (",
                 length,
                 "), got ",
                 trajectory.rollout_log_probs.size());
  }

  void check_empty() const {
    BANYAN_CHECK(left_.empty(),
                 "[generator] wanted every response, got none for index ",
                 left_.begin()->second,
                 " of row ",
                 left_.begin()->first,
                 " (and ",
                 left_.size() - 1,
                 " more)");
  }

 private:
  std::set<std::pair<int64_t, int32_t>> left_;
};

models::CausalLM& present(const std::shared_ptr<models::CausalLM*>& actor) {
  BANYAN_CHECK(*actor != nullptr, "[generator] the run has ended, and its actor with it");
  return **actor;
}

std::vector<double> log_probs(models::CausalLM& model,
                              const std::vector<int32_t>& tokens,
                              double temperature) {
  std::vector<Sample> samples(1);
  samples[0].tokens = tokens;
  trie::PlanOptions options;
  options.for_backward = false;
  const trie::Plan plan = trie::plan(samples, options);
  const train::SampleScores scores =
      train::score_samples(model, plan, {.temperature = temperature});
  const at::Tensor wide = scores.value[0].to(at::kCPU, at::kDouble).contiguous();
  return {wide.const_data_ptr<double>(), wide.const_data_ptr<double>() + wide.numel()};
}

}  // namespace

PythonGenerator::PythonGenerator(py::object driver, models::CausalLM& model) {
  py::gil_scoped_acquire acquire;
  driver_ = std::move(driver);
  actor_ = std::make_shared<models::CausalLM*>(&model);
  const py::cpp_function save([actor = actor_](const std::string& directory,
                                               const std::string& config_from,
                                               const std::string& dtype) {
    const ComputeOptions options = compute_options(dtype, "cpu", "native");
    py::gil_scoped_release release;
    models::save_model(present(actor), config_from, directory, options.dtype);
  });
  const py::cpp_function score(
      [actor = actor_](const std::vector<int32_t>& tokens, double temperature) {
        py::gil_scoped_release release;
        return log_probs(present(actor), tokens, temperature);
      });
  driver_.attr("attach")(save, score);
}

PythonGenerator::~PythonGenerator() {
  py::gil_scoped_acquire acquire;
  *actor_ = nullptr;
  try {
    driver_.attr("detach")();
  } catch (py::error_already_set& error) {
    error.discard_as_unraisable("detach");
  }
  driver_ = py::object();
}

rollout::GenerateStats PythonGenerator::generate(const std::vector<rollout::Prompt>& prompts,
                                                 const rollout::SamplingParams& params,
                                                 const rollout::OnFinished& on_finished,
                                                 const std::function<bool()>& should_stop) {
  py::gil_scoped_acquire acquire;
  Awaited awaited(prompts);
  const py::cpp_function give([&](const py::dict& response) {
    Trajectory trajectory = trajectory_from(response);
    awaited.take(trajectory);
    py::gil_scoped_release release;
    on_finished(std::move(trajectory));
  });
  const py::cpp_function stop([&] {
    py::gil_scoped_release release;
    return should_stop && should_stop();
  });
  const py::dict found =
      driver_.attr("generate")(rows_from(prompts), params_dict(params), give, stop);
  awaited.check_empty();
  rollout::GenerateStats stats;
  stats.logical_prompt_tokens = found["logical_prompt_tokens"].cast<int64_t>();
  stats.computed_prompt_tokens = found["computed_prompt_tokens"].cast<int64_t>();
  stats.response_tokens = found["response_tokens"].cast<int64_t>();
  stats.num_passes = get_or<int64_t>(found, "num_passes", 0);
  stats.num_preemptions = get_or<int64_t>(found, "num_preemptions", 0);
  stats.seconds = found["seconds"].cast<double>();
  return stats;
}

void PythonGenerator::weights_changed(int64_t version) {
  py::gil_scoped_acquire acquire;
  driver_.attr("weights_changed")(version);
}

}  // namespace banyan::bindings
