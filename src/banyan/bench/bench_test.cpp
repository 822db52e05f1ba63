// Shapes of the named batches, the arithmetic of a pass, and one small measurement.
#include <ATen/ops/norm.h>
#include <ATen/ops/sub.h>
#include <gtest/gtest.h>

#include <set>

#include "banyan/bench/trie_bench.h"
#include "banyan/bench/workload.h"
#include "banyan/testing/tiny_run.h"
#include "banyan/train/probe.h"
#include "banyan/trie/sharing_choice.h"

namespace banyan::bench {
namespace {

struct Sizes {
  int64_t samples, logical, unique, scored;
};

Sizes sizes_of(const std::string& name) {
  const std::vector<Sample> samples = make_workload(name, 5000, 3);
  Sizes sizes{static_cast<int64_t>(samples.size()), 0, trie::build(samples).num_tokens(), 0};
  for (const Sample& sample : samples) {
    sizes.logical += static_cast<int64_t>(sample.tokens.size());
    for (const uint8_t scored : sample.scored) sizes.scored += scored;
  }
  return sizes;
}

void expect(const std::string& name, const Sizes& wanted) {
  const Sizes got = sizes_of(name);
  EXPECT_EQ(got.samples, wanted.samples) << name;
  EXPECT_EQ(got.logical, wanted.logical) << name;
  EXPECT_EQ(got.unique, wanted.unique) << name;
  EXPECT_EQ(got.scored, wanted.scored) << name;
}

TEST(Workload, HasTheSizesOfItsName) {
  expect("P100R200n8", {8, 2400, 1700, 1600});
  expect("P4kR256n16", {16, 69632, 8192, 4096});
  expect("P100R200n8x3", {24, 7200, 5100, 4800});
  // n K (S + (K + 1) c / 2) and S + n K c of specification D1, S = 512 and c = 96.
  expect("turns10n8", {80, 83200, 8192, 5120});
  expect("tree-b2d6", {64, 64 * 7 * 50, 127 * 50, 64 * 6 * 50});
  expect("alone8", {8, 2400, 2400, 1600});
  expect("fan512", {512, 512 * 33, 32 + 512, 512});
}

TEST(Workload, IsFixedByItsSeed) {
  const auto a = make_workload("P8R5n3", 100, 1);
  const auto b = make_workload("P8R5n3", 100, 1);
  const auto c = make_workload("P8R5n3", 100, 2);
  ASSERT_EQ(a.size(), 3u);
  EXPECT_EQ(a[2].tokens, b[2].tokens);
  EXPECT_NE(a[2].tokens, c[2].tokens);
  for (const Sample& sample : a) {
    for (const int32_t token : sample.tokens) EXPECT_TRUE(token >= 0 && token < 100);
  }
}

TEST(Workload, NamesTheFormsItKnows) {
  for (const char* name : {"P8R5", "P0R5n3", "tree-b2", "", "P8R5n0"}) {
    try {
      make_workload(name, 100, 1);
      ADD_FAILURE() << name;
    } catch (const std::exception& error) {
      EXPECT_NE(std::string(error.what()).find("[bench] --preset: wanted P<p>R<r>n<n>"),
                std::string::npos)
          << error.what();
    }
  }
}

TEST(PassFlops, AreThoseOfSmolLM2) {
  models::ModelShape shape;
  shape.vocab = 49152;
  shape.hidden = 576;
  shape.layers = 30;
  shape.heads = 9;
  shape.kv_heads = 3;
  shape.head_dim = 64;
  shape.intermediate = 1536;
  EXPECT_NEAR(pass_flops(shape, 1, 0, 0) / (6 * 1.06e8), 1.0, 0.01);
  EXPECT_EQ(pass_flops(shape, 0, 1, 0), 12.0 * 576 * 30);
  EXPECT_EQ(pass_flops(shape, 0, 0, 1), 6.0 * 576 * 49152);
}

// A batch with nothing to share is the same trie either way, so the same kernels see the same
// tokens.
TEST(NothingToShare, IsTheSamePlan) {
  const std::vector<Sample> samples = make_workload("alone8", 500, 1);
  trie::PlanOptions options;
  options.max_tokens_per_block = 1000;
  const trie::Plan shared = trie::plan(samples, options);
  options.build.share = false;
  const trie::Plan apart = trie::plan(samples, options);
  ASSERT_EQ(shared.blocks.size(), apart.blocks.size());
  EXPECT_EQ(shared.entries, apart.entries);
  for (size_t b = 0; b < shared.blocks.size(); ++b) {
    EXPECT_EQ(shared.blocks[b].trie.tok, apart.blocks[b].trie.tok);
    EXPECT_EQ(shared.blocks[b].trie.par, apart.blocks[b].trie.par);
    EXPECT_EQ(shared.blocks[b].trie.segments, apart.blocks[b].trie.segments);
    EXPECT_EQ(shared.blocks[b].edges.source, apart.blocks[b].edges.source);
    EXPECT_EQ(shared.blocks[b].samples, apart.blocks[b].samples);
  }
  EXPECT_FALSE(trie::sharing_pays(samples, options, 0.0));
}

// The ten-turn chats under a budget of their longest path, every way of carrying: the gradients are
// those of the uncut batch.
TEST(TurnsUnderABudget, HaveTheGradientsOfTheUncutBatch) {
  const auto model = models::random_model(
      R"({"model_type": "llama", "vocab_size": 64, "hidden_size": 16, "intermediate_size": 24,
          "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1,
          "head_dim": 8, "rms_norm_eps": 1e-5, "max_position_embeddings": 2048,
          "tie_word_embeddings": true, "initializer_range": 0.3})",
      1,
      {.compute = {.dtype = at::kDouble}, .with_backward = true});
  const std::vector<Sample> samples = make_workload("turns10n8", 64, 1);
  const int64_t longest = 512 + 10 * 96;
  model->params().ensure_grads();
  const auto gradients = [&](const trie::PlanOptions& options, size_t* blocks) {
    model->params().zero_grads();
    const trie::Plan plan = trie::plan(samples, options);
    *blocks = plan.blocks.size();
    train::probe_pass(*model, plan);
    std::vector<at::Tensor> out;
    for (const Param& param : model->params().params()) out.push_back(param.grad.clone());
    return out;
  };
  size_t blocks = 0;
  const std::vector<at::Tensor> wanted = gradients({}, &blocks);
  ASSERT_EQ(blocks, 1u);
  for (const trie::Carry carry :
       {trie::Carry::kAuto, trie::Carry::kRetain, trie::Carry::kRecompute, trie::Carry::kReplay}) {
    trie::PlanOptions options;
    options.max_tokens_per_block = longest;
    options.carry = carry;
    const std::vector<at::Tensor> got = gradients(options, &blocks);
    EXPECT_GE(blocks, 8u);
    for (size_t i = 0; i < wanted.size(); ++i) {
      const double error = got[i].sub(wanted[i]).norm().item<double>();
      EXPECT_LE(error, 1e-10 * wanted[i].norm().item<double>())
          << static_cast<int>(carry) << ' ' << model->params().params()[i].name;
    }
  }
}

TEST(TrieBench, MeasuresTheSameResultTwice) {
  const auto model =
      models::random_model(testing::tiny_config_json(), 1, {{.dtype = at::kBFloat16}, true});
  TrieBenchOptions options;
  options.preset = "P40R9n4";
  options.repeats = 3;
  options.plan.max_tokens_per_block = 100;
  const TrieBenchResult result = bench_trie(*model, options);
  EXPECT_EQ(result.logical_tokens, 196);
  EXPECT_EQ(result.unique_tokens, 76);
  EXPECT_EQ(result.on.seconds.size(), 3u);
  EXPECT_EQ(result.off.seconds.size(), 3u);
  EXPECT_EQ(result.on.blocks, 1);
  EXPECT_EQ(result.off.blocks, 2);
  EXPECT_GT(result.ideal, 1.5);
  EXPECT_NEAR(result.efficiency, result.ratio / result.ideal, 1e-12);
  EXPECT_GT(result.on.peak_bytes, 0);
  EXPECT_NEAR(result.on.loss, result.off.loss, 1e-6 * result.off.loss);
  EXPECT_NEAR(result.on.grad_norm, result.off.grad_norm, 0.02 * result.off.grad_norm);
}

}  // namespace
}  // namespace banyan::bench
