// What a recording of core/profile.h says: a table of ops, and a trace that chrome://tracing and
// Perfetto open. Torch-free.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "banyan/core/profile.h"

namespace banyan::profile {

// One op in one phase, over all its calls.
struct Row {
  std::string name;  // with the shape of its weight, where it has one: "linear 576x1536"
  Phase phase = Phase::kOther;
  int64_t calls = 0;
  double seconds = 0.0;  // in the op itself: without the scopes inside it
  int64_t flops = 0;
  int64_t repeated = 0;
  int64_t bytes = 0;
};

// By phase, then by seconds, most first. Rows of one thread add up to the time of its outermost
// scopes.
std::vector<Row> table(const std::vector<Event>& events);

// The JSON of the trace event format: one complete event per scope, times in microseconds from the
// first event, FLOPs and bytes among its arguments. Throws FileError if `path` cannot be written.
void write_trace(const std::vector<Event>& events, const std::string& path);

}  // namespace banyan::profile
