#include "banyan/rollout/continuation.h"

#include <gtest/gtest.h>

namespace banyan::rollout {
namespace {

Request first_request() {
  Request request;
  request.id = "first";
  request.prompt = {1, 2, 3};
  request.n = 4;
  request.params.max_tokens = 10;
  request.params.min_tokens = 3;
  return request;
}

// The budget of a continuation is what the response has left.
TEST(Continuation, resume_budget_reduced) {
  const Request next = continuation(first_request(), /*index=*/2, {7, 8});
  EXPECT_EQ(next.prompt, (std::vector<int32_t>{1, 2, 3, 7, 8}));
  EXPECT_EQ(next.original_prompt, 3);
  EXPECT_EQ(next.n, 1);
  EXPECT_EQ(next.first_index, 2);
  EXPECT_EQ(next.params.max_tokens, 8);
  EXPECT_EQ(next.params.min_tokens, 1);
  EXPECT_TRUE(next.id.empty());

  const Request last = continuation(next, /*index=*/2, {9, 9, 9});
  EXPECT_EQ(last.prompt.size(), 8u);
  EXPECT_EQ(last.original_prompt, 3);
  EXPECT_EQ(last.params.max_tokens, 5);
  EXPECT_EQ(last.params.min_tokens, 0);
}

TEST(Continuation, RefusesAUsedUpBudget) {
  try {
    continuation(first_request(), 0, std::vector<int32_t>(10, 1));
    ADD_FAILURE() << "no error";
  } catch (const RequestError& error) {
    EXPECT_EQ(error.code, 400);
    EXPECT_EQ(error.param, "max_tokens");
    EXPECT_STREQ(error.what(),
                 "[rollout] continuation: wanted fewer than max_tokens = 10 tokens so far, got 10");
  }
}

TEST(Continuation, SpansAreJoinedWhereTheWeightsAreTheSame) {
  std::vector<WeightSpan> spans = {{.epoch = 1, .version = "a", .start = 0, .end = 5}};
  append_spans({{.epoch = 1, .version = "a", .start = 0, .end = 2},
                {.epoch = 2, .version = "b", .start = 2, .end = 4}},
               /*used=*/5,
               spans);
  ASSERT_EQ(spans.size(), 2u);
  EXPECT_EQ(spans[0].end, 7);
  EXPECT_EQ(spans[1].start, 7);
  EXPECT_EQ(spans[1].end, 9);
  EXPECT_EQ(spans[1].version, "b");
}

}  // namespace
}  // namespace banyan::rollout
