#include "banyan/train/spread.h"

#include <algorithm>
#include <map>
#include <utility>

#include "banyan/parallel/balance.h"
#include "banyan/train/wire.h"

namespace banyan::train {
std::vector<int64_t> chosen(const std::vector<int64_t>& values,
                            const std::vector<int64_t>& places) {
  std::vector<int64_t> out;
  for (const int64_t place : places) out.push_back(values[place]);
  return out;
}

namespace {

// Samples that are computed together, and what that takes.
struct Piece {
  std::vector<int64_t> places;
  double seconds = 0.0;
};

// The samples of one row each, in the order of the rows.
std::vector<std::vector<int64_t>> groups_of(const Batch& batch,
                                            const std::vector<int64_t>& samples) {
  std::map<int64_t, size_t> group_of_row;
  std::vector<std::vector<int64_t>> groups;
  for (size_t k = 0; k < samples.size(); ++k) {
    const int64_t row = batch.trajectories[samples[k]].row;
    const auto [found, is_new] = group_of_row.emplace(row, groups.size());
    if (is_new) groups.emplace_back();
    groups[found->second].push_back(static_cast<int64_t>(k));
  }
  return groups;
}

parallel::Balance balance(const std::vector<Piece>& pieces, int64_t num_ranks) {
  std::vector<double> costs;
  for (const Piece& piece : pieces) costs.push_back(piece.seconds);
  return parallel::balance(costs, num_ranks);
}

double longest(const parallel::Balance& balance) {
  return *std::max_element(balance.load.begin(), balance.load.end());
}

// Whole groups to ranks. As long as the last rank ends sooner for it, its dearest group is halved:
// both halves then compute the group's trunk.
class Spreading {
 public:
  Spreading(const Batch& batch,
            const std::vector<int64_t>& samples,
            const trie::PlanOptions& options,
            int64_t num_ranks)
      : batch_(batch), samples_(samples), options_(options), num_ranks_(num_ranks) {}

  // Which places each rank computes.
  std::vector<std::vector<int64_t>> run(double& imbalance) {
    for (std::vector<int64_t>& group : groups_of(batch_, samples_)) {
      pieces_.push_back(costed(std::move(group)));
    }
    best_ = balance(pieces_, num_ranks_);
    for (int64_t tries = 0; tries < 8 * num_ranks_ && halve(); ++tries) {
    }
    imbalance = parallel::imbalance(best_.load);
    std::vector<std::vector<int64_t>> places(num_ranks_);
    for (int64_t rank = 0; rank < num_ranks_; ++rank) {
      for (const int64_t piece : best_.pieces[rank]) {
        const std::vector<int64_t>& more = pieces_[piece].places;
        places[rank].insert(places[rank].end(), more.begin(), more.end());
      }
      std::sort(places[rank].begin(), places[rank].end());
    }
    return places;
  }

 private:
  static constexpr double kGain = 0.98;  // a cut that saves less is not worth its trunk's memory

  Piece costed(std::vector<int64_t> places) const {
    const std::vector<Sample> paths = samples_of(batch_, chosen(samples_, places));
    return {std::move(places), trie::plan(paths, options_).modelled_seconds};
  }

  bool halve() {
    const auto last = std::max_element(best_.load.begin(), best_.load.end()) - best_.load.begin();
    int64_t dearest = -1;
    for (const int64_t piece : best_.pieces[last]) {
      if (pieces_[piece].places.size() < 2) continue;
      if (dearest < 0 || pieces_[piece].seconds > pieces_[dearest].seconds) dearest = piece;
    }
    if (dearest < 0) return false;
    const std::vector<int64_t>& whole = pieces_[dearest].places;
    const auto middle = whole.begin() + static_cast<int64_t>(whole.size() / 2);
    std::vector<Piece> pieces = pieces_;
    pieces[dearest] = costed({whole.begin(), middle});
    pieces.push_back(costed({middle, whole.end()}));
    parallel::Balance found = balance(pieces, num_ranks_);
    if (longest(found) > kGain * longest(best_)) return false;
    pieces_ = std::move(pieces);
    best_ = std::move(found);
    return true;
  }

  const Batch& batch_;
  const std::vector<int64_t>& samples_;
  const trie::PlanOptions& options_;
  int64_t num_ranks_;
  std::vector<Piece> pieces_;
  parallel::Balance best_;
};

}  // namespace

Spread spread_groups(const Batch& batch,
                     const std::vector<int64_t>& samples,
                     const trie::PlanOptions& options,
                     parallel::Collectives* ranks) {
  Spread spread;
  if (parallel::is_alone(ranks)) {
    for (size_t k = 0; k < samples.size(); ++k) spread.own.push_back(static_cast<int64_t>(k));
    return spread;
  }
  WireWriter out;
  if (ranks->is_first()) {
    const std::vector<std::vector<int64_t>> places =
        Spreading(batch, samples, options, ranks->size()).run(spread.imbalance);
    out.put(spread.imbalance);
    out.put(places);
  }
  const std::string bytes = ranks->broadcast_bytes(out.bytes(), 0);
  WireReader in(bytes);
  in.get(spread.imbalance);
  spread.own = in.next<std::vector<std::vector<int64_t>>>().at(ranks->rank());
  return spread;
}

TokenLists gather_lists(const std::vector<int64_t>& places,
                        const TokenLists& own,
                        int64_t size,
                        parallel::Collectives& ranks) {
  WireWriter out;
  out.put(places);
  for (const int64_t place : places) out.put(own[place]);
  TokenLists all(size);
  for (const std::string& bytes : ranks.all_gather_bytes(out.bytes())) {
    WireReader in(bytes);
    for (const int64_t place : in.next<std::vector<int64_t>>()) in.get(all.at(place));
  }
  return all;
}

namespace {

// The numbers of all ranks from each rank's, which are of `places` out of `size`. A rank without a
// place brings no lists but takes part in every gathering.
BatchScores gather_scores(const std::vector<int64_t>& places,
                          int64_t size,
                          BatchScores own,
                          const HeadSpec& head,
                          parallel::Collectives& ranks) {
  const auto whole = [&](TokenLists lists) {
    if (places.empty()) lists.clear();
    return gather_lists(places, spread(places, size, std::move(lists)), size, ranks);
  };
  BatchScores all;
  all.value = whole(std::move(own.value));
  if (head.with_entropy) all.entropy = whole(std::move(own.entropy));
  if (head.with_sum_squares) all.sum_squares = whole(std::move(own.sum_squares));
  return all;
}

}  // namespace

BatchScores score_batch_over(const Batch& batch,
                             models::CausalLM& model,
                             const trie::PlanOptions& options,
                             const HeadSpec& head,
                             const std::string& name,
                             const Layout& layout) {
  parallel::Collectives* ranks = layout.ranks;
  if (parallel::is_alone(ranks)) {
    return score_batch(batch, model, options, head, name, layout);
  }
  const std::vector<int64_t> valid = valid_of(batch);
  std::vector<int64_t> which;
  Batch part;
  for (const int64_t k : spread_groups(batch, valid, options, ranks).own) {
    which.push_back(valid[k]);
    part.trajectories.push_back(batch.trajectories[valid[k]]);
    part.scores.push_back(batch.scores[valid[k]]);
  }
  BatchScores own = score_batch(part, model, options, head, name, layout);
  return gather_scores(which, batch.size(), std::move(own), head, *ranks);
}

BatchScores score_places(const Batch& batch,
                         const std::vector<int64_t>& samples,
                         models::CausalLM& model,
                         const trie::PlanOptions& options,
                         const HeadSpec& head,
                         const Layout& layout) {
  const std::vector<int64_t> own = spread_groups(batch, samples, options, layout.ranks).own;
  const auto size = static_cast<int64_t>(samples.size());
  const trie::Plan plan = plan_of(samples_of(batch, chosen(samples, own)), options, layout);
  SampleScores scores;
  if (!own.empty() || walks_together(model)) {  // which brings weights together with the others
    scores = score_samples(model, plan, head, /*observer=*/nullptr, layout.context);
  }
  BatchScores part{
      std::move(scores.value), std::move(scores.entropy), std::move(scores.sum_squares)};
  if (parallel::is_alone(layout.ranks)) return part;
  return gather_scores(own, size, std::move(part), head, *layout.ranks);
}

}  // namespace banyan::train
