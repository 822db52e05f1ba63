#include "banyan/train/calibrate.h"

#include <ATen/Parallel.h>
#include <ATen/ops/randn.h>

#include <algorithm>
#include <chrono>
#include <optional>

#include "banyan/core/error.h"
#include "banyan/io/files.h"
#include "banyan/io/json.h"
#include "banyan/ops/trie_attention.h"
#include "banyan/train/detail/least_squares.h"
#include "banyan/train/probe.h"
#include "banyan/trie/plan.h"

namespace banyan::train {
namespace {

double wall_seconds() {
  const auto now = std::chrono::steady_clock::now().time_since_epoch();
  return std::chrono::duration<double>(now).count();
}

// One path of `trunk` tokens, then n branches of r tokens; the last `scored` tokens of the last
// sample are scored, or of every branch all but the first.
std::vector<Sample> fork(int32_t vocab, int64_t trunk, int64_t n, int64_t r, int64_t scored) {
  std::vector<Sample> samples(std::max<int64_t>(n, 1));
  for (size_t i = 0; i < samples.size(); ++i) {
    Sample& sample = samples[i];
    sample.uid = static_cast<int64_t>(i);
    for (int64_t t = 0; t < trunk; ++t) sample.tokens.push_back(static_cast<int32_t>(t % vocab));
    for (int64_t t = 0; t < r; ++t) {
      sample.tokens.push_back(static_cast<int32_t>((i + t) % static_cast<size_t>(vocab)));
    }
    sample.scored.assign(sample.tokens.size(), 0);
    std::fill_n(sample.scored.rbegin(), std::min<size_t>(scored, sample.tokens.size()), 1);
  }
  return samples;
}

// Rows of features with the time each took, as relative errors see them.
struct Runs {
  std::vector<std::vector<double>> rows;
  std::vector<double> ones;

  void add(std::vector<double> features, double seconds) {
    for (double& feature : features) feature /= seconds;
    rows.push_back(std::move(features));
    ones.push_back(1.0);
  }
  std::vector<double> fit() const { return detail::non_negative_least_squares(rows, ones); }
};

class Calibration {
 public:
  Calibration(models::CausalLM& model, const CalibrateOptions& options)
      : model_(model),
        clock_(options.clock ? options.clock : wall_seconds),
        left_(options.seconds) {}

  trie::CostModel run() {
    model_.params().ensure_grads();
    attention_runs();
    model_runs();
    model_.params().zero_grads();
    const models::ModelShape& shape = model_.shape();
    const auto layers = static_cast<double>(shape.layers);
    trie::CostModel cost;
    cost.per_block = body_[0];
    cost.per_token = body_[1] + layers * attention_[0];
    cost.per_pair = layers * attention_[1];
    cost.per_head_row = body_[2];
    cost.per_fork = layers * attention_[2];
    cost.per_recomputed_token = forward_share_ * cost.per_token;
    const int64_t accumulator = model_.options().dtype == at::kDouble ? 8 : 4;
    cost.bytes_per_carried_token =
        layers * 2.0 *
        static_cast<double>(shape.kv_heads * shape.head_dim * (element_bytes() + accumulator));
    cost.per_carry_byte = layers * carried_ / cost.bytes_per_carried_token;
    return cost;
  }

 private:
  int64_t element_bytes() const {
    switch (model_.options().dtype) {
      case at::kDouble:
        return 8;
      case at::kFloat:
        return 4;
      default:
        return 2;
    }
  }

  // Least of two runs, after one that warms up if so wanted.
  template <typename Run>
  double time(bool warm_up, const Run& run) {
    if (warm_up) run();
    double least = 0.0;
    for (int i = 0; i < 2; ++i) {
      const double start = clock_();
      run();
      const double seconds = std::max(clock_() - start, 1e-7);
      least = i == 0 ? seconds : std::min(least, seconds);
    }
    return least;
  }

  at::Tensor random(int64_t tokens, int64_t heads) const {
    const ComputeOptions& options = model_.options();
    return at::randn({tokens, heads, model_.shape().head_dim}, at::kFloat)
        .to(options.device, options.dtype);
  }

  // Forward and backward of one layer's attention over `trie`, the first `carried` tokens of which
  // stand in another block.
  double attention_seconds(const trie::Trie& trie, int64_t carried) {
    const models::ModelShape& shape = model_.shape();
    const int64_t own = trie.num_tokens() - carried;
    const at::Tensor q = random(own, shape.heads);
    const at::Tensor k = random(own, shape.kv_heads);
    const at::Tensor v = random(own, shape.kv_heads);
    ops::CarryStore store;
    ops::BlockCarry carry;
    if (carried > 0) {
      store.k = {random(carried, shape.kv_heads)};
      store.v = {random(carried, shape.kv_heads)};
      carry.num_carried = carried;
      carry.sources = {{&store, carried}};
    }
    ops::TrieAttention attention(trie, model_.options(), std::move(carry));
    return time(/*warm_up=*/true, [&] {
      at::Tensor lse;
      const at::Tensor out = attention.forward(0, q, k, v, 1.0, &lse);
      attention.backward(0, q, q, k, v, out, lse, 1.0);
    });
  }

  void attention_runs() {
    const auto vocab = static_cast<int32_t>(model_.shape().vocab);
    Runs runs;
    const auto add = [&](int64_t trunk, int64_t branches, int64_t length) {
      const trie::Trie trie = trie::build(fork(vocab, trunk, branches, length, 0));
      const double seconds = attention_seconds(trie, 0);
      runs.add({static_cast<double>(trie.num_tokens()),
                static_cast<double>(trie.num_pairs()),
                static_cast<double>(std::max<int64_t>(branches - 1, 0))},
               seconds);
      return seconds;
    };
    const double start = clock_();
    const double small = add(128, 0, 0);
    // A path four times as long takes 4 to 16 times as long; three runs of each.
    int64_t longest = 256;
    const auto estimate = [&](int64_t n) {
      return 3.0 * small * static_cast<double>(n * n) / (128.0 * 128.0);
    };
    while (longest < 1024 && estimate(2 * longest) < 0.1 * left_) longest *= 2;
    add(longest, 0, 0);
    add(longest / 2, 0, 0);
    const int64_t branches = std::min<int64_t>(vocab, longest / 16);
    add(128, branches, 8);
    add(64, branches, 20);
    attention_ = runs.fit();
    const trie::Trie carried = trie::build(fork(vocab, longest, 0, 0, 0));
    const int64_t own = longest / 8;
    const int64_t first = longest - own;
    const double pairs = static_cast<double>(carried.num_pairs() - first * (first + 1) / 2);
    const double expected = attention_[0] * static_cast<double>(own) + attention_[1] * pairs;
    const double seconds = attention_seconds(carried, first);
    carried_ = std::max(0.0, seconds - expected) / static_cast<double>(first);
    left_ -= clock_() - start;
  }

  double attention_part(const trie::Counts& counts) const {
    return static_cast<double>(model_.shape().layers) *
           (attention_[0] * static_cast<double>(counts.tokens) +
            attention_[1] * static_cast<double>(counts.pairs) +
            attention_[2] * static_cast<double>(counts.forks));
  }

  void model_runs() {
    const auto vocab = static_cast<int32_t>(model_.shape().vocab);
    Runs runs;
    double seconds = 0.0;
    const auto add = [&](int64_t tokens, int64_t scored, bool warm_up) {
      const trie::Plan plan = trie::plan(fork(vocab, tokens, 0, 0, scored), {});
      const trie::Counts counts = trie::counts_of(plan);
      ProbeResult probe;
      seconds = time(warm_up, [&] { probe = probe_pass(model_, plan); });
      const double both = probe.stats.forward_seconds + probe.stats.backward_seconds;
      forward_share_ = probe.stats.forward_seconds / std::max(both, 1e-9);
      const double body = std::max(seconds - attention_part(counts), 0.05 * seconds);
      runs.add({1.0, static_cast<double>(tokens), static_cast<double>(counts.head_rows)}, body);
    };
    const double start = clock_();
    add(16, 1, /*warm_up=*/true);
    add(64, 1, /*warm_up=*/true);
    const double per_token = seconds / 64.0;
    left_ -= clock_() - start;
    // Two more, the second one with a row for every token and so longer; two runs of each.
    const auto affordable = static_cast<int64_t>(left_ / per_token / 5.0);
    const int64_t tokens = std::clamp<int64_t>(affordable / 64 * 64, 128, 1024);
    add(tokens, 1, /*warm_up=*/false);
    add(tokens, tokens - 1, /*warm_up=*/false);
    body_ = runs.fit();
  }

  models::CausalLM& model_;
  std::function<double()> clock_;
  double left_;
  std::vector<double> attention_;  // per token, pair, fork; one layer
  double carried_ = 0.0;           // per carried token; one layer
  std::vector<double> body_;       // per block, token, head row
  double forward_share_ = 1.0 / 3.0;
};

// What the figures depend on.
std::string key_of(const models::CausalLM& model) {
  const models::ModelShape& shape = model.shape();
  const ComputeOptions& options = model.options();
  io::Json key = {shape.architecture,
                  shape.vocab,
                  shape.hidden,
                  shape.layers,
                  shape.heads,
                  shape.kv_heads,
                  shape.head_dim,
                  shape.intermediate,
                  shape.active_columns(),
                  static_cast<int>(model.head_kind()),
                  c10::toString(options.dtype),
                  options.device.str(),
                  is_native(options),
                  model.activation_bytes().kept,  // what a backward computes again
                  at::get_num_threads()};
  return key.dump();
}

struct Field {
  const char* name;
  double trie::CostModel::* member;
};
constexpr Field kFields[] = {
    {"per_block", &trie::CostModel::per_block},
    {"per_token", &trie::CostModel::per_token},
    {"per_pair", &trie::CostModel::per_pair},
    {"per_head_row", &trie::CostModel::per_head_row},
    {"per_fork", &trie::CostModel::per_fork},
    {"per_carry_byte", &trie::CostModel::per_carry_byte},
    {"per_recomputed_token", &trie::CostModel::per_recomputed_token},
    {"bytes_per_carried_token", &trie::CostModel::bytes_per_carried_token},
};

std::optional<trie::CostModel> read(const std::string& file, const std::string& key) {
  try {
    const io::Json found = io::parse_json(io::read_text(file), file);
    if (found.at("measured_for").get<std::string>() != key) return std::nullopt;
    trie::CostModel cost;
    for (const Field& field : kFields) cost.*field.member = found.at(field.name).get<double>();
    return cost;
  } catch (const std::exception&) {
    return std::nullopt;
  }
}

}  // namespace

trie::CostModel calibrate(models::CausalLM& model, const CalibrateOptions& options) {
  return Calibration(model, options).run();
}

trie::CostModel calibrate_once(models::CausalLM& model, const std::string& file) {
  if (const std::optional<trie::CostModel> kept = kept_cost(model, file)) return *kept;
  const trie::CostModel cost = calibrate(model);
  keep_cost(model, file, cost);
  return cost;
}

std::optional<trie::CostModel> kept_cost(const models::CausalLM& model, const std::string& file) {
  return read(file, key_of(model));
}

void keep_cost(const models::CausalLM& model,
               const std::string& file,
               const trie::CostModel& cost) {
  io::Json out = {{"measured_for", key_of(model)}};
  for (const Field& field : kFields) out[field.name] = cost.*field.member;
  try {
    io::write_text_atomic(file, out.dump(1) + "\n");
  } catch (const FileError&) {
    // Measured again next time.
  }
}

}  // namespace banyan::train
