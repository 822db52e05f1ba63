#include "banyan/train/sharing_observer.h"

#include <algorithm>
#include <utility>

#include "banyan/core/error.h"
#include "banyan/train/clock.h"

namespace banyan::train {
namespace {

using sharing_log::AttentionCall;
using sharing_log::LayerRecord;

Shape shape_of(const at::Tensor& tensor) {
  return Shape(tensor.sizes().begin(), tensor.sizes().end());
}

// Forks: tokens behind which more than one segment begins.
int64_t num_forks(const trie::Trie& trie) {
  std::vector<int32_t> children(trie.segments.size(), 0);
  for (const trie::Segment& segment : trie.segments) {
    if (segment.parent >= 0) ++children[segment.parent];
  }
  return std::count_if(children.begin(), children.end(), [](int32_t n) { return n > 1; });
}

// What a row has in one block.
struct RowPart {
  int32_t row = 0;
  int32_t own = 0;    // tokens that it is the first to bring
  int32_t reach = 0;  // 1 + position of the last of them: keys that the row sees there
};

}  // namespace

PlanPlaces places_of(const trie::Plan& plan, size_t num_samples) {
  PlanPlaces out;
  out.paths.resize(num_samples);
  std::vector<int32_t> first_place;
  for (size_t b = 0; b < plan.blocks.size(); ++b) {
    first_place.push_back(static_cast<int32_t>(out.block.size()));
    out.block.insert(out.block.end(), plan.blocks[b].num_own(), static_cast<int32_t>(b));
  }
  const auto place_of = [&](int32_t block, int32_t token) {
    return first_place[block] + token - plan.blocks[block].num_carried;
  };
  for (size_t b = 0; b < plan.blocks.size(); ++b) {
    const trie::Block& block = plan.blocks[b];
    std::vector<int32_t> places;  // of the local tokens
    for (const trie::Carried& carried : block.carried) {
      const std::vector<int32_t>& offered = plan.blocks[carried.block].offered;
      for (int32_t i = 0; i < carried.count; ++i) {
        places.push_back(place_of(carried.block, offered.at(i)));
      }
    }
    for (int32_t t = block.num_carried; t < block.trie.num_tokens(); ++t) {
      places.push_back(place_of(static_cast<int32_t>(b), t));
    }
    for (size_t k = 0; k < block.samples.size(); ++k) {
      std::vector<int32_t>& path = out.paths[block.samples[k]];
      for (const int32_t token : block.trie.path(static_cast<int32_t>(k))) {
        path.push_back(places[token]);
      }
    }
  }
  return out;
}

// Everything of one pass: what the plan expects and what has been counted.
struct SharingObserver::Pass {
  std::string backend;
  trie::SharingPlan plan;
  trie::PackedLayout layout;
  trie::SharingStatistics expected;
  sharing_log::Measured measured;
  std::vector<int32_t> scored;       // per row: tokens whose log-probability is wanted
  std::vector<int32_t> prompt_lens;  // per row: tokens in front of the first scored one

  std::vector<std::vector<RowPart>> parts;  // per block, rows ascending
  // Per row: its reused prefix by the block that computes it, and the block where the row goes on.
  struct Reuse {
    std::vector<std::pair<int32_t, int32_t>> tokens_by_block;
    int32_t own_block = 0;
  };
  std::map<int32_t, Reuse> reuses;

  struct Layer {
    LayerRecord record;
    std::vector<int32_t> order;  // per block: when it ran first, -1 = not yet
    int32_t num_calls = 0;
  };
  std::map<int64_t, Layer> layers;
  std::vector<uint8_t> ran;  // per block
  bool in_rounds = false;    // what this rank does not run another one does, and tells it
  std::vector<int32_t> restored_rows;

  void lay_out(const trie::Plan& blocks, const PlanPlaces& places);
  LayerRecord close(Layer& layer) const;
  void expect_own();
};

// Who brings which token, block by block.
void SharingObserver::Pass::lay_out(const trie::Plan& blocks, const PlanPlaces& places) {
  parts.resize(blocks.blocks.size());
  ran.assign(blocks.blocks.size(), 0);
  in_rounds = blocks.blocks_per_round > 1;
  std::vector<uint8_t> seen(places.block.size(), 0);
  for (int32_t row = 0; row < plan.batch_size; ++row) {
    const std::vector<int32_t>& path = places.paths[row];
    Reuse reuse;
    reuse.own_block = path.empty() ? 0 : places.block[path.back()];
    bool has_own = false;
    for (size_t depth = 0; depth < path.size(); ++depth) {
      const int32_t block = places.block[path[depth]];
      if (seen[path[depth]]) {
        auto& by_block = reuse.tokens_by_block;
        if (by_block.empty() || by_block.back().first != block) by_block.push_back({block, 0});
        ++by_block.back().second;
        continue;
      }
      seen[path[depth]] = 1;
      if (!has_own) reuse.own_block = block;
      has_own = true;
      if (parts[block].empty() || parts[block].back().row != row) parts[block].push_back({row});
      ++parts[block].back().own;
      parts[block].back().reach = static_cast<int32_t>(depth) + 1;
    }
    if (!reuse.tokens_by_block.empty()) reuses.emplace(row, std::move(reuse));
  }
}

// Counts the reuse of a layer from the order in which its blocks ran.
LayerRecord SharingObserver::Pass::close(Layer& layer) const {
  LayerRecord record = layer.record;
  for (const auto& [row, reuse] : reuses) {
    const int32_t when = layer.order[reuse.own_block];
    if (when < 0) continue;
    ++record.reuse_count;
    bool hit = true;
    for (const auto& [block, tokens] : reuse.tokens_by_block) {
      const int32_t then = layer.order[block];
      const bool there = then >= 0 ? then <= when : in_rounds;
      if (there) record.reused_prefix_tokens += tokens;
      hit = hit && there;
    }
    ++(hit ? record.reuse_hit_count : record.reuse_miss_count);
  }
  return record;
}

// Of a pass that several ranks share: what is expected of this one.
void SharingObserver::Pass::expect_own() {
  expected.expected_reused_counts_per_layer = 0;
  expected.expected_reused_prefix_tokens_per_layer = 0;
  for (const auto& [row, reuse] : reuses) {
    if (!ran[reuse.own_block]) continue;
    ++expected.expected_reused_counts_per_layer;
    for (const auto& [block, tokens] : reuse.tokens_by_block) {
      expected.expected_reused_prefix_tokens_per_layer += tokens;
    }
  }
}

class SharingObserver::Watch final : public AttentionContext {
 public:
  Watch(SharingObserver& observer,
        int32_t block,
        bool recompute,
        std::unique_ptr<AttentionContext> inner)
      : observer_(observer), block_(block), recompute_(recompute), inner_(std::move(inner)) {}

  at::Tensor forward(int64_t layer,
                     const at::Tensor& q,
                     const at::Tensor& k,
                     const at::Tensor& v,
                     double scale,
                     at::Tensor* lse) override {
    Clock clock;
    at::Tensor out = inner_->forward(layer, q, k, v, scale, lse);
    AttentionCall call;
    call.layer = layer;
    call.query = shape_of(q);
    call.key = shape_of(k);
    call.value = shape_of(v);
    observer_.on_forward(block_, recompute_, layer, call, clock.lap());
    return out;
  }

  AttentionGradients backward(int64_t layer,
                              const at::Tensor& grad_out,
                              const at::Tensor& q,
                              const at::Tensor& k,
                              const at::Tensor& v,
                              const at::Tensor& out,
                              const at::Tensor& lse,
                              double scale) override {
    Clock clock;
    AttentionGradients gradients = inner_->backward(layer, grad_out, q, k, v, out, lse, scale);
    observer_.on_backward(layer, clock.lap());
    return gradients;
  }

  at::Tensor multiplicity() const override { return inner_->multiplicity(); }

 private:
  SharingObserver& observer_;
  int32_t block_;
  bool recompute_;
  std::unique_ptr<AttentionContext> inner_;
};

SharingObserver::SharingObserver(const SharingConfig& config, const RankInfo& rank, Say say)
    : level_(observe_level(config.observe)), config_(config), rank_(rank), say_(std::move(say)) {
  if (is_on() && config.detector != "trie") {
    older_rule_ =
        trie::make_detector(config.detector,
                            {.min_prefix_len = static_cast<int32_t>(config.min_prefix_len),
                             .min_group_size = static_cast<int32_t>(config.min_group_size)});
  }
}

SharingObserver::~SharingObserver() = default;

void SharingObserver::prepare(const ObservedPass& pass,
                              const std::vector<Sample>& samples,
                              const trie::Plan& plan) {
  pass_.reset();
  if (!is_on()) return;
  const auto step = [&](const char* event,
                        std::vector<std::pair<std::string, std::string>> values = {}) {
    if (shows(ObserveLevel::kDebug)) say_(sharing_log::forward_step(rank_, event, values));
  };
  step("enter", {{"pass", pass.name}});
  step("before_prepare_micro_batch");
  say_(sharing_log::enter(static_cast<int64_t>(samples.size()), pass.batch_keys));
  if (config_.mode == "off") {
    say_(sharing_log::disabled());
    step("skip_prepare_prefix_sharing_disabled");
    return;
  }
  const PlanPlaces places = places_of(plan, samples.size());
  const trie::Detection executed =
      trie::detect_paths(places.paths, static_cast<int64_t>(places.block.size()));
  auto next = std::make_unique<Pass>();
  next->backend = pass.native ? "native" : "aten";
  const std::string decision = pass.share ? "on" : "off";
  next->plan = trie::make_sharing_plan(samples,
                                       older_rule_ ? older_rule_->detect(samples) : executed,
                                       ++num_passes_,
                                       ++passes_by_name_[pass.name]);
  next->layout =
      trie::make_packed_layout(next->plan.kept_lengths_q,
                               trie::layout_alignment(static_cast<int32_t>(rank_.tp_size),
                                                      static_cast<int32_t>(rank_.cp_size)),
                               next->plan.q_position_offsets);
  next->expected = trie::sharing_statistics(next->plan, next->layout);
  say_(sharing_log::enabled());
  if (shows(ObserveLevel::kDebug)) {
    for (const std::string& line :
         sharing_log::checks_passed(next->plan.batch_size, next->plan.max_seqlen_kv)) {
      say_(line);
    }
  }
  say_(sharing_log::sequences(next->plan.original_lengths));
  say_(sharing_log::plan_result(next->plan));
  if (!next->plan.has_sharing() && !executed.has_sharing()) {
    say_(sharing_log::no_sharing(decision));
    step("after_prepare_micro_batch");
    return;
  }
  say_(sharing_log::sharing_detected());
  say_(sharing_log::packed_layout(rank_, next->layout));
  say_(sharing_log::prepared(next->plan));
  next->lay_out(plan, places);
  const trie::Trie whole =
      trie::build(samples,
                  {.share = true,
                   .min_prefix_len = static_cast<int32_t>(config_.min_prefix_len),
                   .min_group_size = static_cast<int32_t>(config_.min_group_size)});
  next->measured.unique_tokens = plan.num_unique;
  next->measured.segments = whole.num_segments();
  next->measured.forks = num_forks(whole);
  next->measured.decision = decision;
  for (const trie::Block& block : plan.blocks) {
    next->measured.open_tokens += static_cast<int64_t>(block.offered.size());
  }
  for (const Sample& sample : samples) {
    const auto size = static_cast<int32_t>(sample.tokens.size());
    int32_t scored = 0, prompt = size;
    for (int32_t t = 1; t < size; ++t) {
      if (!sample.scored.empty() && sample.scored[t] == 0) continue;
      ++scored;
      prompt = std::min(prompt, t);
    }
    next->scored.push_back(scored);
    next->prompt_lens.push_back(prompt);
  }
  pass_ = std::move(next);
  step("after_prepare_micro_batch", {{"blocks", std::to_string(plan.blocks.size())}});
  step("before_original_forward_step");
}

std::unique_ptr<AttentionContext> SharingObserver::watch(int32_t block,
                                                         bool recompute,
                                                         std::unique_ptr<AttentionContext> inner) {
  if (!pass_) return inner;
  return std::make_unique<Watch>(*this, block, recompute, std::move(inner));
}

void SharingObserver::on_forward(
    int32_t block, bool recompute, int64_t layer, const AttentionCall& call, double seconds) {
  if (!pass_) return;
  Pass::Layer& state = pass_->layers[layer];
  LayerRecord& record = state.record;
  record.layer = layer;
  record.forward_seconds += seconds;
  if (state.order.empty()) state.order.assign(pass_->parts.size(), -1);
  if (recompute || state.order[block] >= 0) {  // its tokens are counted
    record.recomputed_q_tokens += call.query.at(0);
    return;
  }
  state.order[block] = state.num_calls++;
  pass_->ran[block] = 1;
  record.valid_q_tokens += call.query.at(0);
  record.padded_q_tokens += call.query.at(0);  // banyan pads nothing here
  record.stored_tokens += call.key.at(0);
  AttentionCall shown = call;
  if (shows(ObserveLevel::kLayer)) shown.valid_lengths.assign(pass_->plan.batch_size, 0);
  for (const RowPart& part : pass_->parts[block]) {
    ++record.store_count;
    shown.expanded_tokens += part.reach;
    if (shows(ObserveLevel::kLayer)) shown.valid_lengths[part.row] = part.own;
  }
  record.expanded_kv_tokens += shown.expanded_tokens;
  if (!shows(ObserveLevel::kLayer)) return;
  say_(sharing_log::attention(rank_, shown, pass_->layout.align_size));
  say_(sharing_log::expanded_kv(rank_, shown));
  say_(sharing_log::backend(pass_->backend, shown));
}

void SharingObserver::on_backward(int64_t layer, double seconds) {
  if (pass_) pass_->layers[layer].record.backward_seconds += seconds;
}

void SharingObserver::outputs(const std::vector<int32_t>& samples,
                              const std::vector<int64_t>& offsets) {
  if (!pass_) return;
  for (size_t k = 0; k < samples.size(); ++k) {
    const int32_t row = samples[k];
    if (offsets[k + 1] - offsets[k] != pass_->scored[row]) continue;
    pass_->restored_rows.push_back(row);
  }
}

void SharingObserver::finish() {
  if (!pass_) return;
  const std::unique_ptr<Pass> pass = std::move(pass_);
  sharing_log::Measured& measured = pass->measured;
  std::sort(pass->restored_rows.begin(), pass->restored_rows.end());
  pass->restored_rows.erase(std::unique(pass->restored_rows.begin(), pass->restored_rows.end()),
                            pass->restored_rows.end());
  int64_t with_suffix = 0;
  for (const int32_t row : pass->restored_rows) {
    if (!pass->plan.is_reuser(row)) continue;
    ++measured.actual_restore_count;
    with_suffix += pass->plan.suffix_lens[row] > 0 ? 1 : 0;
  }
  if (pass->in_rounds) pass->expect_own();
  measured.blocks = std::count(pass->ran.begin(), pass->ran.end(), uint8_t{1});
  std::vector<LayerRecord> records;
  for (auto& [layer, state] : pass->layers) {
    if (state.order.empty()) continue;
    records.push_back(pass->close(state));
    measured.kept_valid_tokens =
        std::max(measured.kept_valid_tokens, records.back().valid_q_tokens);
    measured.kept_padded_tokens =
        std::max(measured.kept_padded_tokens, records.back().padded_q_tokens);
  }
  if (shows(ObserveLevel::kDebug)) {
    say_(sharing_log::forward_step(rank_,
                                   "after_original_forward_step",
                                   {{"tokens", std::to_string(measured.kept_valid_tokens)}}));
  }
  if (records.empty()) {
    say_(sharing_log::runtime_missing(rank_, pass->expected));
    return;
  }
  std::vector<int32_t> trimmed, responses;
  for (int32_t row = 0; row < pass->plan.batch_size; ++row) {
    trimmed.push_back(std::max(0, pass->prompt_lens[row] - pass->plan.prefix_lens[row]));
    responses.push_back(pass->plan.original_lengths[row] - pass->prompt_lens[row]);
  }
  say_(sharing_log::trimming(pass->expected.original_tokens,
                             measured.kept_valid_tokens,
                             pass->prompt_lens,
                             trimmed,
                             responses));
  say_(sharing_log::restored(
      static_cast<int64_t>(pass->restored_rows.size()), pass->plan.max_seqlen_kv, with_suffix));
  say_(sharing_log::audit_summary(rank_, pass->expected, measured));
  if (!shows(ObserveLevel::kLayer)) return;
  for (const LayerRecord& record : records) {
    say_(sharing_log::audit_layer(rank_, record, pass->expected));
  }
  if (!shows(ObserveLevel::kProfile)) return;
  for (const LayerRecord& record : records) say_(sharing_log::profile_layer(rank_, record));
}

PassObserver* prepare_pass(SharingObserver* observer,
                           const ObservedPass& pass,
                           const std::vector<Sample>& samples,
                           const trie::Plan& plan) {
  if (observer == nullptr || !observer->is_on()) return nullptr;
  observer->prepare(pass, samples, plan);
  return observer;
}

void finish_pass(SharingObserver* observer) {
  if (observer != nullptr) observer->finish();
}

}  // namespace banyan::train
