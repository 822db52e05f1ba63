#include "banyan/ops/detail/attention_check.h"

#include "banyan/core/error.h"

namespace banyan::ops::detail {

void check_attention_inputs(const char* tag,
                            int64_t num_tokens,
                            const at::Tensor& q,
                            const at::Tensor& k,
                            const at::Tensor& v,
                            const ComputeOptions& options) {
  for (const at::Tensor* x : {&q, &k, &v}) {
    BANYAN_CHECK(x->dim() == 3 && x->size(0) == num_tokens,
                 "[",
                 tag,
                 "] q, k, v: wanted [",
                 num_tokens,
                 ", heads, head_dim], got ",
                 x->sizes());
    BANYAN_CHECK(x->scalar_type() == options.dtype,
                 "[",
                 tag,
                 "] q, k, v: wanted ",
                 options.dtype,
                 ", got ",
                 x->scalar_type());
  }
  BANYAN_CHECK(k.sizes() == v.sizes() && q.size(2) == k.size(2) && k.size(1) >= 1 &&
                   q.size(1) % k.size(1) == 0,
               "[",
               tag,
               "] heads: wanted k and v alike and H a multiple of K, got q ",
               q.sizes(),
               ", k ",
               k.sizes(),
               ", v ",
               v.sizes());
  BANYAN_CHECK(!is_native(options) || q.size(2) % 2 == 0,
               "[",
               tag,
               "] head_dim: wanted an even number for the native kernels, got ",
               q.size(2));
}

}  // namespace banyan::ops::detail
