#include "banyan/rollout/control/weight_probe.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/isfinite.h>

#include <algorithm>
#include <cmath>
#include <stdexcept>
#include <vector>

#include "banyan/core/error.h"
#include "banyan/ops/paged_attention.h"
#include "banyan/rollout/control/together.h"
#include "banyan/rollout/sampling/token_drawer.h"

namespace banyan::rollout {

std::string probe_weights(models::CausalLM& model) {
  const at::NoGradGuard no_grad;
  const models::ModelShape& shape = model.shape();
  ops::KvPool pool(
      shape.layers, own_kv_heads(model), shape.head_dim, /*num_pages=*/1, model.options());
  ops::PagedBatch batch;
  batch.clear();
  const auto length = std::min<int64_t>(kProbeTokens, shape.max_positions);
  ops::PagedRun& run = batch.add_run();
  run.num_tokens = static_cast<int32_t>(length);
  run.pages = {0};
  std::vector<int32_t> next;
  for (int64_t i = 0; i < length; ++i) {
    batch.ids().push_back(static_cast<int32_t>(i * shape.vocab / length));
    next.push_back(static_cast<int32_t>((length - 1 - i) * shape.vocab / length));
    batch.want(static_cast<int32_t>(i));
  }
  batch.finish(pool.num_pages(), shape.vocab);
  const at::Tensor hidden = model.infer(pool, batch);
  if (!at::isfinite(hidden).all().item<bool>()) {
    return "hidden states: wanted finite numbers, got NaN or infinity";
  }
  std::vector<std::vector<TokenLogprob>> scores;
  try {
    TokenDrawer(model).score(hidden, next, /*num_top=*/0, /*ids=*/{}, scores);
  } catch (const std::invalid_argument& error) {
    return error.what();
  }
  for (size_t i = 0; i < scores.size(); ++i) {
    if (std::isfinite(scores[i].at(0).logprob)) continue;
    return detail::concat(
        "wanted finite log-probabilities, got ", scores[i][0].logprob, " at position ", i);
  }
  return "";
}

}  // namespace banyan::rollout
