#include "banyan/rollout/control/loop.h"

#include <algorithm>
#include <chrono>
#include <utility>

#include "banyan/core/error.h"
#include "banyan/feature/running.h"
#include "banyan/ops/slots.h"
#include "banyan/rollout/control/together.h"
#include "banyan/rollout/sampling/noise.h"

namespace banyan::rollout {
namespace {

using Clock = std::chrono::steady_clock;

SchedulerOptions scheduler_options(const EngineOptions& options, int64_t page_bytes) {
  return {.max_num_seqs = options.max_num_seqs,
          .max_num_batched_tokens = options.max_num_batched_tokens,
          .share_prefix = options.share_prefix,
          .chunked_prefill = options.enable_chunked_prefill,
          .long_prefill_token_threshold = options.long_prefill_token_threshold,
          .prefill_schedule_interval = options.prefill_schedule_interval,
          .watermark = options.watermark,
          .conservativeness = options.schedule_conservativeness,
          .policy = options.policy,
          .page_bytes = page_bytes};
}

// Adds the time since `from` to `seconds` and starts anew.
void lap(Clock::time_point& from, double& seconds) {
  const Clock::time_point now = Clock::now();
  seconds += std::chrono::duration<double>(now - from).count();
  from = now;
}

SamplingParams with_max_tokens(SamplingParams params, int32_t max_new) {
  params.max_tokens = max_new;
  return params;
}

int64_t kv_page_bytes(const models::CausalLM& model, int64_t kv_heads) {
  const models::ModelShape& shape = model.shape();
  return ops::KvPool::page_bytes(shape.layers, kv_heads, shape.head_dim, model.options());
}

// A clock that is equal on ranks that run the same passes.
constexpr double kSecondsOfPass = 0.02;

}  // namespace

Live::Live(Request request,
           int32_t max_new,
           const std::vector<std::string>& token_bytes,
           Delivery& delivery)
    : id(request.id),
      row(request.row),
      prompt_length(static_cast<int32_t>(request.prompt.size())),
      plan(with_max_tokens(request.params, max_new),
           request.prompt,
           request.original_prompt,
           token_bytes),
      delivery(delivery) {
  responses.reserve(request.n);
  for (int32_t child = 0; child < request.n; ++child) {
    const int32_t index = request.first_index + child;
    responses.push_back(
        {.state = ResponseState(plan), .key = noise_key(request, index), .index = index});
  }
  if (plan.params.prompt_logprobs >= 0) {
    prompt_logprobs = std::make_shared<PromptLogprobs>(request.prompt.size());
  }
  wanted = {.prompt = std::move(request.prompt),
            .n = request.n,
            .max_new = max_new,
            .ignore_eos = plan.end_ids.empty(),
            .score_prompt = plan.params.prompt_logprobs >= 0,
            .priority = request.priority,
            .salt = std::move(request.cache_salt),
            .source = std::move(request.source),
            .group_id = std::move(request.group_id)};
}

Loop::Loop(models::CausalLM& model, const EngineOptions& options)
    : model_(model),
      grouped_attention_(options.grouped_attention),
      host_kv_bytes_(options.host_kv_bytes),
      scheduler_(scheduler_options(options)),
      body_generation_(ops::body_generation()),
      drawer_(model),
      versions_{{0, "default"}} {}

Loop::~Loop() = default;

SchedulerOptions Loop::scheduler_options(const EngineOptions& options) {
  SchedulerOptions out =
      rollout::scheduler_options(options, kv_page_bytes(model_, most_kv_heads(model_)));
  if (ranks_together(model_) != nullptr) {
    out.now = [this] { return kSecondsOfPass * static_cast<double>(num_passes_); };
  }
  return out;
}

int64_t Loop::page_bytes() const { return kv_page_bytes(model_, own_kv_heads(model_)); }

void Loop::open_pool(int32_t num_pages) {
  const models::ModelShape& shape = model_.shape();
  take_pool();
  pool_ = std::make_unique<ops::KvPool>(
      shape.layers, own_kv_heads(model_), shape.head_dim, std::max(num_pages, 1), model_.options());
  runner_ = std::make_unique<Runner>(model_, *pool_, grouped_attention_);
  const std::vector<int32_t> hopeless = scheduler_.set_num_pages(num_pages);
  const auto num_places = static_cast<int32_t>(least_together(
      model_, host_pages(host_kv_bytes_, num_pages, page_bytes(), model_.options().device)));
  scheduler_.set_host_pages(num_places);
  if (num_places > 0) {
    spill_.measure_copies(*pool_);
    agree_on_spills();
  }
  fail(
      [&](const Live& live) {
        return std::find(hopeless.begin(), hopeless.end(), live.group) != hopeless.end();
      },
      "the KV pool is now too small for this request");
}

// Ranks that run the same passes keep to what the first has measured until the next pool.
void Loop::agree_on_spills() {
  if (ranks_together(model_) == nullptr) return;
  const SpillCosts& own = spill_.costs();
  scheduler_.set_spill_costs({of_first_together(model_, own.bytes_per_second),
                              of_first_together(model_, own.seconds_per_token)});
}

std::vector<c10::Storage> Loop::take_pool() {
  std::vector<c10::Storage> memory;
  if (!pool_) return memory;
  scheduler_.set_num_pages(0);
  for (int64_t layer = 0; layer < model_.shape().layers; ++layer) {
    memory.push_back(pool_->layer(layer).storage());
  }
  runner_.reset();
  pool_.reset();
  return memory;
}

void Loop::add(std::unique_ptr<Live>&& live) {
  const int32_t group = scheduler_.add(std::move(live->wanted));
  live->group = group;
  if (lives_.size() <= static_cast<size_t>(group)) lives_.resize(group + 1);
  lives_[group] = std::move(live);
}

bool Loop::step() {
  const feature::Running running;
  // Keys and values that other ops computed are not those that the present ones attend to.
  if (const int64_t generation = ops::body_generation(); generation != body_generation_) {
    body_generation_ = generation;
    scheduler_.reset_cache(/*retract=*/true);
  }
  Clock::time_point time = Clock::now();
  const bool has_pass = scheduler_.next_pass(pass_);
  if (!somebody_has(has_pass)) return false;
  if (!has_pass) {
    model_.idle(banyan::Pass::kForward, /*chunk=*/0);
    return true;
  }
  ++num_passes_;
  lap(time, seconds_.schedule);
  note_first_pass(time);
  count_prefix_rows();
  const double before = seconds_.forward + seconds_.draw;
  const at::Tensor hidden = runner_->run(pass_, scheduler_);
  lap(time, seconds_.forward);
  requests_.clear();
  targets_.clear();
  const auto num_decodes = static_cast<int32_t>(pass_.decodes.size());
  const auto num_drawn = num_decodes + static_cast<int32_t>(pass_.trunks.size());
  collect_draws(pass_.decodes, 0);
  collect_draws(pass_.trunks, num_decodes);
  if (num_drawn > 0) drawer_.draw(hidden.narrow(0, 0, num_drawn), requests_, drawn_);
  if (!pass_.prompt_rows.empty()) {
    score_prompts(hidden.narrow(0, num_drawn, hidden.size(0) - num_drawn));
  }
  lap(time, seconds_.draw);
  spill_.add_pass(
      pass_.num_tokens, pass_.num_prompt_tokens, seconds_.forward + seconds_.draw - before);
  if (ranks_together(model_) == nullptr) scheduler_.set_spill_costs(spill_.costs());
  deliver();
  lap(time, seconds_.deliver);
  return true;
}

bool Loop::somebody_has(bool own) const {
  parallel::Collectives* ranks = model_.expert_ranks();
  return ranks != nullptr ? ranks->any(own) : own;
}

void Loop::join_others() {
  while (somebody_has(false)) {
    const feature::Running running;
    model_.idle(banyan::Pass::kForward, /*chunk=*/0);
  }
}

void Loop::note_first_pass(std::chrono::steady_clock::time_point now) {
  for (const Run& run : pass_.runs) {
    Live& live = *lives_[run.group];
    if (live.queue_seconds) continue;
    live.queue_seconds = std::chrono::duration<double>(now - live.arrived).count();
  }
}

void Loop::count_prefix_rows() {
  if (!grouped_attention_) return;
  int32_t last_page = -1;
  bool counted = false;  // the run before
  int32_t last_tokens = 0;
  for (const Run& run : pass_.runs) {
    const int32_t page = scheduler_.pages_of(run)[0];
    const bool beside = page == last_page;
    if (beside && !counted) counters_.prefix_attn_rows += last_tokens;
    if (beside) counters_.prefix_attn_rows += run.num_tokens;
    counted = beside;
    last_page = page;
    last_tokens = run.num_tokens;
  }
}

// One draw for a row of a child, one for each child of a group whose prompt just ended.
void Loop::collect_draws(const std::vector<DrawRow>& rows, int32_t first_row) {
  for (const DrawRow& row : rows) {
    const Group& group = scheduler_.group(row.group);
    const Live& live = *lives_[row.group];
    const int32_t begin = row.child == kTrunk ? 0 : row.child;
    const int32_t end = row.child == kTrunk ? group.size() : row.child + 1;
    for (int32_t child = begin; child < end; ++child) {
      const Response& response = live.responses[child];
      if (response.ended) continue;
      requests_.push_back({.row = first_row,
                           .response = &response.state,
                           .key = response.key,
                           .position = static_cast<uint64_t>(group.known(group.sequences[child]))});
      targets_.push_back({row.group, child});
    }
    ++first_row;
  }
}

// hidden: the rows of pass_.prompt_rows. The row of position p scores the token at p + 1.
void Loop::score_prompts(const at::Tensor& hidden) {
  int64_t row = 0;
  for (const PromptRows& rows : pass_.prompt_rows) {
    Live& live = *lives_[rows.group];
    const std::vector<int32_t>& prompt = scheduler_.group(rows.group).prompt();
    const int32_t first = rows.first_position;
    const auto count =
        std::min<int32_t>(rows.num_tokens, static_cast<int32_t>(prompt.size()) - 1 - first);
    if (count > 0 && live.num_ended == 0) {
      const SamplingParams& params = live.plan.params;
      const auto num_top =
          std::min<int32_t>(params.prompt_logprobs, static_cast<int32_t>(model_.shape().vocab));
      next_tokens_.assign(prompt.begin() + first + 1, prompt.begin() + first + 1 + count);
      drawer_.score(
          hidden.narrow(0, row, count), next_tokens_, num_top, params.logprob_token_ids, scored_);
      for (int32_t i = 0; i < count; ++i) {
        (*live.prompt_logprobs)[first + 1 + i] = std::move(scored_[i]);
      }
    }
    row += rows.num_tokens;
  }
}

void Loop::new_epoch(const std::string& version, bool keep) {
  scheduler_.new_epoch(keep);
  versions_[epoch()] = version;
  forget_versions();
}

// Those that no token in progress was drawn under.
void Loop::forget_versions() {
  int64_t oldest = epoch();
  for (const std::unique_ptr<Live>& live : lives_) {
    if (!live) continue;
    for (const Response& response : live->responses) {
      if (!response.ended && !response.spans.empty()) {
        oldest = std::min(oldest, response.spans.front().epoch);
      }
    }
  }
  versions_.erase(versions_.begin(), versions_.lower_bound(oldest));
}

void Loop::label(std::vector<WeightSpan>& spans) const {
  for (WeightSpan& span : spans) span.version = versions_.at(span.epoch);
}

}  // namespace banyan::rollout
