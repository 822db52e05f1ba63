// The tensors of an HF directory against the parameters of a model: which must be there, which may
// be there besides, and their values as floating-point numbers. Shared by loading and updating.
#pragma once

#include <ATen/core/Tensor.h>

#include <string>
#include <vector>

#include "banyan/core/param.h"
#include "banyan/io/safetensors.h"
#include "banyan/models/hf_config.h"

namespace banyan::models::detail {

inline constexpr const char* kHead = "lm_head.weight";
inline constexpr const char* kValueWeight = "score.weight";
inline constexpr const char* kValueBias = "score.bias";
inline constexpr const char* kEmbedding = "model.embed_tokens.weight";

// The structure that a config.json asks for; FileError for an architecture that is not known.
nn::DecoderOptions read_options(const HfConfig& config, const std::string& where);

bool is_value_head(const std::string& name);

// What decides beside the parameters' names.
struct HeadChoice {
  bool tied = false;
  nn::HeadKind kind = nn::HeadKind::kVocabulary;
  bool may_be_missing = false;  // a value head that starts from random numbers
};

// Throws FileError that lists every tensor that is missing, unexpected, of another shape, or of a
// type that is no floating-point number. Reads headers only.
void check_tensors(const std::string& directory,
                   const io::HfWeights& weights,
                   const ParamTable& params,
                   const HeadChoice& head);

// The part of a stored tensor that `param` is, as a floating-point tensor. Throws FileError that
// names the tensor if it holds NaN or infinity.
at::Tensor read_param(const std::string& directory,
                      const io::HfWeights& weights,
                      const Param& param);

// A stored weight as a floating-point tensor of the given shape.
at::Tensor read_float(const io::HfWeights& weights,
                      const std::string& name,
                      const std::vector<int64_t>& shape);

// A tied model's files may carry the head too, if it equals the embedding.
void check_tied_head(const std::string& directory,
                     const io::HfWeights& weights,
                     const ParamTable& params,
                     const HeadChoice& head);

}  // namespace banyan::models::detail
