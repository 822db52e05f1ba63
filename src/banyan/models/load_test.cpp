// HF directories: what is written comes back, and what does not fit is listed.
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>

#include "banyan/io/files.h"
#include "banyan/io/json.h"
#include "banyan/io/safetensors.h"
#include "banyan/io/test_support.h"
#include "banyan/models/test_models.h"

namespace banyan::models {
namespace {

namespace fs = std::filesystem;
using io::file_error_of;
using io::TempDirectory;

const LoadOptions kFp32 = {{.dtype = at::kFloat}, true};

// A directory "source" with the configuration and a tokenizer file, and "model" saved from random
// weights.
std::unique_ptr<CausalLM> write_model(const TempDirectory& folder,
                                      const std::string& config,
                                      at::ScalarType dtype) {
  fs::create_directory(folder / "source");
  io::write_bytes(folder / "source/config.json", config);
  io::write_bytes(folder / "source/tokenizer.json", "{}");
  io::write_bytes(folder / "source/notes.txt", "not copied");
  auto model = random_model(config, 7, kFp32);
  save_model(*model, folder / "source", folder / "model", dtype);
  return model;
}

// All tensors of the saved model, to be changed and written back.
std::vector<io::NamedTensor> tensors_of(const TempDirectory& folder) {
  const io::SafetensorsFile file(folder / "model/model.safetensors");
  std::vector<io::NamedTensor> tensors;
  for (const auto& [name, entry] : file.entries()) tensors.push_back({name, file.read(name)});
  return tensors;
}

std::string load_error(const TempDirectory& folder, const std::vector<io::NamedTensor>& tensors) {
  fs::remove(folder / "model/model.safetensors");
  io::write_safetensors(folder / "model/model.safetensors", tensors, {{"format", "pt"}});
  return file_error_of([&] { load_model(folder / "model", kFp32); });
}

TEST(LoadModel, Fp32ComesBackBitForBit) {
  for (const auto& [name, config] : tiny_configs()) {
    const TempDirectory folder;
    const auto model = write_model(folder, config, at::kFloat);
    const auto loaded = load_model(folder / "model", kFp32);
    ASSERT_EQ(loaded->params().params().size(), model->params().params().size()) << name;
    for (const Param& param : model->params().params()) {
      EXPECT_TRUE(loaded->params().at(param.name).master.equal(param.master))
          << name << " " << param.name;
    }
    Batch batch(samples_of({{1, 2, 3, 4}, {1, 2, 9}}), true, kFp32.compute);
    const auto run = [&](CausalLM& lm) {
      return lm.forward(batch.ids(), batch.positions(), batch.attention, nullptr);
    };
    EXPECT_TRUE(run(*model).equal(run(*loaded))) << name;
  }
}

TEST(LoadModel, Bf16FilesHoldTheRoundedMasters) {
  const TempDirectory folder;
  const auto model = write_model(folder, tiny_configs()[3].second, at::kBFloat16);
  const auto loaded = load_model(folder / "model", kFp32);
  for (const Param& param : model->params().params()) {
    EXPECT_TRUE(loaded->params()
                    .at(param.name)
                    .master.equal(param.master.to(at::kBFloat16).to(at::kFloat)));
  }
  const io::Json config = io::parse_json(io::read_text(folder / "model/config.json"), "config");
  EXPECT_EQ(config["dtype"], "bfloat16");
  EXPECT_EQ(config["torch_dtype"], "bfloat16");
  EXPECT_EQ(config["rope_theta"], 1e6);
  EXPECT_EQ(io::read_text(folder / "model/tokenizer.json"), "{}");
  EXPECT_FALSE(fs::exists(folder / "model/notes.txt"));
  EXPECT_FALSE(io::HfWeights(folder / "model").contains("lm_head.weight"));
}

TEST(LoadModel, SavingOverAnExistingFolderIsRefused) {
  const TempDirectory folder;
  const auto model = write_model(folder, tiny_configs()[0].second, at::kFloat);
  EXPECT_NE(file_error_of([&] {
              save_model(*model, folder / "source", folder / "model", at::kFloat);
            }).find("File exists"),
            std::string::npos);
  EXPECT_TRUE(fs::exists(folder / "model/model.safetensors"));
  EXPECT_NE(
      file_error_of([&] { save_model(*model, folder / "absent", folder / "other", at::kFloat); }),
      "");
  EXPECT_FALSE(fs::exists(folder / "other"));
}

TEST(LoadModel, EveryMissingUnexpectedOrMisshapenTensorIsListed) {
  const TempDirectory folder;
  write_model(folder, tiny_configs()[4].second, at::kFloat);
  std::vector<io::NamedTensor> tensors = tensors_of(folder);
  for (io::NamedTensor& named : tensors) {
    if (named.name == "lm_head.weight") named.name = "head";
    if (named.name == "model.layers.1.self_attn.k_norm.weight") named.name = "extra";
    if (named.name == "model.norm.weight") named.tensor = at::zeros({31});
  }
  EXPECT_EQ(load_error(folder, tensors),
            folder / "model" +
                ": the tensors are not those of config.json; missing: "
                "model.layers.1.self_attn.k_norm.weight, "
                "lm_head.weight; unexpected: extra, head; of another shape: model.norm.weight "
                "(wanted [32], got [31])");
}

TEST(LoadModel, ConfigThatLiesAboutItsSizesAllocatesNothing) {
  const TempDirectory folder;
  write_model(folder, tiny_configs()[0].second, at::kFloat);
  io::Json config = io::parse_json(tiny_configs()[0].second, "config");
  config["hidden_size"] = 1 << 28;
  config["head_dim"] = 8;
  config["intermediate_size"] = 1 << 28;
  io::write_bytes(folder / "model/config.json", config.dump());
  EXPECT_NE(load_error(folder, tensors_of(folder)).find("of another shape"), std::string::npos);
}

TEST(LoadModel, OptionalNames) {
  const TempDirectory folder;
  write_model(folder, tiny_configs()[0].second, at::kFloat);
  std::vector<io::NamedTensor> tensors = tensors_of(folder);
  const at::Tensor embedding =
      io::HfWeights(folder / "model").read("model.embed_tokens.weight", {37, 32});
  tensors.push_back({"model.layers.0.self_attn.rotary_emb.inv_freq", at::zeros({4})});
  tensors.push_back({"lm_head.weight", embedding.clone()});
  EXPECT_EQ(load_error(folder, tensors), "");
  tensors.back().tensor.select(0, 36).fill_(1.0);
  EXPECT_NE(
      load_error(folder, tensors).find("lm_head.weight: differs from model.embed_tokens.weight"),
      std::string::npos);
}

TEST(LoadModel, WrongTypesAndArchitecturesAreNamed) {
  const TempDirectory folder;
  write_model(folder, tiny_configs()[0].second, at::kFloat);
  std::vector<io::NamedTensor> tensors = tensors_of(folder);
  for (io::NamedTensor& named : tensors) {
    if (named.name == "model.norm.weight") named.tensor = at::zeros({32}, at::kInt);
  }
  EXPECT_NE(
      load_error(folder, tensors).find("model.norm.weight: wanted F32, BF16, F16 or F64, got I32"),
      std::string::npos);
  io::Json config = io::parse_json(tiny_configs()[0].second, "config");
  config["model_type"] = "mamba";
  io::write_bytes(folder / "model/config.json", config.dump());
  EXPECT_EQ(file_error_of([&] { load_model(folder / "model", kFp32); }),
            folder / "model/config.json" +
                ": model_type: [model] wanted one of llama, qwen2, qwen3, qwen3_moe, got 'mamba'");
  EXPECT_NE(file_error_of([&] {
              load_model(folder / "absent", kFp32);
            }).find("absent/config.json: cannot open"),
            std::string::npos);
}

LoadOptions value_options(std::vector<std::string>* notes, uint64_t seed) {
  LoadOptions options = kFp32;
  options.head = HeadKind::kValue;
  options.head_seed = seed;
  options.notes = notes;
  return options;
}

TEST(ValueModel, ACausalDirectoryGetsASeededHeadAndSaysSo) {
  for (const auto& [name, config] : tiny_configs()) {
    const TempDirectory folder;
    write_model(folder, config, at::kFloat);
    std::vector<std::string> notes;
    const auto model = load_model(folder / "model", value_options(&notes, 3));
    ASSERT_EQ(notes.size(), 1u) << name;
    EXPECT_NE(notes[0].find("random weights"), std::string::npos);
    EXPECT_EQ(model->head_kind(), HeadKind::kValue);
    EXPECT_FALSE(model->params().contains("lm_head.weight"));
    EXPECT_GT(model->value_head().weight.abs().max().item<float>(), 0.0f);
    EXPECT_EQ(model->value_head().bias.item<float>(), 0.0f);
    const auto same = load_model(folder / "model", value_options(nullptr, 3));
    const auto other = load_model(folder / "model", value_options(nullptr, 4));
    EXPECT_TRUE(model->value_head().weight.equal(same->value_head().weight));
    EXPECT_FALSE(model->value_head().weight.equal(other->value_head().weight));
  }
}

TEST(ValueModel, WhatIsSavedComesBackWithAndWithoutABias) {
  const TempDirectory folder;
  fs::create_directory(folder / "source");
  io::Json config = io::parse_json(tiny_configs()[0].second, "config");
  config["architectures"] = {"LlamaForCausalLM"};
  io::write_bytes(folder / "source/config.json", config.dump());
  const auto model = random_model(config.dump(), 7, value_options(nullptr, 0));
  save_model(*model, folder / "source", folder / "tokens", at::kFloat);
  std::vector<std::string> notes;
  const auto loaded = load_model(folder / "tokens", value_options(&notes, 0));
  EXPECT_TRUE(notes.empty());
  EXPECT_TRUE(loaded->value_head().weight.equal(model->value_head().weight));
  EXPECT_TRUE(loaded->value_head().bias.equal(model->value_head().bias));
  const auto architecture = [&](const std::string& name) {
    return io::parse_json(io::read_text(folder / (name + "/config.json")),
                          name)["architectures"][0];
  };
  EXPECT_EQ(architecture("tokens"), "LlamaForTokenClassification");

  std::vector<io::NamedTensor> tensors;
  for (const Param& param : model->params().params()) {
    if (param.name != "score.bias") tensors.push_back({param.name, param.master});
  }
  fs::remove(folder / "tokens/model.safetensors");
  io::write_safetensors(folder / "tokens/model.safetensors", tensors, {{"format", "pt"}});
  const auto unbiased = load_model(folder / "tokens", value_options(&notes, 0));
  EXPECT_TRUE(notes.empty());
  EXPECT_FALSE(unbiased->value_head().bias.defined());
  save_model(*unbiased, folder / "tokens", folder / "sequence", at::kFloat);
  EXPECT_EQ(architecture("sequence"), "LlamaForSequenceClassification");
}

TEST(ValueModel, SeveralLabelsAreRefused) {
  const TempDirectory folder;
  write_model(folder, tiny_configs()[0].second, at::kFloat);
  std::vector<io::NamedTensor> tensors = tensors_of(folder);
  tensors.push_back({"score.weight", at::zeros({2, 32})});
  fs::remove(folder / "model/model.safetensors");
  io::write_safetensors(folder / "model/model.safetensors", tensors, {{"format", "pt"}});
  const std::string error =
      file_error_of([&] { load_model(folder / "model", value_options(nullptr, 0)); });
  EXPECT_NE(error.find("score.weight (wanted [1, 32], got [2, 32])"), std::string::npos) << error;
}

TEST(RandomModel, IsAFunctionOfItsSeed) {
  const std::string config = tiny_configs()[1].second;
  const auto a = random_model(config, 1, kFp32);
  const auto b = random_model(config, 1, kFp32);
  const auto c = random_model(config, 2, kFp32);
  for (const Param& param : a->params().params()) {
    EXPECT_TRUE(param.master.equal(b->params().at(param.name).master));
    EXPECT_FALSE(param.master.equal(c->params().at(param.name).master)) << param.name;
  }
}

}  // namespace
}  // namespace banyan::models
