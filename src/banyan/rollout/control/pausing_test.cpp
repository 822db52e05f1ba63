// Pause, resume, sleep and wake: every call in every state, under load, and what they cost.
#include <gtest/gtest.h>

#include <thread>

#include "banyan/rollout/control/control_test_support.h"
#include "banyan/rollout/control/memory_release.h"

namespace banyan::rollout {
namespace {

// What the requests of a Served give when nobody disturbs them.
std::map<std::pair<std::string, int32_t>, std::vector<int32_t>> undisturbed(int32_t count,
                                                                            int32_t max_tokens) {
  Served served;
  served.load(count, max_tokens);
  EXPECT_TRUE(served.client.read_all());
  std::map<std::pair<std::string, int32_t>, std::vector<int32_t>> out;
  for (const auto& [key, response] : served.client.responses()) out[key] = response.ids();
  return out;
}

TEST(Pausing, KeepAndRetractChangeNoToken) {
  const auto wanted = undisturbed(3, 120);
  for (const PauseMode mode : {PauseMode::kKeep, PauseMode::kRetract}) {
    Served served(paced());
    served.load(3, 120);
    for (int i = 0; i < 4; ++i) {
      served.engine.pause(mode, kTimeout);
      EXPECT_EQ(served.state(), EngineState::kPaused);
      served.client.read();
      const auto passes = served.engine.stats().counters.at("passes");
      std::this_thread::sleep_for(std::chrono::milliseconds(5));
      EXPECT_EQ(served.engine.stats().counters.at("passes"), passes);
      served.engine.resume();
      std::this_thread::sleep_for(std::chrono::milliseconds(3));
    }
    ASSERT_TRUE(served.client.read_all());
    int32_t retractions = 0;
    for (const auto& [key, response] : served.client.responses()) {
      EXPECT_EQ(response.ids(), wanted.at(key));
      EXPECT_EQ(response.end.finish, FinishReason::kLength);
      retractions += response.end.num_retractions;
    }
    EXPECT_EQ(retractions > 0, mode == PauseMode::kRetract);
  }
}

TEST(Pausing, WaitEndsWhatRunsAndRefusesWhatComes) {
  Served served;
  served.load(2, 60);
  served.engine.pause(PauseMode::kWait, kTimeout);
  served.client.read();
  EXPECT_EQ(served.client.num_finished(), 4u);
  for (const auto& [key, response] : served.client.responses()) {
    EXPECT_EQ(response.end.finish, FinishReason::kLength);
  }
  EXPECT_EQ(refusal_of([&] { served.engine.submit(long_request(1, 3)); }).first, 503);
}

TEST(Pausing, WaitThatTakesTooLongSaysWhomItWaitedFor) {
  Served served(paced());
  served.load(1, 900);
  const auto [code, text] = refusal_of([&] { served.engine.pause(PauseMode::kWait, 0.02); });
  EXPECT_EQ(code, 503);
  EXPECT_NE(text.find("waited 0.02 s for 1 requests (2 responses running"), std::string::npos)
      << text;
  EXPECT_NE(text.find(served.ids[0]), std::string::npos) << text;
  // It is called off: what runs goes on, and requests are taken.
  EXPECT_NE(text.find("; the pause is called off"), std::string::npos) << text;
  EXPECT_EQ(served.state(), EngineState::kRunning);
  served.client.submit(long_request(1, 3));
  served.engine.pause(PauseMode::kAbort, kTimeout);
  ASSERT_TRUE(served.client.read_all());
  EXPECT_EQ(served.state(), EngineState::kPaused);
}

// Several pauses at once: those that fail leave the state to the one that does not.
TEST(Pausing, APauseThatFailsLeavesAnotherAlone) {
  Served served(paced());
  served.load(1, 900);
  std::thread waiting([&] {
    EXPECT_EQ(refusal_of([&] { served.engine.pause(PauseMode::kWait, 0.2); }).first, 503);
  });
  while (served.state() != EngineState::kPausing) std::this_thread::yield();
  EXPECT_EQ(refusal_of([&] { served.engine.pause(PauseMode::kWait, 0.01); }).first, 503);
  waiting.join();
  EXPECT_EQ(served.state(), EngineState::kRunning);
  served.engine.pause(PauseMode::kKeep, kTimeout);
  EXPECT_EQ(served.state(), EngineState::kPaused);
  served.engine.abort({});
  EXPECT_TRUE(served.client.read_all());
}

// The pass in progress takes longer than the caller has: nothing has changed.
TEST(Pausing, APauseThatDoesNotReachTheBoundaryIsCalledOff) {
  for (const PauseMode mode : {PauseMode::kAbort, PauseMode::kKeep, PauseMode::kRetract}) {
    Served served;
    served.model.closed = true;
    const std::string id = served.client.submit(long_request(1, 30));
    while (!served.model.inside) std::this_thread::yield();
    const auto [code, text] = refusal_of([&] { served.engine.pause(mode, 0.01); });
    EXPECT_EQ(code, 503);
    EXPECT_NE(text.find("pause: waited 0.01 s for the pass in progress"), std::string::npos)
        << text;
    EXPECT_EQ(served.state(), EngineState::kRunning);
    EXPECT_EQ(refusal_of([&] { served.engine.sleep(1, mode, 0.01); }).first, 503);
    EXPECT_EQ(served.state(), EngineState::kRunning);
    served.model.closed = false;
    ASSERT_TRUE(served.client.read_all());
    EXPECT_EQ(served.client.response(id).tokens.size(), 30u);
  }
}

// A stop ends within its time too, and goes on when it is called again.
TEST(Pausing, AStopThatTakesTooLongMayBeCalledAgain) {
  Served served;
  served.model.closed = true;
  served.client.submit(long_request(1, 30));
  while (!served.model.inside) std::this_thread::yield();
  const auto [code, text] = refusal_of([&] { served.engine.stop(0.01); });
  EXPECT_EQ(code, 503);
  EXPECT_NE(text.find("stop: waited 0.01 s for the pass in progress"), std::string::npos) << text;
  EXPECT_EQ(refusal_of([&] { served.engine.start(); }).first, 503);
  served.model.closed = false;
  served.engine.stop(kTimeout);
  EXPECT_EQ(served.state(), EngineState::kStopped);
  EXPECT_EQ(served.engine.stats().num_pages, 0);
  served.engine.start();
  served.client.submit(long_request(2, 3));
  EXPECT_TRUE(served.client.read_all());
}

TEST(Pausing, AResumeCallsAWaitingPauseOff) {
  Served served(paced());
  served.load(1, 900);
  int code = 0;
  std::thread pausing(
      [&] { code = refusal_of([&] { served.engine.pause(PauseMode::kWait, kTimeout); }).first; });
  while (served.state() != EngineState::kPausing) std::this_thread::yield();
  served.engine.resume();
  pausing.join();
  EXPECT_EQ(code, 409);
  EXPECT_EQ(served.state(), EngineState::kRunning);
  served.engine.abort({});
  EXPECT_TRUE(served.client.read_all());
}

// What an earlier server left behind does not cut the drain of a trainer's call short.
TEST(Pausing, WaitDrainsACallAfterAServerHasStopped) {
  const auto model = tiny_model();
  Engine engine(*model, {});
  engine.start();
  engine.stop(kTimeout);
  SamplingParams params = make_params(200);
  params.ignore_eos = true;
  const Deadline deadline(kTimeout);
  std::thread pausing;
  int32_t ended = 0;
  engine.generate(
      make_prompts(/*count=*/2, /*trunk=*/30, /*n=*/2),
      params,
      [&](Trajectory&& trajectory) {
        EXPECT_EQ(trajectory.finish, FinishReason::kLength);
        ++ended;
      },
      [&] {
        if (!pausing.joinable()) {
          pausing = std::thread([&] { engine.pause(PauseMode::kWait, kTimeout); });
        }
        return deadline.passed();
      });
  pausing.join();
  EXPECT_EQ(ended, 4);
}

// A level is kept: what was woken in between goes to sleep again.
TEST(Pausing, SleepAfterAPartialWakeDropsTheWeightsAgain) {
  Served served;
  const ParamTable& table = served.model.params();
  served.engine.sleep(1, PauseMode::kAbort, kTimeout);
  EXPECT_EQ(served.engine.wake({"weights"}), std::vector<std::string>{"kv_cache"});
  EXPECT_TRUE(table.has_forms());
  served.engine.sleep(1, PauseMode::kAbort, kTimeout);
  EXPECT_FALSE(table.has_forms());
  EXPECT_EQ(served.engine.sleep(1, PauseMode::kAbort, kTimeout), 0);
  EXPECT_TRUE(served.engine.wake({}).empty());
  served.client.submit(long_request(1, 4));
  EXPECT_TRUE(served.client.read_all());
}

TEST(Pausing, AFrozenEngineCanBeDrained) {
  Served served;
  served.load(1, 40);
  served.engine.pause(PauseMode::kKeep, kTimeout);
  served.engine.pause(PauseMode::kWait, kTimeout);
  served.client.read();
  EXPECT_EQ(served.client.num_finished(), 2u);
}

// Requests that came while paused wait in the queue, and can be aborted there.
TEST(Pausing, WhatWaitsWhilePausedCanBeAborted) {
  Served served(paced());
  served.load(1, 200);
  served.engine.pause(PauseMode::kKeep, kTimeout);
  const std::string queued = served.client.submit(long_request(9, 5));
  const std::string stays = served.client.submit(long_request(10, 5));
  EXPECT_EQ(served.engine.abort({queued, served.ids[0]}), 2);
  ASSERT_TRUE(served.client.read_until([&] { return served.client.num_finished() == 3; }));
  EXPECT_TRUE(served.client.response(queued).tokens.empty());
  EXPECT_EQ(served.client.response(queued).end.finish, FinishReason::kAbort);
  EXPECT_GE(served.client.response(served.ids[0]).tokens.size(), 1u);
  EXPECT_FALSE(served.client.response(stays).finished);
  served.engine.resume();
  EXPECT_TRUE(served.client.read_all());
  EXPECT_EQ(served.client.response(stays).tokens.size(), 5u);
}

// Every control call in every state: it does its work or says why not, and the engine goes on.
TEST(Pausing, EveryCallInEveryState) {
  const WeightDirectories directories;
  const std::string weights = directories.write("new", 4);
  using Change = std::function<void(Engine&)>;
  std::thread pausing;
  const std::vector<std::pair<std::string, Change>> states = {
      {"stopped", [](Engine& e) { e.stop(kTimeout); }},
      {"running", [](Engine&) {}},
      {"pausing",
       [&](Engine& e) {
         pausing = std::thread([&e] { refusal_of([&] { e.pause(PauseMode::kWait, kTimeout); }); });
         while (e.stats().state != EngineState::kPausing) std::this_thread::yield();
       }},
      {"paused abort", [](Engine& e) { e.pause(PauseMode::kAbort, kTimeout); }},
      {"paused keep", [](Engine& e) { e.pause(PauseMode::kKeep, kTimeout); }},
      {"paused retract", [](Engine& e) { e.pause(PauseMode::kRetract, kTimeout); }},
      {"asleep 0", [](Engine& e) { e.sleep(0, PauseMode::kKeep, kTimeout); }},
      {"asleep 1", [](Engine& e) { e.sleep(1, PauseMode::kKeep, kTimeout); }},
      {"asleep 2", [](Engine& e) { e.sleep(2, PauseMode::kAbort, kTimeout); }},
      {"no weights",
       [](Engine& e) {
         e.sleep(2, PauseMode::kKeep, kTimeout);
         e.wake({});
       }},
  };
  const std::vector<std::pair<std::string, Change>> calls = {
      {"start", [](Engine& e) { e.start(); }},
      {"submit", [](Engine& e) { e.submit(long_request(1, 4)); }},
      {"abort", [](Engine& e) { e.abort({}); }},
      {"pause abort", [](Engine& e) { e.pause(PauseMode::kAbort, kTimeout); }},
      {"pause keep", [](Engine& e) { e.pause(PauseMode::kKeep, kTimeout); }},
      {"pause retract", [](Engine& e) { e.pause(PauseMode::kRetract, kTimeout); }},
      {"pause wait", [](Engine& e) { e.pause(PauseMode::kWait, 0.05); }},
      {"resume", [](Engine& e) { e.resume(); }},
      {"sleep 0", [](Engine& e) { e.sleep(0, PauseMode::kKeep, kTimeout); }},
      {"sleep 1", [](Engine& e) { e.sleep(1, PauseMode::kRetract, kTimeout); }},
      {"sleep 2", [](Engine& e) { e.sleep(2, PauseMode::kAbort, kTimeout); }},
      {"wake", [](Engine& e) { e.wake({}); }},
      {"wake weights", [](Engine& e) { e.wake({"weights"}); }},
      {"wake kv", [](Engine& e) { e.wake({"kv_cache"}); }},
      {"update", [&](Engine& e) { e.update_weights_from_disk(weights, "v", false, kTimeout); }},
      {"version", [](Engine& e) { e.set_weight_version("w"); }},
      {"reset", [](Engine& e) { e.reset_prefix_cache(true); }},
      {"checksums", [](Engine& e) { e.weight_checksums(); }},
      {"generate",
       [](Engine& e) { e.generate(make_prompts(1, 10, 1), make_params(3), [](Trajectory&&) {}); }},
      {"stop", [](Engine& e) { e.stop(kTimeout); }},
  };
  for (const auto& [state, enter] : states) {
    for (const auto& [name, call] : calls) {
      Served served(paced());
      served.client.submit(long_request(1, 200));
      served.client.read_tokens(1);
      enter(served.engine);
      const auto [code, text] = refusal_of([&] { call(served.engine); });
      EXPECT_TRUE(code == 0 || code == 409 || code == 503) << state << ", " << name << ": " << text;
      EXPECT_EQ(code == 0, text.empty());
      // Twice: the same state, the same answer or none.
      refusal_of([&] { call(served.engine); });
      // From anywhere back to work.
      served.engine.start();
      if (served.engine.stats().weights_missing) {
        served.engine.update_weights_from_disk(weights, "again", false, kTimeout);
      }
      served.engine.wake({});
      served.engine.resume();
      if (pausing.joinable()) pausing.join();
      served.engine.resume();
      Client client(served.engine);
      const std::string id = client.submit(long_request(5, 3));
      ASSERT_TRUE(client.read_until([&] { return client.response(id).finished; }))
          << state << ", " << name;
      EXPECT_EQ(client.response(id).tokens.size(), 3u) << state << ", " << name;
    }
  }
}

TEST(Pausing, SleepKeepsTheTokensOfWhatRuns) {
  const auto wanted = undisturbed(2, 100);
  for (const int32_t level : {0, 1}) {
    Served served(paced());
    served.load(2, 100);
    const int64_t freed = served.engine.sleep(level, PauseMode::kKeep, kTimeout);
    EXPECT_EQ(freed > 0, level == 1);
    EXPECT_EQ(served.state(), EngineState::kAsleep);
    EXPECT_EQ(served.engine.sleep(level, PauseMode::kKeep, kTimeout), 0);
    EXPECT_EQ(refusal_of([&] { served.engine.resume(); }).first, 409);
    EXPECT_TRUE(served.engine.wake({}).empty());
    EXPECT_EQ(served.state(), EngineState::kRunning);
    ASSERT_TRUE(served.client.read_all());
    for (const auto& [key, response] : served.client.responses()) {
      EXPECT_EQ(response.ids(), wanted.at(key)) << level;
    }
  }
}

TEST(Pausing, WakeRestoresThePause) {
  Served served;
  served.engine.pause(PauseMode::kKeep, kTimeout);
  served.engine.sleep(1, PauseMode::kKeep, kTimeout);
  served.engine.wake({});
  EXPECT_EQ(served.state(), EngineState::kPaused);
  served.engine.resume();
  served.engine.sleep(1, PauseMode::kAbort, kTimeout);
  served.engine.wake({});
  EXPECT_EQ(served.state(), EngineState::kRunning);
  served.engine.sleep(1, PauseMode::kAbort, kTimeout);
  served.engine.pause(PauseMode::kKeep, kTimeout);  // outlasts the sleep
  served.engine.wake({});
  EXPECT_EQ(served.state(), EngineState::kPaused);
}

TEST(Pausing, AwakesByTags) {
  Served served;
  served.engine.sleep(1, PauseMode::kAbort, kTimeout);
  EXPECT_EQ(refusal_of([&] { served.engine.wake({"kv"}); }),
            std::make_pair(
                400, std::string("[rollout] wake: wanted weights, kv_cache or graphs, got 'kv'")));
  EXPECT_EQ(served.engine.wake({"graphs"}).size(), 2u);
  EXPECT_EQ(served.engine.wake({"weights"}), std::vector<std::string>{"kv_cache"});
  EXPECT_EQ(served.state(), EngineState::kAsleep);
  EXPECT_EQ(refusal_of([&] { served.engine.submit(long_request(1, 3)); }).first, 503);
  EXPECT_TRUE(served.engine.wake({"kv_cache"}).empty());
  EXPECT_EQ(served.state(), EngineState::kRunning);
  EXPECT_EQ(refusal_of([&] { served.engine.sleep(3, PauseMode::kAbort, kTimeout); }).first, 400);
}

// A trainer's weights are not given away, and its packed forms stay.
TEST(Pausing, LeavesTheTrainersWeightsAlone) {
  Served served;
  served.model.params().ensure_grads();
  EXPECT_EQ(refusal_of([&] { served.engine.sleep(2, PauseMode::kAbort, kTimeout); }).first, 409);
  served.engine.sleep(1, PauseMode::kAbort, kTimeout);
  EXPECT_TRUE(served.model.params().has_forms());
  EXPECT_TRUE(served.engine.wake({}).empty());
}

}  // namespace
}  // namespace banyan::rollout
