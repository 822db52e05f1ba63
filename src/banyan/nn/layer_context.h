// What a layer is given beside its input, for one forward or backward of one block of the plan.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

#include "banyan/core/attention_context.h"
#include "banyan/nn/rope_table.h"
#include "banyan/nn/router_scope.h"

namespace banyan::nn {

struct LayerContext {
  int64_t layer = 0;
  const at::Tensor& positions;  // [T] int32
  const RopeTable& rope;
  AttentionContext& attention;
  RouterScope* routers = nullptr;  // who counts what the routers choose; null: nobody
};

}  // namespace banyan::nn
