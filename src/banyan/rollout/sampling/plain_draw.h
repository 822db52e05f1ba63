// Draws for plain rows: the law is softmax(z / T) itself, or its largest logit when T is greedy; no
// penalty, bias, mask, truncation or list of likely tokens is asked for. The draw is folded with
// the head, so the logits of a row never stand in memory (kernels/cpu/head_draw.h has the formula).
//
// RowSampler draws untruncated rows from stored logits with the same bits. So what else a request
// asks for does not change its tokens, and where the head is not packed it draws the plain rows
// too.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

#include "banyan/ops/linear.h"

namespace banyan::rollout {

struct PlainDraw {
  int32_t row = 0;           // of the hidden rows
  double temperature = 1.0;  // below kGreedyTemperature: greedy
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
  // draws sorted by row, for any of the rows of hidden [B, E] bf16; head is packed; fills `drawn`
  // in their order. `raw` is logprob where T = 1, otherwise computed with_raw (a second reduction)
  // and else 0.
  void draw(const at::Tensor& hidden,
            const ops::LinearWeight& head,
            const std::vector<PlainDraw>& draws,
            bool with_raw,
            std::vector<PlainDrawn>& drawn);

 private:
  void load(const std::vector<PlainDraw>& draws);

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

}  // namespace banyan::rollout
