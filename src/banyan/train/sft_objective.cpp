// Supervised fine-tuning (algorithms specification section 11):
//   loss = -(1 / N) sum over scored logical tokens of log p(token | its path)
// A token that several samples share counts once for each of them that scores it.
#include "banyan/algo/sft_loss.h"
#include "banyan/train/detail/objectives.h"

namespace banyan::train::detail {
namespace {

class Sft final : public Objective {
 public:
  explicit Sft(const Pass& pass) : pass_(pass) {}

  double weight(const std::vector<Example>& batch) const override {
    double n = 0.0;
    for (const Example& example : batch) n += num_scored(example);
    return n;
  }

  BatchResult train(const std::vector<int64_t>&,
                    std::vector<Example> examples,
                    double weight) override {
    const std::vector<Sample> samples = flatten(std::move(examples));
    BatchResult result = train_pass(pass_, samples, /*pairs=*/false, mean_loss(weight));
    result.weight = weight;
    return result;
  }

  BatchResult score(const std::vector<int64_t>&,
                    std::vector<Example> examples,
                    double weight) override {
    BatchResult result = score_pass(pass_, flatten(std::move(examples)), mean_loss(weight));
    result.weight = weight;
    return result;
  }

 private:
  static Evaluate mean_loss(double n) {
    return [n](const std::vector<int32_t>&, const TokenOutputs& outputs) {
      const algo::SftResult result = algo::sft_loss(outputs.value, /*weight=*/{}, n);
      Evaluated out;
      out.loss = result.loss;
      out.gradients.value = result.grad;
      return out;
    };
  }

  Pass pass_;
};

}  // namespace

std::unique_ptr<Objective> make_sft(const Pass& pass) { return std::make_unique<Sft>(pass); }

}  // namespace banyan::train::detail
