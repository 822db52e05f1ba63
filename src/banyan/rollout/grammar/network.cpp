// Ranges of code points as ranges of bytes: a range is cut where the length of its UTF-8 changes
// and around the surrogates, and then at the first byte where its ends differ.
#include "banyan/rollout/grammar/network.h"

#include <algorithm>
#include <array>

#include "banyan/core/error.h"

namespace banyan::rollout::grammar {
namespace {

constexpr int32_t kMaxNodes = 200000;
constexpr uint8_t kFirst = 0x80, kLast = 0xBF;  // continuation bytes
// Ranges within which all letters have equally many bytes; surrogates are no letters.
constexpr std::array<std::pair<uint32_t, uint32_t>, 5> kSpans = {
    {{0x0, 0x7F}, {0x80, 0x7FF}, {0x800, 0xD7FF}, {0xE000, 0xFFFF}, {0x10000, 0x10FFFF}}};

int32_t encode(uint32_t code, uint8_t* out) {
  const int32_t count = code < 0x80 ? 1 : code < 0x800 ? 2 : code < 0x10000 ? 3 : 4;
  constexpr std::array<uint8_t, 5> kMarks = {0, 0, 0xC0, 0xE0, 0xF0};
  for (int32_t i = count - 1; i > 0; --i, code >>= 6) out[i] = kFirst | (code & 0x3F);
  out[0] = static_cast<uint8_t>(kMarks[count] | code);
  return count;
}

bool all(const uint8_t* bytes, int32_t count, uint8_t value) {
  return std::all_of(bytes, bytes + count, [value](uint8_t byte) { return byte == value; });
}

Edge bytes(uint8_t low, uint8_t high, int32_t to) {
  return {.kind = Edge::Kind::kBytes, .low = low, .high = high, .to = to};
}

}  // namespace

int32_t Network::add_node() {
  BANYAN_CHECK(num_nodes() < kMaxNodes, "[grammar] wanted a smaller grammar, fewer repetitions");
  edges_.emplace_back();
  return num_nodes() - 1;
}

Part Network::add_letters(const std::vector<std::pair<uint32_t, uint32_t>>& ranges) {
  const Part part{add_node(), add_node()};
  for (const auto& [low, high] : ranges) {
    for (const auto& [first, last] : kSpans) {
      if (low > last || high < first) continue;
      std::array<uint8_t, 4> from{}, to{};
      const int32_t count = encode(std::max(low, first), from.data());
      encode(std::min(high, last), to.data());
      add_bytes(part.begin, part.end, from.data(), to.data(), count);
    }
  }
  return part;
}

void Network::add_bytes(
    int32_t from, int32_t to, const uint8_t* low, const uint8_t* high, int32_t count) {
  if (count == 1) return add_edge(from, bytes(low[0], high[0], to));
  constexpr std::array<uint8_t, 3> kLow = {kFirst, kFirst, kFirst};
  constexpr std::array<uint8_t, 3> kHigh = {kLast, kLast, kLast};
  const auto after = [&](uint8_t first, uint8_t last, const uint8_t* rest, const uint8_t* end) {
    const int32_t node = add_node();
    add_edge(from, bytes(first, last, node));
    add_bytes(node, to, rest, end, count - 1);
  };
  int32_t first = low[0], last = high[0];
  if (first == last) return after(low[0], high[0], low + 1, high + 1);
  if (!all(low + 1, count - 1, kFirst)) {
    after(low[0], low[0], low + 1, kHigh.data());
    ++first;
  }
  if (!all(high + 1, count - 1, kLast)) {
    after(high[0], high[0], kLow.data(), high + 1);
    --last;
  }
  if (first <= last) {
    after(static_cast<uint8_t>(first), static_cast<uint8_t>(last), kLow.data(), kHigh.data());
  }
}

}  // namespace banyan::rollout::grammar
