// Random traces against the reference scheduler: requests come and are aborted at any pass, under
// random limits, down to the smallest pool that holds one response. The responses are the
// reference's, whatever is shared, cut in pieces or preempted; everything ends in comparable time,
// and the books balance after every pass (PaperEngine::check_books).
#include <gtest/gtest.h>

#include "banyan/rollout/schedule/paper_engine.h"
#include "banyan/rollout/schedule/reference_scheduler.h"

namespace banyan::rollout {
namespace {

struct Arrival {
  int32_t pass = 0;
  std::vector<int32_t> prompt;
  int32_t n = 1;
  int32_t max_new = 1;
  int32_t priority = 0;
  std::string group_id;
  int32_t abort_at = -1;  // pass; -1: never
  int32_t abort_child = 0;
};

class Trace {
 public:
  explicit Trace(uint32_t seed) : random_(seed) {
    std::vector<std::vector<int32_t>> openings = {{}};
    const int32_t count = pick(1, 8);
    int32_t pass = 0;
    for (int32_t i = 0; i < count; ++i) {
      Arrival& arrival = arrivals.emplace_back();
      std::vector<int32_t> prompt = openings[random_() % openings.size()];
      const auto own = random_tokens(random_, pick(1, 150));
      prompt.insert(prompt.end(), own.begin(), own.end());
      openings.push_back(prompt);
      if (pick(0, 3) == 0) prompt = openings[pick(1, static_cast<int32_t>(openings.size()) - 1)];
      arrival.prompt = prompt;
      arrival.n = pick(1, 5);
      arrival.max_new = pick(1, 200);
      arrival.priority = pick(0, 2);
      if (i % 2 == 1) arrival.group_id = i % 4 == 1 ? "a" : "b";
      arrival.pass = pass;
      pass += pick(0, 2) * pick(0, 40);
      if (pick(0, 4) == 0) {
        arrival.abort_at = arrival.pass + pick(1, 100);
        arrival.abort_child = pick(0, arrival.n - 1);
      }
      least = std::max(least, pages_of_one(static_cast<int32_t>(prompt.size()), arrival.max_new));
    }
  }

  int32_t pick(int32_t low, int32_t high) {
    return low + static_cast<int32_t>(random_() % static_cast<uint32_t>(high - low + 1));
  }

  SchedulerOptions random_options() {
    return {.max_num_seqs = pick(1, 20),
            .max_num_batched_tokens = pick(1, 3) == 1 ? pick(1, 8) : 500,
            .share_prefix = pick(0, 3) != 0,
            .long_prefill_token_threshold = pick(0, 2) * pick(1, 70),
            .prefill_schedule_interval = pick(1, 3),
            .watermark = pick(0, 2) * 0.1,
            .conservativeness = pick(0, 3) * 0.5 + 0.01,
            .policy = static_cast<SchedulingPolicy>(pick(0, 2)),
            .page_bytes = 1,
            .host_pages = pick(0, 2) * 5};
  }

  std::vector<Arrival> arrivals;
  int32_t least = 1;
  std::mt19937& random() { return random_; }

 private:
  std::mt19937 random_;
};

// Adds and aborts what is due at `pass`, on an engine and the reference alike.
template <typename Add, typename Abort>
void play(const Trace& trace, int64_t pass, Add add, Abort abort) {
  for (size_t i = 0; i < trace.arrivals.size(); ++i) {
    const Arrival& arrival = trace.arrivals[i];
    if (arrival.pass == pass) add(arrival);
    if (arrival.abort_at == pass) abort(static_cast<int32_t>(i), arrival.abort_child);
  }
}

constexpr int32_t kLastEvent = 600;  // passes

struct Outcome {
  std::map<std::pair<int32_t, int32_t>, std::vector<int32_t>> responses;
  int64_t num_passes = 0;
  int64_t num_tokens = 0;
  SchedulerCounters counters;
};

Outcome run_reference(const Trace& trace, const SchedulerOptions& options, int32_t pages) {
  ReferenceScheduler reference(options.max_num_seqs, options.max_num_batched_tokens, pages);
  int32_t next = 0;
  for (int64_t pass = 0; pass <= kLastEvent; ++pass) {
    play(
        trace,
        pass,
        [&](const Arrival& a) { reference.add(next++, a.prompt, a.n, a.max_new); },
        [](int32_t, int32_t) {});
    reference.step();
  }
  while (reference.step()) {
  }
  return {reference.responses, reference.num_passes, reference.num_tokens, {}};
}

Outcome run_engine(Trace& trace, const SchedulerOptions& options, int32_t pages, bool hostile) {
  PaperEngine engine(options, pages);
  engine.scheduler().set_spill_costs({.bytes_per_second = 10.0, .seconds_per_token = 0.01});
  int32_t num_groups = 0;
  for (int64_t pass = 0; pass <= kLastEvent; ++pass) {
    play(
        trace,
        pass,
        [&](const Arrival& a) {
          const int32_t id = engine.add(GroupRequest{.prompt = a.prompt,
                                                     .n = a.n,
                                                     .max_new = a.max_new,
                                                     .priority = a.priority,
                                                     .group_id = a.group_id});
          EXPECT_EQ(id, num_groups++);
        },
        [&](int32_t group, int32_t child) { engine.abort(group, child); });
    if (hostile) engine.scheduler().retract_all();
    engine.step();
    engine.time() += 0.05;
    if (testing::Test::HasFatalFailure()) return {};
  }
  engine.run();
  Outcome outcome;
  for (int32_t id = 0; id < num_groups; ++id) {
    engine.check_responses(id);
    for (int32_t child = 0; child < engine.group(id).size(); ++child) {
      outcome.responses[{id, child}] = engine.response(id, child);
    }
  }
  outcome.num_passes = engine.num_passes;
  outcome.counters = engine.scheduler().counters();
  outcome.num_tokens = outcome.counters.pass_tokens;
  return outcome;
}

void expect_same(const Trace& trace, const Outcome& got, const Outcome& wanted) {
  for (const auto& [key, response] : wanted.responses) {
    const auto found = got.responses.find(key);
    ASSERT_NE(found, got.responses.end());
    const Arrival& arrival = trace.arrivals[key.first];
    if (arrival.abort_at >= 0 && arrival.abort_child == key.second) {
      ASSERT_LE(found->second.size(), response.size());
      EXPECT_TRUE(std::equal(found->second.begin(), found->second.end(), response.begin()));
    } else {
      EXPECT_EQ(found->second, response);
    }
  }
}

TEST(SchedulerTrace, ResponsesAreThoseOfTheReference) {
  SchedulerCounters sum;
  for (uint32_t seed = 0; seed < 200; ++seed) {
    SCOPED_TRACE(seed);
    Trace trace(seed);
    const SchedulerOptions options = trace.random_options();
    const int32_t pages = trace.least + trace.pick(0, 1) * trace.pick(0, 60);
    const Outcome wanted = run_reference(trace, options, pages);
    const Outcome got = run_engine(trace, options, pages, /*hostile=*/false);
    if (HasFailure()) return;
    expect_same(trace, got, wanted);
    // Nobody starves: what the reference does in so many passes takes a small multiple of them.
    const int64_t factor = 3 * options.prefill_schedule_interval;
    EXPECT_LE(got.num_passes, factor * wanted.num_passes + 500);
    if (HasFailure()) return;
    sum.preemptions += got.counters.preemptions;
    sum.spilled_pages += got.counters.spilled_pages;
    sum.restored_pages += got.counters.restored_pages;
    sum.cached_prompt_tokens += got.counters.cached_prompt_tokens;
  }
  EXPECT_GT(sum.preemptions, 100) << "the traces must be tight enough to mean something";
  EXPECT_GT(sum.spilled_pages, 50);
  EXPECT_GT(sum.restored_pages, 20);
  EXPECT_GT(sum.cached_prompt_tokens, 1000);
}

TEST(SchedulerTrace, CacheChunksAndPreemptionChangeNothing) {
  for (uint32_t seed = 1000; seed < 1040; ++seed) {
    SCOPED_TRACE(seed);
    Trace trace(seed);
    for (Arrival& arrival : trace.arrivals) arrival.abort_at = -1;
    const SchedulerOptions plain{.share_prefix = false};
    const int32_t pages = trace.least + 60;
    const Outcome base = run_engine(trace, plain, pages, false);
    for (const int32_t chunk : {1, 2, 63, 64, 65, 1 << 20}) {
      SchedulerOptions options{.max_num_batched_tokens = std::max(chunk, 40),
                               .long_prefill_token_threshold = chunk};
      const Outcome got = run_engine(trace, options, pages, false);
      EXPECT_EQ(got.responses, base.responses) << "chunks of " << chunk;
      EXPECT_LE(got.num_tokens, base.num_tokens) << "sharing computes no more";
    }
    // Everything loses its pages before every pass. One token a pass remains, from the cache.
    const Outcome hostile = run_engine(trace, {}, pages, /*hostile=*/true);
    if (HasFailure()) return;
    EXPECT_EQ(hostile.responses, base.responses) << "preempted at every pass";
  }
}

}  // namespace
}  // namespace banyan::rollout
