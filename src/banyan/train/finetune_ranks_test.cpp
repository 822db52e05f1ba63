// SFT and DPO over ranks that share the rows of a batch give what one process gives.
#include <gtest/gtest.h>

#include <map>
#include <mutex>
#include <numeric>

#include "banyan/testing/fake_finetune_host.h"
#include "banyan/testing/thread_transport.h"
#include "banyan/testing/tiny_run.h"
#include "banyan/train/finetune.h"
#include "banyan/train/finetune_exchange.h"

namespace banyan::train {
namespace {

using banyan::testing::FakeFinetuneHost;
using banyan::testing::finetune_rows;
using banyan::testing::masters;
using banyan::testing::ScratchDir;

FinetuneConfig tiny(const std::string& model, const std::string& run) {
  FinetuneConfig config = testing::tiny_finetune_config(model, run);
  config.data.train_batch_size = 5;
  config.data.max_token_len_per_gpu = 24;
  config.dtype = "float32";
  config.optim.lr = 1e-3;
  config.trainer.total_training_steps = 4;
  config.trainer.save_freq = 2;
  config.trainer.test_freq = 2;
  config.num_train_rows = 10;
  config.num_val_rows = 3;
  return config;
}

std::map<std::string, at::Tensor> run_on(int64_t size, FinetuneConfig config, int32_t num_samples) {
  std::vector<std::map<int64_t, Metrics>> logged(size);
  testing::run_ranks(size, [&](parallel::Collectives& ranks) {
    FakeFinetuneHost host(finetune_rows(10, num_samples), finetune_rows(3, num_samples));
    parallel::Groups groups = parallel::data_parallel(ranks);
    finetune(config, host, &groups);
    logged[ranks.rank()] = host.logged;
  });
  for (const auto& mine : logged) {
    for (const auto& [step, metrics] : mine) {
      for (const char* name : {"train/loss", "train/grad_norm", "val/loss"}) {
        if (metrics.contains(name)) {
          EXPECT_EQ(metrics.at(name), logged[0].at(step).at(name));
        }
      }
    }
  }
  return masters(config.trainer.default_local_dir + "/global_step_4");
}

}  // namespace

TEST(FinetuneRanks, ARunEqualsThatOfOneProcess) {
  const ScratchDir scratch("finetune-ranks");
  const std::string model = testing::write_tiny_model(scratch);
  for (const bool pairs : {false, true}) {
    FinetuneConfig config = tiny(model, scratch / (pairs ? "one-dpo" : "one"));
    if (pairs) config.preference = testing::tiny_preference("dpo");
    FakeFinetuneHost host(finetune_rows(10, pairs ? 2 : 1), finetune_rows(3, pairs ? 2 : 1));
    finetune(config, host);
    const auto wanted = masters(config.trainer.default_local_dir + "/global_step_4");
    for (const int64_t size : {2, 8}) {  // eight: some ranks have no row
      config.trainer.default_local_dir =
          scratch / ((pairs ? "dpo-" : "sft-") + std::to_string(size));
      for (const auto& [name, tensor] : run_on(size, config, pairs ? 2 : 1)) {
        const double gap = tensor.sub(wanted.at(name)).norm().item<double>();
        EXPECT_LE(gap / wanted.at(name).norm().item<double>(), 1e-4) << name << " on " << size;
      }
    }
  }
}

TEST(FinetuneRanks, EachRowGoesToOneRank) {
  std::vector<int> seen(10, 0);
  std::mutex mutex;
  testing::run_ranks(3, [&](parallel::Collectives& ranks) {
    std::vector<int64_t> all(10);
    std::iota(all.begin(), all.end(), int64_t{0});
    const RowsOfRank own = spread_rows(all, finetune_rows(10, 1), ranks);
    ASSERT_EQ(own.rows.size(), own.examples.size());
    const std::lock_guard lock(mutex);
    for (size_t k = 0; k < own.rows.size(); ++k) {
      ++seen[own.rows[k]];
      EXPECT_EQ(own.examples[k][0].tokens, finetune_rows(10, 1)[own.rows[k]][0].tokens);
    }
  });
  for (const int count : seen) EXPECT_EQ(count, 1);
}

}  // namespace banyan::train
