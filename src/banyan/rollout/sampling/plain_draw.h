// Draws for plain rows: the law is softmax(z / T) itself, or its largest logit when T is greedy; no
// penalty, bias, mask, truncation or list of likely tokens is asked for. The draw is folded with
// the head, so the logits of a row never stand in memory (kernels/cpu/head_draw.h has the formula).
//
// The general path draws untruncated rows with PlainRow, from stored logits: the same bits. So what
// else a request asks for does not change its tokens.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

#include "banyan/core/device.h"
#include "banyan/kernels/cpu/head_draw.h"
#include "banyan/ops/linear.h"

namespace banyan::rollout {

struct PlainDraw {
  int32_t row = 0;           // of the hidden rows
  double temperature = 1.0;  // below kGreedyTemperature: greedy. Equal for the draws of one row
  float uniform = 0.0f;      // in [0, 1)
};

struct PlainDrawn {
  int32_t token = 0;     // -1: a logit of the row is NaN or infinite
  float logprob = 0.0f;  // log_softmax(z / T)[token]; T = 1 when greedy
  float raw = 0.0f;      // log_softmax(z)[token]
};

// Keeps its working memory from pass to pass; one per thread.
class PlainDrawer {
 public:
  // draws sorted by row, for any of the rows of hidden [B, E]; fills `drawn` in their order.
  // `raw` is logprob where T = 1, and otherwise computed only with_raw (a second reduction).
  void draw(const at::Tensor& hidden,
            const ops::LinearWeight& head,
            const ComputeOptions& options,
            const std::vector<PlainDraw>& draws,
            bool with_raw,
            std::vector<PlainDrawn>& drawn);

 private:
  void load(const std::vector<PlainDraw>& draws);
  void draw_native(const at::Tensor& hidden,
                   const ops::LinearWeight& head,
                   const std::vector<PlainDraw>& draws,
                   bool with_raw,
                   std::vector<PlainDrawn>& drawn);
  void draw_aten(const at::Tensor& hidden,
                 const ops::LinearWeight& head,
                 const ComputeOptions& options,
                 const std::vector<PlainDraw>& draws,
                 bool with_raw,
                 std::vector<PlainDrawn>& drawn);

  std::vector<int32_t> rows_;  // with draws, and what head_draw wants of them
  std::vector<float> inverse_temperature_;
  std::vector<uint8_t> greedy_;
  std::vector<int32_t> row_offsets_;
  std::vector<float> uniform_;
  std::vector<c10::BFloat16> gathered_;
  std::vector<int32_t> token_;  // what it gives
  std::vector<float> logprob_;
  std::vector<float> raw_;
};

// One row of stored logits under the same law. Torch-free.
class PlainRow {
 public:
  explicit PlainRow(int32_t vocabulary);

  // Reads z [vocabulary] fp32, borrowed until the last draw. False if a logit is NaN or +inf, or
  // all are -inf.
  bool load(const float* z, double temperature);
  int32_t draw(float u) const;
  // log_softmax(z / T)[token] with the bits of scoring.
  float logprob(int32_t token) const;

 private:
  int32_t vocabulary_;
  const float* z_ = nullptr;
  float inverse_temperature_ = 1.0f;
  bool greedy_ = false;
  kernels::RowLaw law_;
  std::vector<kernels::TileMass> masses_;
};

}  // namespace banyan::rollout
