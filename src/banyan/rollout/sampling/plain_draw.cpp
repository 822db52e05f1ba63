// Draws of plain rows in the form of kernels/cpu/head_draw.h.
#include "banyan/rollout/sampling/plain_draw.h"

#include <cstring>

#include "banyan/core/error.h"
#include "banyan/core/profile.h"
#include "banyan/kernels/cpu/head_draw.h"
#include "banyan/rollout/sampling/sampling_plan.h"

namespace banyan::rollout {
namespace {

bool is_greedy(double temperature) { return temperature < kGreedyTemperature; }

float inverse_of(double temperature) {
  return is_greedy(temperature) ? 1.0f : static_cast<float>(1.0 / temperature);
}

}  // namespace

void PlainDrawer::load(const std::vector<PlainDraw>& draws) {
  rows_.clear();
  inverse_temperature_.clear();
  greedy_.clear();
  row_offsets_.clear();
  uniform_.clear();
  for (const PlainDraw& draw : draws) {
    const float inverse = inverse_of(draw.temperature);
    const uint8_t greedy = is_greedy(draw.temperature) ? 1 : 0;
    if (rows_.empty() || rows_.back() != draw.row || inverse_temperature_.back() != inverse ||
        greedy_.back() != greedy) {
      rows_.push_back(draw.row);
      inverse_temperature_.push_back(inverse);
      greedy_.push_back(greedy);
      row_offsets_.push_back(static_cast<int32_t>(uniform_.size()));
    }
    uniform_.push_back(draw.uniform);
  }
  row_offsets_.push_back(static_cast<int32_t>(uniform_.size()));
}

void PlainDrawer::draw(const at::Tensor& hidden,
                       const ops::LinearWeight& head,
                       const std::vector<PlainDraw>& draws,
                       bool with_raw,
                       std::vector<PlainDrawn>& drawn) {
  BANYAN_ASSERT(hidden.dim() == 2 && hidden.size(1) == head.in && hidden.is_contiguous() &&
                    hidden.scalar_type() == at::kBFloat16 && head.is_packed(),
                "plain draw: hidden ",
                hidden.sizes());
  drawn.resize(draws.size());
  if (draws.empty()) return;
  const profile::Scope timed("head and draw", [&] {
    const int64_t weight = head.in * head.out;
    return profile::Work{.flops = 2 * hidden.size(0) * weight, .bytes = 2 * weight};
  });
  load(draws);
  const auto num_rows = static_cast<int64_t>(rows_.size());
  const c10::BFloat16* rows = hidden.const_data_ptr<c10::BFloat16>();
  bool in_place = num_rows <= hidden.size(0);
  for (int64_t r = 0; r < num_rows; ++r) in_place = in_place && rows_[r] == r;
  if (!in_place) {  // some rows are left out, or drawn from at two temperatures
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
    const bool free = inverse_of(draws[i].temperature) == 1.0f;  // T = 1: both are the same
    drawn[i] = {token_[i], logprob_[i], free ? logprob_[i] : with_raw ? raw_[i] : 0.0f};
  }
}

}  // namespace banyan::rollout
