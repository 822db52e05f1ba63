// Plain rows are drawn from by the folded head; the others get their logits, kHeadRows rows at a
// time, and a RowSampler per thread. Where the vocabulary lies on several ranks, all rows get their
// logits, of the whole vocabulary, on each of them, and every rank draws the same.
#include "banyan/rollout/sampling/token_drawer.h"

#include <ATen/Parallel.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/index_select.h>

#include <algorithm>
#include <atomic>
#include <functional>
#include <numeric>

#include "banyan/core/error.h"
#include "banyan/ops/edge_logprob.h"
#include "banyan/parallel/cut_head.h"
#include "banyan/rollout/sampling/plain_draw.h"

namespace banyan::rollout {
namespace {

// Rows whose logits stand at once: 25 MB for a vocabulary of 49,152.
constexpr int64_t kHeadRows = 128;

// The requests [begin, end) of one row.
struct RowRequests {
  int64_t begin = 0;
  int64_t end = 0;
};

}  // namespace

class TokenDrawer::Impl {
 public:
  explicit Impl(models::CausalLM& model) : model_(model) {}

  void draw(const at::Tensor& hidden,
            const std::vector<DrawRequest>& requests,
            std::vector<Drawn>& drawn,
            bool with_raw) {
    drawn.resize(requests.size());
    find_rows(requests);
    if (is_native(model_.options()) && model_.tensor() == nullptr)
      draw_plain(hidden, requests, drawn, with_raw);
    index_.clear();
    for (const RowRequests& row : rows_) index_.push_back(requests[row.begin].row);
    for_each_row(hidden, index_, [&](RowSampler& sampler, float* z, int64_t i) {
      sampler.load(z);
      for (int64_t r = rows_[i].begin; r < rows_[i].end; ++r) {
        const DrawRequest& request = requests[r];
        const float u = uniform(request.key, request.position);
        sampler.draw(*request.response, u, with_raw, drawn[r]);
      }
    });
  }

  void score(const at::Tensor& hidden,
             const std::vector<int32_t>& next,
             int32_t num_top,
             const std::vector<int32_t>& ids,
             std::vector<std::vector<TokenLogprob>>& out) {
    BANYAN_ASSERT(static_cast<int64_t>(next.size()) == hidden.size(0),
                  "token drawer: a row without a next token");
    out.resize(next.size());
    index_.resize(next.size());
    std::iota(index_.begin(), index_.end(), 0);
    std::atomic<bool> finite{true};
    for_each_row(hidden, index_, [&](RowSampler& sampler, float* z, int64_t i) {
      sampler.load(z);
      if (!sampler.score(next[i], num_top, ids, out[i])) finite = false;
    });
    BANYAN_CHECK(finite, "[rollout] prompt: ", explain(DrawStatus::kNotFinite));
  }

 private:
  // Draws from the rows whose every draw is plain, and takes them off rows_.
  void draw_plain(const at::Tensor& hidden,
                  const std::vector<DrawRequest>& requests,
                  std::vector<Drawn>& drawn,
                  bool with_raw) {
    plain_.clear();
    plain_of_.clear();
    size_t kept = 0;
    for (const RowRequests& row : rows_) {
      const auto is_plain = [](const DrawRequest& request) { return request.response->plain(); };
      if (!std::all_of(requests.begin() + row.begin, requests.begin() + row.end, is_plain)) {
        rows_[kept++] = row;
        continue;
      }
      for (int64_t r = row.begin; r < row.end; ++r) {
        const DrawRequest& request = requests[r];
        plain_.push_back({.row = request.row,
                          .temperature = request.response->plan().params.temperature,
                          .uniform = uniform(request.key, request.position)});
        plain_of_.push_back(r);
      }
    }
    rows_.resize(kept);
    plain_drawer_.draw(hidden, model_.head(), plain_, with_raw, plain_drawn_);
    for (size_t i = 0; i < plain_of_.size(); ++i) {
      const PlainDrawn& from = plain_drawn_[i];
      Drawn& to = drawn[plain_of_[i]];
      to.status = from.token < 0 ? DrawStatus::kNotFinite : DrawStatus::kDrawn;
      to.logprob = from.logprob;
      to.record.token = from.token;
      to.record.raw = from.raw;
      to.record.processed = from.logprob;
      to.record.log_kept_mass = 0.0f;
      to.record.top.clear();
      to.record.sampling_mask.clear();
    }
  }

  void find_rows(const std::vector<DrawRequest>& requests) {
    rows_.clear();
    for (int64_t r = 0; r < static_cast<int64_t>(requests.size()); ++r) {
      const DrawRequest& request = requests[r];
      if (rows_.empty() || requests[r - 1].row != request.row) {
        rows_.push_back({.begin = r, .end = r});
      }
      rows_.back().end = r + 1;
    }
  }

  // Calls work(sampler, logits of hidden row index[i], i) for every i, in parallel. index ascends.
  void for_each_row(const at::Tensor& hidden,
                    const std::vector<int32_t>& index,
                    const std::function<void(RowSampler&, float*, int64_t)>& work) {
    const int64_t count = static_cast<int64_t>(index.size());
    const int64_t vocab = model_.shape().vocab;
    while (static_cast<int64_t>(samplers_.size()) < at::get_num_threads()) {
      samplers_.push_back(std::make_unique<RowSampler>(static_cast<int32_t>(vocab)));
    }
    for (int64_t first = 0; first < count; first += kHeadRows) {
      const int64_t rows = std::min(kHeadRows, count - first);
      const at::Tensor logits = logits_of(hidden, index.data() + first, rows);
      float* const z = logits.data_ptr<float>();
      at::parallel_for(0, rows, 1, [&](int64_t begin, int64_t end) {
        RowSampler& sampler = *samplers_[at::get_thread_num()];
        for (int64_t row = begin; row < end; ++row) work(sampler, z + row * vocab, first + row);
      });
    }
  }

  // [rows, V] fp32 on the CPU, in memory of this object's where the kernels are native.
  at::Tensor logits_of(const at::Tensor& hidden, const int32_t* index, int64_t rows) {
    at::Tensor chosen;
    if (index[rows - 1] - index[0] == rows - 1) {
      chosen = hidden.narrow(0, index[0], rows);
    } else {
      at::Tensor ids = at::empty({rows}, at::kInt);
      std::copy(index, index + rows, ids.mutable_data_ptr<int32_t>());
      chosen = at::index_select(hidden, 0, ids.to(hidden.device()));
    }
    ops::head_logits_into(chosen, model_.head(), model_.options(), logits_);
    const at::Tensor own = logits_.narrow(0, 0, rows);
    const at::Tensor whole =
        model_.tensor() != nullptr ? parallel::whole_logits(*model_.tensor(), own) : own;
    return whole.to(at::kCPU, at::kFloat).contiguous();
  }

  models::CausalLM& model_;
  std::vector<std::unique_ptr<RowSampler>> samplers_;  // one per thread
  at::Tensor logits_;                                  // [>= rows, V], or this rank's part of V
  std::vector<RowRequests> rows_;                      // reused, like the next
  std::vector<int32_t> index_;                         // hidden rows that are drawn from
  PlainDrawer plain_drawer_;
  std::vector<PlainDraw> plain_;
  std::vector<int64_t> plain_of_;  // their requests
  std::vector<PlainDrawn> plain_drawn_;
};

TokenDrawer::TokenDrawer(models::CausalLM& model) : impl_(std::make_unique<Impl>(model)) {}
TokenDrawer::~TokenDrawer() = default;

void TokenDrawer::draw(const at::Tensor& hidden,
                       const std::vector<DrawRequest>& requests,
                       std::vector<Drawn>& drawn,
                       bool with_raw) {
  impl_->draw(hidden, requests, drawn, with_raw);
}

void TokenDrawer::score(const at::Tensor& hidden,
                        const std::vector<int32_t>& next,
                        int32_t num_top,
                        const std::vector<int32_t>& ids,
                        std::vector<std::vector<TokenLogprob>>& out) {
  impl_->score(hidden, next, num_top, ids, out);
}

const char* explain(DrawStatus status) {
  switch (status) {
    case DrawStatus::kDrawn:
      return "drawn";
    case DrawStatus::kNotFinite:
      return "logits: wanted finite numbers, got NaN or infinity; the weights may have diverged "
             "(lower the learning rate)";
    case DrawStatus::kNothingLeft:
      return "sampling: wanted at least one token that may follow, got none: the structured "
             "output, "
             "allowed_token_ids, bad_words and min_tokens together bar them all";
  }
  return "";
}

}  // namespace banyan::rollout
