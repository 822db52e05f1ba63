// Checks and dispatch of the head: kernels/cpu/head.h for a packed weight,
// detail/edge_logprob_aten.cpp otherwise.
#include "banyan/ops/edge_logprob.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/zeros.h>

#include <algorithm>

#include "banyan/core/error.h"
#include "banyan/core/profile.h"
#include "banyan/kernels/cpu/head.h"
#include "banyan/ops/detail/edge_logprob_aten.h"
#include "banyan/ops/detail/originals.h"
#include "banyan/ops/slots.h"

namespace banyan::ops {

using c10::BFloat16;
using kernels::HeadGradients;
using kernels::HeadInput;
using kernels::Panels;

namespace {

void check_temperature(double temperature) {
  BANYAN_CHECK(temperature > 0, "[edge_logprob] temperature: wanted > 0, got ", temperature);
}

void check_hidden(const at::Tensor& hidden,
                  const LinearWeight& head,
                  const ComputeOptions& options) {
  BANYAN_CHECK(
      hidden.dim() == 2 && hidden.size(1) == head.in && hidden.scalar_type() == options.dtype,
      "[edge_logprob] hidden: wanted ",
      options.dtype,
      " [R, ",
      head.in,
      "], got ",
      hidden.scalar_type(),
      " ",
      hidden.sizes());
  BANYAN_ASSERT(head.is_packed() == is_native(options), "the head was packed under other options");
}

// Token ids are looked at on the CPU only: elsewhere LibTorch's own check reports them.
void check_tokens(const at::Tensor& token, int64_t vocabulary, bool is_part = false) {
  BANYAN_CHECK(token.dim() == 1 && token.scalar_type() == at::kInt && token.is_contiguous(),
               "[edge_logprob] token: wanted contiguous int32 [X], got ",
               token.scalar_type(),
               " ",
               token.sizes());
  if (!token.device().is_cpu()) return;
  const int32_t* values = token.const_data_ptr<int32_t>();
  for (int64_t x = 0; x < token.numel(); ++x) {
    BANYAN_CHECK(values[x] >= (is_part ? -1 : 0) && values[x] < vocabulary,
                 "[edge_logprob] token ",
                 x,
                 ": wanted an id in [0, ",
                 vocabulary,
                 "), got ",
                 values[x]);
  }
}

void check_index(const EdgeIndex& index, int64_t rows, int64_t vocabulary) {
  check_tokens(index.token, vocabulary, index.is_part);
  const at::Tensor& offsets = index.row_offsets;
  BANYAN_CHECK(offsets.dim() == 1 && offsets.size(0) == rows + 1 &&
                   offsets.scalar_type() == at::kInt && offsets.is_contiguous(),
               "[edge_logprob] row_offsets: wanted contiguous int32 [",
               rows + 1,
               "], got ",
               offsets.scalar_type(),
               " ",
               offsets.sizes());
  if (!offsets.device().is_cpu()) return;
  const int32_t* values = offsets.const_data_ptr<int32_t>();
  bool ascending = values[0] == 0 && values[rows] == index.token.numel();
  for (int64_t r = 0; r < rows; ++r) ascending = ascending && values[r] <= values[r + 1];
  BANYAN_CHECK(ascending,
               "[edge_logprob] row_offsets: wanted ascending from 0 to ",
               index.token.numel(),
               " edges");
}

// [count] fp32 that the kernel may read; undefined gives null.
const float* gradient_values(const char* what, const at::Tensor& gradient, int64_t count) {
  if (!gradient.defined()) return nullptr;
  BANYAN_CHECK(gradient.dim() == 1 && gradient.size(0) == count && gradient.is_contiguous() &&
                   gradient.scalar_type() == at::kFloat,
               "[edge_logprob] ",
               what,
               ": wanted contiguous fp32 [",
               count,
               "], got ",
               gradient.scalar_type(),
               " ",
               gradient.sizes());
  return gradient.const_data_ptr<float>();
}

// Forward one product with the head; backward two, and the logits once more. dW is fp32, read and
// written.
// `repeats`: a backward that computes the logits again.
profile::Work head_work(const at::Tensor& hidden,
                        const LinearWeight& head,
                        bool backward,
                        bool repeats) {
  const int64_t rows = hidden.size(0);
  const int64_t product = 2 * rows * head.in * head.out;
  const int64_t weight = head.in * head.out;
  return {.flops = backward ? 2 * product : product,
          .repeated = repeats ? product : 0,
          .bytes = backward ? 4 * rows * head.in + (2 + 2 + 8) * weight
                            : 2 * rows * head.in + 2 * weight};
}

// `rows` is hidden with unit stride in a row.
HeadInput kernel_input(const at::Tensor& rows,
                       const LinearWeight& head,
                       const EdgeIndex& index,
                       double temperature) {
  return {.hidden = rows.const_data_ptr<BFloat16>(),
          .ld_hidden = rows.stride(0),
          .rows = rows.size(0),
          .weight = {head.packed.const_data_ptr<BFloat16>(), head.in, head.out},
          .row_offsets = index.row_offsets.const_data_ptr<int32_t>(),
          .token = index.token.const_data_ptr<int32_t>(),
          .inverse_temperature = static_cast<float>(1.0 / temperature)};
}

// What the forward left in the memory, or leaves there when it runs again.
kernels::KeptProbabilities kept_of(const HeadInput& input,
                                   const EdgeLogprob& forward,
                                   HeadMemory& memory) {
  const kernels::KeptProbabilities held = memory.held(forward.kept);
  if (held.rows > 0 || input.rows == 0) return held;
  const kernels::KeptProbabilities kept = memory.hold(input.rows, input.weight.columns);
  const at::Tensor logprob = at::empty_like(forward.logprob);
  const at::Tensor lse = at::empty_like(forward.lse);
  kernels::head_forward(
      input, logprob.data_ptr<float>(), lse.data_ptr<float>(), /*entropy=*/nullptr, kept);
  return kept;
}

}  // namespace

kernels::KeptProbabilities HeadMemory::hold(int64_t rows, int64_t vocabulary) {
  now_ = {.vocabulary = vocabulary};
  const int64_t bytes =
      now_.tiles() * (kernels::kVocabTile * static_cast<int64_t>(sizeof(uint16_t)) +
                      kernels::kLanes * static_cast<int64_t>(sizeof(float)));
  now_.rows = std::min(rows, kBytes / std::max<int64_t>(bytes, 1));
  // Whole row tiles: the backward looks at them as one.
  if (now_.rows < rows) now_.rows = now_.rows / kernels::kRowTile * kernels::kRowTile;
  now_.values = values_.get<uint16_t>(now_.rows * now_.tiles() * kernels::kVocabTile);
  now_.max = max_.get<float>(now_.rows * now_.tiles() * kernels::kLanes);
  ++number_;
  return now_;
}

kernels::KeptProbabilities HeadMemory::held(int64_t kept) const {
  return kept == number_ && kept > 0 ? now_ : kernels::KeptProbabilities{};
}

namespace detail {

EdgeLogprob edge_logprob_forward(const at::Tensor& hidden,
                                 const LinearWeight& head,
                                 const EdgeIndex& index,
                                 double temperature,
                                 bool with_entropy,
                                 const ComputeOptions& options,
                                 HeadMemory* memory) {
  const profile::Scope timed(
      "head", [&] { return head_work(hidden, head, /*backward=*/false, /*repeats=*/false); });
  check_temperature(temperature);
  check_hidden(hidden, head, options);
  check_index(index, hidden.size(0), head.out);
  if (!is_native(options)) {
    return aten::edge_logprob_forward(hidden, head, index, temperature, with_entropy);
  }
  const auto wide = hidden.options().dtype(at::kFloat);
  EdgeLogprob out{.logprob = index.is_part ? at::zeros({index.token.numel()}, wide)
                                           : at::empty({index.token.numel()}, wide),
                  .lse = at::empty({hidden.size(0)}, wide),
                  .entropy = with_entropy ? at::empty({hidden.size(0)}, wide) : at::Tensor()};
  const at::Tensor rows = hidden.contiguous();
  kernels::KeptProbabilities kept;
  if (memory != nullptr) {
    kept = memory->hold(rows.size(0), head.out);
    out.kept = memory->number();
  }
  kernels::head_forward(kernel_input(rows, head, index, temperature),
                        out.logprob.data_ptr<float>(),
                        out.lse.data_ptr<float>(),
                        with_entropy ? out.entropy.data_ptr<float>() : nullptr,
                        kept);
  return out;
}

at::Tensor edge_logprob_backward(const at::Tensor& hidden,
                                 const LinearWeight& head,
                                 const EdgeIndex& index,
                                 const EdgeLogprob& forward,
                                 const at::Tensor& grad_logprob,
                                 const at::Tensor& grad_entropy,
                                 double temperature,
                                 at::Tensor& grad_head,
                                 const ComputeOptions& options,
                                 HeadMemory* memory) {
  const bool keeps = memory != nullptr && !grad_entropy.defined();
  const bool held = keeps && memory->held(forward.kept).rows > 0;
  const profile::Scope timed("head backward",
                             [&] { return head_work(hidden, head, /*backward=*/true, !held); });
  check_temperature(temperature);
  check_hidden(hidden, head, options);
  check_index(index, hidden.size(0), head.out);
  BANYAN_CHECK(!grad_entropy.defined() || forward.entropy.defined(),
               "[edge_logprob] grad_entropy: wanted a forward with entropy");
  BANYAN_CHECK(grad_head.defined() && grad_head.sizes() == at::IntArrayRef({head.out, head.in}) &&
                   grad_head.is_contiguous(),
               "[edge_logprob] grad_head: wanted a contiguous buffer [",
               head.out,
               ", ",
               head.in,
               "]");
  if (!is_native(options)) {
    return aten::edge_logprob_backward(
        hidden, head, index, forward, grad_logprob, grad_entropy, temperature, grad_head);
  }
  BANYAN_ASSERT(head.packed_t.defined(), "the head was packed for inference only");
  const at::Tensor rows = hidden.contiguous();
  const HeadInput input = kernel_input(rows, head, index, temperature);
  at::Tensor grad_hidden = at::empty(rows.sizes(), rows.options());
  const HeadGradients gradients{
      .lse = forward.lse.const_data_ptr<float>(),
      .entropy = forward.entropy.defined() ? forward.entropy.const_data_ptr<float>() : nullptr,
      .grad_logprob = gradient_values("grad_logprob", grad_logprob, index.token.numel()),
      .grad_entropy = gradient_values("grad_entropy", grad_entropy, hidden.size(0)),
      .weight_t = {head.packed_t.const_data_ptr<BFloat16>(), head.out, head.in},
      .grad_hidden = grad_hidden.data_ptr<BFloat16>(),
      .grad_weight = grad_head.data_ptr<float>(),
      .kept = keeps ? kept_of(input, forward, *memory) : kernels::KeptProbabilities{}};
  kernels::head_backward(input, gradients);
  return grad_hidden;
}

}  // namespace detail

at::Tensor head_logits(const at::Tensor& hidden,
                       const LinearWeight& head,
                       const ComputeOptions& options) {
  at::Tensor logits;
  head_logits_into(hidden, head, options, logits);
  return logits;
}

void head_logits_into(const at::Tensor& hidden,
                      const LinearWeight& head,
                      const ComputeOptions& options,
                      at::Tensor& logits) {
  check_hidden(hidden, head, options);
  if (!is_native(options)) {
    logits = aten::head_logits(hidden, head);
    return;
  }
  const at::Tensor rows = hidden.contiguous();
  if (!logits.defined() || logits.size(0) < rows.size(0)) {
    logits = at::empty({rows.size(0), head.out}, rows.options().dtype(at::kFloat));
  }
  kernels::gemm(rows.const_data_ptr<BFloat16>(),
                rows.stride(0),
                rows.size(0),
                Panels{head.packed.const_data_ptr<BFloat16>(), head.in, head.out},
                logits.data_ptr<float>(),
                head.out);
}

at::Tensor sum_squared_probabilities(const at::Tensor& hidden,
                                     const LinearWeight& head,
                                     const at::Tensor& lse,
                                     double temperature,
                                     const ComputeOptions& options) {
  check_temperature(temperature);
  check_hidden(hidden, head, options);
  BANYAN_CHECK(lse.dim() == 1 && lse.size(0) == hidden.size(0),
               "[edge_logprob] lse: wanted [",
               hidden.size(0),
               "], got ",
               lse.sizes());
  BANYAN_CHECK(
      !cross_entropy_slot().is_changed(),
      "[feature] cross_entropy: wanted the original where sums of squared probabilities are "
      "wanted (optimal_token_baseline, calculate_sum_pi_squared), which come from the head's "
      "own logits; it is changed");
  constexpr int64_t kRows = 32;  // 32 rows of a 152k vocabulary are 20 MB of logits
  at::Tensor sums = at::empty_like(lse);
  for (int64_t first = 0; first < hidden.size(0); first += kRows) {
    const int64_t rows = std::min(kRows, hidden.size(0) - first);
    const at::Tensor logits = head_logits(hidden.narrow(0, first, rows), head, options);
    at::Tensor out = sums.narrow(0, first, rows);
    if (is_native(options)) {
      kernels::sum_squared_probabilities(logits.const_data_ptr<float>(),
                                         rows,
                                         logits.size(1),
                                         static_cast<float>(1.0 / temperature),
                                         lse.const_data_ptr<float>() + first,
                                         out.data_ptr<float>());
    } else {
      const at::Tensor probs =
          logits.div(temperature).sub_(lse.narrow(0, first, rows).unsqueeze(1)).exp_();
      out.copy_(probs.square_().sum({1}));
    }
  }
  return sums;
}

at::Tensor logits_logprob(const at::Tensor& logits,
                          const at::Tensor& token,
                          double temperature,
                          const ComputeOptions& options) {
  check_temperature(temperature);
  BANYAN_CHECK(logits.dim() == 2 && token.numel() == logits.size(0),
               "[edge_logprob] logits: wanted [",
               token.numel(),
               ", V], got ",
               logits.sizes());
  check_tokens(token, logits.size(1));
  if (!is_native(options)) return aten::logits_logprob(logits, token, temperature);
  BANYAN_CHECK(logits.scalar_type() == at::kFloat && logits.is_contiguous(),
               "[edge_logprob] logits: wanted contiguous fp32, got ",
               logits.scalar_type());
  at::Tensor logprob = at::empty({logits.size(0)}, logits.options());
  kernels::logits_logprob(logits.const_data_ptr<float>(),
                          logits.size(0),
                          logits.size(1),
                          token.const_data_ptr<int32_t>(),
                          static_cast<float>(1.0 / temperature),
                          logprob.data_ptr<float>());
  return logprob;
}

}  // namespace banyan::ops
