// The facade; control/ has the rest.
#include "banyan/rollout/engine.h"

#include "banyan/rollout/control/engine_impl.h"

namespace banyan::rollout {

Engine::Engine(models::CausalLM& model,
               const EngineOptions& options,
               std::vector<std::string> token_bytes)
    : impl_(std::make_unique<Impl>(model, options, std::move(token_bytes))) {}

Engine::~Engine() = default;

GenerateStats Engine::generate(const std::vector<Prompt>& prompts,
                               const SamplingParams& params,
                               const OnFinished& on_finished,
                               const std::function<bool()>& should_stop) {
  return impl_->generate(prompts, params, on_finished, should_stop);
}

void Engine::weights_changed(int64_t version) { impl_->weights_changed(std::to_string(version)); }

void Engine::start() { impl_->start(); }
void Engine::stop(double timeout) { impl_->stop(Deadline(timeout)); }
std::string Engine::submit(Request request) { return impl_->submit(std::move(request)); }

std::vector<Event> Engine::drain() {
  std::vector<Event> events;
  impl_->drain(events);
  return events;
}

void Engine::drain(std::vector<Event>& events) { impl_->drain(events); }

int Engine::event_fd() const { return impl_->event_fd(); }
int32_t Engine::abort(const std::vector<std::string>& ids) { return impl_->abort(ids); }

void Engine::pause(PauseMode mode, double timeout) { impl_->pause(mode, Deadline(timeout)); }
void Engine::resume() { impl_->resume(); }

int64_t Engine::sleep(int32_t level, PauseMode mode, double timeout) {
  return impl_->sleep(level, mode, Deadline(timeout));
}

std::vector<std::string> Engine::wake(const std::vector<std::string>& tags) {
  return impl_->wake(tags);
}

void Engine::update_weights_from_disk(const std::string& directory,
                                      const std::string& version,
                                      bool keep,
                                      double timeout) {
  impl_->update_weights_from_disk(directory, version, keep, Deadline(timeout));
}

void Engine::set_weight_version(const std::string& version) { impl_->set_weight_version(version); }

void Engine::reset_prefix_cache(bool retract_running) {
  impl_->reset_prefix_cache(retract_running);
}

std::map<std::string, std::string> Engine::weight_checksums() { return impl_->weight_checksums(); }

EngineStats Engine::stats() const { return impl_->stats(); }

}  // namespace banyan::rollout
