#include "banyan/models/hf_config.h"

#include <gtest/gtest.h>

#include "banyan/core/error.h"
#include "banyan/models/architecture.h"
#include "banyan/models/decoder_lm.h"

namespace banyan::models {
namespace {

const char* kLlama = R"({
  "model_type": "llama", "vocab_size": 100, "hidden_size": 48, "intermediate_size": 96, "num_hidden_layers": 2,
  "num_attention_heads": 6, "num_key_value_heads": 2, "rms_norm_eps": 1e-5, "max_position_embeddings": 512,
  "hidden_act": "silu", "rope_theta": 100000.0, "tie_word_embeddings": true})";

// kLlama with the keys of `patch` set (null removes).
std::string patched(const std::string& patch) {
  io::Json config = io::parse_json(kLlama, "llama");
  config.merge_patch(io::parse_json(patch, "patch"));
  return config.dump();
}

nn::DecoderOptions read(const std::string& patch) {
  const HfConfig config(patched(patch), "config.json");
  return architectures().get(config.model_type())(config);
}

std::string refusal(const std::string& patch) {
  try {
    read(patch);
  } catch (const FileError& error) {
    return error.what();
  }
  return "";
}

TEST(HfConfig, OldAndNewRopeKeysReadAlike) {
  const std::string rule = R"("factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                              "original_max_position_embeddings": 64)";
  for (const std::string& patch :
       {R"({"rope_theta": 5e5, "rope_scaling": {"rope_type": "llama3", )" + rule + "}}",
        R"({"rope_theta": 5e5, "rope_scaling": {"type": "llama3", )" + rule + "}}",
        R"({"rope_theta": null, "rope_parameters": {"rope_type": "llama3", "rope_theta": 5e5, )" +
            rule + "}}"}) {
    const nn::RopeOptions rope = read(patch).rope;
    EXPECT_EQ(rope.type, "llama3");
    EXPECT_EQ(rope.theta, 5e5);
    EXPECT_EQ(rope.factor, 8.0);
    EXPECT_EQ(rope.original_max_positions, 64);
  }
  EXPECT_EQ(read(R"({"rope_scaling": null})").rope.type, "default");
  EXPECT_EQ(read(R"({"rope_parameters": {"rope_theta": 7e5}})").rope.theta, 7e5);
  EXPECT_EQ(read(R"({"rope_theta": null})").rope.theta, 1e4);
}

TEST(HfConfig, YarnFallsBackToTheLengthOfTheModel) {
  const nn::RopeOptions rope =
      read(R"({"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "mscale": 1,
                                        "mscale_all_dim": 0.5, "truncate": false}})")
          .rope;
  EXPECT_EQ(rope.original_max_positions, 512);
  EXPECT_EQ(rope.mscale_all_dim, 0.5);
  EXPECT_FALSE(rope.truncate);
  EXPECT_FALSE(rope.attention_factor.has_value());
}

TEST(HfConfig, HeadSizeDefaultsToHiddenOverHeads) {
  EXPECT_EQ(read("{}").head_dim, 8);
  EXPECT_EQ(read(R"({"head_dim": null})").head_dim, 8);
  EXPECT_EQ(read(R"({"head_dim": 16})").head_dim, 16);
  EXPECT_EQ(read(R"({"num_key_value_heads": null})").kv_heads, 6);
  EXPECT_FALSE(read(R"({"tie_word_embeddings": null})").tied);
}

TEST(HfConfig, ArchitecturesChooseTheirParts) {
  const nn::DecoderOptions llama = read("{}");
  EXPECT_FALSE(llama.qkv_bias || llama.out_bias || llama.mlp_bias || llama.qk_norm);
  const nn::DecoderOptions biased = read(R"({"attention_bias": true, "mlp_bias": true})");
  EXPECT_TRUE(biased.qkv_bias && biased.out_bias && biased.mlp_bias);
  const nn::DecoderOptions qwen2 = read(R"({"model_type": "qwen2"})");
  EXPECT_TRUE(qwen2.qkv_bias && !qwen2.out_bias && !qwen2.qk_norm);
  const nn::DecoderOptions qwen3 = read(R"({"model_type": "qwen3", "head_dim": 24})");
  EXPECT_TRUE(qwen3.qk_norm && !qwen3.qkv_bias);
}

TEST(HfConfig, SlidingWindowCountsOnlyWhereItWouldChangeSomething) {
  const std::string qwen = R"("model_type": "qwen2", "sliding_window": 64)";
  EXPECT_EQ(refusal("{" + qwen + "}"), "");
  EXPECT_EQ(refusal("{" + qwen + R"(, "use_sliding_window": true, "max_window_layers": 2})"), "");
  EXPECT_EQ(
      refusal(
          R"({"model_type": "qwen2", "use_sliding_window": true, "sliding_window": 512, "max_window_layers": 0})"),
      "");
  EXPECT_EQ(refusal("{" + qwen + R"(, "use_sliding_window": true, "max_window_layers": 1})"),
            "config.json: use_sliding_window: sliding-window attention is not supported");
  EXPECT_EQ(refusal("{" + qwen + R"(, "layer_types": ["full_attention", "full_attention"]})"), "");
  EXPECT_EQ(refusal("{" + qwen + R"(, "layer_types": ["full_attention", "sliding_attention"]})"),
            "config.json: layer_types: sliding-window attention is not supported: wanted "
            "full_attention only");
  EXPECT_EQ(refusal(R"({"sliding_window": 64})"), "");  // Llama has no such key
}

TEST(HfConfig, RefusesByKey) {
  const std::vector<std::pair<const char*, const char*>> cases = {
      {R"({"model_type": null})", "model_type: is missing"},
      {R"({"vocab_size": null})", "vocab_size: is missing"},
      {R"({"hidden_size": -4})", "hidden_size: wanted an integer in [1, 268435456], got -4"},
      {R"({"hidden_size": 48.0})", "hidden_size: wanted an integer in [1, 268435456], got 48.0"},
      {R"({"hidden_size": 1099511627776})",
       "hidden_size: wanted an integer in [1, 268435456], got 1099511627776"},
      {R"({"num_hidden_layers": 100000})",
       "num_hidden_layers: wanted an integer in [1, 1024], got 100000"},
      {R"({"num_key_value_heads": 4})",
       "num_key_value_heads: wanted a divisor of the 6 query heads, got 4"},
      {R"({"hidden_size": 50})",
       "head_dim: is missing, and hidden_size is not a multiple of num_attention_heads"},
      {R"({"hidden_size": 402653184})",
       "hidden_size: wanted an integer in [1, 268435456], got 402653184"},
      {R"({"hidden_size": 100663296})",
       "head_dim: wanted an even number of at most 65536, got 16777216"},
      {R"({"head_dim": 7})", "head_dim: wanted an even number of at most 65536, got 7"},
      {R"({"hidden_act": "gelu"})", "hidden_act: wanted \"silu\", got \"gelu\""},
      {R"({"attention_dropout": 0.1})", "attention_dropout: wanted 0, got 0.1"},
      {R"({"tie_word_embeddings": 1})", "tie_word_embeddings: wanted true or false, got 1"},
      {R"({"rope_theta": "1e4"})", "rope_theta: wanted a number, got \"1e4\""},
      {R"({"rope_theta": 0})", "rope_theta: wanted > 1, got 0"},
      {R"({"rope_scaling": []})", "rope_scaling: wanted an object, got []"},
      {R"({"rope_scaling": {"rope_type": "longrope"}})",
       "rope_scaling.rope_type: wanted default, linear, dynamic, llama3 or yarn, got \"longrope\""},
      {R"({"rope_scaling": {"rope_type": "linear"}})", "rope_scaling.factor: is missing"},
      {R"({"rope_parameters": {"rope_type": "llama3", "factor": 8}})",
       "rope_parameters.original_max_position_embeddings: is missing"},
      {R"({"quantization_config": {"bits": 4}})",
       "quantization_config: quantised weights are not read; save the model in bf16 or fp32"},
  };
  for (const auto& [patch, message] : cases)
    EXPECT_EQ(refusal(patch), std::string("config.json: ") + message);
  EXPECT_THROW(HfConfig("[]", "config.json"), FileError);
  EXPECT_THROW(HfConfig(R"({"model_type": "llama", "model_type": "qwen2"})", "config.json"),
               FileError);
}

struct Size {
  const char* type;
  int64_t hidden, intermediate, layers, heads, kv_heads, head_dim, vocab;
  bool tied;
  int64_t parameters;
};

// Published sizes (models specification, section 7), built on the meta device: no memory, all
// shapes.
TEST(DecoderLM, CountsTheParametersOfPublishedModels) {
  for (const Size& size : {
           Size{"llama", 576, 1536, 30, 9, 3, 64, 49152, true, 134515008},
           Size{"llama", 960, 2560, 32, 15, 5, 64, 49152, true, 361821120},
           Size{"llama", 2048, 8192, 16, 32, 8, 64, 128256, true, 1235814400},
           Size{"llama", 4096, 14336, 32, 32, 8, 128, 128256, false, 8030261248},
           Size{"llama", 8192, 28672, 80, 64, 8, 128, 128256, false, 70553706496},
           Size{"llama", 16384, 53248, 126, 128, 8, 128, 128256, false, 405853388800},
           Size{"qwen2", 896, 4864, 24, 14, 2, 64, 151936, true, 494032768},
           Size{"qwen2", 3584, 18944, 28, 28, 4, 128, 152064, false, 7615616512},
           Size{"qwen3", 1024, 3072, 28, 16, 8, 128, 151936, true, 596049920},
           Size{"qwen3", 4096, 12288, 36, 32, 8, 128, 151936, false, 8190735360},
       }) {
    const io::Json config = {{"model_type", size.type},
                             {"hidden_size", size.hidden},
                             {"intermediate_size", size.intermediate},
                             {"num_hidden_layers", size.layers},
                             {"num_attention_heads", size.heads},
                             {"num_key_value_heads", size.kv_heads},
                             {"head_dim", size.head_dim},
                             {"vocab_size", size.vocab},
                             {"tie_word_embeddings", size.tied}};
    const HfConfig parsed(config.dump(), "config.json");
    DecoderLM model(size.type,
                    architectures().get(size.type)(parsed),
                    {{.dtype = at::kFloat, .device = at::kMeta, .kernels = Kernels::kAten}, false});
    EXPECT_EQ(model.params().num_elements(), size.parameters) << size.type << " " << size.hidden;
  }
}

TEST(HfConfig, ExpertsAndTheLayersThatHaveThem) {
  const std::string base = R"("model_type": "qwen3_moe", "num_experts": 8, "num_experts_per_tok": 2,
                              "moe_intermediate_size": 24, "num_hidden_layers": 6)";
  const nn::MoeOptions moe =
      read("{" + base + R"(, "norm_topk_prob": true, "decoder_sparse_step": 2,
                             "mlp_only_layers": [3]})")
          .moe;
  EXPECT_EQ(moe.num_experts, 8);
  EXPECT_EQ(moe.num_chosen, 2);
  EXPECT_EQ(moe.intermediate, 24);
  EXPECT_TRUE(moe.renormalise);
  for (int64_t layer = 0; layer < 6; ++layer) {
    EXPECT_EQ(moe.has_experts(layer), layer == 1 || layer == 5) << layer;
  }
  const nn::DecoderOptions plain = read("{" + base + "}");
  EXPECT_FALSE(plain.moe.renormalise);
  EXPECT_TRUE(plain.qk_norm);
  EXPECT_EQ(plain.num_moe_layers(), 6);
  EXPECT_EQ(read("{}").num_moe_layers(), 0);
  EXPECT_NE(refusal("{" + base + R"(, "num_experts_per_tok": 9})").find("num_experts_per_tok"),
            std::string::npos);
  EXPECT_NE(
      refusal("{" + base + R"(, "mlp_only_layers": 3})").find("mlp_only_layers: wanted a list"),
      std::string::npos);
  EXPECT_NE(refusal("{" + base + R"(, "use_sliding_window": true, "sliding_window": 64})")
                .find("use_sliding_window"),
            std::string::npos);
}

}  // namespace
}  // namespace banyan::models
