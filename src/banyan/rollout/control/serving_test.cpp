// A served engine: requests in, events out, aborts, limits, failures.
#include <gtest/gtest.h>

#include <atomic>
#include <cmath>
#include <stdexcept>
#include <thread>

#include "banyan/rollout/control/control_test_support.h"

namespace banyan::rollout {
namespace {

TEST(Serving, EventsHoldWhatGenerateGives) {
  const auto prompts = make_prompts(/*count=*/3, /*trunk=*/70, /*n=*/3);
  const SamplingParams params = make_params(40);
  const Result wanted = generate(shared_model(), prompts, params);
  Engine engine(shared_model(), {});
  engine.start();
  Client client(engine);
  std::map<std::string, int64_t> row_of;
  for (const Prompt& prompt : prompts) {
    Request request;
    request.prompt = prompt.tokens;
    request.n = prompt.n;
    request.params = params;
    request.row = prompt.row;
    row_of[client.submit(request)] = prompt.row;
  }
  ASSERT_TRUE(client.read_all());
  ASSERT_EQ(client.responses().size(), 9u);
  for (const auto& [key, response] : client.responses()) {
    const Trajectory& trajectory = wanted.trajectories.at({row_of.at(key.first), key.second});
    EXPECT_EQ(response.ids(), trajectory.response);
    for (size_t i = 0; i < response.tokens.size(); ++i) {
      EXPECT_EQ(response.tokens[i].processed, trajectory.rollout_log_probs[i]);
      EXPECT_EQ(response.tokens[i].raw, response.tokens[i].processed);  // T = 1, nothing cut
      EXPECT_EQ(response.tokens[i].log_kept_mass, 0.0f);
    }
    EXPECT_EQ(response.end.finish, trajectory.finish);
    EXPECT_TRUE(response.end.error.empty());
    EXPECT_EQ(response.end.prompt_tokens, static_cast<int32_t>(trajectory.prompt.size()));
    ASSERT_EQ(response.end.spans.size(), 1u);
    EXPECT_EQ(response.end.spans[0].version, "default");
    EXPECT_EQ(response.end.spans[0].end, static_cast<int32_t>(response.tokens.size()));
  }
  const EngineStats stats = engine.stats();
  EXPECT_EQ(stats.state, EngineState::kRunning);
  EXPECT_EQ(stats.running + stats.waiting, 0);
  EXPECT_EQ(stats.used_pages, 0);
  engine.stop(kTimeout);
  EXPECT_EQ(engine.stats().state, EngineState::kStopped);
}

TEST(Serving, ASecondRequestFindsThePromptOfTheFirst) {
  Engine engine(shared_model(), {});
  engine.start();
  Client client(engine);
  Request request = long_request(3, 5);
  request.prompt = tokens_of(1, 200);
  const std::string first = client.submit(request);
  ASSERT_TRUE(client.read_all());
  const std::string second = client.submit(request);
  request.cache_salt = "other";
  const std::string salted = client.submit(request);
  ASSERT_TRUE(client.read_all());
  EXPECT_EQ(client.response(first).end.cached_tokens, 0);
  EXPECT_GT(client.response(first).end.queue_seconds, 0.0);
  EXPECT_GE(client.response(second).end.cached_tokens, 192);
  EXPECT_EQ(client.response(salted).end.cached_tokens, 0);
  EXPECT_EQ(client.response(first).ids(), client.response(second).ids());
  EXPECT_EQ(client.response(first).ids(), client.response(salted).ids());
}

// Four prompts of 16 tokens want 68 rows of a pass of 64: the last rows had no memory of their own.
TEST(Serving, ScoredPromptsThatFillAPassHaveTheScoresOfOne) {
  const auto scores = [](bool together) {
    Engine engine(shared_model(), {});
    engine.start();
    Client client(engine);
    if (together) engine.pause(PauseMode::kKeep, kTimeout);
    std::vector<std::string> ids;
    for (int32_t seed = 1; seed <= 4; ++seed) {
      Request request = long_request(1, 1);
      request.prompt = tokens_of(seed, 16);
      request.params.prompt_logprobs = 0;
      ids.push_back(client.submit(request));
      if (!together) {
        EXPECT_TRUE(client.read_all());
      }
    }
    if (together) engine.resume();
    EXPECT_TRUE(client.read_all());
    std::vector<float> out;
    for (const std::string& id : ids) {
      for (const auto& token : *client.response(id).end.prompt_logprobs) {
        if (!token.empty()) out.push_back(token[0].logprob);
      }
      out.push_back(client.response(id).tokens.at(0).raw);
    }
    return out;
  };
  const std::vector<float> alone = scores(false);
  EXPECT_EQ(alone.size(), 64u);
  EXPECT_EQ(scores(true), alone);
}

TEST(Serving, DrawnIdsBeyondTheTokenizersHaveNoText) {
  Engine engine(shared_model(), {}, {"a", "b"});
  engine.start();
  Client client(engine);
  Request request = long_request(2, 40);
  request.params.stop = {"zz"};
  const std::string id = client.submit(request);
  ASSERT_TRUE(client.read_all());
  EXPECT_EQ(client.response(id).ids().size(), 40u);
}

TEST(Serving, SaysWhatItCannotTake) {
  StagedModel model;
  Engine engine(model, paced({.kv_bytes = 10 * 16384, .max_num_queued_reqs = 2}));
  EXPECT_EQ(refusal_of([&] { engine.submit(long_request(1, 4)); }),
            std::make_pair(503, std::string("[rollout] the engine does not run; start it first")));
  engine.start();
  const auto refused = [&](auto change) {
    Request request = long_request(1, 4);
    change(request);
    return refusal_of([&] { engine.submit(request); });
  };
  const auto expect = [](const std::pair<int, std::string>& got, int code, const char* text) {
    EXPECT_EQ(got.first, code) << got.second;
    EXPECT_NE(got.second.find(text), std::string::npos) << got.second;
  };
  expect(refused([](Request& r) { r.prompt.clear(); }), 400, "prompt: wanted at least one token");
  expect(
      refused([](Request& r) { r.prompt[2] = -1; }), 400, "wanted token ids in [0, 300), got -1");
  expect(refused([](Request& r) { r.n = 0; }), 400, "n: wanted");
  expect(refused([](Request& r) { r.params.top_p = 2.0; }), 400, "top_p: wanted");
  expect(refused([](Request& r) { r.params.max_tokens = 0; }), 400, "max_tokens: wanted >= 1");
  expect(refused([](Request& r) { r.params.stop_token_ids = {400}; }), 400, "400");
  expect(refused([](Request& r) { r.params.stop = {"x"}; }), 400, "stop");
  expect(refused([](Request& r) { r.original_prompt = 900; }), 400, "original_prompt: wanted 0 ..");
  expect(refused([](Request& r) { r.id = std::string(600, 'x'); }), 400, "request_id: wanted");
  expect(refused([](Request& r) { r.prompt.assign(700, 1); }), 400, "can never fit");
  Client client(engine);
  Request named = long_request(2, 400);
  named.id = "twice";
  client.submit(named);
  expect(refusal_of([&] { engine.submit(named); }), 400, "'twice' is in progress");
  client.read_tokens(1);
  engine.pause(PauseMode::kKeep, kTimeout);
  client.submit(long_request(3, 4));
  client.submit(long_request(4, 4));
  expect(refusal_of([&] { engine.submit(long_request(5, 4)); }), 503, "max_num_queued_reqs = 2");
  EXPECT_EQ(engine.stats().counters.at("admission_rejections"), 1);
  engine.resume();
  ASSERT_TRUE(client.read_all());
  named.params.max_tokens = 3;  // the name is free again
  client.submit(named);
}

// The time to come back is learned from the groups that have ended.
TEST(Serving, AFullQueueSaysWhenAPlaceIsFree) {
  StagedModel model;
  Engine engine(model, {.max_num_seqs = 1, .max_num_queued_reqs = 1});
  engine.start();
  Client client(engine);
  const auto retry_after = [&] {
    engine.pause(PauseMode::kKeep, kTimeout);
    client.submit(long_request(1, 1));
    double seconds = 0.0;
    try {
      engine.submit(long_request(2, 1));
    } catch (const RequestError& error) {
      EXPECT_EQ(error.code, 503);
      seconds = error.retry_after;
    }
    engine.resume();
    EXPECT_TRUE(client.read_all());
    return seconds;
  };
  EXPECT_EQ(retry_after(), 1.0);  // nobody knows yet
  model.delay = std::chrono::milliseconds(1100);
  client.submit(long_request(3, 1));  // ends that long after the one before
  EXPECT_TRUE(client.read_all());
  model.delay = std::chrono::microseconds(0);
  EXPECT_GE(retry_after(), 2.0);
}

TEST(Serving, CountsRowsThatAttendATrunkTogether) {
  for (const bool grouped : {false, true}) {
    Engine engine(shared_model(), {.grouped_attention = grouped});
    engine.start();
    Client client(engine);
    Request request = long_request(1, 11, /*n=*/4);
    request.prompt = tokens_of(9, 100);  // one whole page
    client.submit(request);
    ASSERT_TRUE(client.read_all());
    // The first token of each comes with the prompt.
    EXPECT_EQ(engine.stats().counters.at("prefix_attn_rows"), grouped ? 4 * 10 : 0);
    client.submit(long_request(2, 11));
    ASSERT_TRUE(client.read_all());
    EXPECT_EQ(engine.stats().counters.at("prefix_attn_rows"), grouped ? 4 * 10 : 0);
  }
}

TEST(Serving, GenerateAndServingExcludeEachOther) {
  Engine engine(shared_model(), {});
  engine.start();
  engine.start();  // again: no effect
  EXPECT_EQ(refusal_of([&] {
              engine.generate(make_prompts(1, 10, 1), make_params(3), [](Trajectory&&) {});
            }).first,
            409);
  engine.stop(kTimeout);
  engine.stop(kTimeout);
  int ended = 0;
  engine.generate(make_prompts(1, 10, 2), make_params(3), [&](Trajectory&&) {
    EXPECT_EQ(refusal_of([&] { engine.start(); }).first, 409);
    ++ended;
  });
  EXPECT_EQ(ended, 2);
  engine.start();
  Client client(engine);
  client.submit(long_request(1, 4));
  EXPECT_TRUE(client.read_all());
}

TEST(Serving, AnAbortReturnsAtOnceAndEndsWithinAPass) {
  StagedModel model;
  Engine engine(model, paced());
  engine.start();
  Client client(engine);
  const std::string a = client.submit(long_request(1, 900, /*n=*/2));
  const std::string b = client.submit(long_request(2, 60));
  ASSERT_TRUE(client.read_tokens(2));
  EXPECT_EQ(engine.abort({a, "nobody"}), 1);
  EXPECT_EQ(engine.abort({a}) <= 1, true);
  ASSERT_TRUE(client.read_all());
  for (int32_t index = 0; index < 2; ++index) {
    EXPECT_EQ(client.response(a, index).end.finish, FinishReason::kAbort);
    EXPECT_GE(client.response(a, index).tokens.size(), 1u);
    EXPECT_LT(client.response(a, index).tokens.size(), 900u);
  }
  EXPECT_EQ(client.response(b).end.finish, FinishReason::kLength);
  EXPECT_EQ(client.response(b).tokens.size(), 60u);
  EXPECT_EQ(engine.abort({a, b}), 0);
  client.submit(long_request(3, 900));
  client.submit(long_request(4, 900));
  EXPECT_EQ(engine.abort({}), 2);
  ASSERT_TRUE(client.read_all());
  EXPECT_EQ(engine.stats().used_pages, 0);
}

TEST(Serving, RequestsThatAreCutOffCountAsDroppedGroups) {
  StagedModel model;
  Engine engine(model, paced());
  engine.start();
  Client client(engine);
  client.submit(long_request(1, 5, /*n=*/2));
  ASSERT_TRUE(client.read_all());
  const std::string cut = client.submit(long_request(2, 900, /*n=*/3));
  ASSERT_TRUE(client.read_until([&] { return !client.response(cut).tokens.empty(); }));
  engine.abort({cut});
  ASSERT_TRUE(client.read_all());
  EXPECT_EQ(engine.stats().counters.at("dropped_groups"), 1);
  EXPECT_EQ(engine.stats().counters.at("finished_abort"), 3);
}

// A response that stops being computable ends with an error; its batch-mates and the engine go on.
TEST(Serving, AFailingPassEndsItsRequestsAndTheEngineGoesOn) {
  StagedModel model;
  Engine engine(model, paced());
  engine.start();
  Client client(engine);
  const std::string id = client.submit(long_request(1, 400, /*n=*/2));
  ASSERT_TRUE(client.read_tokens(1));
  engine.pause(PauseMode::kKeep, kTimeout);
  const at::Tensor head = model.params().at("model.norm.weight").master;
  const at::Tensor before = head.clone();
  head.fill_(std::nanf(""));
  model.params().repack();
  engine.resume();
  ASSERT_TRUE(client.read_all());
  for (int32_t index = 0; index < 2; ++index) {
    const Collected& response = client.response(id, index);
    EXPECT_NE(response.end.error.find("logits: wanted finite numbers"), std::string::npos)
        << response.end.error;
    EXPECT_GE(response.tokens.size(), 1u);
  }
  engine.pause(PauseMode::kWait, kTimeout);
  head.copy_(before);
  model.params().repack();
  engine.weights_changed(1);
  engine.resume();
  const std::string next = client.submit(long_request(2, 4));
  ASSERT_TRUE(client.read_all());
  EXPECT_EQ(client.response(next).end.finish, FinishReason::kLength);
  EXPECT_EQ(engine.stats().counters.at("finished_error"), 2);
}

// An exception in a pass ends the requests of the pass; those that waited go on.
TEST(Serving, AnExceptionInAPassIsAnErrorOfItsRequests) {
  StagedModel model;
  Engine engine(model, paced({.max_num_seqs = 2}));
  engine.start();
  Client client(engine);
  const std::string running = client.submit(long_request(1, 900, /*n=*/2));
  ASSERT_TRUE(client.read_tokens(3));
  const std::string waiting = client.submit(long_request(2, 30));
  model.fails = true;
  ASSERT_TRUE(client.read_all());
  for (int32_t index = 0; index < 2; ++index) {
    EXPECT_EQ(client.response(running, index).end.error, "no memory");
    EXPECT_GE(client.response(running, index).tokens.size(), 3u);
  }
  EXPECT_EQ(client.response(waiting).tokens.size(), 30u);
  EXPECT_TRUE(client.response(waiting).end.error.empty());
  Engine fresh(shared_model(), {});
  fresh.start();
  Client other(fresh);
  const std::string wanted = other.submit(long_request(2, 30));
  ASSERT_TRUE(other.read_all());
  EXPECT_EQ(client.response(waiting).ids(), other.response(wanted).ids());
  EXPECT_EQ(engine.stats().used_pages, 0);
  // A trainer's call ends with the exception.
  engine.stop(kTimeout);
  model.fails = true;
  EXPECT_THROW(engine.generate(make_prompts(1, 10, 2), make_params(5), [](Trajectory&&) {}),
               std::runtime_error);
  int ended = 0;
  engine.generate(make_prompts(1, 10, 2), make_params(5), [&](Trajectory&&) { ++ended; });
  EXPECT_EQ(ended, 2);
}

// Nobody drains: the passes wait, memory stays as it is, and nothing is lost.
TEST(Serving, AReaderThatDoesNotReadIsWaitedFor) {
  Engine engine(shared_model(), {.max_undrained_bytes = 40 * sizeof(TokenRecord)});
  engine.start();
  Client client(engine);
  for (int32_t i = 0; i < 4; ++i) client.submit(long_request(i, 200));
  while (engine.stats().counters.at("drain_waits") == 0) std::this_thread::yield();
  const int64_t tokens = engine.stats().counters.at("generation_tokens");
  EXPECT_GT(tokens, 40);
  EXPECT_LE(tokens, 44);  // one pass more
  engine.pause(PauseMode::kKeep, kTimeout);
  engine.resume();
  ASSERT_TRUE(client.read_all());
  for (const auto& [key, response] : client.responses()) EXPECT_EQ(response.tokens.size(), 200u);
}

// Log-probabilities count too: a few tokens with long lists are as much as many tokens.
TEST(Serving, AReaderThatDoesNotReadIsWaitedForByBytes) {
  constexpr int64_t kPerToken = sizeof(TokenRecord) + (kVocab + 1) * sizeof(TokenLogprob);
  Engine engine(shared_model(), {.max_undrained_bytes = 10 * kPerToken});
  engine.start();
  Client client(engine);
  Request request = long_request(1, 200);
  request.params.top_logprobs = kAllTokens;
  client.submit(request);
  while (engine.stats().counters.at("drain_waits") == 0) std::this_thread::yield();
  EXPECT_EQ(engine.stats().counters.at("generation_tokens"), 11);
  ASSERT_TRUE(client.read_all());
}

TEST(Serving, ResponsesShareTheScoresOfTheirPrompt) {
  Engine engine(shared_model(), {});
  engine.start();
  Client client(engine);
  Request request = long_request(1, 5, /*n=*/3);
  const std::string plain = client.submit(request);
  request.params.prompt_logprobs = 2;
  const std::string scored = client.submit(request);
  ASSERT_TRUE(client.read_all());
  EXPECT_EQ(client.response(plain, 0).end.prompt_logprobs, nullptr);
  const auto first = client.response(scored, 0).end.prompt_logprobs;
  ASSERT_NE(first, nullptr);
  EXPECT_EQ(first->size(), request.prompt.size());
  for (int32_t index = 1; index < 3; ++index) {
    EXPECT_EQ(client.response(scored, index).end.prompt_logprobs, first);
  }
}

TEST(Serving, PromptLogprobsAreThoseOfScoring) {
  Engine engine(shared_model(), {.max_num_batched_tokens = 50});
  engine.start();
  Client client(engine);
  Request request = long_request(1, 5, /*n=*/2);
  request.prompt = tokens_of(9, 130);
  request.params.prompt_logprobs = 3;
  const std::string drawn = client.submit(request);
  request.params.max_tokens = 0;
  const std::string scored = client.submit(request);
  ASSERT_TRUE(client.read_all());
  Result result;
  Trajectory& all = result.trajectories[{0, 0}];
  all.prompt = {request.prompt[0]};
  all.response.assign(request.prompt.begin() + 1, request.prompt.end());
  const std::vector<float> wanted = score(shared_model(), result, 1.0).at({0, 0});
  for (const std::string& id : {drawn, scored}) {
    const Collected& response = client.response(id, 1);
    const auto& got = *response.end.prompt_logprobs;
    ASSERT_EQ(got.size(), 130u);
    EXPECT_TRUE(got[0].empty());
    for (size_t i = 1; i < got.size(); ++i) {
      ASSERT_GE(got[i].size(), 3u);
      EXPECT_EQ(got[i][0].token, request.prompt[i]);
      EXPECT_EQ(got[i][0].logprob, wanted[i - 1]);
    }
  }
  EXPECT_TRUE(client.response(scored).tokens.empty());
  EXPECT_EQ(client.response(scored).end.finish, FinishReason::kLength);
  EXPECT_EQ(client.response(drawn).tokens.size(), 5u);
}

TEST(Serving, AnEngineMayBeDestroyedWhileItRuns) {
  for (int i = 0; i < 5; ++i) {
    Engine engine(shared_model(), {});
    engine.start();
    for (int32_t r = 0; r < 4; ++r) engine.submit(long_request(r, 900));
    std::this_thread::sleep_for(std::chrono::milliseconds(2 * i));
  }
  Engine never_started(shared_model(), {});
}

TEST(Serving, StopReturnsPartials) {
  StagedModel model;
  Engine engine(model, paced());
  engine.start();
  Client client(engine);
  const std::string id = client.submit(long_request(1, 900));
  ASSERT_TRUE(client.read_tokens(3));
  engine.stop(kTimeout);
  client.read();
  EXPECT_TRUE(client.response(id).finished);
  EXPECT_GE(client.response(id).tokens.size(), 3u);
  EXPECT_EQ(client.response(id).end.finish, FinishReason::kAbort);
  engine.start();
  client.submit(long_request(1, 3));
  EXPECT_TRUE(client.read_all());
}

TEST(Serving, WithoutSharingEveryResponseComputesItsPrompt) {
  Engine engine(shared_model(), {.share_prefix = false});
  engine.start();
  Client client(engine);
  Request request = long_request(1, 6, /*n=*/3);
  request.prompt = tokens_of(5, 100);
  const std::string id = client.submit(request);
  ASSERT_TRUE(client.read_all());
  EXPECT_EQ(client.responses().size(), 3u);
  EXPECT_EQ(engine.stats().counters.at("computed_prompt_tokens"), 300);
  EXPECT_EQ(engine.abort({id}), 0);
}

}  // namespace
}  // namespace banyan::rollout
