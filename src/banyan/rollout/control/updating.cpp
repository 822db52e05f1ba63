// New weights: from a directory, in two phases, or by the trainer, who says when.
#include "banyan/core/error.h"
#include "banyan/models/weight_update.h"
#include "banyan/rollout/control/engine_impl.h"
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

void Engine::Impl::update_weights_from_disk(const std::string& directory,
                                            const std::string& version,
                                            bool keep,
                                            const Deadline& deadline) {
  const std::unique_lock<std::timed_mutex> weights(weights_, deadline.at());
  if (!weights.owns_lock()) busy("update_weights");
  // Phase one, beside the passes: everything is verified and, where there are weights to go back
  // to, read beside them.
  bool has_weights = model_.params().has_masters();
  {
    const std::unique_lock<std::mutex> lock(mutex_);
    has_weights = has_weights && !status_.weights_missing;
  }
  auto update = refusing([&] { return models::WeightUpdate(model_, directory); });
  const int64_t free_bytes = read_memory(model_.options().device).free;
  if (has_weights) {
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
  // Phase two, between two passes.
  const Boundary::Hold held = hold("update_weights", deadline);
  const auto set_missing = [&](bool missing) {
    const std::unique_lock<std::mutex> lock(mutex_);
    status_.weights_missing = missing;
    if (!missing) status_.weights_asleep = false;
    num_updates_ += missing ? 0 : 1;
  };
  try {
    update.commit();
  } catch (const std::exception& error) {
    set_missing(true);
    publish();
    throw RequestError(500,
                       "directory",
                       std::string("[rollout] update_weights: the weights are neither old nor new, "
                                   "update again: ") +
                           error.what());
  }
  loop_.new_epoch(version, keep);
  set_missing(false);
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
