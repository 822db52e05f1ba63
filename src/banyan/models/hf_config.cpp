#include "banyan/models/hf_config.h"

#include <algorithm>
#include <array>
#include <string_view>

#include "banyan/core/error.h"

namespace banyan::models {
namespace {

// Far above any model, and small enough that no product of the sizes overflows 64 bits.
constexpr int64_t kMaxSize = int64_t{1} << 28;
constexpr int64_t kMaxHeads = int64_t{1} << 16;
constexpr int64_t kMaxLayers = 1024;

constexpr std::array<std::string_view, 5> kRopeTypes = {
    "default", "linear", "dynamic", "llama3", "yarn"};

void check_heads(const JsonFields& fields, const nn::DecoderOptions& options) {
  if (options.heads % options.kv_heads != 0) {
    fields.refuse(
        "num_key_value_heads",
        detail::concat(
            "wanted a divisor of the ", options.heads, " query heads, got ", options.kv_heads));
  }
  if (!fields.has("head_dim") && options.hidden % options.heads != 0) {
    fields.refuse("head_dim",
                  "is missing, and hidden_size is not a multiple of num_attention_heads");
  }
  if (options.head_dim % 2 != 0 || options.head_dim > kMaxHeads) {
    fields.refuse(
        "head_dim",
        detail::concat("wanted an even number of at most ", kMaxHeads, ", got ", options.head_dim));
  }
}

void refuse_unsupported(const JsonFields& fields) {
  const std::string activation = fields.text_or("hidden_act", "silu");
  if (activation != "silu")
    fields.refuse("hidden_act", "wanted \"silu\", got \"" + activation + "\"");
  const double dropout = fields.number_or("attention_dropout", 0.0);
  if (dropout != 0.0) fields.refuse("attention_dropout", detail::concat("wanted 0, got ", dropout));
  if (fields.number_or("partial_rotary_factor", 1.0) != 1.0) {
    fields.refuse("partial_rotary_factor",
                  "wanted 1: whole heads are rotated in this architecture");
  }
  if (fields.flag_or("attn_output_gate", false)) {
    fields.refuse("attn_output_gate", "wanted false: attention with an output gate is not built");
  }
  if (fields.has("quantization_config")) {
    fields.refuse("quantization_config",
                  "quantised weights are not read; save the model in bf16 or fp32");
  }
}

}  // namespace

HfConfig::HfConfig(const std::string& text, const std::string& where)
    : fields_(io::parse_json(text, where), where), model_type_(fields_.text_or("model_type", "")) {
  if (model_type_.empty()) fields_.refuse("model_type", "is missing");
}

nn::DecoderOptions HfConfig::decoder() const {
  nn::DecoderOptions options;
  options.vocab = fields_.size("vocab_size", kMaxSize);
  options.hidden = fields_.size("hidden_size", kMaxSize);
  options.intermediate = fields_.size("intermediate_size", kMaxSize);
  options.layers = fields_.size("num_hidden_layers", kMaxLayers);
  options.heads = fields_.size("num_attention_heads", kMaxHeads);
  options.kv_heads = fields_.size_or("num_key_value_heads", options.heads, kMaxHeads);
  options.head_dim = fields_.size_or("head_dim", options.hidden / options.heads, kMaxHeads);
  check_heads(fields_, options);
  options.max_positions = fields_.size_or("max_position_embeddings", 2048, kMaxSize);
  options.norm_eps = fields_.number_or("rms_norm_eps", 1e-6);
  options.tied = fields_.flag_or("tie_word_embeddings", false);
  options.rope = rope(options.max_positions);
  refuse_unsupported(fields_);
  return options;
}

// Newer files carry rope_parameters {rope_type, rope_theta, ...}; older ones rope_theta at the top
// and rope_scaling {type | rope_type, ...} (null: no scaling).
nn::RopeOptions HfConfig::rope(int64_t max_positions) const {
  nn::RopeOptions rope;
  rope.theta = fields_.number_or("rope_theta", rope.theta);
  const char* key = fields_.has("rope_parameters") ? "rope_parameters" : "rope_scaling";
  if (const io::Json* object = fields_.find(key)) {
    if (!object->is_object())
      fields_.refuse(key, "wanted an object, got " + JsonFields::shown(*object));
    const JsonFields scaling(*object, fields_.where(), std::string(key) + ".");
    rope.theta = scaling.number_or("rope_theta", rope.theta);
    rope.type = scaling.text_or("rope_type", scaling.text_or("type", "default"));
    if (std::find(kRopeTypes.begin(), kRopeTypes.end(), rope.type) == kRopeTypes.end()) {
      scaling.refuse("rope_type",
                     "wanted default, linear, dynamic, llama3 or yarn, got \"" +
                         io::printable(rope.type) + "\"");
    }
    if (rope.type != "default") {
      rope.factor = scaling.number("factor");
      if (!(rope.factor > 0))
        scaling.refuse("factor", detail::concat("wanted > 0, got ", rope.factor));
    }
    if (rope.type == "llama3") {
      rope.original_max_positions = scaling.size("original_max_position_embeddings", kMaxSize);
      rope.low_freq_factor = scaling.number("low_freq_factor");
      rope.high_freq_factor = scaling.number("high_freq_factor");
    } else if (rope.type == "yarn") {
      rope.original_max_positions =
          scaling.size_or("original_max_position_embeddings", max_positions, kMaxSize);
      rope.beta_fast = scaling.number_or("beta_fast", rope.beta_fast);
      rope.beta_slow = scaling.number_or("beta_slow", rope.beta_slow);
      rope.truncate = scaling.flag_or("truncate", rope.truncate);
      rope.attention_factor = scaling.optional_number("attention_factor");
      rope.mscale = scaling.optional_number("mscale");
      rope.mscale_all_dim = scaling.optional_number("mscale_all_dim");
    }
  }
  if (!(rope.theta > 1.0))
    fields_.refuse("rope_theta", detail::concat("wanted > 1, got ", rope.theta));
  return rope;
}

// A window counts only with use_sliding_window, for layers from max_window_layers on, and only if
// it is shorter than the sequences can get.
void HfConfig::require_full_attention(const nn::DecoderOptions& options) const {
  const std::string reason = "sliding-window attention is not supported";
  const int64_t window = fields_.size_or("sliding_window", 4096, kMaxSize);
  if (window >= options.max_positions) return;
  if (const io::Json* types = fields_.find("layer_types")) {
    const bool full =
        types->is_array() && std::all_of(types->begin(), types->end(), [](const io::Json& type) {
          return type == "full_attention";
        });
    if (!full) fields_.refuse("layer_types", reason + ": wanted full_attention only");
    return;
  }
  if (!fields_.flag_or("use_sliding_window", false)) return;
  if (fields_.number_or("max_window_layers", 28) < static_cast<double>(options.layers)) {
    fields_.refuse("use_sliding_window", reason);
  }
}

}  // namespace banyan::models
