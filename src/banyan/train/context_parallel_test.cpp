// Ranks that walk one batch together give what one process gives, on tries and on dense batches.
#include "banyan/train/context_parallel.h"

#include <ATen/Parallel.h>
#include <gtest/gtest.h>

#include <array>
#include <map>
#include <mutex>

#include "banyan/parallel/gradient_sum.h"
#include "banyan/testing/one_thread.h"
#include "banyan/testing/random_trie.h"
#include "banyan/testing/thread_transport.h"
#include "banyan/testing/walk_run.h"
#include "banyan/trie/context_plan.h"

namespace banyan::train {
namespace {

using testing::kBf16;
using testing::kFp32;
using testing::kFp64;
using testing::kHead;
using testing::kVocab;
using testing::largest_error;
using testing::model_of;
using testing::Outcome;

trie::PlanOptions options_of(bool share, int64_t budget) {
  trie::PlanOptions options;
  options.build.share = share;
  options.max_tokens_per_block = budget;
  options.cost.per_pair = 0.02;
  return options;
}

trie::Plan plan_of(const std::vector<Sample>& samples,
                   const trie::PlanOptions& options,
                   int64_t ranks,
                   ContextKind kind) {
  return kind == ContextKind::kRanges ? trie::context_plan(samples, options, ranks)
                                      : trie::plan(samples, options);
}

constexpr ContextKind kKinds[] = {ContextKind::kRanges, ContextKind::kHeads};

// The outcome of every rank, gradients summed over them.
std::vector<Outcome> run_together(int64_t size,
                                  size_t which,
                                  const ComputeOptions& compute,
                                  const std::vector<Sample>& samples,
                                  const trie::PlanOptions& options,
                                  ContextKind kind = ContextKind::kRanges,
                                  LossScope scope = LossScope::kSample) {
  std::vector<Outcome> outcomes(size);
  testing::run_ranks(size, [&](parallel::Collectives& ranks) {
    at::set_num_threads(1);  // of this rank's thread
    const auto model = model_of(which, compute);
    const trie::Plan plan = plan_of(samples, options, size, kind);
    Outcome& outcome = outcomes[ranks.rank()];
    outcome = testing::run(*model, plan, scope, {}, {&ranks, kind});
    parallel::sum_gradients(model->params(), ranks);
    for (const Param& param : model->params().params()) {
      outcome.gradients[param.name] = param.grad.clone();
    }
  });
  return outcomes;
}

void expect_equal(const Outcome& got,
                  const Outcome& wanted,
                  double bound,
                  const std::string& name) {
  EXPECT_LE(largest_error(got, wanted), bound) << name;
  EXPECT_NEAR(got.loss, wanted.loss, bound * std::max(1.0, std::abs(wanted.loss))) << name;
  ASSERT_EQ(got.value.size(), wanted.value.size()) << name;
  for (const auto& [sample, value] : wanted.value) {
    EXPECT_TRUE(got.value.at(sample).allclose(value, bound, bound)) << name;
    EXPECT_TRUE(got.entropy.at(sample).allclose(wanted.entropy.at(sample), bound, bound)) << name;
  }
}

TEST(ContextParallel, GradientsEqualOneProcess) {
  const testing::OneThread one_thread;
  size_t which = 0;
  for (const testing::TrieCase& c : testing::trie_cases(5, kVocab)) {
    ++which;
    const ComputeOptions& compute = which % 4 == 0 ? kFp32 : kFp64;
    const double bound = compute.dtype == at::kDouble ? 1e-10 : 1e-5;
    const auto model = model_of(which, compute);
    const Outcome wanted = testing::run(*model, testing::dense_plan(c.samples));
    for (const int64_t size : {2, 3}) {
      for (const int64_t budget : {0, 17}) {
        const bool share = which % 3 != 0 || budget == 0;
        for (const ContextKind kind : kKinds) {
          if (kind == ContextKind::kHeads && size == 3) continue;  // heads that do not divide
          const auto outcomes =
              run_together(size, which, compute, c.samples, options_of(share, budget), kind);
          for (const Outcome& got : outcomes) expect_equal(got, wanted, bound, c.name);
        }
      }
    }
  }
}

TEST(ContextParallel, ALossOfTheWholeMiniBatchSeesAllOfIt) {
  const testing::OneThread one_thread;
  const auto cases = testing::trie_cases(9, kVocab);
  for (const size_t which : {size_t{0}, cases.size() - 1}) {
    const std::vector<Sample>& samples = cases[which].samples;
    const auto model = model_of(which, kFp64);
    const Outcome wanted =
        testing::run(*model, testing::dense_plan(samples), LossScope::kMiniBatch);
    for (const int64_t budget : {0, 5}) {
      for (const Outcome& got : run_together(2,
                                             which,
                                             kFp64,
                                             samples,
                                             options_of(true, budget),
                                             ContextKind::kRanges,
                                             LossScope::kMiniBatch)) {
        EXPECT_EQ(got.num_calls, 1);
        expect_equal(got, wanted, 1e-10, cases[which].name);
      }
    }
  }
}

// The rows of the forward are those of the uncut trie, bit for bit, and two runs have the same
// gradients.
TEST(ContextParallel, ForwardBitsAreThoseOfOneProcessAndTwoRunsAgree) {
  const testing::OneThread one_thread;
  for (const testing::TrieCase& c : testing::trie_cases(3, kVocab)) {
    if (c.samples.size() < 3) continue;
    const auto model = model_of(1, kBf16);
    const Outcome wanted = testing::run(*model, testing::dense_plan(c.samples));
    for (const ContextKind kind : kKinds) {
      const auto first = run_together(2, 1, kBf16, c.samples, options_of(true, 0), kind);
      const auto second = run_together(2, 1, kBf16, c.samples, options_of(true, 0), kind);
      for (size_t rank = 0; rank < first.size(); ++rank) {
        for (const auto& [sample, value] : wanted.value) {
          EXPECT_TRUE(value.equal(first[rank].value.at(sample))) << c.name;
          EXPECT_TRUE(wanted.entropy.at(sample).equal(first[rank].entropy.at(sample))) << c.name;
        }
        for (const auto& [name, gradient] : first[rank].gradients) {
          EXPECT_TRUE(gradient.equal(second[rank].gradients.at(name))) << c.name << " " << name;
        }
      }
      EXPECT_LE(largest_error(first[0], wanted), 0.05) << c.name;
    }
  }
}

TEST(ContextParallel, RanksScoreTogether) {
  const testing::OneThread one_thread;
  const auto cases = testing::trie_cases(4, kVocab);
  for (const testing::TrieCase& c : cases) {
    const auto alone = model_of(2, kFp64);
    const HeadSpec head = {.temperature = 0.7, .with_entropy = true, .with_sum_squares = true};
    const SampleScores wanted = score_samples(*alone, testing::dense_plan(c.samples), head);
    testing::run_ranks(2, [&](parallel::Collectives& ranks) {
      at::set_num_threads(1);
      const auto model = model_of(2, kFp64);
      trie::PlanOptions options = options_of(true, 11);
      options.for_backward = false;
      for (const ContextKind kind : kKinds) {
        const trie::Plan plan = plan_of(c.samples, options, ranks.size(), kind);
        const SampleScores got = score_samples(*model, plan, head, nullptr, {&ranks, kind});
        for (size_t s = 0; s < c.samples.size(); ++s) {
          EXPECT_TRUE(got.value[s].allclose(wanted.value[s], 1e-10, 1e-10)) << c.name;
          EXPECT_TRUE(got.entropy[s].allclose(wanted.entropy[s], 1e-10, 1e-10)) << c.name;
          EXPECT_TRUE(got.sum_squares[s].allclose(wanted.sum_squares[s], 1e-10, 1e-10)) << c.name;
        }
      }
    });
  }
}

// The header's formula.
TEST(ContextParallel, TrafficIsThatOfTheFormula) {
  const std::vector<Sample> samples = testing::toy_samples();
  testing::run_ranks(2, [&](parallel::Collectives& ranks) {
    at::set_num_threads(1);
    const auto model = model_of(0, kFp32);
    const trie::Plan plan = trie::context_plan(samples, options_of(true, 0), 2);
    ASSERT_EQ(plan.blocks.size(), 2u);
    const auto most = static_cast<int64_t>(plan.blocks[0].offered.size());
    ASSERT_GT(most, 0);
    testing::run(*model, plan, LossScope::kSample, {}, {&ranks, ContextKind::kRanges});
    const models::ModelShape& shape = model->shape();
    const int64_t of_layer = 2 * most * shape.kv_heads * shape.head_dim * 4;
    int64_t numbers = 0;  // of the heads: values of edges, entropies of rows
    for (const bool on_edges : {true, false}) {
      size_t longest = 0;
      for (const trie::Block& block : plan.blocks) {
        longest =
            std::max(longest, on_edges ? block.edges.token.size() : block.edges.source.size());
      }
      numbers += 8 * static_cast<int64_t>(longest);
    }
    EXPECT_EQ(ranks.traffic().at("all_gather").bytes, shape.layers * of_layer + numbers);
    EXPECT_EQ(ranks.traffic().at("all_to_all").bytes, shape.layers * of_layer);
  });
}

TEST(Ulysses, HeadsThatCannotBeDealtOutAreRefused) {
  check_ulysses("key", 2, 4, 2);
  check_ulysses("key", 4, 8, 2);
  for (const auto& [ranks, heads, kv_heads] :
       std::vector<std::array<int64_t, 3>>{{3, 4, 2}, {4, 8, 3}, {6, 12, 4}}) {
    EXPECT_THROW(check_ulysses("key", ranks, heads, kv_heads), std::invalid_argument);
  }
}

TEST(ContextPlan, BlocksKeepTheBudgetAndCoverTheTrieOnce) {
  for (const testing::TrieCase& c : testing::trie_cases(6, kVocab)) {
    for (const int64_t ranks : {1, 2, 5}) {
      for (const int64_t budget : {0, 1, 7, 64}) {
        const trie::Plan plan = trie::context_plan(c.samples, options_of(true, budget), ranks);
        int64_t tokens = 0;
        for (const trie::Block& block : plan.blocks) {
          EXPECT_GE(block.num_own(), 1) << c.name;
          EXPECT_LE(block.num_own(), budget > 0 ? budget : plan.num_unique) << c.name;
          tokens += block.num_own();
        }
        EXPECT_EQ(tokens, plan.num_unique) << c.name;
        const auto blocks = static_cast<int64_t>(plan.blocks.size());
        std::map<trie::Action, int64_t> count;
        for (const trie::Entry& entry : plan.entries) {
          EXPECT_LT(entry.block * ranks, blocks) << c.name;
          ++count[entry.action];
        }
        const int64_t rounds = (blocks + ranks - 1) / ranks;
        EXPECT_EQ(count[trie::Action::kForward], rounds) << c.name;
        EXPECT_EQ(count[trie::Action::kLoss], rounds) << c.name;
        EXPECT_EQ(count[trie::Action::kBackward], rounds) << c.name;
        EXPECT_EQ(count[trie::Action::kRecompute], rounds - 1) << c.name;
      }
    }
  }
}

TEST(ContextPlan, RoundsKeepTheLimitOfSamples) {
  for (const testing::TrieCase& c : testing::trie_cases(6, kVocab)) {
    for (const int64_t ranks : {1, 2, 3}) {
      for (const int64_t most : {1, 3}) {
        trie::PlanOptions options = options_of(/*share=*/false, /*budget=*/0);
        options.max_samples_per_block = most;
        const trie::Plan plan = trie::context_plan(c.samples, options, ranks);
        int64_t tokens = 0;
        std::vector<int64_t> samples;  // by round
        for (size_t b = 0; b < plan.blocks.size(); ++b) {
          if (b % ranks == 0) samples.push_back(0);
          samples.back() += static_cast<int64_t>(plan.blocks[b].samples.size());
          tokens += plan.blocks[b].num_own();
        }
        EXPECT_EQ(tokens, plan.num_unique) << c.name;
        for (const Sample& sample : c.samples) {  // else a round has more, for a token a rank
          if (static_cast<int64_t>(sample.tokens.size()) < ranks) samples.clear();
        }
        for (const int64_t count : samples) EXPECT_LE(count, most) << c.name;
      }
    }
  }
}

}  // namespace
}  // namespace banyan::train
