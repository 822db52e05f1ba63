#include "banyan/bench/trie_bench.h"

#include <algorithm>
#include <ctime>

#include "banyan/bench/median.h"
#include "banyan/bench/workload.h"
#include "banyan/core/error.h"
#include "banyan/core/memory.h"
#include "banyan/optim/adamw.h"
#include "banyan/train/calibrate.h"
#include "banyan/train/clock.h"
#include "banyan/train/probe.h"
#include "banyan/trie/sharing_choice.h"
#include "banyan/trie/trie.h"

namespace banyan::bench {
namespace {

constexpr double kMargin = 0.02;  // sharing.margin

struct Timing {
  double wall = 0.0;  // planning included
  double cpu = 0.0;
  double plan = 0.0;
};

class Bench {
 public:
  Bench(models::CausalLM& model, const TrieBenchOptions& options)
      : model_(model),
        options_(options),
        samples_(make_workload(
            options.preset, static_cast<int32_t>(model.shape().vocab), options.seed)) {}

  TrieBenchResult run() {
    keep_freed_memory();
    model_.params().ensure_grads();
    train::Clock clock;
    options_.plan.cost = train::calibrate(model_);
    result_.calibration_seconds = clock.lap();
    sizes();
    pass(/*share=*/true);
    Timing off = pass(/*share=*/false);
    // A long first pass is counted: what a warm-up saves is small beside it.
    const bool keep_first = off.wall > 0.5 * options_.off_seconds;
    double left = options_.off_seconds - (keep_first ? off.wall : 0.0);
    if (keep_first) off_.push_back(off);
    std::vector<double> ratios;
    for (int64_t i = 0; i < options_.repeats; ++i) {
      on_.push_back(pass(/*share=*/true));
      if (off_.empty() || left > off.wall) {
        off = pass(/*share=*/false);
        off_.push_back(off);
        left -= off.wall;
      }
      ratios.push_back(off.wall / on_.back().wall);
    }
    finish(ratios);
    return std::move(result_);
  }

 private:
  void sizes() {
    const auto count = [&](bool share, int64_t& tokens, int64_t& pairs) {
      trie::BuildOptions build = options_.plan.build;
      build.share = share;
      const trie::Trie trie = trie::build(samples_, build);
      tokens = trie.num_tokens();
      pairs = trie.num_pairs();
      const auto rows = static_cast<int64_t>(trie::edges_of(trie, samples_).source.size());
      return pass_flops(model_.shape(), tokens, pairs, rows);
    };
    const double on = count(true, result_.unique_tokens, result_.pairs_on);
    const double off = count(false, result_.logical_tokens, result_.pairs_off);
    result_.ideal = off / on;
    result_.samples = static_cast<int64_t>(samples_.size());
    for (const Sample& sample : samples_) {
      longest_ = std::max(longest_, static_cast<int64_t>(sample.tokens.size()));
    }
  }

  Timing pass(bool share) {
    model_.params().zero_grads();
    Side& side = share ? result_.on : result_.off;
    const bool first = side.peak_bytes == 0;
    if (first) {
      release_freed_memory();
      reset_peak_resident();
    }
    Timing timing;
    train::Clock clock;
    const std::clock_t cpu_start = std::clock();
    trie::PlanOptions options = options_.plan;
    options.build.share = share;
    if (share && options_.longest_path) options.max_tokens_per_block = longest_;
    const trie::Plan plan = trie::plan(samples_, options);
    timing.plan = clock.lap();
    const train::ProbeResult probe = train::probe_pass(model_, plan);
    timing.wall = timing.plan + clock.lap();
    timing.cpu = static_cast<double>(std::clock() - cpu_start) / CLOCKS_PER_SEC;
    if (first) {
      side.peak_bytes = peak_resident_bytes();
      side.loss = probe.loss;
      side.grad_norm = optim::grad_norm(model_.params());
      side.blocks = static_cast<int64_t>(plan.blocks.size());
      side.computed_tokens = plan.num_computed;
      side.recomputed_tokens = plan.num_recomputed;
      side.live_tokens = probe.stats.peak_live_tokens;
      side.carry_bytes = probe.stats.peak_carry_bytes;
      side.modelled_seconds = options_.plan.cost.seconds(trie::counts_of(plan));
    }
    return timing;
  }

  static void summarize(const std::vector<Timing>& timings, Side& side) {
    std::vector<double> plan, cpu;
    for (const Timing& timing : timings) {
      side.seconds.push_back(timing.wall);
      plan.push_back(timing.plan);
      cpu.push_back(timing.cpu);
    }
    side.median = median(side.seconds);
    side.plan_seconds = median(plan);
    side.cpu_median = median(cpu);
  }

  void finish(const std::vector<double>& ratios) {
    summarize(on_, result_.on);
    summarize(off_, result_.off);
    result_.cpu_ratio = result_.off.cpu_median / result_.on.cpu_median;
    result_.auto_shares = trie::sharing_pays(samples_, options_.plan, kMargin);
    result_.ratio = median(ratios);
    result_.ratio_low = *std::min_element(ratios.begin(), ratios.end());
    result_.ratio_high = *std::max_element(ratios.begin(), ratios.end());
    result_.efficiency = result_.ratio / result_.ideal;
  }

  models::CausalLM& model_;
  TrieBenchOptions options_;
  std::vector<Sample> samples_;
  int64_t longest_ = 0;  // tokens of the longest sample
  std::vector<Timing> on_;
  std::vector<Timing> off_;
  TrieBenchResult result_;
};

}  // namespace

double pass_flops(const models::ModelShape& shape,
                  int64_t tokens,
                  int64_t pairs,
                  int64_t head_rows) {
  const auto hidden = static_cast<double>(shape.hidden);
  const auto layers = static_cast<double>(shape.layers);
  const auto attention = static_cast<double>(shape.heads * shape.head_dim);
  const auto kv = static_cast<double>(shape.kv_heads * shape.head_dim);
  const double body = hidden * (layers * (2.0 * attention + 2.0 * kv) +
                                3.0 * static_cast<double>(shape.active_columns()));
  return 6.0 * body * static_cast<double>(tokens) +
         12.0 * attention * layers * static_cast<double>(pairs) +
         6.0 * hidden * static_cast<double>(shape.vocab) * static_cast<double>(head_rows);
}

TrieBenchResult bench_trie(models::CausalLM& model, const TrieBenchOptions& options) {
  BANYAN_CHECK(options.repeats >= 1, "[bench] --repeats: wanted at least 1, got ", options.repeats);
  return Bench(model, options).run();
}

}  // namespace banyan::bench
