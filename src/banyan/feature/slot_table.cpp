#include "banyan/feature/slot_table.h"

#include <algorithm>
#include <set>
#include <utility>

#include "banyan/core/error.h"

namespace banyan::feature {

SlotTable::SlotTable(std::vector<SlotBase*> slots) : slots_(std::move(slots)) {
  std::set<std::string> names;
  for (const SlotBase* slot : slots_) {
    BANYAN_ASSERT(names.insert(slot->name()).second, "slot '", slot->name(), "' twice");
  }
}

SlotBase& SlotTable::get(const std::string& name) const {
  std::vector<std::string> names;
  std::string known;
  for (SlotBase* slot : slots_) {
    if (slot->name() == name) return *slot;
    names.push_back(slot->name());
    known += (known.empty() ? "" : ", ") + slot->name();
  }
  const std::string near = nearest_name(name, names);
  BANYAN_CHECK(false,
               "[feature] slot: wanted one of ",
               known,
               ", got '",
               name,
               "'",
               near.empty() ? "" : "; the nearest is ",
               near);
  return *slots_.front();
}

bool SlotTable::apply() const {
  bool now = true;
  for (SlotBase* slot : slots_) now = slot->apply() && now;
  return now;
}

int64_t SlotTable::remove(const std::string& owner) const {
  int64_t count = 0;
  for (SlotBase* slot : slots_) count += slot->remove(owner);
  return count;
}

void SlotTable::remove_all() const {
  for (SlotBase* slot : slots_) slot->remove_all();
}

bool SlotTable::any_changed() const {
  return std::any_of(
      slots_.begin(), slots_.end(), [](const SlotBase* slot) { return slot->is_changed(); });
}

std::vector<std::string> SlotTable::dump() const {
  std::vector<std::string> lines;
  for (const SlotBase* slot : slots_) {
    const SlotOwners owners = slot->applied();
    if (owners.empty()) continue;
    std::string line = slot->name() + ": ";
    line += owners.replacement.empty() ? "original" : owners.replacement;
    for (const std::string& wrapper : owners.wrappers) line += " <- " + wrapper;
    lines.push_back(line);
  }
  return lines;
}

std::string nearest_name(const std::string& name, const std::vector<std::string>& candidates) {
  const auto distance = [&](const std::string& other) {
    std::vector<size_t> row(other.size() + 1);
    for (size_t j = 0; j <= other.size(); ++j) row[j] = j;
    for (size_t i = 1; i <= name.size(); ++i) {
      size_t diagonal = std::exchange(row[0], i);
      for (size_t j = 1; j <= other.size(); ++j) {
        const size_t substituted = diagonal + (name[i - 1] == other[j - 1] ? 0 : 1);
        diagonal = row[j];
        row[j] = std::min({row[j] + 1, row[j - 1] + 1, substituted});
      }
    }
    return row.back();
  };
  std::string best;
  size_t fewest = name.size() / 2 + 1;
  for (const std::string& candidate : candidates) {
    const size_t changes = distance(candidate);
    if (changes < fewest) {
      fewest = changes;
      best = candidate;
    }
  }
  return best;
}

}  // namespace banyan::feature
