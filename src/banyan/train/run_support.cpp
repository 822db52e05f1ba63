#include "banyan/train/run_support.h"

#include <ATen/Parallel.h>

#include <algorithm>
#include <chrono>
#include <filesystem>
#include <optional>

#include "banyan/core/error.h"
#include "banyan/core/memory.h"
#include "banyan/core/threads.h"
#include "banyan/ops/edge_logprob.h"
#include "banyan/parallel/tensor_parallel.h"
#include "banyan/train/calibrate.h"
#include "banyan/train/exchange.h"

namespace banyan::train {

namespace {

std::string look_for_checkpoint(const std::string& resume_mode,
                                const std::optional<std::string>& from_path,
                                const std::string& directory,
                                RunHost& host) {
  if (resume_mode == "disable") return "";
  if (resume_mode == "resume_path") {
    BANYAN_CHECK(from_path,
                 "[config] trainer.resume_from_path: wanted a checkpoint with "
                 "resume_mode=resume_path, got null");
    return *from_path;
  }
  BANYAN_CHECK(resume_mode == "auto",
               "[config] trainer.resume_mode: wanted auto, disable or resume_path, got '",
               resume_mode,
               "'");
  const std::optional<checkpoint::Found> found = checkpoint::find_latest(directory);
  if (!found) return "";
  for (const std::string& reason : found->rejected) host.say("checkpoint not used: " + reason);
  return found->path;
}

}  // namespace

void set_up_process() {
  keep_freed_memory();
  at::set_num_threads(static_cast<int>(choose_threads(thread_facts())));
}

std::string find_checkpoint(const std::string& resume_mode,
                            const std::optional<std::string>& from_path,
                            const std::string& directory,
                            RunHost& host,
                            parallel::Collectives& ranks) {
  std::string path;
  if (ranks.is_first()) path = look_for_checkpoint(resume_mode, from_path, directory, host);
  return ranks.broadcast_bytes(path, 0);
}

bool holds_all(const models::CausalLM& model) {
  return model.stage() == nullptr && model.expert_ranks() == nullptr;
}

trie::CostModel calibrated_cost(models::CausalLM& model,
                                const std::string& directory,
                                parallel::Collectives& ranks) {
  const std::string file = directory + "/cost_model.json";
  trie::CostModel cost;
  if (ranks.is_first()) std::filesystem::create_directories(directory);
  if (model.tensor() == nullptr || !holds_all(model)) {
    if (ranks.is_first()) cost = calibrate_once(model, file);
    return broadcast(cost, ranks);
  }
  const auto kept = ranks.is_first() ? kept_cost(model, file) : std::nullopt;
  if (!ranks.any(kept.has_value())) {
    // How many runs there are follows from the times, so all must see the same.
    parallel::Collectives& tensor = model.tensor()->ranks();
    cost = calibrate(model, {.clock = [&tensor] {
                       const auto now = std::chrono::steady_clock::now().time_since_epoch();
                       const double seconds = std::chrono::duration<double>(now).count();
                       return tensor.all_gather_number(seconds)[0];
                     }});
    if (ranks.is_first()) keep_cost(model, file, cost);
  }
  return broadcast(kept.value_or(cost), ranks);
}

trie::CostModel calibrated_cost(models::CausalLM& model,
                                const std::function<std::unique_ptr<models::CausalLM>()>& load,
                                const std::string& directory,
                                parallel::Collectives& ranks) {
  const bool in_parts = model.params().keeper() != nullptr || !holds_all(model);
  std::unique_ptr<models::CausalLM> whole;
  if (in_parts && ranks.is_first()) whole = load();
  return calibrated_cost(whole ? *whole : model, directory, ranks);
}

int64_t most(int64_t value, parallel::Collectives& ranks) {
  const std::vector<double> all = ranks.all_gather_number(static_cast<double>(value));
  return static_cast<int64_t>(*std::max_element(all.begin(), all.end()));
}

int64_t free_bytes_of_rank(at::Device device, int64_t num_processes) {
  const int64_t bytes = free_memory_bytes(device);
  return device.is_cpu() ? bytes / num_processes : bytes;
}

int64_t chosen_token_budget(const std::string& directory,
                            const std::string& role,
                            const std::string& key,
                            const models::CausalLM& model,
                            const MemoryLeft& left,
                            RunHost& host,
                            parallel::Collectives& ranks) {
  // Stages have different layers and parameters: the one with least room decides.
  MemoryLeft with_head = left;
  const int64_t most_bytes = most(bytes_per_token(model), ranks);
  with_head.free_bytes = -most(-left.free_bytes, ranks);
  with_head.reserved_bytes = most(left.reserved_bytes, ranks);
  if (model.head_kind() == models::HeadKind::kVocabulary) {
    with_head.reserved_bytes += ops::HeadMemory::kBytes;
  }
  return of_first(ranks, [&] {
    return token_budget_once(
        directory, role, key, most_bytes, with_head, [&](const std::string& line) {
          host.say(line);
        });
  });
}

bool due(int64_t every, int64_t step) { return every > 0 && step % every == 0; }

void check_skipped(int64_t skipped_in_a_row, int64_t max_nonfinite_steps) {
  BANYAN_CHECK(skipped_in_a_row < max_nonfinite_steps,
               "[update] ",
               skipped_in_a_row,
               " updates in a row had a non-finite loss or gradient norm "
               "(banyan.max_nonfinite_steps=",
               max_nonfinite_steps,
               "); the weights are those of the last finite one");
}

}  // namespace banyan::train
