#include "banyan/train/batch.h"

#include <ATen/ops/ones.h>
#include <ATen/ops/tensor.h>

#include <algorithm>
#include <map>
#include <numeric>

#include "banyan/core/error.h"
#include "banyan/core/rng.h"

namespace banyan::train {
namespace {

// Fisher-Yates; the draw for place i is keyed by (seed, step, epoch, i).
void shuffle(uint64_t seed, int64_t step, int64_t epoch, std::vector<int64_t>& order) {
  for (size_t i = order.size(); i-- > 1;) {
    const auto words =
        philox(seed, i, (static_cast<uint64_t>(step) << 20) ^ static_cast<uint64_t>(epoch));
    const uint64_t draw = uint64_t{words[0]} | (uint64_t{words[1]} << 32);
    std::swap(order[i], order[draw % (i + 1)]);
  }
}

}  // namespace

int64_t Batch::num_tokens(int64_t i) const {
  const auto& mask = trajectories[i].response_mask;
  return std::count(mask.begin(), mask.end(), uint8_t{1});
}

int64_t Batch::num_kept(int64_t i) const {
  if (keep.empty()) return num_tokens(i);
  return keep[i].defined() ? static_cast<int64_t>(keep[i].sum().item<double>()) : 0;
}

bool Batch::valid(int64_t i) const { return !scores[i].failed && num_tokens(i) > 0; }

std::vector<uint8_t> Batch::validity() const {
  std::vector<uint8_t> out;
  for (int64_t i = 0; i < size(); ++i) out.push_back(valid(i) ? 1 : 0);
  return out;
}

Batch make_batch(std::vector<Trajectory> trajectories,
                 const std::vector<Score>& scores,
                 const std::vector<int64_t>& row_order) {
  std::map<int64_t, int64_t> rank;
  for (size_t i = 0; i < row_order.size(); ++i) rank[row_order[i]] = static_cast<int64_t>(i);
  std::sort(trajectories.begin(), trajectories.end(), [&](const auto& a, const auto& b) {
    return std::pair(rank.at(a.row), a.index) < std::pair(rank.at(b.row), b.index);
  });
  std::map<std::pair<int64_t, int32_t>, const Score*> by_key;
  for (const Score& score : scores) by_key[{score.row, score.index}] = &score;

  Batch batch;
  for (Trajectory& trajectory : trajectories) {
    const auto found = by_key.find({trajectory.row, trajectory.index});
    BANYAN_ASSERT(
        found != by_key.end(), "no score for row ", trajectory.row, " sample ", trajectory.index);
    batch.scores.push_back(*found->second);
    batch.trajectories.push_back(std::move(trajectory));
  }
  return batch;
}

std::vector<Sample> samples_of(const Batch& batch, const std::vector<int64_t>& which) {
  std::vector<Sample> samples;
  samples.reserve(which.size());
  for (const int64_t i : which) {
    const Trajectory& from = batch.trajectories[i];
    Sample sample;
    sample.uid = static_cast<int64_t>(samples.size());
    sample.tokens = from.prompt;
    sample.tokens.insert(sample.tokens.end(), from.response.begin(), from.response.end());
    sample.scored.assign(from.prompt.size(), 0);
    sample.scored.insert(sample.scored.end(), from.response_mask.begin(), from.response_mask.end());
    samples.push_back(std::move(sample));
  }
  return samples;
}

algo::PerToken per_token(const Batch& batch, const TokenLists& lists) {
  algo::PerToken out;
  if (lists.empty()) return out;
  for (int64_t i = 0; i < batch.size(); ++i) {
    if (!lists[i].defined()) {
      out.emplace_back(batch.num_tokens(i), 0.0);
      continue;
    }
    const at::Tensor wide = lists[i].to(at::kCPU, at::kDouble).contiguous();
    const double* begin = wide.const_data_ptr<double>();
    out.emplace_back(begin, begin + wide.numel());
  }
  return out;
}

TokenLists token_lists(const algo::PerToken& values) {
  TokenLists out;
  for (const std::vector<double>& row : values) out.push_back(at::tensor(row, at::kDouble));
  return out;
}

TokenLists spread(const std::vector<int64_t>& which, int64_t size, TokenLists lists) {
  if (lists.empty()) return {};
  TokenLists out(size);
  for (size_t k = 0; k < which.size(); ++k) out[which[k]] = std::move(lists[k]);
  return out;
}

at::Tensor loss_mask(const Batch& batch, const TokenLists& keep, int64_t i) {
  return keep.empty() ? at::ones({batch.num_tokens(i)}, at::kDouble) : keep[i];
}

std::vector<MiniBatch> mini_batches(const MiniBatchOptions& options,
                                    const Batch& batch,
                                    int64_t step) {
  std::vector<int64_t> all = batch.order;
  if (all.empty()) {
    all.resize(batch.size());
    std::iota(all.begin(), all.end(), 0);
  }
  std::vector<MiniBatch> out;
  for (int64_t epoch = 0; epoch < options.epochs; ++epoch) {
    std::vector<int64_t> order = all;
    if (options.shuffle) shuffle(options.seed, step, epoch, order);
    for (size_t begin = 0; begin < order.size(); begin += options.size) {
      MiniBatch part{{}, step, static_cast<int64_t>(out.size())};
      const size_t end = std::min(order.size(), begin + static_cast<size_t>(options.size));
      for (size_t k = begin; k < end; ++k) {
        const int64_t i = order[k];
        if (batch.valid(i) && batch.num_kept(i) > 0) part.samples.push_back(i);
      }
      if (!part.samples.empty()) out.push_back(std::move(part));
    }
  }
  return out;
}

}  // namespace banyan::train
