// A served engine with its client, and weights on disk, for the tests of the engine.
#pragma once

#include <poll.h>

#include <atomic>
#include <chrono>
#include <map>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "banyan/io/safetensors.h"
#include "banyan/io/test_support.h"
#include "banyan/rollout/control/boundary.h"
#include "banyan/rollout/test_support.h"

namespace banyan::rollout {

// Upper bound of calls and waits that are expected to end: no test waits for it.
inline constexpr double kTimeout = 60.0;

inline const models::LoadOptions kInference = {.compute = {}, .with_backward = false};

// What came of one response.
struct Collected {
  std::vector<TokenRecord> tokens;
  bool finished = false;
  Event end;  // where finished

  std::vector<int32_t> ids() const {
    std::vector<int32_t> out;
    for (const TokenRecord& record : tokens) out.push_back(record.token);
    return out;
  }
};

// Reads events as a server does: waits for the descriptor, drains all.
class Client {
 public:
  explicit Client(Engine& engine) : engine_(engine) {}

  std::string submit(Request request) {
    const int32_t n = request.n;
    const int32_t first = request.first_index;
    std::string id = engine_.submit(std::move(request));
    for (int32_t i = 0; i < n; ++i) responses_[{id, first + i}];
    return id;
  }

  // Reads until `done` or for `seconds`; whether it is done.
  bool read_until(const std::function<bool()>& done, double seconds = kTimeout) {
    const Deadline deadline(seconds);
    while (!done()) {
      if (deadline.passed()) return false;
      pollfd wanted = {.fd = engine_.event_fd(), .events = POLLIN, .revents = 0};
      poll(&wanted, 1, /*milliseconds=*/20);
      read();
    }
    return true;
  }
  void read() {
    engine_.drain(events_);
    for (Event& event : events_) take(event);
  }
  bool read_all(double seconds = kTimeout) {
    return read_until([&] { return num_finished_ == responses_.size(); }, seconds);
  }
  // Until some response has at least `count` tokens.
  bool read_tokens(size_t count) {
    return read_until([&] {
      for (const auto& [key, response] : responses_) {
        if (response.tokens.size() >= count) return true;
      }
      return false;
    });
  }

  const Collected& response(const std::string& id, int32_t index = 0) const {
    return responses_.at({id, index});
  }
  const std::map<std::pair<std::string, int32_t>, Collected>& responses() const {
    return responses_;
  }
  size_t num_finished() const { return num_finished_; }

 private:
  void take(Event& event) {
    Collected& response = responses_[{event.request, event.index}];
    EXPECT_FALSE(response.finished) << event.request << " goes on after its end";
    for (TokenRecord& record : event.tokens) response.tokens.push_back(std::move(record));
    event.tokens.clear();
    if (!event.finished) return;
    response.finished = true;
    response.end = event;
    ++num_finished_;
  }

  Engine& engine_;
  std::vector<Event> events_;
  std::map<std::pair<std::string, int32_t>, Collected> responses_;
  size_t num_finished_ = 0;
};

inline std::vector<int32_t> tokens_of(int32_t seed, int32_t count) {
  std::mt19937 random(static_cast<uint32_t>(seed));
  std::vector<int32_t> out(count);
  for (int32_t& id : out) id = static_cast<int32_t>(random() % kVocab);
  return out;
}

// A request that draws `max_tokens` tokens: no EOS.
inline Request long_request(int32_t seed, int32_t max_tokens, int32_t n = 1) {
  Request request;
  request.prompt = tokens_of(seed, 20 + seed % 60);
  request.n = n;
  request.params.max_tokens = max_tokens;
  request.params.seed = 11;
  return request;
}

// The code and text of the RequestError of a call; {0, ""} if there was none.
template <typename Call>
std::pair<int, std::string> refusal_of(Call&& call) {
  try {
    call();
  } catch (const RequestError& error) {
    return {error.code, error.what()};
  }
  return {0, ""};
}

// The tiny model with passes that take their time, wait while they are to, and fail on demand.
class StagedModel final : public models::CausalLM {
 public:
  const models::ModelShape& shape() const override { return model_->shape(); }
  const ComputeOptions& options() const override { return model_->options(); }
  ParamTable& params() override { return model_->params(); }
  at::Tensor forward(const at::Tensor& ids,
                     const at::Tensor& positions,
                     AttentionContext& attention,
                     std::unique_ptr<models::Saved>* saved) override {
    if (fails.exchange(false)) throw std::runtime_error("no memory");
    for (inside = true; closed;) std::this_thread::sleep_for(std::chrono::microseconds(100));
    inside = false;
    std::this_thread::sleep_for(delay.load());
    return model_->forward(ids, positions, attention, saved);
  }
  void backward(std::unique_ptr<models::Saved>, const at::Tensor&, AttentionContext&) override {}
  models::HeadKind head_kind() const override { return model_->head_kind(); }
  const ops::LinearWeight& head() const override { return model_->head(); }
  at::Tensor& head_grad() override { return model_->head_grad(); }
  const ops::ValueHeadWeight& value_head() const override { return model_->value_head(); }
  at::Tensor& value_head_grad() override { return model_->value_head_grad(); }
  at::Tensor value_head_bias_grad() const override { return model_->value_head_bias_grad(); }

  std::atomic<bool> fails{false};
  std::atomic<bool> closed{false};  // a pass waits
  std::atomic<bool> inside{false};  // a pass is at that place
  std::atomic<std::chrono::microseconds> delay{std::chrono::microseconds(300)};

 private:
  std::unique_ptr<models::CausalLM> model_ = tiny_model();
};

// The passes wait once some tokens wait for the reader: while nobody reads, nothing ends by itself,
// however long the test takes for its next call.
inline EngineOptions paced(EngineOptions options = {}) {
  options.max_undrained_bytes = 16 * sizeof(TokenRecord);
  return options;
}

// A served engine with a model of its own.
struct Served {
  explicit Served(const EngineOptions& options = {}) : engine(model, options), client(engine) {
    engine.start();
  }
  // Requests of two responses in progress.
  void load(int32_t count, int32_t max_tokens) {
    for (int32_t i = 0; i < count; ++i) {
      ids.push_back(client.submit(long_request(100 + i, max_tokens, /*n=*/2)));
    }
    EXPECT_TRUE(client.read_tokens(2));
  }
  EngineState state() const { return engine.stats().state; }

  StagedModel model;
  Engine engine;
  Client client;
  std::vector<std::string> ids;  // of load()
};

// Directories of weights of the tiny model.
class WeightDirectories {
 public:
  WeightDirectories() {
    std::filesystem::create_directory(folder_ / "config");
    io::write_bytes(folder_ / "config/config.json", kTinyConfig);
  }
  // Random weights of `seed` as bf16 files; an old directory of that name is replaced.
  std::string write(const std::string& name,
                    uint64_t seed,
                    const std::function<void(models::CausalLM&)>& change = nullptr) const {
    std::filesystem::remove_all(folder_ / name);
    const auto model = models::random_model(kTinyConfig, seed, kInference);
    if (change) change(*model);
    models::save_model(*model, folder_ / "config", folder_ / name, at::kBFloat16);
    return folder_ / name;
  }
  std::string path(const std::string& name) const { return folder_ / name; }

 private:
  io::TempDirectory folder_;
};

}  // namespace banyan::rollout
