// The facade: checks a request, sizes the pool, runs the call (call.h).
#include "banyan/rollout/engine.h"

#include <ATen/core/grad_mode.h>

#include <algorithm>
#include <chrono>

#include "banyan/rollout/call.h"
#include "banyan/rollout/memory/kv_budget.h"
#include "banyan/rollout/request_check.h"

namespace banyan::rollout {
namespace {

// One group per prompt; without sharing one per response.
std::vector<CallGroup> make_groups(const std::vector<Prompt>& prompts,
                                   const SamplingParams& params,
                                   int64_t max_len,
                                   bool share) {
  std::vector<CallGroup> groups;
  for (const Prompt& prompt : prompts) {
    for (int32_t index = 0; index < prompt.n; ++index) {
      if (index == 0 || !share) {
        CallGroup& group = groups.emplace_back();
        group.row = prompt.row;
        group.first_index = index;
        group.request.prompt = prompt.tokens;
        group.request.n = share ? prompt.n : 1;
        const int64_t room = max_len - static_cast<int64_t>(prompt.tokens.size());
        group.request.max_new = static_cast<int32_t>(std::min<int64_t>(params.max_tokens, room));
        group.request.ignore_eos = params.ignore_eos || params.eos_ids.empty();
      }
    }
  }
  return groups;
}

// Pages with which nothing ever waits: every trunk, and max_num_seqs of the longest children.
int64_t pages_wanted(const std::vector<CallGroup>& groups, bool share, int32_t max_num_seqs) {
  PagePool no_pages(0);
  PrefixTree tree(no_pages, share);
  int64_t num_sequences = 0;
  int64_t own = 0;
  for (const CallGroup& group : groups) {
    tree.insert(group.request.prompt, /*salt=*/"");
    num_sequences += group.request.n;
    const int32_t length = static_cast<int32_t>(group.request.prompt.size());
    own = std::max<int64_t>(own, pages_of_one(length, group.request.max_new) - pages_for(length));
  }
  return tree.num_nodes() + own * std::min<int64_t>(num_sequences, max_num_seqs);
}

}  // namespace

class Engine::Impl {
 public:
  Impl(models::CausalLM& model, const EngineOptions& options, std::vector<std::string> token_bytes)
      : model_(model), options_(options), token_bytes_(std::move(token_bytes)) {
    check_options(options);
    max_len_ = model.shape().max_positions;
    if (options.max_model_len > 0) max_len_ = std::min(max_len_, options.max_model_len);
  }

  std::vector<CallGroup> accept(const std::vector<Prompt>& prompts,
                                const SamplingParams& params) const {
    check_params(params, model_.shape().vocab);
    check_prompts(prompts, options_, model_.shape().vocab, max_len_);
    return make_groups(prompts, params, max_len_, options_.share_prefix);
  }

  int64_t page_bytes() const {
    const models::ModelShape& shape = model_.shape();
    return ops::KvPool::page_bytes(shape.layers, shape.kv_heads, shape.head_dim, model_.options());
  }

  models::CausalLM& model_;
  EngineOptions options_;
  std::vector<std::string> token_bytes_;
  int64_t max_len_ = 0;
};

Engine::Engine(models::CausalLM& model,
               const EngineOptions& options,
               std::vector<std::string> token_bytes)
    : impl_(std::make_unique<Impl>(model, options, std::move(token_bytes))) {}

Engine::~Engine() = default;

// Pool and tree die with the call, so nothing of the old weights is left.
void Engine::weights_changed(int64_t) {}

GenerateStats Engine::generate(const std::vector<Prompt>& prompts,
                               const SamplingParams& params,
                               const OnFinished& on_finished,
                               const std::function<bool()>& should_stop) {
  const auto start = std::chrono::steady_clock::now();
  std::vector<CallGroup> groups = impl_->accept(prompts, params);
  if (groups.empty()) return {};
  const EngineOptions& options = impl_->options_;
  const int64_t page_bytes = impl_->page_bytes();
  const int32_t num_pages =
      pool_pages(pages_wanted(groups, options.share_prefix, options.max_num_seqs),
                 page_bytes,
                 {.kv_bytes = options.kv_bytes, .memory_share = options.memory_share},
                 impl_->model_.options().device);
  const at::NoGradGuard no_grad;
  Call call(impl_->model_, options, params, on_finished, std::move(groups), num_pages);
  GenerateStats stats = call.run(should_stop);
  stats.seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  return stats;
}

}  // namespace banyan::rollout
