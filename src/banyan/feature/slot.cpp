#include "banyan/feature/slot.h"

#include <algorithm>
#include <utility>

#include "banyan/core/error.h"
#include "banyan/feature/running.h"

namespace banyan::feature {

void SlotBase::set_replacement(const std::string& owner, Erased op, bool force) {
  BANYAN_CHECK(!owner.empty(), "[feature] ", name_, ": wanted an owner of the replacement");
  Erased before;  // dropped without the lock: what it holds may take locks of its own
  const std::lock_guard<std::mutex> lock(mutex_);
  BANYAN_CHECK(force || replacement_.op == nullptr,
               "[feature] ",
               name_,
               ": wanted one replacement, got that of '",
               owner,
               "' beside that of '",
               replacement_.owner,
               "'; remove one of them, or force the second");
  before = std::exchange(replacement_.op, std::move(op));
  replacement_.owner = owner;
  ++ticket_;
}

bool SlotBase::add_wrapper(const std::string& owner,
                           const std::string& name,
                           ErasedWrapper wrapper) {
  BANYAN_CHECK(!owner.empty() && !name.empty(),
               "[feature] ",
               name_,
               ": wanted an owner and a name of the wrapper");
  const std::lock_guard<std::mutex> lock(mutex_);
  for (const Wrapper& known : wrappers_) {
    if (known.owner == owner && known.name == name) return false;
  }
  wrappers_.push_back({owner, name, std::move(wrapper)});
  ++ticket_;
  return true;
}

int64_t SlotBase::remove(const std::string& owner) {
  Replacement replacement;  // dropped without the lock, and so the wrappers
  std::vector<Wrapper> removed;
  const std::lock_guard<std::mutex> lock(mutex_);
  if (replacement_.op != nullptr && replacement_.owner == owner) {
    std::swap(replacement, replacement_);
  }
  const auto first =
      std::stable_partition(wrappers_.begin(), wrappers_.end(), [&](const Wrapper& wrapper) {
        return wrapper.owner != owner;
      });
  removed.assign(std::make_move_iterator(first), std::make_move_iterator(wrappers_.end()));
  wrappers_.erase(first, wrappers_.end());
  const int64_t count = static_cast<int64_t>(removed.size()) + (replacement.op != nullptr ? 1 : 0);
  if (count > 0) ++ticket_;
  return count;
}

void SlotBase::remove_wrapper(const std::string& name) {
  std::vector<Wrapper> removed;
  const std::lock_guard<std::mutex> lock(mutex_);
  std::string known;
  for (const Wrapper& wrapper : wrappers_) known += (known.empty() ? "" : ", ") + wrapper.name;
  const auto first =
      std::stable_partition(wrappers_.begin(), wrappers_.end(), [&](const Wrapper& wrapper) {
        return wrapper.name != name;
      });
  BANYAN_CHECK(first != wrappers_.end(),
               "[feature] ",
               name_,
               ": wanted the name of a wrapper there (",
               known.empty() ? "there is none" : known,
               "), got '",
               name,
               "'");
  removed.assign(std::make_move_iterator(first), std::make_move_iterator(wrappers_.end()));
  wrappers_.erase(first, wrappers_.end());
  ++ticket_;
}

void SlotBase::remove_all() {
  Replacement replacement;
  std::vector<Wrapper> wrappers;
  const std::lock_guard<std::mutex> lock(mutex_);
  std::swap(replacement, replacement_);
  std::swap(wrappers, wrappers_);
  ++ticket_;
}

SlotBase::Composed SlotBase::compose() {
  Composed out;
  std::vector<Wrapper> wrappers;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    out.chain = replacement_.op;
    out.owners.replacement = replacement_.owner;
    out.ticket = ticket_;
    wrappers = wrappers_;
  }
  if (out.chain == nullptr && !wrappers.empty()) out.chain = original();
  for (const Wrapper& wrapper : wrappers) {
    out.chain = wrapper.wrap(out.chain);
    out.owners.wrappers.push_back(wrapper.owner + "/" + wrapper.name);
  }
  return out;
}

SlotBase::Erased SlotBase::publish(Composed composed) {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (composed.ticket < published_.ticket) return composed.chain;  // overtaken by a later change
  std::swap(published_, composed);
  is_changed_.store(published_.chain != nullptr, std::memory_order_release);
  generation_.fetch_add(1, std::memory_order_acq_rel);
  return composed.chain;
}

bool SlotBase::apply() {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (composed_ticket_ == ticket_) return published_.ticket == ticket_;
  }
  Composed composed = compose();
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    composed_ticket_ = std::max(composed_ticket_, composed.ticket);
  }
  return when_idle([this, composed = std::move(composed)] { return publish(composed); });
}

SlotOwners SlotBase::registered() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  SlotOwners out{replacement_.owner, {}};
  for (const Wrapper& wrapper : wrappers_) {
    out.wrappers.push_back(wrapper.owner + "/" + wrapper.name);
  }
  return out;
}

SlotOwners SlotBase::applied() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return published_.owners;
}

SlotBase::Erased SlotBase::current() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return published_.chain;
}

}  // namespace banyan::feature
