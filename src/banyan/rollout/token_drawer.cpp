#include "banyan/rollout/token_drawer.h"

#include <ATen/Parallel.h>
#include <ATen/ops/empty.h>

#include <algorithm>
#include <atomic>

#include "banyan/core/error.h"
#include "banyan/ops/edge_logprob.h"

namespace banyan::rollout {
namespace {

// Rows whose logits stand at once: 25 MB for a vocabulary of 49,152.
constexpr int64_t kHeadRows = 128;

// First request of each row first_row, first_row + 1, ..., and one past the last.
std::vector<int64_t> row_starts(const DrawRequest* begin, const DrawRequest* end, int64_t rows) {
  std::vector<int64_t> starts;
  starts.reserve(rows + 1);
  for (const DrawRequest* request = begin; request != end; ++request) {
    if (request == begin || request->row != (request - 1)->row) starts.push_back(request - begin);
  }
  BANYAN_ASSERT(static_cast<int64_t>(starts.size()) == rows, "token drawer: a row without a draw");
  starts.push_back(end - begin);
  return starts;
}

}  // namespace

TokenDrawer::TokenDrawer(models::CausalLM& model, const SamplerOptions& options)
    : model_(model), options_(options) {}

void TokenDrawer::draw(const at::Tensor& hidden,
                       const std::vector<DrawRequest>& requests,
                       std::vector<Drawn>& drawn) const {
  drawn.resize(requests.size());
  const DrawRequest* begin = requests.data();
  const DrawRequest* const last = begin + requests.size();
  for (int64_t row = 0; row < hidden.size(0); row += kHeadRows) {
    const int64_t rows = std::min(kHeadRows, hidden.size(0) - row);
    const DrawRequest* end =
        std::partition_point(begin, last, [&](const DrawRequest& r) { return r.row < row + rows; });
    const at::Tensor logits =
        ops::head_logits(hidden.narrow(0, row, rows), model_.head(), model_.options());
    Drawn* const out = drawn.data() + (begin - requests.data());
    draw_rows(logits, begin, end, out);
    add_logprobs(logits, begin, end, out);
    begin = end;
  }
}

void TokenDrawer::draw_rows(const at::Tensor& logits,
                            const DrawRequest* begin,
                            const DrawRequest* end,
                            Drawn* drawn) const {
  const at::Tensor z = logits.to(at::kCPU, at::kFloat).contiguous();
  const float* data = z.const_data_ptr<float>();
  const int64_t rows = z.size(0);
  const int64_t vocab = z.size(1);
  const std::vector<int64_t> starts = row_starts(begin, end, rows);
  std::atomic<int64_t> broken{-1};
  at::parallel_for(0, rows, 1, [&](int64_t first, int64_t last) {
    Sampler sampler(options_, static_cast<int32_t>(vocab));
    for (int64_t row = first; row < last; ++row) {
      if (!sampler.load(data + row * vocab)) {
        broken = starts[row];
        continue;
      }
      for (int64_t i = starts[row]; i < starts[row + 1]; ++i) {
        drawn[i].token = sampler.draw(uniform(begin[i].key, begin[i].position));
        drawn[i].log_kept = sampler.log_kept_share();
      }
    }
  });
  BANYAN_CHECK(broken < 0,
               "[rollout] logits: wanted finite numbers, got NaN or infinity for row ",
               begin[broken].key.row,
               " at position ",
               begin[broken].position,
               "; the weights may have diverged (lower the learning rate)");
}

void TokenDrawer::add_logprobs(const at::Tensor& logits,
                               const DrawRequest* begin,
                               const DrawRequest* end,
                               Drawn* drawn) const {
  const int64_t rows = logits.size(0);
  const double temperature = options_.greedy() ? 1.0 : options_.temperature;
  const std::vector<int64_t> starts = row_starts(begin, end, rows);
  int64_t rounds = 0;
  for (int64_t row = 0; row < rows; ++row) {
    rounds = std::max(rounds, starts[row + 1] - starts[row]);
  }
  // One token of every row a round: rows of prompts have as many as they have responses.
  const at::Tensor token = at::empty({rows}, at::kInt);
  int32_t* const tokens = token.mutable_data_ptr<int32_t>();
  for (int64_t round = 0; round < rounds; ++round) {
    const auto request_of = [&](int64_t row) {
      return std::min(starts[row] + round, starts[row + 1] - 1);
    };
    for (int64_t row = 0; row < rows; ++row) tokens[row] = drawn[request_of(row)].token;
    const at::Tensor logprob =
        ops::logits_logprob(logits, token.to(logits.device()), temperature, model_.options())
            .to(at::kCPU, at::kFloat);
    const float* values = logprob.const_data_ptr<float>();
    for (int64_t row = 0; row < rows; ++row) drawn[request_of(row)].logprob = values[row];
  }
}

}  // namespace banyan::rollout
