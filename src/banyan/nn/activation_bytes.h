// How many bytes of activations a decoder needs per token, by its shape: what the planner's token
// budget is chosen by. A test holds the figures to what a forward keeps.
#pragma once

#include <cstdint>

#include "banyan/core/device.h"
#include "banyan/nn/decoder_options.h"
#include "banyan/nn/recompute.h"

namespace banyan::nn {

// Bytes per token.
struct ActivationBytes {
  int64_t kept = 0;     // from forward to backward, all layers
  int64_t again = 0;    // most that the backward computes again and holds at one time
  int64_t working = 0;  // most that a layer's backward holds beside that
  int64_t total() const { return kept + again + working; }
};

// Of `shape.layers` layers from `first` on, as if they were all of a model.
ActivationBytes activation_bytes(const DecoderOptions& shape,
                                 const ComputeOptions& options,
                                 const Recompute& recompute,
                                 int64_t first = 0);

// A row of the residual stream, as it is kept: shared out with sequence parallel.
int64_t kept_row_bytes(const DecoderOptions& shape, const ComputeOptions& options);

}  // namespace banyan::nn
