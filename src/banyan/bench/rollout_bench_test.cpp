// The roofline of a rollout by hand, the machine's two rates, and the comparison of grouped
// attention.
#include <gtest/gtest.h>

#include "banyan/bench/grouped_bench.h"
#include "banyan/bench/machine_rates.h"
#include "banyan/bench/rollout_limit.h"
#include "banyan/testing/tiny_run.h"

namespace banyan::bench {
namespace {

models::ModelShape smollm2() {
  models::ModelShape shape;
  shape.vocab = 49152;
  shape.hidden = 576;
  shape.layers = 30;
  shape.heads = 9;
  shape.kv_heads = 3;
  shape.head_dim = 64;
  shape.intermediate = 1536;
  return shape;
}

TEST(ModelCost, IsThatOfSmolLM2) {
  const ModelCost cost = model_cost(smollm2());
  EXPECT_NEAR(cost.weight_numbers, 1.345e8, 1e5);
  EXPECT_EQ(cost.weight_bytes, 2.0 * cost.weight_numbers);
  EXPECT_EQ(cost.kv_bytes_per_token, 2.0 * 30 * 3 * 64 * 2);
  EXPECT_EQ(cost.attention_flops_per_pair, 4.0 * 30 * 576);
}

// W = 100, P = 50, kappa = 10, 4 per pair; two groups of 3, prompts of 5 and 7, two tokens.
TEST(LeastCost, SumsTheLargerOfReadingAndComputing) {
  const ModelCost model{100.0, 50.0, 10.0, 4.0};
  const RolloutWork work{{5, 7}, 3, 2};
  // Reading counts a trunk once: 100 + 10 (12 + 6 r); computing counts it per sibling:
  // 2 * 50 * 6 + 4 (3 * 12 + 6 r).
  const RolloutCost slow_memory = least_cost(model, work, /*flops_per_s=*/1e9, /*bytes_per_s=*/10);
  EXPECT_DOUBLE_EQ(slow_memory.bytes, 280.0 + 340.0);
  EXPECT_DOUBLE_EQ(slow_memory.flops, 768.0 + 792.0);
  EXPECT_DOUBLE_EQ(slow_memory.decode_seconds, 62.0);
  EXPECT_DOUBLE_EQ(slow_memory.prompt_seconds, (100.0 + 120.0) / 10.0);
  const RolloutCost slow_products = least_cost(model, work, 10, 1e9);
  EXPECT_DOUBLE_EQ(slow_products.decode_seconds, 156.0);
  EXPECT_DOUBLE_EQ(slow_products.prompt_seconds, (2.0 * 50 * 12 + 4.0 * (15 + 28)) / 10.0);
  // A step is bound by what is slower in that step: the first by products, the second by reading.
  const RolloutCost mixed = least_cost({100.0, 1.0, 1000.0, 0.0}, {{1}, 1, 2}, 2.0 / 2500.0, 1.0);
  EXPECT_DOUBLE_EQ(mixed.decode_seconds, 2500.0 + 3100.0);
}

TEST(MachineRates, AreRatesOfThisMachine) {
  models::ModelShape shape = smollm2();
  shape.layers = 2;
  shape.vocab = 5000;  // more than one part
  const MachineRates rates = measure_rates(shape, {}, /*rows=*/64, /*repeats=*/1);
  EXPECT_EQ(rates.rows, 64);
  EXPECT_GE(rates.weight_bytes, static_cast<int64_t>(model_cost(shape).weight_bytes));
  EXPECT_LE(rates.weight_bytes, static_cast<int64_t>(1.01 * model_cost(shape).weight_bytes));
  EXPECT_GT(rates.bytes_per_s, 1e8);
  EXPECT_LT(rates.bytes_per_s, 1e13);
  EXPECT_GT(rates.flops_per_s, 1e8);
  EXPECT_LT(rates.flops_per_s, 1e15);
  EXPECT_EQ(rates.flops_per_s, std::max(rates.packed_flops_per_s, rates.mm_flops_per_s));
}

TEST(MachineRates, WantBf16OnACpu) {
  try {
    measure_rates(smollm2(), {.dtype = at::kFloat});
    FAIL();
  } catch (const std::invalid_argument& error) {
    EXPECT_NE(std::string(error.what()).find("[bench] rates: wanted a bf16 model on a CPU"),
              std::string::npos);
  }
}

TEST(GroupedBench, ComparesEqualTokens) {
  const auto model =
      models::random_model(testing::tiny_config_json(), 1, {{.dtype = at::kBFloat16}, false});
  GroupedBenchOptions options;
  options.trunk_tokens = 70;
  options.n = 3;
  options.new_tokens = 4;
  options.repeats = 3;
  const GroupedBenchResult result = bench_grouped(*model, options);
  EXPECT_EQ(result.on.seconds.size(), 3u);
  EXPECT_EQ(result.off.seconds.size(), 3u);
  EXPECT_GT(result.whole_ratio, 0.0);
  EXPECT_NEAR(result.ratio * result.on.decode_seconds, result.off.decode_seconds, 1e-9);
  options.new_tokens = 1;
  EXPECT_THROW(bench_grouped(*model, options), std::invalid_argument);
}

}  // namespace
}  // namespace banyan::bench
