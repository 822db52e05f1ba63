#include "banyan/rollout/grammar/scanner.h"

#include <algorithm>

#include "banyan/core/error.h"

namespace banyan::rollout::grammar {
namespace {

constexpr int32_t kMaxCount = 4096;  // of a repetition
constexpr size_t kShown = 12;        // letters of the text in a message

bool is_name_letter(char c) {
  return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') || c == '_' ||
         c == '-';
}

int32_t digit_of(char c) {
  if (c >= '0' && c <= '9') return c - '0';
  if (c >= 'a' && c <= 'f') return c - 'a' + 10;
  return c >= 'A' && c <= 'F' ? c - 'A' + 10 : -1;
}

// All letters but those.
Ranges others(Ranges ranges) {
  std::sort(ranges.begin(), ranges.end());
  Ranges found;
  uint32_t next = 0;
  for (const auto& [low, high] : ranges) {
    if (low > next) found.emplace_back(next, low - 1);
    next = std::max(next, high + 1);
  }
  if (next <= kMaxCode) found.emplace_back(next, kMaxCode);
  return found;
}

}  // namespace

bool Scanner::takes(std::string_view wanted) {
  if (text_.substr(std::min(place_, text_.size()), wanted.size()) != wanted) return false;
  place_ += wanted.size();
  return true;
}

void Scanner::fail(const std::string& wanted) const {
  const size_t place = std::min(place_, text_.size());
  const auto line =
      1 + std::count(text_.begin(), text_.begin() + static_cast<int64_t>(place), '\n');
  std::string got = "the end";
  if (!done()) {
    got = std::string(text_.substr(place, kShown));
    // A letter that is cut would be no text.
    while (!got.empty() && place + got.size() < text_.size() &&
           (static_cast<uint8_t>(text_[place + got.size()]) & 0xC0) == 0x80) {
      got.pop_back();
    }
    got = "'" + got + "'";
  }
  detail::throw_value_error(
      detail::concat("[grammar] line ", line, ": wanted ", wanted, ", got ", got));
}

void Scanner::skip() {
  while (!done()) {
    if (peek() == '#') {
      while (!done() && peek() != '\n') ++place_;
    } else if (peek() == ' ' || peek() == '\t' || peek() == '\r' || peek() == '\n') {
      ++place_;
    } else {
      return;
    }
  }
}

std::string_view Scanner::name() {
  const size_t begin = place_;
  while (!done() && is_name_letter(peek())) ++place_;
  return text_.substr(std::min(begin, text_.size()), place_ - begin);
}

int32_t Scanner::count() {
  int32_t value = 0;
  const size_t begin = place_;
  for (; peek() >= '0' && peek() <= '9' && value <= kMaxCount; ++place_) {
    value = 10 * value + (peek() - '0');
  }
  if (place_ == begin || value > kMaxCount) fail(detail::concat("a count of at most ", kMaxCount));
  return value;
}

Ranges Scanner::letter_class() {
  const bool is_negated = takes("^");
  Ranges ranges;
  while (peek() != ']') {
    if (done() || peek() == '\n') fail("']'");
    const uint32_t low = letter();
    uint32_t high = low;
    if (peek() == '-' && place_ + 1 < text_.size() && text_[place_ + 1] != ']') {
      ++place_;
      high = letter();
    }
    if (high < low) fail("a range that ascends");
    ranges.emplace_back(low, high);
  }
  ++place_;
  return is_negated ? others(std::move(ranges)) : ranges;
}

uint32_t Scanner::letter() {
  const auto lead = static_cast<uint8_t>(peek());
  if (lead == '\\') return escape();
  const int32_t more = lead < 0x80 ? 0 : lead < 0xE0 ? 1 : lead < 0xF0 ? 2 : 3;
  if (place_ + more >= text_.size() || (lead >= 0x80 && lead < 0xC0)) fail("UTF-8");
  uint32_t code = more == 0 ? lead : lead & (0x3F >> more);
  for (int32_t i = 1; i <= more; ++i) {
    code = code << 6 | (static_cast<uint8_t>(text_[place_ + i]) & 0x3F);
  }
  place_ += more + 1;
  return code;
}

uint32_t Scanner::escape() {
  ++place_;
  const char kind = peek();
  ++place_;
  switch (kind) {
    case 'n':
      return '\n';
    case 'r':
      return '\r';
    case 't':
      return '\t';
    case 'x':
      return hex(2);
    case 'u':
      return hex(4);
    case 'U':
      return hex(8);
    default:
      break;
  }
  if (kind == '\0' || std::string_view("\\\"'[]-^").find(kind) == std::string_view::npos) {
    place_ -= 2;
    fail(R"(an escape: \n \r \t \\ \" \' \[ \] \- \^ \xHH \uHHHH \UHHHHHHHH)");
  }
  return static_cast<uint8_t>(kind);
}

uint32_t Scanner::hex(int32_t digits) {
  uint64_t value = 0;
  for (int32_t i = 0; i < digits; ++i, ++place_) {
    const int32_t digit = digit_of(peek());
    if (digit < 0) fail("a hexadecimal digit");
    value = value << 4 | static_cast<uint64_t>(digit);
  }
  if (value > kMaxCode || (value >= 0xD800 && value < 0xE000)) fail("a letter of Unicode");
  return static_cast<uint32_t>(value);
}

}  // namespace banyan::rollout::grammar
