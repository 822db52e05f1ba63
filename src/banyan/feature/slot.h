// Operator slots: the named place that every call of an op goes through, so that a run can have
// another op there, or something around it.
//
// A slot holds the original, at most one replacement and wrappers in order. apply() composes
//   chain = replacement, or the original;  for each wrapper in order: chain = wrapper(chain)
// from the original, so the first wrapper is the innermost one, and nothing of an earlier chain is
// left (MindSpeed's patches have these rules). What is registered takes effect with apply() only.
//
//   if (const auto op = slot.changed()) [[unlikely]] return op->forward(x);   // in the op itself
//
// With nothing registered that is one load per call of the op; the original is called directly and
// not through the slot. Chains change between steps only (feature/running.h). Thread-safe; a call
// under way keeps the chain that it began with. Torch-free.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

namespace banyan::feature {

// Who stands in a slot.
struct SlotOwners {
  std::string replacement;            // empty: the original
  std::vector<std::string> wrappers;  // "owner/name", innermost first
  bool empty() const { return replacement.empty() && wrappers.empty(); }
};

// A slot without the type of its op.
class SlotBase {
 public:
  explicit SlotBase(std::string name) : name_(std::move(name)) {}
  virtual ~SlotBase() = default;
  SlotBase(const SlotBase&) = delete;
  SlotBase& operator=(const SlotBase&) = delete;

  const std::string& name() const { return name_; }
  bool is_changed() const { return is_changed_.load(std::memory_order_acquire); }

  // Takes out what `owner` registered; returns how many entries that were.
  int64_t remove(const std::string& owner);
  // Takes out the wrappers of that name, whoever owns them. Throws [feature] if there is none.
  void remove_wrapper(const std::string& name);
  void remove_all();

  // Composes what is registered, if that changed, and publishes it: at once, or when the step under
  // way has ended (then false). Wrappers are called here, on this thread.
  bool apply();
  SlotOwners registered() const;
  SlotOwners applied() const;
  // Counts the chains that were published.
  int64_t generation() const { return generation_.load(std::memory_order_acquire); }

 protected:
  using Erased = std::shared_ptr<const void>;
  using ErasedWrapper = std::function<Erased(const Erased& inner)>;

  void set_replacement(const std::string& owner, Erased op, bool force);
  bool add_wrapper(const std::string& owner, const std::string& name, ErasedWrapper wrapper);
  virtual Erased original() const = 0;
  Erased current() const;

 private:
  struct Replacement {
    std::string owner;
    Erased op;
  };
  struct Wrapper {
    std::string owner;
    std::string name;
    ErasedWrapper wrap;
  };
  struct Composed {
    Erased chain;  // null: nothing is registered
    SlotOwners owners;
    int64_t ticket = 0;  // later changes have larger ones
  };
  Composed compose();
  Erased publish(Composed composed);  // what it replaces

  const std::string name_;
  std::atomic<bool> is_changed_{false};
  std::atomic<int64_t> generation_{0};
  mutable std::mutex mutex_;  // of all below
  Replacement replacement_;
  std::vector<Wrapper> wrappers_;
  int64_t ticket_ = 0;           // of what is registered
  int64_t composed_ticket_ = 0;  // of what was composed last
  Composed published_;
};

// A slot for ops of type Op: a struct of std::functions (forward, backward, ...).
template <typename Op>
class OpSlot final : public SlotBase {
 public:
  OpSlot(std::string name, Op original)
      : SlotBase(std::move(name)), original_(std::make_shared<const Op>(std::move(original))) {}

  // Throws [feature] where another owner's replacement stands already, naming both; with `force`
  // it gives way.
  void replace(const std::string& owner, Op op, bool force = false) {
    set_replacement(owner, std::make_shared<const Op>(std::move(op)), force);
  }
  // False, and nothing happens, if the owner has a wrapper of that name here.
  bool wrap(const std::string& owner,
            const std::string& name,
            std::function<Op(const Op& inner)> wrapper) {
    return add_wrapper(owner, name, [wrapper = std::move(wrapper)](const Erased& inner) -> Erased {
      return std::make_shared<const Op>(wrapper(*std::static_pointer_cast<const Op>(inner)));
    });
  }

  // The chain that calls go through; null: nothing is registered, call the original.
  std::shared_ptr<const Op> changed() const {
    return is_changed() ? std::static_pointer_cast<const Op>(current()) : nullptr;
  }

 protected:
  Erased original() const override { return original_; }

 private:
  std::shared_ptr<const Op> original_;
};

}  // namespace banyan::feature
