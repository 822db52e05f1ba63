// Plain rows: the folded draw where the head is packed, else one row of stored logits after
// another.
#include "banyan/rollout/sampling/plain_draw.h"

#include <ATen/ops/tensor.h>

#include <algorithm>
#include <cstring>

#include "banyan/core/error.h"
#include "banyan/ops/edge_logprob.h"
#include "banyan/rollout/sampling/sampling_plan.h"

namespace banyan::rollout {
namespace {

bool is_greedy(double temperature) { return temperature < kGreedyTemperature; }

float inverse_of(double temperature) {
  return is_greedy(temperature) ? 1.0f : static_cast<float>(1.0 / temperature);
}

}  // namespace

void PlainDrawer::draw(const at::Tensor& hidden,
                       const ops::LinearWeight& head,
                       const ComputeOptions& options,
                       const std::vector<PlainDraw>& draws,
                       bool with_raw,
                       std::vector<PlainDrawn>& drawn) {
  drawn.resize(draws.size());
  if (draws.empty()) return;
  is_native(options) ? draw_native(hidden, head, draws, with_raw, drawn)
                     : draw_aten(hidden, head, options, draws, with_raw, drawn);
}

void PlainDrawer::load(const std::vector<PlainDraw>& draws) {
  rows_.clear();
  inverse_temperature_.clear();
  greedy_.clear();
  row_offsets_.clear();
  uniform_.clear();
  for (const PlainDraw& draw : draws) {
    if (rows_.empty() || rows_.back() != draw.row) {
      rows_.push_back(draw.row);
      inverse_temperature_.push_back(inverse_of(draw.temperature));
      greedy_.push_back(is_greedy(draw.temperature) ? 1 : 0);
      row_offsets_.push_back(static_cast<int32_t>(uniform_.size()));
    }
    uniform_.push_back(draw.uniform);
  }
  row_offsets_.push_back(static_cast<int32_t>(uniform_.size()));
}

void PlainDrawer::draw_native(const at::Tensor& hidden,
                              const ops::LinearWeight& head,
                              const std::vector<PlainDraw>& draws,
                              bool with_raw,
                              std::vector<PlainDrawn>& drawn) {
  BANYAN_ASSERT(hidden.dim() == 2 && hidden.size(1) == head.in && hidden.is_contiguous() &&
                    hidden.scalar_type() == at::kBFloat16 && head.is_packed(),
                "plain draw: hidden ",
                hidden.sizes());
  load(draws);
  const auto num_rows = static_cast<int64_t>(rows_.size());
  const c10::BFloat16* rows = hidden.const_data_ptr<c10::BFloat16>();
  // Rows that other laws draw from are left out.
  if (num_rows != hidden.size(0)) {
    gathered_.resize(num_rows * head.in);
    for (int64_t r = 0; r < num_rows; ++r) {
      std::memcpy(static_cast<void*>(gathered_.data() + r * head.in),
                  rows + rows_[r] * head.in,
                  head.in * sizeof(c10::BFloat16));
    }
    rows = gathered_.data();
  }
  token_.resize(draws.size());
  logprob_.resize(draws.size());
  raw_.resize(draws.size());
  kernels::head_draw({.hidden = rows,
                      .ld_hidden = head.in,
                      .rows = num_rows,
                      .weight = {head.packed.const_data_ptr<c10::BFloat16>(), head.in, head.out},
                      .inverse_temperature = inverse_temperature_.data(),
                      .greedy = greedy_.data(),
                      .row_offsets = row_offsets_.data(),
                      .uniform = uniform_.data()},
                     {.token = token_.data(),
                      .logprob = logprob_.data(),
                      .raw = with_raw ? raw_.data() : nullptr});
  for (size_t i = 0; i < draws.size(); ++i) {
    drawn[i] = {token_[i], logprob_[i], with_raw ? raw_[i] : logprob_[i]};
  }
}

void PlainDrawer::draw_aten(const at::Tensor& hidden,
                            const ops::LinearWeight& head,
                            const ComputeOptions& options,
                            const std::vector<PlainDraw>& draws,
                            bool with_raw,
                            std::vector<PlainDrawn>& drawn) {
  PlainRow row(static_cast<int32_t>(head.out));
  at::Tensor logits;
  at::Tensor z;
  bool finite = false;
  for (size_t i = 0; i < draws.size(); ++i) {
    const PlainDraw& draw = draws[i];
    if (i == 0 || draw.row != draws[i - 1].row) {
      logits = ops::head_logits(hidden.narrow(0, draw.row, 1), head, options);
      z = logits.to(at::kCPU, at::kFloat).contiguous();
      finite = row.load(z.const_data_ptr<float>(), draw.temperature);
    }
    if (!finite) {
      drawn[i] = {.token = -1};
      continue;
    }
    drawn[i].token = row.draw(draw.uniform);
    // The reduction of scoring on this device.
    const at::Tensor token = at::tensor({drawn[i].token}, at::kInt).to(logits.device());
    const double temperature = is_greedy(draw.temperature) ? 1.0 : draw.temperature;
    const auto logprob = [&](double t) {
      return ops::logits_logprob(logits, token, t, options).to(at::kCPU, at::kFloat).item<float>();
    };
    drawn[i].logprob = logprob(temperature);
    drawn[i].raw = with_raw && temperature != 1.0 ? logprob(1.0) : drawn[i].logprob;
  }
}

PlainRow::PlainRow(int32_t vocabulary)
    : vocabulary_(vocabulary), masses_(kernels::vocab_tiles(vocabulary)) {}

bool PlainRow::load(const float* z, double temperature) {
  z_ = z;
  inverse_temperature_ = inverse_of(temperature);
  greedy_ = is_greedy(temperature);
  law_ = kernels::row_law(z, vocabulary_, inverse_temperature_, masses_.data());
  return law_.finite();
}

int32_t PlainRow::draw(float u) const {
  kernels::TilePick pick;
  if (greedy_) {
    pick.tile = kernels::largest_tile(law_, masses_.data(), vocabulary_);
  } else {
    pick = kernels::pick_tile(law_, masses_.data(), vocabulary_, u);
  }
  const int64_t first = pick.tile * kernels::kVocabTile;
  const int64_t count = std::min(kernels::kVocabTile, vocabulary_ - first);
  const int64_t chosen =
      greedy_ ? kernels::largest_in_tile(law_, z_ + first, count, inverse_temperature_)
              : kernels::pick_in_tile(law_, pick, z_ + first, count, inverse_temperature_);
  return static_cast<int32_t>(first + chosen);
}

float PlainRow::logprob(int32_t token) const {
  return static_cast<float>(z_[token] * inverse_temperature_ - law_.log_sum);
}

}  // namespace banyan::rollout
