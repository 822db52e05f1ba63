// A process group of torch.distributed as a transport. The shell creates the group; it is found by
// the name that torch gave it (`pg.group_name`), so Gloo, NCCL, HCCL and backends written in Python
// are reached by the same code. Calls must not hold the GIL.
#pragma once

#include <chrono>
#include <memory>
#include <string>

#include "banyan/parallel/transport.h"

namespace banyan::parallel {

// `deadline` bounds each operation. Throws [banyan bug] if no group has this name.
std::shared_ptr<Transport> c10d_transport(const std::string& group_name,
                                          std::chrono::milliseconds deadline);

}  // namespace banyan::parallel
