// config.json of an HF directory, old and new key styles. Everything that would change the
// computation and is not supported is refused here, by key.
#pragma once

#include <string>

#include "banyan/models/json_fields.h"
#include "banyan/nn/decoder_options.h"

namespace banyan::models {

// What the architectures read alike; each file in models/ adds what is its own.
class HfConfig {
 public:
  // `text` of a config.json; `where` (its path) starts every message. Throws FileError.
  HfConfig(const std::string& text, const std::string& where);

  const JsonFields& fields() const { return fields_; }
  const std::string& model_type() const { return model_type_; }
  double initializer_range() const { return fields_.number_or("initializer_range", 0.02); }

  // Sizes, norm, RoPE and tying: all that does not differ between the architectures. Refuses
  // another activation, attention dropout, partial rotary and quantised weights.
  nn::DecoderOptions decoder() const;
  // Throws unless every layer attends to the whole sequence (use_sliding_window, layer_types).
  void require_full_attention(const nn::DecoderOptions& options) const;

 private:
  nn::RopeOptions rope(int64_t max_positions) const;

  JsonFields fields_;
  std::string model_type_;
};

}  // namespace banyan::models
