#include "banyan/train/separate_rollout.h"

#include <set>
#include <string_view>
#include <utility>

#include "banyan/core/error.h"
#include "banyan/train/checks.h"
#include "banyan/train/clock.h"
#include "banyan/train/memory_keys.h"
#include "banyan/train/parallel_keys.h"
#include "banyan/train/rollout_wire.h"
#include "banyan/train/run_support.h"
#include "banyan/train/trainer_mode.h"
#include "banyan/train/weight_push.h"

namespace banyan::train {
namespace {

enum class Ask : int8_t { kBatch, kValidation, kEnd };

struct Order {
  Ask ask = Ask::kEnd;
  bool new_weights = false;  // they follow
  int64_t step = 0;
  int64_t version = 0;  // the step after which they are
};

// Where the ranks that generate begin.
struct Begin {
  std::string position;
  std::string unfinished;  // JSON
};

struct Delivery {
  SampledBatch sampled;  // of a validation its rollout only
  Begin next;            // where another run would go on
  bool should_stop = false;
};

constexpr std::string_view kFormat = "banyan batch 1\n";  // before a delivery in a file

constexpr int64_t kFirst = 0;  // places in the group of the hand-over
constexpr int64_t kFirstThatGenerates = 1;

}  // namespace

template <typename Wire, Is<Begin> T>
void fields(Wire& wire, T& begin) {
  wire(begin.position, begin.unfinished);
}

template <typename Wire, Is<Delivery> T>
void fields(Wire& wire, T& delivery) {
  auto& sampled = delivery.sampled;
  wire(sampled.end_of_data, sampled.refused, sampled.rollout, sampled.filter, sampled.over_sample);
  wire(sampled.batch.trajectories, sampled.batch.scores, sampled.batch.greedy_score);
  wire(sampled.idle_seconds, delivery.next, delivery.should_stop);
}

namespace {

template <typename T>
std::string to_bytes(const T& value) {
  WireWriter out;
  out.put(value);
  return out.bytes();
}

template <typename T>
T from_bytes(const std::string& bytes) {
  return WireReader(bytes).next<T>();
}

std::string json_of(const std::vector<UnfinishedGroup>& groups) {
  return groups.empty() ? "" : to_json(groups);
}

std::vector<UnfinishedGroup> groups_of(const std::string& json) {
  if (json.empty()) return {};
  return unfinished_from_json(json, "the ranks that generate");
}

class SeparateSampler final : public Sampler {
 public:
  SeparateSampler(const Config& config,
                  Host& host,
                  parallel::Groups& groups,
                  models::CausalLM& actor,
                  parallel::Fsdp* fsdp,
                  int64_t num_steps)
      : host_(host),
        groups_(groups),
        actor_(actor),
        fsdp_(fsdp),
        num_steps_(num_steps),
        batches_ahead_(batches_ahead(config)) {}

  void begin(SamplerState from, const std::string& ahead) override {
    state_ = std::move(from);
    Begin begin = {state_.position, json_of(state_.unfinished)};
    if (!ahead.empty() && batches_ahead_ == 0) {
      host_.say("the checkpoint's batch that was generated ahead is drawn again");
    } else if (!ahead.empty()) {
      if (!ahead.starts_with(kFormat)) {
        throw FileError("state/ahead.bin: wanted a batch of this version of banyan");
      }
      auto delivery = from_bytes<Delivery>(ahead.substr(kFormat.size()));
      delivery.should_stop = false;  // that was about the run before
      begin = delivery.next;
      ahead_ = to_bytes(delivery);
    }
    tell(to_bytes(begin));
    const std::string names = groups_.hand_over.broadcast_bytes("", kFirstThatGenerates);
    if (!groups_.hand_over.is_alone()) {
      const auto as_masters = from_bytes<std::vector<std::string>>(names);
      as_masters_ = {as_masters.begin(), as_masters.end()};
    }
  }

  SampledBatch batch(int64_t step) override {
    if (ahead_.empty() && !is_asked_) ask(Ask::kBatch, step, step - 1);
    Clock clock;
    const std::string bytes = ahead_.empty() ? collect() : std::exchange(ahead_, "");
    auto delivery = from_bytes<Delivery>(bytes);
    SampledBatch& sampled = delivery.sampled;
    sampled.waited_seconds = clock.lap();
    state_ = {delivery.next.position, groups_of(delivery.next.unfinished)};
    was_asked_to_stop_ = was_asked_to_stop_ || delivery.should_stop;
    const bool goes_on = !sampled.end_of_data && sampled.refused.empty() && step < num_steps_;
    if (batches_ahead_ > 0 && goes_on) ask(Ask::kBatch, step + 1, step - 1);
    return std::move(sampled);
  }

  RolloutResult validation(int64_t step) override {
    fetch();
    ask(Ask::kValidation, step, step);
    return from_bytes<Delivery>(collect()).sampled.rollout;
  }

  SamplerState state() override { return state_; }

  std::string ahead() override {
    fetch();
    if (ahead_.empty()) return "";
    // A resumed run tries again what gave nothing.
    const auto delivery = from_bytes<Delivery>(ahead_);
    if (delivery.sampled.end_of_data || !delivery.sampled.refused.empty()) return "";
    return std::string(kFormat) + ahead_;
  }

  bool should_stop() override {
    return groups_.world.any(host_.should_stop()) || was_asked_to_stop_;
  }

  void end() override {
    fetch();
    tell(to_bytes(Order{}));
  }

 private:
  void tell(const std::string& bytes) { groups_.hand_over.broadcast_bytes(bytes, kFirst); }

  void ask(Ask what, int64_t step, int64_t version) {
    Clock clock;
    const bool is_new = std::exchange(handed_over_, version) != version;
    tell(to_bytes(Order{.ask = what, .new_weights = is_new, .step = step, .version = version}));
    if (is_new) send_weights(actor_, fsdp_, as_masters_, groups_);
    is_asked_ = true;
    hand_over_seconds_ += clock.lap();
  }

  // The batch that is on its way is here then.
  void fetch() {
    if (is_asked_) ahead_ = collect();
  }

  // Waits for what was asked for.
  std::string collect() {
    std::string bytes;
    if (groups_.world.is_first()) {
      bytes = groups_.hand_over.broadcast_bytes("", kFirstThatGenerates);
    }
    is_asked_ = false;
    return groups_.world.broadcast_bytes(bytes, 0);
  }

  Host& host_;
  parallel::Groups& groups_;
  models::CausalLM& actor_;
  parallel::Fsdp* fsdp_;
  int64_t num_steps_;
  int64_t batches_ahead_;
  std::set<std::string> as_masters_;  // on the rank that sends: how
  int64_t handed_over_ = -1;          // step whose weights generate
  bool is_asked_ = false;             // a delivery is on its way
  std::string ahead_;                 // the next batch, if it is here
  SamplerState state_;
  bool was_asked_to_stop_ = false;  // a rank that generates
};

class RolloutRank {
 public:
  RolloutRank(const Config& config,
              Host& host,
              const GeneratorFactory& factory,
              parallel::Groups& groups)
      : config_(config), host_(host), groups_(groups) {
    check_rollout_model(config, groups);
    model_ = load_rollout_model(config, groups);
    weights_ = std::make_unique<FilledWeights>(*model_);
    const bool scores = groups.rollout_tensor.is_first();
    if (config.reward_model.enable && scores) reward_model_ = std::make_unique<RewardModel>(config);
    generator_ = make_generator(config, factory, *model_);
  }

  void run() {
    begin();
    while (true) {
      Clock clock;
      const auto order = from_bytes<Order>(hear());
      if (order.ask == Ask::kEnd) return;
      if (order.new_weights) {
        weights_->fill(
            [&](const FilledWeights::Put& put) { take_weights(*model_, groups_.hand_over, put); });
        generator_->weights_changed(order.version);
      }
      const double idle_seconds = clock.lap();
      Delivery delivery;
      if (order.ask == Ask::kBatch) {
        delivery.sampled = sample_batch(generation(), order.step, unfinished_);
      } else {
        delivery.sampled.rollout = run_rollout(generation(),
                                               {.rows = host_.validation_prompts()},
                                               RolloutKind::kValidation,
                                               order.step);
      }
      host_.on_samples(order.step, order.ask == Ask::kValidation, {}, {});
      delivery.sampled.idle_seconds = idle_seconds;
      deliver(std::move(delivery));
    }
  }

 private:
  std::string hear() { return groups_.hand_over.broadcast_bytes("", kFirst); }

  void begin() {
    const auto begin = from_bytes<Begin>(hear());
    if (!begin.position.empty()) host_.load_state(begin.position);
    unfinished_ = groups_of(begin.unfinished);
    const std::set<std::string> as_masters = read_as_masters(*model_);
    const std::vector<std::string> names(as_masters.begin(), as_masters.end());
    groups_.hand_over.broadcast_bytes(to_bytes(names), kFirstThatGenerates);
  }

  void deliver(Delivery delivery) {
    delivery.should_stop = groups_.rollout.any(host_.should_stop());
    std::string bytes;
    if (groups_.rollout.is_first()) {
      delivery.next = {host_.save_state(), json_of(unfinished_)};
      bytes = to_bytes(delivery);
    }
    groups_.hand_over.broadcast_bytes(bytes, kFirstThatGenerates);
  }

  Generation generation() {
    return {config_,
            *generator_,
            reward_model_.get(),
            host_,
            groups_.rollout.is_alone() ? nullptr : &groups_.rollout,
            groups_.rollout_tensor.is_alone() ? nullptr : &groups_.rollout_tensor,
            !groups_.rollout_experts.is_alone()};
  }

  const Config& config_;
  Host& host_;
  parallel::Groups& groups_;
  std::unique_ptr<models::CausalLM> model_;
  std::unique_ptr<FilledWeights> weights_;
  std::unique_ptr<RewardModel> reward_model_;
  std::unique_ptr<rollout::Generator> generator_;
  std::vector<UnfinishedGroup> unfinished_;
};

}  // namespace

std::unique_ptr<Sampler> separate_sampler(const Config& config,
                                          Host& host,
                                          parallel::Groups& groups,
                                          models::CausalLM& actor,
                                          parallel::Fsdp* fsdp,
                                          int64_t num_steps) {
  return std::make_unique<SeparateSampler>(config, host, groups, actor, fsdp, num_steps);
}

void generate_for_others(const Config& config,
                         Host& host,
                         const GeneratorFactory& factory,
                         parallel::Groups& groups) {
  set_up_process();
  for (const std::string& line : check_config(config)) host.say(line);
  RolloutRank(config, host, factory, groups).run();
}

}  // namespace banyan::train
