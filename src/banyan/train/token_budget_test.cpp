#include "banyan/train/token_budget.h"

#include <gtest/gtest.h>

#include <fstream>

#include "banyan/io/files.h"
#include "banyan/testing/tiny_run.h"

namespace banyan::train {
namespace {

using testing::ScratchDir;

constexpr int64_t kGib = int64_t{1} << 30;

TEST(TokenBudget, IsThePowerOfTwoThatTheFreeMemoryHolds) {
  // 0.8 * 10 GiB / 100,000 bytes are 85,899 tokens.
  EXPECT_EQ(token_budget(100000, {.free_bytes = 10 * kGib}), 65536);
  EXPECT_EQ(token_budget(100000, {.free_bytes = 10 * kGib, .reserved_bytes = 6 * kGib}), 32768);
  // A little more or less free memory does not move it.
  EXPECT_EQ(token_budget(100000, {.free_bytes = 11 * kGib}), 65536);
  EXPECT_EQ(token_budget(100000, {.free_bytes = 9 * kGib}), 65536);
  EXPECT_EQ(token_budget(100000, {.free_bytes = kGib, .reserved_bytes = 2 * kGib}), 256);
  EXPECT_EQ(token_budget(100000, {.free_bytes = 0}), 16384);
  EXPECT_EQ(token_budget(0, {.free_bytes = kGib}), 16384);
  EXPECT_EQ(token_budget(1, {.free_bytes = int64_t{1} << 50}), int64_t{1} << 30);
}

TEST(TokenBudget, ASmallRunIsOneBlock) {
  const auto model = models::random_model(testing::tiny_config_json(), 1, {});
  const int64_t bytes = bytes_per_token(*model);
  EXPECT_GT(bytes, model->activation_bytes().kept);
  EXPECT_GT(token_budget(bytes, {.free_bytes = kGib}), 50000);
  EXPECT_GT(free_memory_bytes(at::kCPU), 0);
  const int64_t numbers = model->params().num_elements();
  EXPECT_EQ(coming_bytes(*model, /*with_moments=*/true), 12 * numbers);
  model->params().ensure_grads();
  EXPECT_EQ(coming_bytes(*model, /*with_moments=*/false), 0);
}

TEST(TokenBudget, IsKeptInTheFolderOfTheRunAndSaid) {
  const ScratchDir scratch("budget");
  const std::string folder = scratch / "run";
  std::string said;
  const auto choose = [&](const std::string& role, int64_t bytes, int64_t free_bytes) {
    return token_budget_once(
        folder, role, "the.key", bytes, {.free_bytes = free_bytes}, [&](const std::string& line) {
          said = line;
        });
  };
  EXPECT_EQ(choose("actor", 100000, 10 * kGib), 65536);
  EXPECT_EQ(said,
            "actor: blocks of at most 65536 tokens, since 10.0 GiB are free, 0.0 GiB of them wait "
            "for gradients and the like, and a token takes 100000 bytes (the.key is null)");
  EXPECT_EQ(choose("critic", 100000, 5 * kGib), 32768);
  EXPECT_EQ(choose("actor", 100000, 90 * kGib), 65536);
  EXPECT_EQ(said,
            "actor: blocks of at most 65536 tokens, as " + folder +
                "/token_budget.json has it (the.key is null)");
  EXPECT_EQ(choose("critic", 100000, 90 * kGib), 32768);
  EXPECT_EQ(choose("actor", 100000, kGib), 8192) << "what was kept does not fit any more";
  EXPECT_EQ(choose("actor", 50000, 10 * kGib), 131072) << "another model";
  std::ofstream(folder + "/token_budget.json") << "[]";
  EXPECT_EQ(choose("actor", 100000, 0), 16384);
  EXPECT_NE(said.find("the free memory is not known"), std::string::npos);
}

}  // namespace
}  // namespace banyan::train
