// What an Engine is made of. Two kinds of state:
//   behind the boundary   the loop (schedule, pages, requests in progress) and the weights: whoever
//                         holds `boundary_`, a pass or a control call
//   behind `mutex_`       who may do what (Status), requests that no pass has taken yet, aborts,
//                         figures: for moments only, by any thread
// Status changes only with both, except that a pause and a resume show at once: submissions are
// gated before what runs is waited for. `mutex_` is taken after the boundary, never before.
#pragma once

#include <condition_variable>
#include <deque>
#include <functional>
#include <mutex>
#include <string>
#include <thread>
#include <unordered_map>
#include <vector>

#include "banyan/rollout/control/boundary.h"
#include "banyan/rollout/control/deliveries.h"
#include "banyan/rollout/control/loop.h"
#include "banyan/rollout/engine.h"
#include "banyan/rollout/request_check.h"

namespace banyan::models {
class WeightUpdate;
}

namespace banyan::rollout {

// Seconds that a control call without a timeout of its own waits for.
inline constexpr double kControlSeconds = 120.0;

class Engine::Impl {
 public:
  Impl(models::CausalLM& model, const EngineOptions& options, std::vector<std::string> token_bytes);
  ~Impl();

  // generating.cpp
  GenerateStats generate(const std::vector<Prompt>& prompts,
                         const SamplingParams& params,
                         const OnFinished& on_finished,
                         const std::function<bool()>& should_stop);

  // serving.cpp
  void start();
  void stop(const Deadline& deadline);
  std::string submit(Request request);
  void drain(std::vector<Event>& events);
  int event_fd() { return events_.outbox().fd(); }
  int32_t abort(const std::vector<std::string>& ids);
  EngineStats stats() const;

  // pausing.cpp
  int64_t pause(PauseMode mode, const Deadline& deadline);  // Status::num_settled after it
  void resume();
  int64_t sleep(int32_t level, PauseMode mode, const Deadline& deadline);
  std::vector<std::string> wake(const std::vector<std::string>& tags);

  // updating.cpp
  void update_weights_from_disk(const std::string& directory,
                                const std::string& version,
                                bool keep,
                                const Deadline& deadline);
  void weights_changed(const std::string& version);
  void set_weight_version(const std::string& version);
  void reset_prefix_cache(bool retract_running);
  std::map<std::string, std::string> weight_checksums();

 private:
  enum class Flow : uint8_t {
    kFlowing,
    kDraining,  // pause(wait): what runs goes on, nothing is taken
    kHalted,    // no passes
  };

  struct Status {
    bool started = false;
    bool stopping = false;
    bool exited = false;  // the thread's last act
    bool generating = false;
    Flow flow = Flow::kFlowing;
    bool pausing = false;        // halted, but a pass may still be in progress
    bool refuses = false;        // new requests while not flowing: refused, else they wait
    int32_t sleep_level = -1;    // -1: awake
    bool flowed_before = false;  // the state that the end of the sleep restores
    bool kv_asleep = false;
    bool weights_asleep = false;
    bool weights_missing = false;
    int32_t num_pausing = 0;  // pauses in progress
    // As the last call left it that went through: what pauses that fail go back to.
    struct Settled {
      Flow flow = Flow::kFlowing;
      bool refuses = false;
      bool flowed_before = false;
    } settled;

    int64_t num_settled = 0;  // calls that went through

    void settle() {
      settled = {flow, refuses, flowed_before};
      ++num_settled;
    }
    void show(const Settled& to) {
      flow = to.flow;
      refuses = to.refuses;
      flowed_before = to.flowed_before;
      pausing = false;
    }
    void go_back(const Settled& to) {
      show(to);
      settle();
    }

    bool asleep() const { return sleep_level >= 0; }
    bool runs_passes() const {
      return flow != Flow::kHalted && !kv_asleep && !weights_asleep && !weights_missing;
    }
  };

  // Of the loop, as of the last publish().
  struct Figures {
    int32_t running = 0;  // responses
    int32_t waiting = 0;
    int32_t groups_running = 0;
    int32_t num_pages = 0;
    int32_t used_pages = 0;
    int32_t cached_pages = 0;
    bool idle = true;
    QueueState queue;
    int64_t epoch = 0;
    std::string version;
    SchedulerCounters scheduler;
    LoopCounters loop;
    PassSeconds seconds;
  };

  // --- all of them ---
  // The boundary by the deadline, or RequestError 503 that says whom `call` waited for.
  Boundary::Hold hold(const char* call, const Deadline& deadline);
  // With the lock: throws RequestError if generation is not possible now.
  void check_ready(const Status& status) const;
  int32_t room_for(const Request& request) const;  // new tokens that it may have
  // A request as the loop takes it: one group, or one for each response where nothing is shared.
  std::vector<std::unique_ptr<Live>> lives_from(Request request, Delivery& delivery) const;
  // Makes the figures of the loop known, and lets go of what ended. Needs the boundary.
  void publish();
  int32_t pages_within_budget(int64_t wanted) const;
  // Opens a pool of num_pages_ after checking that the memory is there. Needs the boundary.
  void open_pool(const char* call);
  bool is_trained() const;  // the weights are a trainer's
  std::string whom(double seconds) const;

  // --- serving.cpp ---
  void serve();
  bool has_work() const;  // with the lock
  bool reader_is_behind() const {
    return events_.outbox().backlog() > options_.max_undrained_bytes;
  }
  bool guarded_turn();
  bool turn();
  void add_to_loop(std::unique_ptr<Live> live);
  void check_accepts(int64_t prompt_tokens);
  std::deque<std::unique_ptr<Live>> take_inbox();
  // Ends what the loop never took; needs the boundary.
  void refuse(const std::deque<std::unique_ptr<Live>>& lives);
  void refuse(const Live& live, const std::string& error);
  void end_everything();
  int32_t run_aborts();        // those asked for since the last time; needs the boundary
  int64_t most_pages() const;  // of use to a server
  int32_t server_pages() const;

  // --- pausing.cpp ---
  void begin_pause(PauseMode mode);
  int64_t carry_out_pause(PauseMode mode, const Deadline& deadline);
  void end_pause();
  Boundary::Hold hold_for_sleep(const Deadline& deadline,
                                std::unique_lock<std::timed_mutex>& weights);
  void wait_until_drained(const Deadline& deadline);
  std::vector<std::string> still_asleep() const;  // with the lock
  void wake_weights();
  void wake_kv(bool is_started);

  // --- updating.cpp ---
  void read_update(models::WeightUpdate& update);
  void switch_weights(models::WeightUpdate& update, bool has_weights);

  // --- generating.cpp ---
  std::vector<Request> requests_from(const std::vector<Prompt>& prompts,
                                     const SamplingParams& params) const;
  void enter_generate();
  void leave_generate() noexcept;
  void open_pool_for(const std::vector<std::unique_ptr<Live>>& lives);
  bool generate_pass(const std::function<bool()>& should_stop);  // false: everything has ended
  void run_pass();

  models::CausalLM& model_;
  EngineOptions options_;
  std::vector<std::string> token_bytes_;
  RequestLimits limits_;

  // Behind the boundary.
  Boundary boundary_;
  Loop loop_;
  EventDelivery events_;
  int32_t num_pages_ = 0;     // of the pool while it is awake
  bool pool_sleeps_ = false;  // it was there when sleep took it

  // Whoever reads or changes the weights as such: update, sleep, wake, checksums.
  std::timed_mutex weights_;

  mutable std::mutex mutex_;
  std::condition_variable changed_;  // anything behind the mutex
  Status status_;
  std::deque<std::unique_ptr<Live>> inbox_;
  int64_t inbox_tokens_ = 0;                            // of prompts
  std::unordered_map<std::string, int32_t> in_flight_;  // request -> responses that have not ended
  std::vector<std::string> aborts_;                     // asked for and not carried out
  bool abort_all_ = false;
  int64_t next_id_ = 1;
  int64_t num_rejected_ = 0;
  int64_t num_updates_ = 0;
  int64_t num_backlogs_ = 0;  // times that the passes waited for drain()
  Figures figures_;

  std::thread thread_;
};

}  // namespace banyan::rollout
