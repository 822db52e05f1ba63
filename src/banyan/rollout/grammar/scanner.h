// What a grammar's text is made of: names, letters, classes of letters, counts. Torch-free.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace banyan::rollout::grammar {

using Ranges = std::vector<std::pair<uint32_t, uint32_t>>;  // of code points, ends included

inline constexpr uint32_t kMaxCode = 0x10FFFF;

class Scanner {
 public:
  explicit Scanner(std::string_view text) : text_(text) {}

  bool done() const { return place_ >= text_.size(); }
  char peek() const { return done() ? '\0' : text_[place_]; }
  size_t place() const { return place_; }
  void go_back(size_t place) { place_ = place; }
  bool takes(std::string_view wanted);
  // Throws [grammar] with the line, what was wanted and what stands there.
  [[noreturn]] void fail(const std::string& wanted) const;

  void skip();  // spaces, line ends, comments
  // Letters, digits, '_' and '-'; empty if there are none.
  std::string_view name();
  int32_t count();  // digits
  // A letter of UTF-8, or an escape.
  uint32_t letter();
  // What stands behind '[', its ']' included.
  Ranges letter_class();

 private:
  uint32_t escape();
  uint32_t hex(int32_t digits);

  std::string_view text_;
  size_t place_ = 0;
};

}  // namespace banyan::rollout::grammar
