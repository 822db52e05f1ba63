#include "fields.h"

#include <algorithm>
#include <numeric>

#include "banyan/core/error.h"
#include "banyan/rollout/request.h"

namespace banyan::bindings {
namespace {

// Insertions, deletions and replacements between two words (Levenshtein).
size_t distance(const std::string& a, const std::string& b) {
  std::vector<size_t> row(b.size() + 1);
  std::iota(row.begin(), row.end(), size_t{0});
  for (size_t i = 0; i < a.size(); ++i) {
    size_t diagonal = row[0]++;
    for (size_t j = 0; j < b.size(); ++j) {
      const size_t replaced = diagonal + (a[i] == b[j] ? 0 : 1);
      diagonal = row[j + 1];
      row[j + 1] = std::min({replaced, row[j] + 1, row[j + 1] + 1});
    }
  }
  return row.back();
}

}  // namespace

py::object Fields::find(const char* name) {
  known_.emplace_back(name);
  return from_.contains(name) ? py::object(from_[name]) : py::object(py::none());
}

void Fields::refuse_value(const char* name, const py::object& value) const {
  throw rollout::RequestError(400,
                              name,
                              detail::concat("[rollout] ",
                                             name,
                                             ": got ",
                                             py::repr(value).cast<std::string>().substr(0, 80),
                                             ", which is not of its type or range"));
}

void Fields::finish() const {
  for (const auto& [key, value] : from_) {
    const std::string name = py::str(key);
    if (std::find(known_.begin(), known_.end(), name) != known_.end()) continue;
    const std::string& nearest =
        *std::min_element(known_.begin(), known_.end(), [&](const auto& a, const auto& b) {
          return distance(name, a) < distance(name, b);
        });
    throw rollout::RequestError(
        400,
        name,
        detail::concat(
            "[rollout] unknown ", what_, " '", name.substr(0, 80), "'; the nearest is ", nearest));
  }
}

}  // namespace banyan::bindings
