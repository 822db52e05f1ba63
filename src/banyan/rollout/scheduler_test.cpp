// The scheduler against a paper pool: pages hold the tokens that were "computed" into them, and a
// pass may only read what is there. Whatever the limits, the responses must be those of a plain
// loop.
#include "banyan/rollout/scheduler.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <random>
#include <set>

#include "banyan/core/rng.h"

namespace banyan::rollout {
namespace {

constexpr int32_t kVocab = 400;
constexpr int32_t kStop = 3;

// The paper model: the next token is a function of all tokens before it and of the sample.
int32_t next_token(const std::vector<int32_t>& tokens, int64_t row, int32_t index) {
  uint64_t hash = 1;
  for (const int32_t token : tokens) hash = hash * 1000003 + static_cast<uint64_t>(token) + 1;
  const NoiseKey key{.seed = hash,
                     .step = 0,
                     .row = static_cast<uint64_t>(row),
                     .index = static_cast<uint64_t>(index)};
  return static_cast<int32_t>(uniform(key, tokens.size()) * kVocab);
}

std::vector<int32_t> reference_response(const Group& group, int32_t index) {
  std::vector<int32_t> tokens = group.prompt;
  std::vector<int32_t> response;
  while (static_cast<int32_t>(response.size()) < group.max_new) {
    response.push_back(next_token(tokens, group.row, index));
    tokens.push_back(response.back());
    if (response.back() == kStop) break;
  }
  return response;
}

Group make_group(int64_t row, std::vector<int32_t> prompt, int32_t n, int32_t max_new) {
  Group group;
  group.row = row;
  group.prompt = std::move(prompt);
  group.max_new = max_new;
  for (int32_t index = 0; index < n; ++index) group.sequences.emplace_back().index = index;
  return group;
}

class PaperRun {
 public:
  PaperRun(std::vector<Group> groups, const SchedulerOptions& options, int32_t pages, bool share)
      : groups_(std::move(groups)),
        options_(options),
        pool_(pages),
        tree_(pool_, share),
        scheduler_(options, pool_, tree_, groups_),
        written_(pages, std::vector<int32_t>(kPageTokens, -1)) {}

  void run() {
    Pass pass;
    while (!scheduler_.done()) {
      scheduler_.next_pass(pass);
      check(pass);
      ++num_passes;
      num_prompt_tokens += pass.num_prompt_tokens;
      num_copies += static_cast<int64_t>(pass.copies.size());
      for (const DrawRow& draw : pass.decodes) take(draw.group, draw.child);
      for (const DrawRow& draw : pass.trunks) {
        const size_t n = groups_[draw.group].sequences.size();
        for (size_t c = 0; c < n; ++c) take(draw.group, static_cast<int32_t>(c));
      }
      ASSERT_LT(num_passes, 200000) << "no end in sight";
    }
    EXPECT_EQ(pool_.num_free(), pool_.num_pages()) << "pages leaked";
    for (const Group& group : groups_) {
      for (const Sequence& sequence : group.sequences) {
        EXPECT_EQ(sequence.response, reference_response(group, sequence.index));
        EXPECT_EQ(sequence.logprobs.size(), sequence.response.size());
      }
    }
  }

  int64_t num_passes = 0;
  int64_t num_prompt_tokens = 0;
  int64_t num_copies = 0;
  int64_t max_running = 0;
  int64_t preemptions() const { return scheduler_.num_preemptions(); }

 private:
  std::vector<int32_t> known_tokens(const Run& run) const {
    const Group& group = groups_[run.group];
    std::vector<int32_t> tokens = group.prompt;
    if (run.child != kTrunk) {
      const auto& response = group.sequences[run.child].response;
      tokens.insert(tokens.end(), response.begin(), response.end());
    }
    return tokens;
  }

  // Writes first, as paged attention does, then looks at what every run reads.
  void check(const Pass& pass) {
    ASSERT_LE(pass.num_tokens, options_.max_num_batched_tokens);
    for (const PageCopy& copy : pass.copies) written_[copy.to] = written_[copy.from];
    std::vector<std::vector<int32_t>> pages(pass.runs.size());
    std::map<int32_t, size_t> writer;
    int32_t total = 0;
    for (size_t r = 0; r < pass.runs.size(); ++r) {
      const Run& run = pass.runs[r];
      scheduler_.pages_of(run, pages[r]);
      const std::vector<int32_t> tokens = known_tokens(run);
      ASSERT_GE(run.num_tokens, 1);
      for (int32_t i = 0; i < run.num_tokens; ++i) {
        const int32_t position = run.first_position + i;
        const int32_t page = pages[r][position / kPageTokens];
        written_[page][position % kPageTokens] = tokens[position];
        if (run.child != kTrunk) {
          ASSERT_EQ(pool_.holders(page), 1) << "wrote to a page that others read";
        }
        const auto [it, fresh] = writer.emplace(page, r);
        // Two trunks may write one page in turn, at different positions.
        ASSERT_TRUE(fresh || it->second == r || pass.runs[it->second].child == kTrunk);
      }
      total += run.num_tokens;
    }
    ASSERT_EQ(total, pass.num_tokens);
    std::pair<int32_t, int32_t> before{-1, -1};
    int64_t running = 0;
    for (size_t r = 0; r < pass.runs.size(); ++r) {
      const Run& run = pass.runs[r];
      const std::vector<int32_t> tokens = known_tokens(run);
      for (int32_t position = 0; position < run.first_position + run.num_tokens; ++position) {
        const int32_t page = pages[r][position / kPageTokens];
        ASSERT_EQ(written_[page][position % kPageTokens], tokens[position])
            << "group " << run.group << " child " << run.child << " position " << position;
      }
      const std::pair<int32_t, int32_t> place{run.group, run.child};
      ASSERT_LT(before, place) << "rows out of order";
      before = place;
      running += run.child != kTrunk;
    }
    ASSERT_LE(running, options_.max_num_seqs);
    max_running = std::max(max_running, running);
  }

  void take(int32_t g, int32_t c) {
    const Group& group = groups_[g];
    const Sequence& sequence = group.sequences[c];
    ASSERT_NE(sequence.state, SequenceState::kFinished);
    std::vector<int32_t> tokens = group.prompt;
    tokens.insert(tokens.end(), sequence.response.begin(), sequence.response.end());
    const int32_t token = next_token(tokens, group.row, sequence.index);
    scheduler_.append(g, c, token, 0.0f);
    if (token == kStop || static_cast<int32_t>(sequence.response.size()) == group.max_new) {
      scheduler_.finish(g, c);
    }
  }

  std::vector<Group> groups_;
  SchedulerOptions options_;
  PagePool pool_;
  PrefixTree tree_;
  Scheduler scheduler_;
  std::vector<std::vector<int32_t>> written_;
};

std::vector<int32_t> random_tokens(std::mt19937& random, int32_t count) {
  std::vector<int32_t> tokens(count);
  for (int32_t& token : tokens) token = static_cast<int32_t>(random() % kVocab);
  return tokens;
}

TEST(Scheduler, APromptIsPrefilledOncePerGroup) {
  std::mt19937 random(1);
  for (const int32_t length : {1, 63, 64, 65, 128, 200}) {
    PaperRun run({make_group(0, random_tokens(random, length), /*n=*/8, /*max_new=*/20)},
                 {},
                 /*pages=*/100,
                 /*share=*/true);
    run.run();
    EXPECT_EQ(run.num_prompt_tokens, length);
    EXPECT_LE(run.num_copies, 7) << "the last sibling writes in the tail itself";
    EXPECT_EQ(run.preemptions(), 0);
  }
}

TEST(Scheduler, GroupsShareWholePagesOfTheirTrunk) {
  std::mt19937 random(2);
  const std::vector<int32_t> trunk = random_tokens(random, 2 * kPageTokens);
  std::vector<Group> groups;
  for (int64_t row = 0; row < 3; ++row) {
    std::vector<int32_t> prompt = trunk;
    const auto own = random_tokens(random, 10);
    prompt.insert(prompt.end(), own.begin(), own.end());
    groups.push_back(make_group(row, prompt, 2, 5));
  }
  groups.push_back(make_group(3, trunk, 2, 5));                  // ends inside the trunk of others
  groups.push_back(make_group(4, groups.front().prompt, 2, 5));  // an equal prompt
  for (const int32_t budget : {1, 7, 2048}) {
    PaperRun run(groups, {.max_num_batched_tokens = budget}, /*pages=*/100, /*share=*/true);
    run.run();
    EXPECT_EQ(run.num_prompt_tokens, 2 * kPageTokens + 3 * 10) << "budget " << budget;
  }
}

TEST(Scheduler, KeepsATrunkForLaterGroups) {
  std::mt19937 random(3);
  const std::vector<int32_t> trunk = random_tokens(random, kPageTokens);
  std::vector<Group> groups;
  for (int64_t row = 0; row < 6; ++row) {
    std::vector<int32_t> prompt = trunk;
    prompt.push_back(static_cast<int32_t>(row));
    groups.push_back(make_group(row, prompt, 2, 10));
  }
  PaperRun run(groups, {.max_num_seqs = 2}, /*pages=*/100, /*share=*/true);
  run.run();
  EXPECT_EQ(run.num_prompt_tokens, kPageTokens + 6);
}

TEST(Scheduler, UsesTheSeatsThereAre) {
  std::mt19937 random(4);
  std::vector<Group> groups;
  for (int64_t row = 0; row < 8; ++row) {
    groups.push_back(make_group(row, random_tokens(random, 30), 8, 40));
  }
  PaperRun run(groups, {.max_num_seqs = 64}, /*pages=*/1000, /*share=*/true);
  run.run();
  EXPECT_GT(run.max_running, 50);
  EXPECT_LE(run.num_passes, 41);
}

TEST(Scheduler, ATinyPoolPreemptsAndEnds) {
  std::mt19937 random(5);
  std::vector<Group> groups;
  for (int64_t row = 0; row < 4; ++row) {
    groups.push_back(make_group(row, random_tokens(random, 100), 4, 300));
  }
  const int32_t least = pages_of_one(100, 300);
  int64_t preemptions = 0;
  for (int32_t pages = least; pages < least + 12; ++pages) {
    PaperRun run(groups, {}, pages, /*share=*/true);
    run.run();
    preemptions += run.preemptions();
  }
  EXPECT_GT(preemptions, 0);
}

TEST(Scheduler, WholePromptsWithoutChunking) {
  std::mt19937 random(6);
  std::vector<Group> groups;
  for (int64_t row = 0; row < 5; ++row) {
    groups.push_back(make_group(row, random_tokens(random, 90), 3, 20));
  }
  PaperRun run(
      groups, {.max_num_batched_tokens = 100, .chunked_prefill = false}, 200, /*share=*/true);
  run.run();
  EXPECT_EQ(run.num_prompt_tokens, 5 * 90);
}

// Random trees of prompts under random limits, down to the smallest pool that holds one response.
TEST(Scheduler, RandomTracesGiveTheSameResponses) {
  int64_t preemptions = 0;
  for (uint32_t seed = 0; seed < 300; ++seed) {
    SCOPED_TRACE(seed);
    std::mt19937 random(seed);
    const auto pick = [&](int32_t low, int32_t high) {
      return low + static_cast<int32_t>(random() % static_cast<uint32_t>(high - low + 1));
    };
    std::vector<Group> groups;
    std::vector<std::vector<int32_t>> trunks = {{}};
    int32_t least = 1;
    const int32_t num_groups = pick(1, 6);
    for (int64_t row = 0; row < num_groups; ++row) {
      std::vector<int32_t> prompt = trunks[random() % trunks.size()];
      const auto own = random_tokens(random, pick(1, 150));
      prompt.insert(prompt.end(), own.begin(), own.end());
      trunks.push_back(prompt);
      if (pick(0, 3) == 0) prompt = trunks[pick(1, static_cast<int32_t>(trunks.size()) - 1)];
      groups.push_back(make_group(row, prompt, pick(1, 5), pick(1, 200)));
      least = std::max(least, pages_of_one(groups.back().prompt_length(), groups.back().max_new));
    }
    const SchedulerOptions options{.max_num_seqs = pick(1, 20),
                                   .max_num_batched_tokens = pick(1, 3) == 1 ? pick(1, 8) : 500,
                                   .chunked_prefill = true,
                                   .expected_percent = pick(0, 2) * 50};
    PaperRun run(groups, options, least + pick(0, 1) * pick(0, 60), /*share=*/pick(0, 3) != 0);
    run.run();
    preemptions += run.preemptions();
    if (HasFatalFailure() || HasNonfatalFailure()) break;
  }
  EXPECT_GT(preemptions, 100) << "the traces must be tight enough to mean something";
}

}  // namespace
}  // namespace banyan::rollout
