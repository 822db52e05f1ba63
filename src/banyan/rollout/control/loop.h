// The passes of the engine: the scheduler plans one, the runner computes it, the drawer draws,
// ended responses are handed over and leave. Owns schedule, KV pool and the requests in progress;
// waits for nothing and locks nothing: whoever holds the engine's boundary (boundary.h) may call
// it.
#pragma once

#include <c10/core/Storage.h>

#include <chrono>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "banyan/models/causal_lm.h"
#include "banyan/ops/paged_attention.h"
#include "banyan/rollout/control/live.h"
#include "banyan/rollout/control/spill_costs.h"
#include "banyan/rollout/engine.h"
#include "banyan/rollout/runner.h"
#include "banyan/rollout/schedule/scheduler.h"

namespace banyan::rollout {

// Seconds spent in the parts of the passes.
struct PassSeconds {
  double schedule = 0.0;
  double forward = 0.0;
  double draw = 0.0;
  double deliver = 0.0;
};

struct LoopCounters {
  int64_t generation_tokens = 0;
  int64_t finished_stop = 0;
  int64_t finished_length = 0;
  int64_t finished_abort = 0;
  int64_t finished_repetition = 0;
  int64_t finished_error = 0;
  // Tokens computed beside another sequence's that reads the same first page: they attend their
  // trunk together (grouped attention).
  int64_t prefix_attn_rows = 0;
};

class Loop {
 public:
  // `model` is borrowed.
  Loop(models::CausalLM& model, const EngineOptions& options);
  ~Loop();

  // --- memory ---
  // Reserves the pool. What runs is retracted.
  void open_pool(int32_t num_pages);
  // The pool's memory, to be freed by dropping it; what runs is retracted and waits.
  std::vector<c10::Storage> take_pool();
  bool has_pool() const { return pool_ != nullptr; }
  int64_t page_bytes() const;

  // --- requests ---
  // Throws RequestError as Scheduler::add does, and leaves `live` with the caller then.
  void add(std::unique_ptr<Live>&& live);
  bool idle() const { return scheduler_.idle(); }
  // Ends the responses of the requests that `chosen` takes: they come back as they are. The number
  // of responses.
  int32_t abort(const std::function<bool(const Live&)>& chosen);
  // The same with an error for a user.
  int32_t fail(const std::function<bool(const Live&)>& chosen, const std::string& error);

  // --- passes ---
  // One pass; false if there is nothing to compute. After an exception call one of the next two.
  // Where others share the experts of the model, they all take a pass together, and this one idles
  // through it where it has nothing to compute; false if nobody has.
  bool step();
  // Idles through the passes of those that share the experts, until nobody has any.
  void join_others();
  // Ends the requests that took part in the pass that failed; all others go on. The number of
  // responses.
  int32_t failed_pass(const std::string& error);
  // Nothing of the pass that failed counts; its requests stay.
  void withdraw_pass() { scheduler_.withdraw_pass(); }

  // --- control ---
  int32_t retract_all() { return scheduler_.retract_all(); }
  void reset_cache(bool retract) { scheduler_.reset_cache(retract); }
  // The weights have changed. `keep`: what runs goes on with its old keys and values.
  void new_epoch(const std::string& version, bool keep);
  void set_version(const std::string& version) { versions_[epoch()] = version; }
  int64_t epoch() const { return scheduler_.epoch(); }
  const std::string& version() const { return versions_.at(epoch()); }
  // Epochs whose labels are remembered: those of tokens in progress, and the present one.
  size_t num_versions() const { return versions_.size(); }
  // What comes next is a whole batch: nothing is added until it has ended.
  void close_queue(bool closed) { scheduler_.close_queue(closed); }

  const Scheduler& scheduler() const { return scheduler_; }
  const LoopCounters& counters() const { return counters_; }
  const PassSeconds& seconds() const { return seconds_; }

 private:
  Live& live(int32_t group) { return *lives_[group]; }
  SchedulerOptions scheduler_options(const EngineOptions& options);
  void agree_on_spills();
  // Of those that share the experts; without others, what is said.
  bool somebody_has(bool own) const;
  // Ends the waiting time of the groups that the pass computes for.
  void note_first_pass(std::chrono::steady_clock::time_point now);
  void count_prefix_rows();
  void collect_draws(const std::vector<DrawRow>& rows, int32_t first_row);
  void score_prompts(const at::Tensor& hidden);
  void deliver();
  void take(Live& live, int32_t child, Drawn& drawn);
  void end(Live& live, int32_t child, Outcome outcome);
  int32_t end_all(const std::function<bool(const Live&)>& chosen, const Outcome& outcome);
  void remove_ended();
  void label(std::vector<WeightSpan>& spans) const;
  void forget_versions();

  // The child that a draw is for.
  struct Target {
    int32_t group = 0;
    int32_t child = 0;
  };

  models::CausalLM& model_;
  bool grouped_attention_;
  int64_t host_kv_bytes_;
  int64_t num_passes_ = 0;
  Scheduler scheduler_;
  int64_t body_generation_ = 0;  // ops/slots.h
  SpillMeter spill_;
  std::unique_ptr<ops::KvPool> pool_;
  std::unique_ptr<Runner> runner_;
  TokenDrawer drawer_;
  std::vector<std::unique_ptr<Live>> lives_;  // by group; null: none
  std::map<int64_t, std::string> versions_;   // by epoch
  LoopCounters counters_;
  PassSeconds seconds_;
  // Of the pass in progress, kept for their memory.
  Pass pass_;
  std::vector<DrawRequest> requests_;
  std::vector<Target> targets_;
  std::vector<Drawn> drawn_;
  std::vector<Delivery*> open_;
  std::vector<int32_t> ended_groups_;
  std::vector<int32_t> next_tokens_;
  std::vector<std::vector<TokenLogprob>> scored_;
};

}  // namespace banyan::rollout
