// DPO and IPO: the log-probability of an answer against that of a reference model, chosen against
// rejected. Both samples of a pair, and all pairs of a prompt, hang on one trunk.
#include <ATen/ops/cat.h>

#include <algorithm>
#include <numeric>

#include "banyan/algo/preference.h"
#include "banyan/core/error.h"
#include "banyan/train/detail/objectives.h"
#include "banyan/train/finetune_exchange.h"
#include "banyan/train/finetune_layout.h"
#include "banyan/train/spread.h"

namespace banyan::train::detail {
namespace {

using Tensors = std::vector<at::Tensor>;

algo::PreferenceOptions loss_options(const PreferenceConfig& preference) {
  algo::PreferenceOptions options;
  options.loss_type = preference.objective == "ipo" ? "ipo" : "sigmoid";
  options.beta = preference.beta;
  options.label_smoothing = preference.label_smoothing;
  options.reference_free = preference.reference_free;
  options.sft_coef = preference.rpo_alpha;
  return options;
}

class Preference final : public Objective {
 public:
  Preference(const FinetuneConfig& config,
             const Pass& pass,
             FinetuneHost& host,
             parallel::Groups& groups)
      : options_(loss_options(*config.preference)),
        pass_(pass),
        ranks_(groups.data),
        batch_size_(config.data.train_batch_size) {
    algo::check_preference_options(options_);
    if (options_.reference_free) return;
    models::LoadOptions load = finetune_load_options(config, nullptr);
    load.with_backward = false;
    reference_ = load_finetuned(config,
                                config.preference->reference_path.value_or(config.model.path),
                                load,
                                groups,
                                reference_fsdp_);
    if (!config.preference->precompute_ref_log_probs) return;
    train_reference_ = precompute(host, config.num_train_rows, /*validation=*/false);
    val_reference_ = precompute(host, config.num_val_rows, /*validation=*/true);
    reference_fsdp_.reset();
    reference_.reset();
  }

  double weight(const std::vector<Example>& batch) const override {
    return static_cast<double>(batch.size());
  }

  BatchResult train(const std::vector<int64_t>& rows,
                    std::vector<Example> examples,
                    double weight) override {
    const std::vector<Sample> samples = flatten(std::move(examples));
    const Tensors reference = reference_of(rows, samples, train_reference_);
    BatchResult result =
        train_pass(pass_, samples, /*pairs=*/true, loss(reference, rows.size(), weight));
    result.weight = weight;
    return result;
  }

  BatchResult score(const std::vector<int64_t>& rows,
                    std::vector<Example> examples,
                    double weight) override {
    const std::vector<Sample> samples = flatten(std::move(examples));
    const Tensors reference = reference_of(rows, samples, val_reference_);
    BatchResult result = score_pass(pass_, samples, loss(reference, rows.size(), weight));
    result.weight = weight;
    return result;
  }

 private:
  Pass of_reference() const {
    return {*reference_, pass_.sharing, pass_.margin, pass_.layout, pass_.limits};
  }

  // Two entries per row of the data, in the order of the rows; each is scored by one of the ranks
  // with different samples.
  Tensors precompute(FinetuneHost& host, int64_t num_rows, bool validation) {
    Tensors out;
    for (int64_t begin = 0; begin < num_rows; begin += batch_size_) {
      std::vector<int64_t> rows(std::min(batch_size_, num_rows - begin));
      std::iota(rows.begin(), rows.end(), begin);
      RowsOfRank own = spread_rows(rows, host.examples(rows, validation), ranks_);
      Tensors part;
      if (!own.rows.empty() || walks_together(*reference_)) {
        part = log_probs(of_reference(), flatten(std::move(own.examples)));
      }
      if (!ranks_.is_alone()) part = told(part, own.rows, rows);
      out.insert(out.end(), part.begin(), part.end());
    }
    return out;
  }

  // (all) The numbers of `rows`, neighbours, from those that each rank has of its own.
  Tensors told(const Tensors& mine,
               const std::vector<int64_t>& own,
               const std::vector<int64_t>& rows) {
    const auto size = static_cast<int64_t>(2 * rows.size());
    std::vector<int64_t> places;
    Tensors lists(size);
    for (size_t i = 0; i < own.size(); ++i) {
      for (const int64_t half : {0, 1}) {
        places.push_back(2 * (own[i] - rows.front()) + half);
        lists[places.back()] = mine[2 * i + half];
      }
    }
    return gather_lists(places, lists, size, ranks_);
  }

  // The reference's log-probabilities of the batch's samples; empty without a reference.
  Tensors reference_of(const std::vector<int64_t>& rows,
                       const std::vector<Sample>& samples,
                       const Tensors& known) {
    if (options_.reference_free) return {};
    if (reference_) return log_probs(of_reference(), samples);
    Tensors out;
    for (const int64_t row : rows) {
      out.push_back(known[2 * row]);
      out.push_back(known[2 * row + 1]);
    }
    return out;
  }

  // `which` holds both samples of each of its pairs: 2p chosen, 2p + 1 rejected, of the pairs here,
  // of `num_pairs` in all.
  Evaluate loss(const Tensors& reference, size_t num_here, double num_pairs) const {
    return [this, reference, num_here, num_pairs](const std::vector<int32_t>& which,
                                                  const TokenOutputs& outputs) {
      algo::PreferenceTokens tokens;
      tokens.log_prob = outputs.value;
      tokens.offsets = outputs.offsets;
      std::vector<int64_t> place(2 * num_here, -1);
      Tensors of_reference;
      for (size_t k = 0; k < which.size(); ++k) {
        place[which[k]] = static_cast<int64_t>(k);
        if (!reference.empty()) of_reference.push_back(reference[which[k]]);
      }
      if (!reference.empty()) tokens.ref_log_prob = at::cat(of_reference);
      for (size_t p = 0; p < place.size(); p += 2) {
        if (place[p] < 0) continue;
        BANYAN_ASSERT(
            place[p + 1] >= 0, "preference: pair ", p / 2, " without its rejected sample");
        tokens.chosen.push_back(place[p]);
        tokens.rejected.push_back(place[p + 1]);
      }
      algo::PreferenceResult result = algo::preference_loss(tokens, num_pairs, options_);
      Evaluated out;
      out.loss = result.loss;
      out.metrics = std::move(result.metrics);
      out.gradients.value = result.grad;
      return out;
    };
  }

  algo::PreferenceOptions options_;
  Pass pass_;
  parallel::Collectives& ranks_;  // with different samples
  int64_t batch_size_;
  std::unique_ptr<models::CausalLM> reference_;  // null: precomputed, or none
  std::unique_ptr<parallel::Fsdp> reference_fsdp_;
  Tensors train_reference_;
  Tensors val_reference_;
};

}  // namespace

std::unique_ptr<Objective> make_preference(const FinetuneConfig& config,
                                           const Pass& pass,
                                           FinetuneHost& host,
                                           parallel::Groups& groups) {
  return std::make_unique<Preference>(config, pass, host, groups);
}

}  // namespace banyan::train::detail
