// Permute and unpermute of a mixture-of-experts layer: every (token, choice) becomes a row, rows
// are sorted by expert (stable: by token, then by choice, inside an expert), and what the experts
// give comes back to the tokens, added in the order of the choices. No token is dropped.
// unpermute(permute(x)) with weights that sum to one is x.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

#include "banyan/core/device.h"

namespace banyan::ops {

// S = T k rows.
struct ExpertRows {
  at::Tensor source;             // [S] int64: t k + c of each row
  at::Tensor token;              // [S] int64: t
  at::Tensor slot;               // [T, k] int64: row of each choice
  std::vector<int64_t> offsets;  // [X + 1]: rows of expert e are [offsets[e], offsets[e + 1])
};

// choice [T, k] int64 of experts in [0, num_experts); throws [experts] on others. O(T k + X), on
// the CPU.
ExpertRows sort_by_expert(const at::Tensor& choice, int64_t num_experts);

// x [T, E] -> [S, E].
at::Tensor permute(const at::Tensor& x, const ExpertRows& rows);

// y [S, E] -> [T, E] = sum over c of weight [T, k] (undefined: one) times the rows of a token, in
// fp32 (fp64), rounded; plus the residual [T, E], if defined, rounded again. The weight is rounded
// to y's type first, as transformers does.
at::Tensor unpermute(const at::Tensor& y,
                     const ExpertRows& rows,
                     const at::Tensor& weight,
                     const at::Tensor& residual,
                     const ComputeOptions& options);

// weight [T, k] -> [S] of the rows, rounded to `dtype` and held in fp32 (fp64).
at::Tensor weight_of_rows(const at::Tensor& weight, const ExpertRows& rows, at::ScalarType dtype);

// x [S, F] with each row times weight [S], as weight_of_rows gives it.
at::Tensor scale_rows(const at::Tensor& x, const at::Tensor& weight, const ComputeOptions& options);

// Row by row a · b in fp32 (fp64): a, b [S, F] -> [S].
at::Tensor dot_rows(const at::Tensor& a, const at::Tensor& b, const ComputeOptions& options);

// A number of each row [S] -> of each choice [T, k].
at::Tensor to_choices(const at::Tensor& numbers, const ExpertRows& rows);

}  // namespace banyan::ops
