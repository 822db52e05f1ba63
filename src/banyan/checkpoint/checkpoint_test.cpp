#include "banyan/checkpoint/checkpoint.h"

#include <gtest/gtest.h>

#include "banyan/checkpoint/manifest.h"
#include "banyan/checkpoint/test_model.h"
#include "banyan/io/files.h"
#include "banyan/io/json.h"
#include "banyan/io/safetensors.h"

namespace banyan::checkpoint {
namespace {

namespace fs = std::filesystem;

std::vector<std::string> names_in(const std::string& directory) {
  std::vector<std::string> names;
  for (const auto& entry : fs::directory_iterator(directory)) {
    names.push_back(entry.path().filename().string());
  }
  std::sort(names.begin(), names.end());
  return names;
}

TEST(Checkpoint, ComesBackBitForBit) {
  SmallRun run;
  run.step();
  run.step();
  run.state.skipped_in_a_row = 3;
  run.state.ahead = std::string("a\0\xff", 3);
  run.save();

  ThreeParams model;
  optim::AdamW optimizer(model.params(), {});
  const TrainerState state = load(run.checkpoint(2), model, optimizer);
  EXPECT_EQ(state.global_step, 2);
  EXPECT_EQ(state.skipped_in_a_row, 3);
  EXPECT_EQ(state.extra, "{\"position\": 20}");
  EXPECT_EQ(state.ahead, run.state.ahead);
  EXPECT_EQ(optimizer.num_steps(), 2);
  EXPECT_EQ(model.num_repacks, 1);
  for (size_t i = 0; i < 3; ++i) {
    EXPECT_TRUE(
        at::equal(model.params().params()[i].master, run.model.params().params()[i].master));
    EXPECT_TRUE(at::equal(optimizer.first_moments()[i], run.optimizer.first_moments()[i]));
    EXPECT_TRUE(at::equal(optimizer.second_moments()[i], run.optimizer.second_moments()[i]));
  }
}

TEST(Checkpoint, IsAnHfDirectoryWithAManifest) {
  SmallRun run;
  run.step();
  run.save();
  const std::string path = run.checkpoint(1);
  EXPECT_EQ(
      names_in(path),
      (std::vector<std::string>{"config.json", "model.safetensors", "state", "tokenizer.json"}));
  const io::HfWeights weights(path);
  EXPECT_EQ(weights.entry("model.norm.weight").dtype, at::kBFloat16);
  const io::Json manifest = io::parse_json(io::read_text(path + "/" + kManifestFile), path);
  EXPECT_EQ(manifest["step"], 1);
  EXPECT_EQ(manifest["files"].size(), 5u);
  const io::Json& place = manifest["tensors"]["m.model.layers.0.mlp.up_proj.weight"];
  EXPECT_EQ(place["global_shape"], (std::vector<int64_t>{16, 8}));
  EXPECT_EQ(place["offset"], (std::vector<int64_t>{0, 0}));
  EXPECT_EQ(place["file"], kMomentsFile);
  EXPECT_EQ(io::read_text(run.directory() + "/latest_checkpointed_iteration.txt"), "1");
}

TEST(Checkpoint, KeepsTheNewestAndLeavesOtherFoldersAlone) {
  SmallRun run;
  fs::create_directories(run.directory() + "/global_step_99x");
  fs::create_directories(run.directory() + "/notes");
  for (int n = 1; n <= 4; ++n) {
    run.step();
    run.save(/*max_to_keep=*/2);
  }
  EXPECT_EQ(names_in(run.directory()),
            (std::vector<std::string>{"global_step_3",
                                      "global_step_4",
                                      "global_step_99x",
                                      "latest_checkpointed_iteration.txt",
                                      "notes"}));
  EXPECT_EQ(find_latest(run.directory())->path, run.checkpoint(4));
}

TEST(Checkpoint, NewestIsTheOneSavedLast) {
  SmallRun run;
  run.state.global_step = 99;
  run.step();
  run.save();
  run.state.global_step = 4;  // the run was started anew in the same folder
  run.step();
  run.save();
  EXPECT_EQ(find_latest(run.directory())->path, run.checkpoint(5));
}

TEST(Checkpoint, SavingAStepAgainReplacesIt) {
  SmallRun run;
  run.step();
  run.save();
  run.state.global_step = 0;
  run.step();
  run.save();
  ThreeParams model;
  optim::AdamW optimizer(model.params(), {});
  load(find_latest(run.directory())->path, model, optimizer);
  EXPECT_EQ(optimizer.num_steps(), 2);
  EXPECT_EQ(names_in(run.directory()),
            (std::vector<std::string>{"global_step_1", "latest_checkpointed_iteration.txt"}));
}

TEST(Checkpoint, NothingThereIsNoCheckpoint) {
  const io::TempDirectory scratch;
  EXPECT_FALSE(find_latest(scratch.path()).has_value());
  EXPECT_FALSE(find_latest(scratch / "absent").has_value());
}

TEST(Checkpoint, AnotherModelIsRefusedUntouched) {
  SmallRun run;
  run.step();
  run.save();
  ThreeParams other(38);
  const at::Tensor norm = other.params().params()[1].master.clone();
  optim::AdamW optimizer(other.params(), {});
  const std::string message = io::file_error_of([&] { load(run.checkpoint(1), other, optimizer); });
  EXPECT_NE(
      message.find("model.embed_tokens.weight: shape: the model has [38, 8], the file [37, 8]"),
      std::string::npos)
      << message;
  EXPECT_TRUE(at::equal(other.params().params()[1].master, norm));
  EXPECT_EQ(other.num_repacks, 0);
}

TEST(Checkpoint, ACriticIsSavedAndVerifiedWithTheActor) {
  SmallRun run;
  ThreeParams critic(11);
  optim::AdamW critic_optimizer(critic.params(), {});
  critic.params().ensure_grads();
  critic_optimizer.step(1e-2, 1.0);
  critic_optimizer.step(1e-2, 1.0);
  run.step();
  run.state.kl_coef = 0.1;
  const Critic saved{&critic, &critic_optimizer, run.source()};
  save(run.directory(), run.model, run.optimizer, run.state, run.source(), 0, &saved);
  EXPECT_TRUE(fs::exists(run.checkpoint(1) + "/critic/config.json"));

  ThreeParams actor, other(11);
  optim::AdamW optimizer(actor.params(), {}), other_optimizer(other.params(), {});
  const Critic wanted{&other, &other_optimizer, ""};
  const auto found = find_latest(run.directory());
  const TrainerState state =
      load(found->path, actor, optimizer, {.critic = &wanted, .verified = true});
  EXPECT_EQ(state.kl_coef, 0.1);
  EXPECT_EQ(optimizer.num_steps(), 1);
  EXPECT_EQ(other_optimizer.num_steps(), 2);
  for (size_t i = 0; i < 3; ++i) {
    EXPECT_TRUE(at::equal(other.params().params()[i].master, critic.params().params()[i].master));
    EXPECT_TRUE(
        at::equal(other_optimizer.second_moments()[i], critic_optimizer.second_moments()[i]));
  }
  // One byte of the critic spoils the whole checkpoint.
  const std::string file = run.checkpoint(1) + "/critic/state/moments.safetensors";
  std::string bytes = io::read_text(file);
  bytes[bytes.size() - 2] ^= 1;
  fs::remove(file);
  io::write_bytes(file, bytes);
  EXPECT_NE(io::file_error_of([&] { find_latest(run.directory()); }).find("critic/state/moments"),
            std::string::npos);
}

TEST(Checkpoint, ACriticThatIsNotThereIsNamed) {
  SmallRun run;
  run.step();
  run.save();
  ThreeParams critic;
  optim::AdamW optimizer(critic.params(), {});
  const Critic wanted{&critic, &optimizer, ""};
  const std::string message = io::file_error_of(
      [&] { load(run.checkpoint(1), run.model, run.optimizer, {.critic = &wanted}); });
  EXPECT_NE(message.find("no critic in it"), std::string::npos) << message;
}

}  // namespace
}  // namespace banyan::checkpoint
