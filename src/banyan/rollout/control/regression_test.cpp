// Complaints of users of other engines (rollout specification, section 12), one test each, named
// after it.
#include <ATen/ops/empty.h>
#include <c10/core/Allocator.h>
#include <c10/util/ThreadLocalDebugInfo.h>
#include <gtest/gtest.h>

#include <set>
#include <thread>

#include "banyan/core/memory.h"
#include "banyan/models/weight_update.h"
#include "banyan/rollout/continuation.h"
#include "banyan/rollout/control/control_test_support.h"
#include "banyan/rollout/control/memory_release.h"

namespace banyan::rollout {
namespace {

// Most bytes that tensors of this thread hold at once while it lives.
class PeakBytes final : public c10::MemoryReportingInfoBase {
 public:
  void reportMemoryUsage(void*, int64_t bytes, size_t, size_t, c10::Device) override {
    now_ += bytes;
    peak_ = std::max(peak_, now_);
  }
  bool memoryProfilingEnabled() const override { return true; }
  int64_t peak() const { return peak_; }

 private:
  int64_t now_ = 0;
  int64_t peak_ = 0;
};

template <typename Call>
int64_t peak_bytes_of(const Call& call) {
  const auto peak = std::make_shared<PeakBytes>();
  {
    const c10::DebugInfoGuard guard(c10::DebugInfoKind::PROFILER_STATE, peak);
    call();
  }
  return peak->peak();
}

// Old weights and KV are never there beside new weights.
TEST(Regression, wake_order_no_double_weights) {
  const WeightDirectories directories;
  const std::string weights = directories.write("new", 4);
  Served served({.kv_bytes = int64_t{64} << 20});
  const ParamTable& table = served.model.params();
  const int64_t elements = table.num_elements();
  served.engine.sleep(2, PauseMode::kAbort, kTimeout);
  EXPECT_EQ(refusal_of([&] { served.engine.wake({"kv_cache"}); }).first, 409);
  const int64_t peak = peak_bytes_of([&] {
    EXPECT_EQ(served.engine.wake({"weights"}), std::vector<std::string>{"kv_cache"});
    EXPECT_EQ(refusal_of([&] { served.engine.wake({"kv_cache"}); }).first, 409);
    served.engine.update_weights_from_disk(weights, "new", false, kTimeout);
  });
  // fp32 masters and packed bf16; what one tensor takes on its way is gone before the packing. A
  // second copy of the weights would be 8 bytes an element. The forward that follows has a page of
  // its own and a few rows.
  EXPECT_LE(peak, elements * 6 + elements / 4 + 32768);
  EXPECT_GE(peak, elements * 5);
  EXPECT_TRUE(served.engine.wake({"kv_cache"}).empty());
  served.client.submit(long_request(1, 4));
  EXPECT_TRUE(served.client.read_all());
}

// A wake beside a trainer that holds the memory says how much is missing.
TEST(Regression, resume_needs_free_memory) {
  const auto [code, text] =
      refusal_of([] { check_free_memory("[rollout] wake: kv_cache", 5000, 1200); });
  EXPECT_EQ(code, 503);
  EXPECT_EQ(text,
            "[rollout] wake: kv_cache wants 5000 bytes, 1200 are free; let the trainer give its "
            "memory back first");
  check_free_memory("[rollout] wake: kv_cache", 1200, 1200);
  check_free_memory("[rollout] wake: kv_cache", 5000, 0);  // nobody knows
  const auto model = tiny_model();
  Engine engine(*model, {.max_num_seqs = 1 << 30, .kv_bytes = int64_t{1} << 50});
  const auto [start_code, start_text] = refusal_of([&] { engine.start(); });
  EXPECT_EQ(start_code, 503);
  EXPECT_NE(start_text.find("start: kv_cache wants "), std::string::npos) << start_text;
  EXPECT_EQ(engine.stats().state, EngineState::kStopped);
}

// The memory is back with the system when sleep returns.
TEST(Regression, release_returns_after_free) {
  Served served;
  served.client.submit(long_request(1, 400, /*n=*/16));
  ASSERT_TRUE(served.client.read_all());
  std::vector<std::pair<const void*, size_t>> weights;
  for (const Param& param : served.model.params().params()) {
    weights.emplace_back(param.master.const_data_ptr(), param.master.nbytes());
  }
  const int64_t freed = served.engine.sleep(2, PauseMode::kAbort, kTimeout);
  int64_t resident = 0;
  int64_t planned = 0;
  for (const auto& [data, num_bytes] : weights) {
    resident += resident_bytes_of(data, num_bytes);
    planned += static_cast<int64_t>(num_bytes);
  }
  EXPECT_GT(freed, planned);  // the pool and the packed forms besides
  EXPECT_LE(resident, planned / 10 + 8192 * static_cast<int64_t>(weights.size()));
}

// After level 2 nothing is generated from memory that holds no weights.
TEST(Regression, sleep2_refuses_until_sync) {
  const WeightDirectories directories;
  const std::string weights = directories.write("new", 4);
  Served served;
  const std::string before = served.client.submit(long_request(1, 30));
  ASSERT_TRUE(served.client.read_all());
  served.engine.update_weights_from_disk(weights, "a", false, kTimeout);
  const std::string wanted = served.client.submit(long_request(1, 30));
  ASSERT_TRUE(served.client.read_all());
  served.engine.sleep(2, PauseMode::kAbort, kTimeout);
  const auto refused = [&] {
    return refusal_of([&] { served.engine.submit(long_request(1, 3)); });
  };
  EXPECT_EQ(refused().first, 409);
  served.engine.wake({"weights"});
  EXPECT_EQ(refused().first, 409);
  EXPECT_NE(refused().second.find("weights_missing"), std::string::npos);
  EXPECT_TRUE(served.engine.stats().weights_missing);
  EXPECT_EQ(refusal_of([&] { served.engine.weight_checksums(); }).first, 409);
  EXPECT_EQ(refusal_of([&] {
              served.engine.update_weights_from_disk(directories.path("none"), "b", false, 1.0);
            }).first,
            400);
  EXPECT_EQ(refused().first, 409);
  served.engine.update_weights_from_disk(weights, "c", false, kTimeout);
  served.engine.wake({"kv_cache"});
  const std::string after = served.client.submit(long_request(1, 30));
  ASSERT_TRUE(served.client.read_all());
  EXPECT_EQ(served.client.response(after).ids(), served.client.response(wanted).ids());
  EXPECT_NE(served.client.response(after).ids(), served.client.response(before).ids());
}

// Memory that somebody still holds is an error with both numbers, not a log line.
TEST(Regression, sleep_frees_something) {
  const auto filled = [] {
    at::Tensor tensor = at::empty({int64_t{16} << 20}, at::kByte);
    tensor.fill_(1);
    return tensor;
  };
  at::Tensor held = filled();
  const auto [code, text] = refusal_of([&] { release_memory({held.storage()}, at::kCPU); });
  EXPECT_EQ(code, 500);
  EXPECT_NE(text.find(" bytes back to the system, 0 came back"), std::string::npos) << text;
  std::vector<c10::Storage> memory = {held.storage()};
  held = at::Tensor();
  EXPECT_GE(release_memory(std::move(memory), at::kCPU), (int64_t{16} << 20) * 9 / 10);
  EXPECT_EQ(release_memory({}, at::kCPU), 0);
}

// An update under load succeeds: with requests queued, running and retracted.
TEST(Regression, update_under_load_never_asserts) {
  const WeightDirectories directories;
  const std::string weights[] = {directories.write("a", 4), directories.write("b", 5)};
  for (const bool keep : {false, true}) {
    Served served(paced({.max_num_seqs = 5, .kv_bytes = 24 * 16384}));
    for (int32_t i = 0; i < 8; ++i) served.client.submit(long_request(i, 150, /*n=*/2));
    ASSERT_TRUE(served.client.read_tokens(3));
    for (int i = 0; i < 12; ++i) {
      if (i == 5) served.engine.pause(PauseMode::kRetract, kTimeout);
      served.engine.update_weights_from_disk(
          weights[i % 2], "v" + std::to_string(i), keep, kTimeout);
      if (i == 5) served.engine.resume();
      served.client.read();
    }
    ASSERT_TRUE(served.client.read_all());
    size_t most_spans = 0;
    for (const auto& [key, response] : served.client.responses()) {
      EXPECT_EQ(response.tokens.size(), 150u) << response.end.error;
      int32_t end = 0;
      for (const WeightSpan& span : response.end.spans) {
        EXPECT_EQ(span.start, end);
        EXPECT_EQ(span.version, span.epoch == 0 ? "default" : "v" + std::to_string(span.epoch - 1));
        end = span.end;
      }
      EXPECT_EQ(end, 150);
      most_spans = std::max(most_spans, response.end.spans.size());
    }
    EXPECT_GT(most_spans, 1u);
    EXPECT_EQ(served.engine.stats().weight_epoch, 12);
    EXPECT_EQ(served.engine.stats().used_pages, 0);
  }
}

TEST(Regression, double_resume_noop) {
  Served served;
  served.engine.pause(PauseMode::kAbort, kTimeout);
  served.engine.resume();
  const std::string id = served.client.submit(long_request(1, 200));
  for (int i = 0; i < 50; ++i) served.engine.resume();
  ASSERT_TRUE(served.client.read_all());
  EXPECT_EQ(served.client.response(id).tokens.size(), 200u);
}

// Submissions are gated before what runs is drained, so the drain ends.
TEST(Regression, pause_gates_submission) {
  Served served;
  std::atomic<bool> stop{false};
  std::atomic<int> refused{0};
  std::vector<std::thread> threads;
  for (int t = 0; t < 3; ++t) {
    threads.emplace_back([&, t] {
      for (int32_t i = 0; !stop; ++i) {
        if (refusal_of([&] { served.engine.submit(long_request(1000 * t + i, 20)); }).first ==
            503) {
          ++refused;
        }
        std::this_thread::sleep_for(std::chrono::microseconds(200));
      }
    });
  }
  std::this_thread::sleep_for(std::chrono::milliseconds(50));
  served.engine.pause(PauseMode::kWait, kTimeout);
  EXPECT_EQ(served.engine.stats().running + served.engine.stats().waiting, 0);
  while (refused == 0) std::this_thread::yield();
  stop = true;
  for (std::thread& thread : threads) thread.join();
  EXPECT_GT(refused, 0);
  EXPECT_EQ(served.engine.stats().running + served.engine.stats().waiting, 0);
}

// The pause state after an update is that of before.
TEST(Regression, disk_update_resumes) {
  const WeightDirectories directories;
  const std::string weights = directories.write("new", 4);
  Served served;
  const std::string id = served.client.submit(long_request(1, 300));
  ASSERT_TRUE(served.client.read_tokens(1));
  served.engine.update_weights_from_disk(weights, "a", false, kTimeout);
  EXPECT_EQ(served.engine.stats().state, EngineState::kRunning);
  ASSERT_TRUE(served.client.read_all());
  EXPECT_EQ(served.client.response(id).tokens.size(), 300u);
  served.engine.pause(PauseMode::kKeep, kTimeout);
  served.engine.update_weights_from_disk(weights, "b", true, kTimeout);
  EXPECT_EQ(served.engine.stats().state, EngineState::kPaused);
  // An update that fails leaves it as well.
  EXPECT_EQ(refusal_of([&] {
              served.engine.update_weights_from_disk(directories.path("none"), "c", false, 1.0);
            }).first,
            400);
  EXPECT_EQ(served.engine.stats().state, EngineState::kPaused);
  EXPECT_EQ(served.engine.stats().weight_version, "b");
}

// At learning rate 0 rollout and scoring agree exactly, step after step.
TEST(Regression, lr0_logprob_gap_constant) {
  const auto model = tiny_model();
  Engine engine(*model, {.keep_pool = true});
  const auto prompts = make_prompts(/*count=*/2, /*trunk=*/70, /*n=*/3);
  for (int64_t step = 1; step <= 4; ++step) {
    SamplingParams params = make_params(30);
    params.step = static_cast<uint64_t>(step);
    Result result;
    engine.generate(
        prompts, params, [&](Trajectory&& t) { result.trajectories[{t.row, t.index}] = t; });
    const auto scored = score(*model, result, 1.0);
    for (const auto& [key, t] : result.trajectories) {
      EXPECT_EQ(t.rollout_log_probs, scored.at(key)) << "step " << step;
    }
    model->params().repack();  // an update that changes nothing
    engine.weights_changed(step);
  }
}

// Batch-mates, with seeds or without, change no draw.
TEST(Regression, seed_ignores_batchmates) {
  const auto tokens_beside = [](int32_t mates, int32_t max_num_seqs) {
    Engine engine(shared_model(), {.max_num_seqs = max_num_seqs});
    engine.start();
    Client client(engine);
    for (int32_t i = 0; i < mates; ++i) {
      Request mate = long_request(50 + i, 20 + 10 * i);
      mate.params.seed = i % 2 == 0 ? 0 : 1234 + i;
      mate.params.top_k = i % 3 == 0 ? 5 : -1;
      client.submit(mate);
    }
    Request request = long_request(1, 60, /*n=*/2);
    request.params.top_p = 0.9;
    const std::string id = client.submit(request);
    EXPECT_TRUE(client.read_all());
    return std::make_pair(client.response(id, 0).ids(), client.response(id, 1).ids());
  };
  const auto alone = tokens_beside(0, 8);
  EXPECT_NE(alone.first, alone.second);
  EXPECT_EQ(tokens_beside(5, 8), alone);
  EXPECT_EQ(tokens_beside(7, 2), alone);
}

// A group is n single requests with seeds in a row.
TEST(Regression, a_group_equals_single_requests) {
  Engine engine(shared_model(), {});
  engine.start();
  Client client(engine);
  Request request = long_request(1, 40, /*n=*/4);
  const std::string group = client.submit(request);
  std::vector<std::string> single;
  request.n = 1;
  for (int32_t i = 0; i < 4; ++i) {
    single.push_back(client.submit(request));
    ++request.params.seed;
  }
  ASSERT_TRUE(client.read_all());
  for (int32_t i = 0; i < 4; ++i) {
    EXPECT_EQ(client.response(group, i).ids(), client.response(single[i]).ids());
  }
}

// One seed over many prompts: each has its own noise. A very high temperature makes every token
// equally likely, so equal noise would give equal tokens.
TEST(Regression, seed_broadcast_uncorrelated) {
  Engine engine(shared_model(), {});
  engine.start();
  Client client(engine);
  std::vector<std::string> ids;
  for (int32_t i = 0; i < 24; ++i) {
    Request request = long_request(0, 20);
    request.prompt = tokens_of(7, 30);
    request.prompt[3] = i;
    request.params.temperature = 1e6;
    ids.push_back(client.submit(request));
  }
  ASSERT_TRUE(client.read_all());
  int equal = 0;
  int pairs = 0;
  for (size_t a = 0; a < ids.size(); ++a) {
    for (size_t b = a + 1; b < ids.size(); ++b) {
      const auto first = client.response(ids[a]).ids();
      const auto second = client.response(ids[b]).ids();
      for (size_t i = 0; i < first.size(); ++i, ++pairs) equal += first[i] == second[i];
    }
  }
  EXPECT_LT(equal, pairs / 50);  // 1 in 300 by chance
}

// Running, queued and retracted requests return ids and log-probabilities when aborted.
TEST(Regression, abort_returns_partials) {
  Served served(paced({.max_num_seqs = 2}));
  Engine& engine = served.engine;
  const std::string running = served.client.submit(long_request(1, 900, /*n=*/2));
  ASSERT_TRUE(served.client.read_tokens(5));
  engine.pause(PauseMode::kRetract, kTimeout);
  const std::string queued = served.client.submit(long_request(2, 900));
  engine.resume();
  const std::string late = served.client.submit(long_request(3, 900));
  ASSERT_TRUE(served.client.read_tokens(20));
  engine.pause(PauseMode::kRetract, kTimeout);
  EXPECT_EQ(engine.abort({running, queued, late}), 3);
  ASSERT_TRUE(served.client.read_all());
  for (int32_t index = 0; index < 2; ++index) {
    const Collected& response = served.client.response(running, index);
    EXPECT_EQ(response.end.finish, FinishReason::kAbort);
    EXPECT_GE(response.tokens.size(), 5u);
    EXPECT_GE(response.end.num_retractions, 1);
    for (const TokenRecord& record : response.tokens) {
      EXPECT_TRUE(std::isfinite(record.raw) && record.raw <= 0.0f);
    }
    ASSERT_EQ(response.end.spans.size(), 1u);
    EXPECT_EQ(response.end.spans[0].end, static_cast<int32_t>(response.tokens.size()));
  }
  EXPECT_EQ(served.client.response(queued).end.finish, FinishReason::kAbort);
  EXPECT_EQ(served.client.response(late).end.finish, FinishReason::kAbort);
}

// A response that goes on after an abort has the budget that is left, and ends as if nothing had
// happened.
TEST(Regression, resume_budget_reduced) {
  Served served;
  Request request = long_request(4, 80, /*n=*/2);
  request.params.frequency_penalty = 0.3;
  request.params.repetition_penalty = 1.1;
  request.params.min_tokens = 60;
  const std::string whole = served.client.submit(request);
  ASSERT_TRUE(served.client.read_all());
  for (const size_t cut : {1u, 17u, 79u}) {
    const std::vector<int32_t> wanted = served.client.response(whole, 1).ids();
    const std::vector<int32_t> so_far(wanted.begin(), wanted.begin() + static_cast<int64_t>(cut));
    const Request rest = continuation(request, /*index=*/1, so_far);
    EXPECT_EQ(rest.params.max_tokens, 80 - static_cast<int32_t>(cut));
    const std::string id = served.client.submit(rest);
    ASSERT_TRUE(served.client.read_all());
    const Collected& resumed = served.client.response(id, 1);
    EXPECT_EQ(resumed.tokens.size(), 80 - cut);
    EXPECT_EQ(resumed.ids(),
              std::vector<int32_t>(wanted.begin() + static_cast<int64_t>(cut), wanted.end()));
    EXPECT_EQ(resumed.end.finish, FinishReason::kLength);
  }
}

// Files are opened anew: the same path with new contents gives new weights.
TEST(Regression, reload_reads_disk_again) {
  const WeightDirectories directories;
  Served served;
  std::set<std::map<std::string, std::string>> seen;
  for (const uint64_t seed : {4, 5, 6}) {
    served.engine.update_weights_from_disk(
        directories.write("same", seed), "v" + std::to_string(seed), false, kTimeout);
    EXPECT_TRUE(seen.insert(served.engine.weight_checksums()).second);
    const auto fresh = models::load_model(directories.path("same"), kInference);
    EXPECT_EQ(served.engine.weight_checksums(), models::weight_checksums(*fresh));
  }
}

// Nothing is appended that was not sampled: every id has its log-probability, EOS too.
TEST(Regression, every_id_has_logprob) {
  Served served;
  std::vector<std::string> ids;
  for (int32_t i = 0; i < 12; ++i) {
    Request request = long_request(i, 60);
    request.params.eos_ids = {7, 8, 9, 10, 11, 12};
    request.params.stop_token_ids = {20, 21, 22, 23, 24};
    ids.push_back(served.client.submit(request));
  }
  ASSERT_TRUE(served.client.read_all());
  std::set<FinishReason> reasons;
  for (const std::string& id : ids) {
    const Collected& response = served.client.response(id);
    reasons.insert(response.end.finish);
    ASSERT_FALSE(response.tokens.empty());
    for (const TokenRecord& record : response.tokens) {
      EXPECT_TRUE(std::isfinite(record.raw) && record.raw <= 0.0f);
      EXPECT_TRUE(std::isfinite(record.processed));
    }
    const int32_t last = response.tokens.back().token;
    if (response.end.finish == FinishReason::kStop) {
      EXPECT_TRUE((last >= 7 && last <= 12) || (last >= 20 && last <= 24));
      EXPECT_EQ(response.end.stop_token, last >= 20 ? last : -1);
    } else {
      EXPECT_EQ(response.tokens.size(), 60u);
    }
  }
  EXPECT_TRUE(reasons.contains(FinishReason::kStop));
}

// What is derived from weights follows them: forms, and what others register.
TEST(Regression, derived_caches_refresh) {
  const WeightDirectories directories;
  const std::string weights = directories.write("new", 9);
  Served served;
  int refreshed = 0;
  served.model.params().on_repack([&] { ++refreshed; });
  served.client.submit(long_request(1, 30));
  ASSERT_TRUE(served.client.read_all());
  served.engine.update_weights_from_disk(weights, "new", false, kTimeout);
  EXPECT_EQ(refreshed, 1);
  const std::string updated = served.client.submit(long_request(1, 30));
  ASSERT_TRUE(served.client.read_all());

  const auto fresh = models::load_model(weights, kInference);
  Engine engine(*fresh, {});
  engine.start();
  Client client(engine);
  const std::string wanted = client.submit(long_request(1, 30));
  ASSERT_TRUE(client.read_all());
  EXPECT_EQ(served.client.response(updated).ids(), client.response(wanted).ids());
  for (size_t i = 0; i < 30; ++i) {
    EXPECT_EQ(served.client.response(updated).tokens[i].raw, client.response(wanted).tokens[i].raw);
  }
}

// Packing runs once per wake, however often it is asked for (dense models).
TEST(Regression, layout_transform_once) {
  Served served;
  int packed = 0;
  served.model.params().on_repack([&] { ++packed; });
  const std::string before = served.client.submit(long_request(1, 20));
  ASSERT_TRUE(served.client.read_all());
  served.engine.sleep(1, PauseMode::kAbort, kTimeout);
  EXPECT_FALSE(served.model.params().has_forms());
  served.engine.wake({"weights"});
  served.engine.wake({"weights"});
  served.engine.wake({});
  served.engine.wake({});
  EXPECT_EQ(packed, 1);
  const std::string after = served.client.submit(long_request(1, 20));
  ASSERT_TRUE(served.client.read_all());
  EXPECT_EQ(served.client.response(after).ids(), served.client.response(before).ids());
}

}  // namespace
}  // namespace banyan::rollout
