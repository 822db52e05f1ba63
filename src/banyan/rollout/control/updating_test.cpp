// New weights: from disk while requests run, refused whole, kept or retracted; versions per token;
// checksums; calls from many threads at once.
#include <gtest/gtest.h>

#include <atomic>
#include <thread>

#include "banyan/models/weight_update.h"
#include "banyan/rollout/continuation.h"
#include "banyan/rollout/control/control_test_support.h"
#include "banyan/rollout/control/deliveries.h"
#include "banyan/rollout/control/loop.h"

namespace banyan::rollout {
namespace {

// A retracted response goes on as if its tokens so far had been the prompt of the new weights.
TEST(Updating, RetractedResponsesGoOnUnderTheNewWeights) {
  const WeightDirectories directories;
  const std::string weights = directories.write("new", 4);
  Served served(paced());
  const Request request = long_request(1, 120, /*n=*/2);
  const std::string id = served.client.submit(request);
  ASSERT_TRUE(served.client.read_tokens(10));
  served.engine.update_weights_from_disk(weights, "new", /*keep=*/false, kTimeout);
  ASSERT_TRUE(served.client.read_all());
  for (int32_t index = 0; index < 2; ++index) {
    const Collected& response = served.client.response(id, index);
    ASSERT_EQ(response.end.spans.size(), 2u);
    const WeightSpan& old_span = response.end.spans[0];
    const WeightSpan& new_span = response.end.spans[1];
    EXPECT_EQ(old_span.version, "default");
    EXPECT_EQ(new_span.version, "new");
    EXPECT_EQ(new_span.epoch, old_span.epoch + 1);
    EXPECT_GE(old_span.end, 1);
    EXPECT_EQ(new_span.start, old_span.end);
    EXPECT_EQ(new_span.end, 120);
    EXPECT_GE(response.end.num_retractions, 1);
    const std::vector<int32_t> ids = response.ids();
    const std::vector<int32_t> so_far(ids.begin(), ids.begin() + old_span.end);
    const std::string rest = served.client.submit(continuation(request, index, so_far));
    ASSERT_TRUE(served.client.read_all());
    EXPECT_EQ(served.client.response(rest, index).ids(),
              std::vector<int32_t>(ids.begin() + old_span.end, ids.end()));
  }
}

// Kept responses are not computed again, and nothing of them is found by later requests.
TEST(Updating, KeptResponsesPublishNothing) {
  const WeightDirectories directories;
  const std::string weights = directories.write("new", 4);
  Served served(paced());
  Request request = long_request(1, 200);
  request.prompt = tokens_of(2, 150);
  const std::string id = served.client.submit(request);
  ASSERT_TRUE(served.client.read_tokens(10));
  served.engine.update_weights_from_disk(weights, "new", /*keep=*/true, kTimeout);
  const std::string same = served.client.submit(request);
  ASSERT_TRUE(served.client.read_all());
  EXPECT_EQ(served.client.response(id).end.num_retractions, 0);
  EXPECT_EQ(served.client.response(id).end.spans.size(), 2u);
  EXPECT_EQ(served.client.response(same).end.cached_tokens, 0);
  Request longer = request;
  const std::vector<int32_t> kept = served.client.response(id).ids();
  longer.prompt.insert(longer.prompt.end(), kept.begin(), kept.end());
  longer.params.max_tokens = 2;
  const std::string after = served.client.submit(longer);
  ASSERT_TRUE(served.client.read_all());
  // The prompt comes from `same`; pages of the kept response do not.
  EXPECT_LE(served.client.response(after).end.cached_tokens, 192);
  const auto fresh = models::load_model(weights, kInference);
  Engine engine(*fresh, {});
  engine.start();
  Client client(engine);
  const std::string wanted = client.submit(longer);
  ASSERT_TRUE(client.read_all());
  EXPECT_EQ(served.client.response(after).ids(), client.response(wanted).ids());
  EXPECT_EQ(served.client.response(after).tokens[0].raw, client.response(wanted).tokens[0].raw);
}

// A directory that is not whole leaves everything as it was, and the engine running.
TEST(Updating, AHalfWrittenDirectoryLeavesTheOldWeights) {
  const WeightDirectories directories;
  namespace fs = std::filesystem;
  const auto file_of = [&](const std::string& name) {
    return directories.write(name, 4) + "/model.safetensors";
  };
  const auto rewrite = [&](const std::string& name, auto change) {
    const std::string path = file_of(name);
    std::vector<io::NamedTensor> tensors;
    {
      const io::SafetensorsFile file(path);
      for (const auto& [tensor, entry] : file.entries()) {
        tensors.push_back({tensor, file.read(tensor)});
      }
    }
    change(tensors);
    fs::remove(path);
    io::write_safetensors(path, tensors, {{"format", "pt"}});
  };
  const std::string truncated = file_of("truncated");
  fs::resize_file(truncated, fs::file_size(truncated) / 2);
  rewrite("missing", [](auto& tensors) { tensors.erase(tensors.begin() + 3); });
  rewrite("shape", [](auto& tensors) { tensors[5].tensor = tensors[5].tensor.narrow(0, 0, 1); });
  rewrite("type", [](auto& tensors) { tensors[5].tensor = tensors[5].tensor.to(at::kInt); });
  fs::create_directory(directories.path("empty"));

  Served served;
  const auto checksums = served.engine.weight_checksums();
  const std::string before = served.client.submit(long_request(1, 40));
  ASSERT_TRUE(served.client.read_all());
  const std::string through = served.client.submit(long_request(2, 300));
  for (const char* name : {"truncated", "missing", "shape", "type", "empty", "absent"}) {
    const auto [code, text] = refusal_of([&] {
      served.engine.update_weights_from_disk(directories.path(name), name, false, kTimeout);
    });
    EXPECT_EQ(code, 400) << name;
    EXPECT_NE(text.find(std::string("/") + name), std::string::npos) << text;
  }
  EXPECT_EQ(served.engine.weight_checksums(), checksums);
  EXPECT_EQ(served.engine.stats().weight_epoch, 0);
  EXPECT_EQ(served.engine.stats().weight_version, "default");
  const std::string after = served.client.submit(long_request(1, 40));
  ASSERT_TRUE(served.client.read_all());
  EXPECT_EQ(served.client.response(after).ids(), served.client.response(before).ids());
  EXPECT_EQ(served.client.response(through).end.spans.size(), 1u);
}

// Numbers that are finite one by one and not together: the old weights come back, bit for bit.
TEST(Updating, WeightsThatDoNotComputeAreRolledBack) {
  const WeightDirectories directories;
  const std::string good = directories.write("good", 4);
  const std::string bad = directories.write("bad", 5, [](models::CausalLM& model) {
    model.params().at("model.norm.weight").master.fill_(3e38);
  });
  Served served(paced());
  const auto checksums = served.engine.weight_checksums();
  const std::string before = served.client.submit(long_request(1, 40));
  ASSERT_TRUE(served.client.read_all());
  const std::string through = served.client.submit(long_request(2, 300));
  ASSERT_TRUE(served.client.read_tokens(3));
  const auto refused = [&] {
    return refusal_of([&] { served.engine.update_weights_from_disk(bad, "bad", false, kTimeout); });
  };
  const auto [code, text] = refused();
  EXPECT_EQ(code, 400);
  EXPECT_NE(text.find("the weights do not compute"), std::string::npos) << text;
  EXPECT_NE(text.find("the old ones are in use again"), std::string::npos) << text;
  EXPECT_EQ(served.engine.weight_checksums(), checksums);
  EXPECT_EQ(served.engine.stats().weight_epoch, 0);
  EXPECT_EQ(served.engine.stats().counters.at("weight_updates"), 0);
  const std::string after = served.client.submit(long_request(1, 40));
  ASSERT_TRUE(served.client.read_all());
  EXPECT_EQ(served.client.response(after).ids(), served.client.response(before).ids());
  EXPECT_EQ(served.client.response(through).tokens.size(), 300u);
  EXPECT_EQ(served.client.response(through).end.num_retractions, 0);

  // Nothing to go back to: refused until an update that computes.
  served.engine.sleep(2, PauseMode::kAbort, kTimeout);
  served.engine.wake({"weights"});
  EXPECT_EQ(refused().first, 400);
  EXPECT_TRUE(served.engine.stats().weights_missing);
  EXPECT_EQ(refusal_of([&] { served.engine.submit(long_request(1, 3)); }).first, 409);
  served.engine.update_weights_from_disk(good, "good", false, kTimeout);
  EXPECT_TRUE(served.engine.wake({}).empty());
  served.client.submit(long_request(1, 3));
  EXPECT_TRUE(served.client.read_all());
}

TEST(Updating, AnEngineDoesNotStartWithWeightsThatDoNotCompute) {
  StagedModel model;
  model.params().at("model.norm.weight").master.fill_(3e38);
  model.params().repack();
  Engine engine(model, {});
  const auto [code, text] = refusal_of([&] { engine.start(); });
  EXPECT_EQ(code, 409);
  EXPECT_NE(text.find("start: the weights do not compute"), std::string::npos) << text;
  EXPECT_EQ(engine.stats().state, EngineState::kStopped);
}

// Reading stops when the caller's time is over.
TEST(Updating, ReadingObeysTheDeadline) {
  const WeightDirectories directories;
  const std::string weights = directories.write("new", 4);
  Served served;
  const auto [code, text] = refusal_of(
      [&] { served.engine.update_weights_from_disk(weights, "new", false, /*timeout=*/0.0); });
  EXPECT_EQ(code, 503);
  EXPECT_NE(text.find("0 s are over, 0 of "), std::string::npos) << text;
  EXPECT_EQ(served.engine.stats().weight_version, "default");
}

TEST(Updating, LabelsAreThoseOfTheWeights) {
  Served served;
  served.engine.set_weight_version("seven");
  const std::string first = served.client.submit(long_request(1, 5));
  ASSERT_TRUE(served.client.read_all());
  served.engine.weights_changed(8);
  const std::string second = served.client.submit(long_request(1, 5));
  ASSERT_TRUE(served.client.read_all());
  EXPECT_EQ(served.client.response(first).end.spans[0].version, "seven");
  EXPECT_EQ(served.client.response(second).end.spans[0].version, "8");
  EXPECT_EQ(served.client.response(second).end.spans[0].epoch, 1);
  EXPECT_EQ(served.engine.stats().weight_version, "8");
}

// Labels of weights that no token in progress was drawn under are forgotten.
TEST(Updating, OldLabelsDoNotPileUp) {
  Loop loop(shared_model(), {});
  loop.open_pool(8);
  for (int i = 0; i < 1000; ++i) loop.new_epoch("v" + std::to_string(i), /*keep=*/false);
  EXPECT_EQ(loop.num_versions(), 1u);
  EXPECT_EQ(loop.version(), "v999");

  const std::vector<std::string> no_bytes;
  TrajectoryDelivery delivery;
  loop.add(std::make_unique<Live>(long_request(1, 12), 12, no_bytes, delivery));
  for (int i = 0; i < 2; ++i) ASSERT_TRUE(loop.step());  // the prompt, and the first decode
  for (int i = 0; i < 5; ++i) {
    ASSERT_TRUE(loop.step());
    loop.new_epoch("w" + std::to_string(i), /*keep=*/true);
  }
  EXPECT_EQ(loop.num_versions(), 6u);
  while (loop.step()) {
  }
  loop.new_epoch("last", /*keep=*/false);
  EXPECT_EQ(loop.num_versions(), 1u);
  const std::vector<Trajectory> done = delivery.take();
  ASSERT_EQ(done.size(), 1u);
  ASSERT_EQ(done[0].weight_spans.size(), 6u);
  EXPECT_EQ(done[0].weight_spans[0].version, "v999");
  EXPECT_EQ(done[0].weight_spans[5].version, "w4");
}

// A trainer that keeps the pool says when its weights changed; nothing old is used then.
TEST(Updating, AKeptPoolForgetsTheOldWeights) {
  const auto model = tiny_model();
  const auto prompts = make_prompts(/*count=*/2, /*trunk=*/100, /*n=*/2);
  Engine engine(*model, {.keep_pool = true});
  const auto run = [&] {
    Result result;
    result.stats = engine.generate(prompts, make_params(20), [&](Trajectory&& t) {
      result.trajectories[{t.row, t.index}] = t;
    });
    return result;
  };
  const Result first = run();
  const Result again = run();
  expect_same(again, first, "kept pool");
  EXPECT_LT(again.stats.computed_prompt_tokens, first.stats.computed_prompt_tokens);
  for (Param& param : model->params().params()) param.master.mul_(1.1);
  model->params().repack();
  engine.weights_changed(1);
  const Result changed = run();
  EXPECT_EQ(changed.stats.computed_prompt_tokens, first.stats.computed_prompt_tokens);
  expect_same(generate(*model, prompts, make_params(20)), changed, "fresh engine");
  for (const auto& [key, t] : changed.trajectories) {
    ASSERT_EQ(t.weight_spans.size(), 1u);
    EXPECT_EQ(t.weight_spans[0].version, "1");
    EXPECT_EQ(t.weight_spans[0].end, static_cast<int32_t>(t.response.size()));
  }
  EXPECT_GT(engine.stats().num_pages, 0);
  EXPECT_EQ(engine.sleep(1, PauseMode::kAbort, kTimeout) > 0, true);
  engine.wake({});
  expect_same(run(), changed, "after a sleep");
}

// A trainer's continuation: the trajectory has the new tokens, the budget is what is left.
TEST(Updating, GenerateGoesOnWithPartials) {
  std::vector<Prompt> prompts = make_prompts(/*count=*/2, /*trunk=*/30, /*n=*/2);
  SamplingParams params = make_params(50);
  params.ignore_eos = true;
  const Result whole = generate(shared_model(), prompts, params);
  std::vector<Prompt> rest;
  for (const Prompt& prompt : prompts) {
    for (int32_t index = 0; index < 2; ++index) {
      const std::vector<int32_t>& response = whole.trajectories.at({prompt.row, index}).response;
      Prompt& next = rest.emplace_back(prompt);
      next.n = 1;
      next.first_index = index;
      next.original_prompt = static_cast<int32_t>(prompt.tokens.size());
      next.tokens.insert(next.tokens.end(), response.begin(), response.begin() + 20 + index);
    }
  }
  const Result resumed = generate(shared_model(), rest, params);
  ASSERT_EQ(resumed.trajectories.size(), 4u);
  for (const auto& [key, t] : resumed.trajectories) {
    const Trajectory& all = whole.trajectories.at(key);
    const int64_t used = 20 + key.second;
    EXPECT_EQ(t.response, std::vector<int32_t>(all.response.begin() + used, all.response.end()));
    EXPECT_EQ(
        t.rollout_log_probs,
        std::vector<float>(all.rollout_log_probs.begin() + used, all.rollout_log_probs.end()));
    EXPECT_EQ(t.finish, FinishReason::kLength);
  }
}

// Threads that call at random: nothing hangs, nothing is lost, the figures add up.
TEST(Updating, ManyThreadsAtOnce) {
  const WeightDirectories directories;
  const std::string weights[] = {directories.write("a", 4), directories.write("b", 5)};
  Served served({.max_num_seqs = 8, .kv_bytes = 60 * 16384});
  constexpr int kThreads = 32;
  const Deadline least(3.0);
  const Deadline most(60.0);
  constexpr int64_t kEnough = 100;
  std::atomic<int64_t> submitted{0};
  std::atomic<int64_t> unexpected{0};
  const auto over = [&] { return most.passed() || (least.passed() && submitted >= kEnough); };
  std::vector<std::thread> threads;
  for (int t = 0; t < kThreads; ++t) {
    threads.emplace_back([&, t] {
      std::mt19937 random(static_cast<uint32_t>(t));
      Engine& engine = served.engine;
      while (!over()) {
        const uint32_t choice = random() % 24;
        const auto mode = static_cast<PauseMode>(random() % 4);
        const auto [code, text] = refusal_of([&] {
          if (choice < 8) {
            const auto n = static_cast<int32_t>(1 + random() % 3);
            engine.submit(long_request(
                static_cast<int32_t>(random() % 50), static_cast<int32_t>(1 + random() % 120), n));
            submitted += n;
          } else if (choice == 8) {
            engine.abort({"request-" + std::to_string(random() % 500)});
          } else if (choice == 9) {
            engine.abort({});
          } else if (choice < 12) {
            engine.pause(mode, 0.2);
          } else if (choice < 17) {
            engine.resume();
          } else if (choice == 17) {
            engine.sleep(static_cast<int32_t>(random() % 2), mode, 0.2);
          } else if (choice < 20) {
            engine.wake({});
          } else if (choice == 20) {
            engine.update_weights_from_disk(
                weights[random() % 2], "v", random() % 2 == 0, /*timeout=*/5.0);
          } else if (choice == 21) {
            engine.reset_prefix_cache(random() % 2 == 0);
          } else if (choice == 22) {
            engine.stats();
          } else {
            engine.weight_checksums();
          }
        });
        if (code != 0 && code != 409 && code != 503) {
          ++unexpected;
          ADD_FAILURE() << code << " " << text;
        }
        std::this_thread::sleep_for(std::chrono::microseconds(random() % 2000));
      }
    });
  }
  int64_t ended = 0;
  std::vector<Event> events;
  const auto read = [&] {
    served.engine.drain(events);
    for (const Event& event : events) {
      ended += event.finished;
      EXPECT_TRUE(event.error.empty()) << event.error;
    }
  };
  while (!over()) {
    read();
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(unexpected, 0);
  served.engine.wake({});
  served.engine.resume();
  const Deadline last(kTimeout);
  while (ended < submitted && !last.passed()) {
    read();
    std::this_thread::sleep_for(std::chrono::milliseconds(2));
  }
  EXPECT_EQ(ended, submitted);
  EXPECT_GE(submitted, kEnough);
  const EngineStats stats = served.engine.stats();
  EXPECT_EQ(stats.running + stats.waiting + stats.used_pages, 0);
  const std::string id = served.client.submit(long_request(1, 5));
  EXPECT_TRUE(served.client.read_until([&] { return served.client.response(id).finished; }));
}

}  // namespace
}  // namespace banyan::rollout
