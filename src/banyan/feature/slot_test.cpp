// Slots: the rules of replacement, wrappers and removal; changes only between steps; threads.
#include "banyan/feature/slot.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <random>
#include <stdexcept>
#include <thread>

#include "banyan/feature/running.h"
#include "banyan/feature/slot_table.h"

namespace banyan::feature {
namespace {

// An op on text, so that a result shows who took part and in which order.
struct TextOp {
  std::function<std::string(const std::string&)> run;
};
using TextSlot = OpSlot<TextOp>;

std::string original(const std::string& x) { return "original(" + x + ")"; }

TextOp named(const std::string& name) {
  return {[name](const std::string& x) { return name + "(" + x + ")"; }};
}

std::function<TextOp(const TextOp&)> around(const std::string& name) {
  return [name](const TextOp& inner) {
    return TextOp{[name, inner](const std::string& x) { return name + "[" + inner.run(x) + "]"; }};
  };
}

std::string call(const TextSlot& slot) {
  const auto op = slot.changed();
  return op ? op->run("x") : original("x");
}

template <typename Call>
std::string error_of(const Call& call) {
  try {
    call();
  } catch (const std::invalid_argument& error) {
    return error.what();
  }
  return "";
}

TEST(OpSlot, TheFirstWrapperIsTheInnermost) {
  TextSlot slot("text", {original});
  EXPECT_FALSE(slot.is_changed());
  EXPECT_TRUE(slot.wrap("a", "first", around("first")));
  EXPECT_TRUE(slot.wrap("b", "second", around("second")));
  EXPECT_EQ(call(slot), "original(x)") << "nothing takes effect before apply";
  EXPECT_TRUE(slot.apply());
  EXPECT_EQ(call(slot), "second[first[original(x)]]");
  slot.replace("c", named("mine"));
  slot.apply();
  EXPECT_EQ(call(slot), "second[first[mine(x)]]");
  EXPECT_EQ(slot.applied().replacement, "c");
  EXPECT_EQ(slot.applied().wrappers, (std::vector<std::string>{"a/first", "b/second"}));
}

TEST(OpSlot, AChainIsBuiltFromTheOriginalEachTime) {
  TextSlot slot("text", {original});
  slot.wrap("a", "w", around("w"));
  slot.apply();
  slot.apply();
  EXPECT_EQ(call(slot), "w[original(x)]");
  EXPECT_EQ(slot.generation(), 1) << "an apply without a change publishes nothing";
  slot.replace("b", named("mine"));
  slot.apply();
  slot.remove("b");
  slot.apply();
  EXPECT_EQ(call(slot), "w[original(x)]");
  slot.remove_all();
  EXPECT_EQ(call(slot), "w[original(x)]");
  slot.apply();
  EXPECT_EQ(call(slot), "original(x)");
  EXPECT_FALSE(slot.is_changed());
  EXPECT_EQ(slot.changed(), nullptr);
}

TEST(OpSlot, ASecondReplacementNamesBothOwners) {
  TextSlot slot("text", {original});
  slot.replace("first", named("first"));
  EXPECT_EQ(error_of([&] { slot.replace("second", named("second")); }),
            "[feature] text: wanted one replacement, got that of 'second' beside that of 'first'; "
            "remove one of them, or force the second");
  slot.replace("second", named("second"), /*force=*/true);
  slot.apply();
  EXPECT_EQ(call(slot), "second(x)");
  EXPECT_EQ(slot.remove("first"), 0);
  EXPECT_NE(error_of([&] { slot.replace("", named("nobody")); }), "");
}

TEST(OpSlot, AWrapperTwiceIsDropped) {
  TextSlot slot("text", {original});
  EXPECT_TRUE(slot.wrap("a", "w", around("w")));
  EXPECT_FALSE(slot.wrap("a", "w", around("other")));
  EXPECT_TRUE(slot.wrap("b", "w", around("b")));
  slot.apply();
  EXPECT_EQ(call(slot), "b[w[original(x)]]");
}

TEST(OpSlot, WrappersAreRemovedByNameOrByOwner) {
  TextSlot slot("text", {original});
  slot.wrap("a", "one", around("one"));
  slot.wrap("b", "two", around("two"));
  slot.wrap("a", "three", around("three"));
  EXPECT_EQ(error_of([&] { slot.remove_wrapper("four"); }),
            "[feature] text: wanted the name of a wrapper there (one, two, three), got 'four'");
  slot.remove_wrapper("two");
  slot.apply();
  EXPECT_EQ(call(slot), "three[one[original(x)]]");
  EXPECT_EQ(slot.remove("a"), 2);
  slot.apply();
  EXPECT_EQ(call(slot), "original(x)");
  EXPECT_NE(error_of([&] { slot.remove_wrapper("one"); }).find("there is none"), std::string::npos);
}

TEST(OpSlot, AWrapperThatThrowsLeavesTheChain) {
  TextSlot slot("text", {original});
  slot.wrap("a", "w", around("w"));
  slot.apply();
  slot.wrap("b", "bad", [](const TextOp&) -> TextOp { throw std::invalid_argument("no"); });
  EXPECT_EQ(error_of([&] { slot.apply(); }), "no");
  EXPECT_EQ(call(slot), "w[original(x)]");
  slot.remove("b");
  slot.apply();
  EXPECT_EQ(call(slot), "w[original(x)]");
}

// Against a model in plain vectors: any order of registering, removing and applying.
TEST(OpSlot, FollowsItsModel) {
  std::mt19937 random(1);
  const auto pick = [&](int count) {
    return std::uniform_int_distribution<int>(0, count - 1)(random);
  };
  const std::string owners[] = {"a", "b", "c"};
  for (int round = 0; round < 200; ++round) {
    TextSlot slot("text", {original});
    std::string replacement;
    std::vector<std::pair<std::string, std::string>> wrappers;  // owner, name
    std::string shown = "original(x)";
    for (int step = 0; step < 30; ++step) {
      const std::string& owner = owners[pick(3)];
      const std::string name(1, static_cast<char>('p' + pick(4)));
      switch (pick(5)) {
        case 0:
          if (replacement.empty() || pick(2) == 0) {
            slot.replace(owner, named(owner), /*force=*/true);
            replacement = owner;
          }
          break;
        case 1: {
          const auto entry = std::pair(owner, name);
          const bool known = std::find(wrappers.begin(), wrappers.end(), entry) != wrappers.end();
          EXPECT_EQ(slot.wrap(owner, name, around(owner + name)), !known);
          if (!known) wrappers.push_back(entry);
          break;
        }
        case 2: {
          int64_t count = replacement == owner ? 1 : 0;
          if (count > 0) replacement.clear();
          count += static_cast<int64_t>(
              std::erase_if(wrappers, [&](const auto& entry) { return entry.first == owner; }));
          EXPECT_EQ(slot.remove(owner), count);
          break;
        }
        case 3: {
          const size_t count =
              std::erase_if(wrappers, [&](const auto& entry) { return entry.second == name; });
          EXPECT_EQ(error_of([&] { slot.remove_wrapper(name); }).empty(), count > 0);
          break;
        }
        case 4:
          EXPECT_TRUE(slot.apply());
          shown = (replacement.empty() ? "original" : replacement) + "(x)";
          for (const auto& [by, of] : wrappers) shown = by + of + "[" + shown + "]";
          break;
      }
      ASSERT_EQ(call(slot), shown);
    }
  }
}

TEST(Running, ChangesWaitForTheEndOfTheStep) {
  TextSlot slot("text", {original});
  {
    const Running step;
    EXPECT_TRUE(is_running());
    slot.wrap("a", "w", around("w"));
    EXPECT_FALSE(slot.apply());
    EXPECT_FALSE(slot.apply()) << "still to come";
    EXPECT_EQ(call(slot), "original(x)");
    {
      const Running inner;
    }
    EXPECT_EQ(call(slot), "original(x)") << "the outer scope is open";
  }
  EXPECT_FALSE(is_running());
  EXPECT_EQ(call(slot), "w[original(x)]");
}

TEST(Running, TheLastChangeOfAStepIsTheOneThatCounts) {
  TextSlot slot("text", {original});
  {
    const Running step;
    slot.replace("a", named("a"));
    slot.apply();
    slot.remove("a");
    slot.wrap("b", "w", around("w"));
    slot.apply();
  }
  EXPECT_EQ(call(slot), "w[original(x)]");
}

TEST(Running, ThreadsSeeOneChainThroughAStep) {
  TextSlot slot("text", {original});
  std::atomic<bool> done{false};
  std::atomic<int64_t> torn{0};
  std::vector<std::thread> steps;
  for (int i = 0; i < 3; ++i) {
    steps.emplace_back([&] {
      while (!done.load()) {
        const Running step;
        const std::string forward = call(slot);
        for (int k = 0; k < 20; ++k) {
          if (call(slot) != forward) ++torn;
        }
      }
    });
  }
  for (int i = 0; i < 300; ++i) {
    slot.replace("a", named(std::to_string(i)), /*force=*/true);
    if (i % 3 == 0) slot.remove("a");
    slot.apply();
  }
  done = true;
  for (std::thread& step : steps) step.join();
  EXPECT_EQ(torn.load(), 0);
  slot.apply();
  EXPECT_EQ(call(slot), "299(x)");
}

TEST(SlotTable, FindsByNameAndSaysTheNearest) {
  TextSlot first("rms_norm", {original});
  TextSlot second("swiglu", {original});
  const SlotTable table({&first, &second});
  EXPECT_EQ(&table.get("swiglu"), &second);
  EXPECT_EQ(error_of([&] { table.get("swigloo"); }),
            "[feature] slot: wanted one of rms_norm, swiglu, got 'swigloo'; the nearest is swiglu");
  EXPECT_EQ(error_of([&] { table.get("zzz"); }),
            "[feature] slot: wanted one of rms_norm, swiglu, got 'zzz'");
  EXPECT_THROW(SlotTable({&first, &first}), std::logic_error);
}

TEST(SlotTable, TwoOwnersInSeveralSlots) {
  TextSlot first("one", {original});
  TextSlot second("two", {original});
  const SlotTable table({&first, &second});
  first.replace("a", named("a"));
  first.wrap("b", "count", around("count"));
  second.wrap("a", "count", around("count"));
  EXPECT_TRUE(table.apply());
  EXPECT_TRUE(table.any_changed());
  EXPECT_EQ(table.dump(),
            (std::vector<std::string>{"one: a <- b/count", "two: original <- a/count"}));
  EXPECT_EQ(table.remove("a"), 2);
  EXPECT_EQ(table.remove("nobody"), 0);
  table.apply();
  EXPECT_EQ(table.dump(), (std::vector<std::string>{"one: original <- b/count"}));
  table.remove_all();
  table.apply();
  EXPECT_FALSE(table.any_changed());
  EXPECT_TRUE(table.dump().empty());
}

}  // namespace
}  // namespace banyan::feature
