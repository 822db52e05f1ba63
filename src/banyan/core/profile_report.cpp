#include "banyan/core/profile_report.h"

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <fstream>
#include <iomanip>
#include <limits>
#include <map>
#include <tuple>

#include "banyan/core/error.h"

namespace banyan::profile {
namespace {

std::string label(const Event& event) {
  if (event.work.columns == 0) return event.name;
  return banyan::detail::concat(event.name, " ", event.work.rows, "x", event.work.columns);
}

// Nanoseconds of each event without the events directly inside it.
std::vector<int64_t> self_ns(const std::vector<Event>& events) {
  std::vector<int64_t> self(events.size());
  std::vector<size_t> open;  // events around the current one
  for (size_t i = 0; i < events.size(); ++i) {
    const Event& event = events[i];
    self[i] = event.end_ns - event.begin_ns;
    const auto encloses = [&](const Event& outer) {
      return outer.thread == event.thread && outer.depth < event.depth &&
             outer.end_ns >= event.end_ns;
    };
    while (!open.empty() && !encloses(events[open.back()])) open.pop_back();
    if (!open.empty()) self[open.back()] -= self[i];
    open.push_back(i);
  }
  return self;
}

}  // namespace

std::vector<Row> table(const std::vector<Event>& events) {
  const std::vector<int64_t> self = self_ns(events);
  std::map<std::tuple<Phase, std::string>, Row> rows;
  for (size_t i = 0; i < events.size(); ++i) {
    const Event& event = events[i];
    Row& row = rows[{event.phase, label(event)}];
    row.name = label(event);
    row.phase = event.phase;
    ++row.calls;
    row.seconds += 1e-9 * static_cast<double>(self[i]);
    row.flops += event.work.flops;
    row.repeated += event.work.repeated;
    row.bytes += event.work.bytes;
  }
  std::vector<Row> out;
  for (auto& [key, row] : rows) out.push_back(std::move(row));
  std::stable_sort(out.begin(), out.end(), [](const Row& a, const Row& b) {
    return std::tuple(a.phase, -a.seconds) < std::tuple(b.phase, -b.seconds);
  });
  return out;
}

void write_trace(const std::vector<Event>& events, const std::string& path) {
  int64_t first = std::numeric_limits<int64_t>::max();
  for (const Event& event : events) first = std::min(first, event.begin_ns);
  const auto microseconds = [](int64_t ns) { return 1e-3 * static_cast<double>(ns); };
  std::ofstream out(path);
  out << std::fixed << std::setprecision(3) << "{\"displayTimeUnit\":\"ms\",\"traceEvents\":[";
  const char* separator = "\n";
  for (const Event& event : events) {
    out << separator << "{\"ph\":\"X\",\"name\":\"" << label(event) << "\",\"cat\":\""
        << phase_name(event.phase) << "\",\"pid\":1,\"tid\":" << event.thread
        << ",\"ts\":" << microseconds(event.begin_ns - first)
        << ",\"dur\":" << microseconds(event.end_ns - event.begin_ns)
        << ",\"args\":{\"flops\":" << event.work.flops << ",\"repeated\":" << event.work.repeated
        << ",\"bytes\":" << event.work.bytes << "}}";
    separator = ",\n";
  }
  out << "\n]}\n" << std::flush;
  if (!out) throw FileError(path + ": cannot be written: " + std::strerror(errno));
}

}  // namespace banyan::profile
