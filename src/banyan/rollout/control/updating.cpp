// New weights: from a directory, in two phases, or by the trainer, who says when.
#include "banyan/core/error.h"
#include "banyan/models/weight_update.h"
#include "banyan/rollout/control/engine_impl.h"
#include "banyan/rollout/control/weight_probe.h"
#include "banyan/rollout/memory/kv_budget.h"

namespace banyan::rollout {
namespace {

[[noreturn]] void busy(const char* call) {
  throw RequestError(
      503, "", detail::concat("[rollout] ", call, ": waited for a weight update"), 1.0);
}

// Files that do not fit are the caller's mistake.
template <typename Function>
auto refusing(const Function& function) {
  try {
    return function();
  } catch (const FileError& error) {
    throw RequestError(400, "directory", std::string("[rollout] update_weights: ") + error.what());
  }
}

}  // namespace

// Brought to memory beside the weights in use, where there are any and the memory is there.
void Engine::Impl::read_update(models::WeightUpdate& update) {
  const int64_t free_bytes = read_memory(model_.options().device).free;
  if (free_bytes > 0 && update.num_bytes() > free_bytes) {
    throw RequestError(503,
                       "",
                       detail::concat("[rollout] update_weights: ",
                                      update.num_bytes(),
                                      " bytes are to be read beside the weights in use, ",
                                      free_bytes,
                                      " are free; sleep with level 2 first"));
  }
  refusing([&] { update.read(); });
}

// Between two passes. Weights that do not compute are taken back where there are others to go back
// to; else the engine refuses to generate until the next update.
void Engine::Impl::switch_weights(models::WeightUpdate& update, bool has_weights) {
  const auto set_missing = [&](bool missing) {
    const std::unique_lock<std::mutex> lock(mutex_);
    status_.weights_missing = missing;
    if (!missing) status_.weights_asleep = false;
  };
  std::string wrong;
  try {
    update.commit();
    wrong = probe_weights(model_);
    if (!wrong.empty() && has_weights) update.roll_back();
  } catch (const std::exception& error) {
    set_missing(true);
    publish();
    if (dynamic_cast<const RequestError*>(&error) != nullptr) throw;
    throw RequestError(500,
                       "directory",
                       std::string("[rollout] update_weights: the weights are neither old nor new, "
                                   "update again: ") +
                           error.what());
  }
  set_missing(!wrong.empty() && !has_weights);
  if (wrong.empty()) return;
  publish();
  throw RequestError(
      400,
      "directory",
      detail::concat("[rollout] update_weights: the weights do not compute (",
                     wrong,
                     has_weights ? "); the old ones are in use again" : "); update again"));
}

void Engine::Impl::update_weights_from_disk(const std::string& directory,
                                            const std::string& version,
                                            bool keep,
                                            const Deadline& deadline) {
  const std::unique_lock<std::timed_mutex> weights(weights_, deadline.at());
  if (!weights.owns_lock()) busy("update_weights");
  // Phase one, beside the passes: everything is verified and read.
  bool has_weights = model_.params().has_masters();
  {
    const std::unique_lock<std::mutex> lock(mutex_);
    has_weights = has_weights && !status_.weights_missing;
  }
  auto update = refusing([&] { return models::WeightUpdate(model_, directory); });
  int64_t num_read = 0;
  update.before_each([&] {
    if (!deadline.passed()) {
      ++num_read;
      return;
    }
    throw RequestError(503,
                       "",
                       detail::concat("[rollout] update_weights: ",
                                      deadline.seconds(),
                                      " s are over, ",
                                      num_read,
                                      " of ",
                                      model_.params().params().size(),
                                      " tensors are read"),
                       1.0);
  });
  if (has_weights) read_update(update);
  // Phase two.
  const Boundary::Hold held = hold("update_weights", deadline);
  switch_weights(update, has_weights);
  loop_.new_epoch(version, keep);
  {
    const std::unique_lock<std::mutex> lock(mutex_);
    ++num_updates_;
  }
  publish();
}

void Engine::Impl::weights_changed(const std::string& version) {
  const Boundary::Hold held = hold("weights_changed", Deadline(kControlSeconds));
  loop_.new_epoch(version, /*keep=*/false);
  {
    const std::unique_lock<std::mutex> lock(mutex_);
    ++num_updates_;
  }
  publish();
}

void Engine::Impl::set_weight_version(const std::string& version) {
  const Boundary::Hold held = hold("set_weight_version", Deadline(kControlSeconds));
  loop_.set_version(version);
  publish();
}

void Engine::Impl::reset_prefix_cache(bool retract_running) {
  const Boundary::Hold held = hold("reset_prefix_cache", Deadline(kControlSeconds));
  loop_.reset_cache(retract_running);
  publish();
}

std::map<std::string, std::string> Engine::Impl::weight_checksums() {
  const std::unique_lock<std::timed_mutex> weights(weights_, Deadline(kControlSeconds).at());
  if (!weights.owns_lock()) busy("weight_checksums");
  {
    const std::unique_lock<std::mutex> lock(mutex_);
    if (status_.weights_missing) check_ready(status_);
  }
  return models::weight_checksums(model_);
}

}  // namespace banyan::rollout
