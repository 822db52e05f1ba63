#include "banyan/rollout/control/outbox.h"

#include <gtest/gtest.h>
#include <poll.h>

#include <thread>

namespace banyan::rollout {
namespace {

bool readable(int fd) {
  pollfd wanted = {.fd = fd, .events = POLLIN, .revents = 0};
  return poll(&wanted, 1, 0) == 1;
}

void add(Outbox& outbox, const std::string& request, int32_t token, Outbox::Writer::Slot& slot) {
  Outbox::Writer writer(outbox);
  TokenRecord record;
  record.token = token;
  writer.event(request, 0, slot).tokens.push_back(record);
  writer.count(bytes_of(record));
}

TEST(Outbox, JoinsWhatNobodyFetched) {
  Outbox outbox;
  Outbox::Writer::Slot a, b;
  EXPECT_FALSE(readable(outbox.fd()));
  add(outbox, "a", 1, a);
  EXPECT_TRUE(readable(outbox.fd()));
  add(outbox, "b", 2, b);
  add(outbox, "a", 3, a);
  constexpr int64_t kThree = 3 * sizeof(TokenRecord);
  EXPECT_EQ(outbox.backlog(), kThree);
  std::vector<Event> events;
  EXPECT_EQ(outbox.drain(events), kThree);
  EXPECT_FALSE(readable(outbox.fd()));
  EXPECT_EQ(outbox.backlog(), 0);
  ASSERT_EQ(events.size(), 2u);
  EXPECT_EQ(events[0].request, "a");
  ASSERT_EQ(events[0].tokens.size(), 2u);
  EXPECT_EQ(events[0].tokens[1].token, 3);
  EXPECT_EQ(events[1].request, "b");
  add(outbox, "a", 4, a);
  outbox.drain(events);
  ASSERT_EQ(events.size(), 1u);
  EXPECT_EQ(events[0].tokens.size(), 1u);
  outbox.drain(events);
  EXPECT_TRUE(events.empty());
}

TEST(Outbox, AnEventThatIsUsedAgainIsAsNew) {
  Outbox outbox;
  Outbox::Writer::Slot slot;
  {
    Outbox::Writer writer(outbox);
    Event& event = writer.event("first", 3, slot);
    event.tokens.resize(60);
    event.finished = true;
    event.error = "text";
    event.spans.resize(1);
    event.stop_string = 1;
  }
  std::vector<Event> events;
  outbox.drain(events);
  outbox.drain(events);  // gives the event back
  add(outbox, "second", 7, slot);
  outbox.drain(events);
  ASSERT_EQ(events.size(), 1u);
  EXPECT_EQ(events[0].request, "second");
  EXPECT_EQ(events[0].index, 0);
  EXPECT_EQ(events[0].tokens.size(), 1u);
  EXPECT_GE(events[0].tokens.capacity(), 60u);
  EXPECT_FALSE(events[0].finished);
  EXPECT_TRUE(events[0].error.empty());
  EXPECT_TRUE(events[0].spans.empty());
  EXPECT_EQ(events[0].stop_string, -1);
}

// What a slow reader let grow is not kept.
TEST(Outbox, AnEventThatHasGrownIsGivenBack) {
  Outbox outbox;
  Outbox::Writer::Slot slot;
  Outbox::Writer(outbox).event("first", 0, slot).tokens.resize(5000);
  std::vector<Event> events;
  outbox.drain(events);
  outbox.drain(events);
  add(outbox, "second", 7, slot);
  outbox.drain(events);
  ASSERT_EQ(events.size(), 1u);
  EXPECT_LT(events[0].tokens.capacity(), 100u);
}

TEST(Outbox, CountsListsToo) {
  TokenRecord record;
  record.top.resize(10);
  record.sampling_mask.resize(7);
  EXPECT_EQ(bytes_of(record),
            static_cast<int64_t>(sizeof(record) + 10 * sizeof(TokenLogprob) + 7 * 4));
  const PromptLogprobs prompt(3, std::vector<TokenLogprob>(5));
  EXPECT_EQ(bytes_of(prompt),
            static_cast<int64_t>(3 * sizeof(prompt[0]) + 15 * sizeof(TokenLogprob)));
}

TEST(Outbox, AReaderBesideTheWriterMissesNothing) {
  Outbox outbox;
  constexpr int32_t kTokens = 20000;
  std::thread writer([&] {
    Outbox::Writer::Slot slot;
    for (int32_t i = 0; i < kTokens; ++i) add(outbox, "r", i, slot);
  });
  int32_t next = 0;
  std::vector<Event> events;
  while (next < kTokens) {
    pollfd wanted = {.fd = outbox.fd(), .events = POLLIN, .revents = 0};
    ASSERT_EQ(poll(&wanted, 1, 5000), 1) << "after " << next;
    outbox.drain(events);
    for (const Event& event : events) {
      for (const TokenRecord& record : event.tokens) ASSERT_EQ(record.token, next++);
    }
  }
  writer.join();
}

}  // namespace
}  // namespace banyan::rollout
