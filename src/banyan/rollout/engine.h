// The rollout engine: requests in, tokens out. One KV copy per trunk (the prompt of a group, and
// every prefix that requests share), copy-on-write tails, continuous batching with chunked prefill,
// counter-based sampling. It reads the trainer's packed weights; there is no copy.
//
// Two ways to use it. A trainer calls generate() and waits. A server calls start() and submit(); a
// thread of the engine's runs the passes and drain() fetches what came out. Both go through the
// same schedule.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "banyan/models/causal_lm.h"
#include "banyan/rollout/event.h"
#include "banyan/rollout/generator.h"
#include "banyan/rollout/request.h"
#include "banyan/rollout/schedule/policy.h"

namespace banyan::rollout {

struct EngineOptions {
  int32_t max_num_seqs = 256;             // running sequences
  int32_t max_num_batched_tokens = 2048;  // tokens of one forward pass
  int64_t kv_bytes = 0;                   // KV pool; 0: a share of the machine's free memory
  double memory_share = 0.5;              // that share
  double mem_fraction_static = 0.0;       // SGLang's: weights and KV pool together, of all the
                                          // device's memory; 0: memory_share
  // Where pages of responses that must give way wait in host memory, if that is cheaper than to
  // compute them again; -1: beside an accelerator as much as the pool, on a CPU nothing.
  int64_t host_kv_bytes = -1;
  int64_t max_model_len = 0;  // prompt + response; 0, or more than it has: the model's
  bool share_prefix = true;   // false: every sequence prefills its own prompt
  bool enable_chunked_prefill = true;
  int32_t long_prefill_token_threshold = 0;  // most tokens of one prompt in a pass; 0: the pass
  int32_t prefill_schedule_interval = 1;     // prompts are computed every so many passes
  double watermark = 0.0;                    // share of the pages kept free at admission
  double schedule_conservativeness = 1.0;    // times the expected length of a response
  SchedulingPolicy policy = SchedulingPolicy::kGroup;
  int32_t max_num_queued_reqs = 0;    // requests waiting; 0: any
  int64_t max_num_queued_tokens = 0;  // prompt tokens waiting; 0: any
  bool grouped_attention = true;  // one pass over a trunk's pages for all siblings, where that pays
  bool keep_pool = false;         // false: the pool's memory is given back at the end of generate()
  // Tokens and log-probabilities that wait for drain() before the passes wait: this much, and what
  // one more pass brings.
  int64_t max_undrained_bytes = int64_t{64} << 20;
};

enum class PauseMode : uint8_t {
  kAbort,    // what runs is returned as it is; new requests are refused until resume
  kWait,     // what runs ends; new requests are refused
  kKeep,     // what runs is frozen with its KV; new requests wait
  kRetract,  // what runs is put back in the queue without KV; new requests wait
};

enum class EngineState : uint8_t { kStopped, kRunning, kPausing, kPaused, kAsleep };

// Figures since start(), and of this moment.
struct EngineStats {
  EngineState state = EngineState::kStopped;
  int32_t running = 0;  // sequences
  int32_t waiting = 0;
  int32_t groups_running = 0;
  int32_t num_pages = 0;
  int32_t used_pages = 0;    // held by what runs
  int32_t cached_pages = 0;  // held by nobody, kept for later prompts
  int64_t weight_epoch = 0;
  std::string weight_version;
  bool weights_missing = false;
  // counters by name: prompt_tokens, prompt_tokens_cached, generation_tokens, preemptions,
  // admission_rejections, prefix_cache_queries, prefix_cache_hits, sibling_shared_tokens, passes,
  // pass_tokens, spilled_pages, ...
  std::map<std::string, int64_t> counters;
  std::map<std::string, double> seconds;  // of the parts of a pass: schedule, forward, draw (head
                                          // and sampling), deliver
};

class Engine final : public Generator {
 public:
  // `model` is borrowed and must outlive the engine. `token_bytes`: the bytes of every token id,
  // for stop strings, ids beyond them have none; empty: requests with stop strings are refused.
  Engine(models::CausalLM& model,
         const EngineOptions& options,
         std::vector<std::string> token_bytes = {});
  ~Engine() override;

  // --- for a trainer ---
  // Refused (409) while start() is in force.
  GenerateStats generate(const std::vector<Prompt>& prompts,
                         const SamplingParams& params,
                         const OnFinished& on_finished,
                         const std::function<bool()>& should_stop = nullptr) override;
  bool can_continue() const override { return true; }
  void weights_changed(int64_t version) override;

  // --- for a server: every call may come from any thread ---
  void start();
  // Aborts what is left, joins the thread. At most `timeout` seconds, then throws with what it
  // waited for; it goes on when it is called again.
  void stop(double timeout);
  // Takes a request or throws RequestError. Returns its id.
  std::string submit(Request request);
  // Everything that came out since the last call, in order; never waits. The second form takes the
  // memory of the events that it is given back for later ones.
  std::vector<Event> drain();
  void drain(std::vector<Event>& events);
  // Readable (eventfd on Linux, else a pipe) once per pass while drain() has something.
  int event_fd() const;
  // Returns partials with FinishReason::kAbort within one pass. Unknown ids are passed over; empty:
  // all. The number of requests that were ended.
  int32_t abort(const std::vector<std::string>& ids);

  // --- control: each is idempotent, and bounded by `timeout` seconds, after which it throws
  // RequestError 503 that says whom it waited for and leaves the engine as it was ---
  void pause(PauseMode mode, double timeout);
  void resume();
  // Level 0 stops scheduling, 1 gives the KV pool's memory back, 2 also drops the weights:
  // generation is refused (409) until an update brought them. Bytes freed, measured; throws if less
  // than 90 % of the plan came back.
  int64_t sleep(int32_t level, PauseMode mode, double timeout);
  // Tags: "weights", "kv_cache"; empty: all. What is still asleep.
  std::vector<std::string> wake(const std::vector<std::string>& tags);
  // Loads the safetensors of a directory into the model at a pass boundary: names, shapes, dtypes
  // and that all numbers are finite are verified before anything changes, and a few tokens are
  // scored after it: weights that do not compute are rolled back. A switch that has begun is not
  // interrupted by `timeout`. The running pause state is restored. Running
  // sequences: retracted (recomputed under the new weights) or, if `keep`, kept on old context and
  // never published.
  void update_weights_from_disk(const std::string& directory,
                                const std::string& version,
                                bool keep,
                                double timeout);
  // Sets the label of the present weights.
  void set_weight_version(const std::string& version);
  // Drops everything cached; with `retract_running`, of what runs too. Always succeeds.
  void reset_prefix_cache(bool retract_running);
  // SHA-256 of every parameter by its HF name.
  std::map<std::string, std::string> weight_checksums();

  EngineStats stats() const;

 private:
  class Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace banyan::rollout
