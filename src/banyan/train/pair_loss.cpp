// Pairs that a plan tears apart. The loss of a pair needs the numbers of both samples, and a plan
// may complete them in two loss entries. Such samples run forward once more, before the walk and by
// themselves; each half is then differentiated with the other half's numbers from that pass. The
// other pairs, nearly all of them, need nothing.
#include <ATen/ops/cat.h>
#include <ATen/ops/zeros_like.h>

#include <algorithm>
#include <utility>

#include "banyan/train/detail/objectives.h"

namespace banyan::train::detail {
namespace {

// Samples of one loss entry that are evaluated together.
struct Group {
  std::vector<int32_t> samples;  // pairs, whole
  std::vector<int64_t> place;    // where each stands in the entry; -1: it is not in it
};

// Whole pairs; pairs whose chosen sample alone is here; pairs whose rejected sample alone is.
std::array<Group, 3> groups_of(const std::vector<int32_t>& which, size_t num_samples) {
  std::vector<int64_t> place(num_samples, -1);
  for (size_t k = 0; k < which.size(); ++k) place[which[k]] = static_cast<int64_t>(k);
  std::array<Group, 3> groups;
  for (int32_t s = 0; s < static_cast<int32_t>(num_samples); s += 2) {
    if (place[s] < 0 && place[s + 1] < 0) continue;
    Group& group = groups[place[s + 1] < 0 ? 1 : place[s] < 0 ? 2 : 0];
    for (const int32_t half : {s, s + 1}) {
      group.samples.push_back(half);
      group.place.push_back(place[half]);
    }
  }
  return groups;
}

}  // namespace

SplitPairs::SplitPairs(const Pass& pass, const trie::Plan& plan, const std::vector<Sample>& samples)
    : values_(samples.size()) {
  std::vector<int32_t> entry(samples.size(), -1);
  const auto width = static_cast<size_t>(plan.blocks_per_round);
  for (size_t e = 0; e < plan.entries.size(); ++e) {
    if (plan.entries[e].action != trie::Action::kLoss) continue;
    const size_t begin = plan.entries[e].block * width;
    for (size_t b = begin; b < std::min(begin + width, plan.blocks.size()); ++b) {
      for (const int32_t s : plan.blocks[b].samples) entry[s] = static_cast<int32_t>(e);
    }
  }
  std::vector<Sample> split;
  std::vector<size_t> origin;
  for (size_t s = 0; s < samples.size(); ++s) {
    if (entry[s] == entry[s ^ 1]) continue;
    split.push_back(samples[s]);
    origin.push_back(s);
  }
  if (split.empty() && !walks_together(pass.model)) return;
  const trie::Plan scoring = plan_of(pass, split, /*for_backward=*/false);
  const SampleScores scores =
      score_samples(pass.model, scoring, pass.head, /*observer=*/nullptr, pass.layout.context);
  for (size_t k = 0; k < split.size(); ++k) values_[origin[k]] = scores.value[k];
  num_computed_ = scoring.num_computed;
}

Evaluated SplitPairs::evaluate(const Evaluate& loss,
                               const std::vector<int32_t>& which,
                               const TokenOutputs& outputs) const {
  if (num_computed_ == 0) return loss(which, outputs);
  Evaluated out;
  out.gradients.value = at::zeros_like(outputs.value);
  const auto groups = groups_of(which, values_.size());
  for (size_t g = 0; g < groups.size(); ++g) {
    const Group& group = groups[g];
    if (group.samples.empty()) continue;
    const auto here = [&](const at::Tensor& of, int64_t k) {
      return of.narrow(0, outputs.offsets[k], outputs.offsets[k + 1] - outputs.offsets[k]);
    };
    TokenOutputs part;
    part.offsets.assign(1, 0);
    std::vector<at::Tensor> values;
    for (size_t i = 0; i < group.samples.size(); ++i) {
      const int64_t k = group.place[i];
      values.push_back(k < 0 ? values_[group.samples[i]] : here(outputs.value, k));
      part.offsets.push_back(part.offsets.back() + values.back().numel());
    }
    part.value = at::cat(values);
    Evaluated of_part = loss(group.samples, part);
    for (size_t i = 0; i < group.samples.size(); ++i) {
      const int64_t k = group.place[i];
      if (k < 0) continue;
      const int64_t length = part.offsets[i + 1] - part.offsets[i];
      here(out.gradients.value, k)
          .copy_(of_part.gradients.value.narrow(0, part.offsets[i], length));
    }
    if (g == 2) continue;  // counted where its chosen sample is
    out.loss += of_part.loss;
    algo::merge(of_part.metrics, out.metrics);
  }
  return out;
}

}  // namespace banyan::train::detail
