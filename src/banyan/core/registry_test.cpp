#include "banyan/core/registry.h"

#include <gtest/gtest.h>

namespace banyan {
namespace {

TEST(Registry, UnknownNameListsTheKnownOnes) {
  Registry<int> registry("policy loss");
  registry.add("vanilla", 1);
  registry.add("gspo", 2);
  EXPECT_EQ(registry.get("gspo"), 2);
  try {
    registry.get("gsop");
    FAIL() << "an unknown name was accepted";
  } catch (const std::invalid_argument& error) {
    EXPECT_STREQ(error.what(), "[policy loss] wanted one of gspo, vanilla, got 'gsop'");
  }
}

TEST(Registry, DuplicateNameIsABug) {
  Registry<int> registry("model");
  registry.add("llama", 1);
  EXPECT_THROW(registry.add("llama", 2), std::logic_error);
}

}  // namespace
}  // namespace banyan
