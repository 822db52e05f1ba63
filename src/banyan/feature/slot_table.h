// The slots of a process: found by name, applied and removed together, and shown. Torch-free.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "banyan/feature/slot.h"

namespace banyan::feature {

class SlotTable {
 public:
  // Borrowed; a name twice throws [banyan bug].
  explicit SlotTable(std::vector<SlotBase*> slots);

  const std::vector<SlotBase*>& slots() const { return slots_; }
  // Throws [feature] with the nearest name and all of them.
  SlotBase& get(const std::string& name) const;

  // Applies every slot whose registrations changed; false if a step under way puts it off.
  bool apply() const;
  // Takes out what `owner` registered, everywhere; returns how many entries. No effect before
  // apply().
  int64_t remove(const std::string& owner) const;
  void remove_all() const;
  bool any_changed() const;

  // One line per slot that is changed: "swiglu: original <- count/wrapper <- ...", innermost first.
  std::vector<std::string> dump() const;

 private:
  std::vector<SlotBase*> slots_;
};

// The candidate with the fewest letters to change (Levenshtein), or "" if more than half of `name`
// would have to.
std::string nearest_name(const std::string& name, const std::vector<std::string>& candidates);

}  // namespace banyan::feature
