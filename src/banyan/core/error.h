// Errors. A user's mistake throws std::invalid_argument (Python: ValueError) whose text reads
//   [tag] what: wanted ..., got ...; next step
// A bug of ours throws std::logic_error. Nothing in banyan exits or aborts the process. Torch-free.
#pragma once

#include <sstream>
#include <stdexcept>
#include <string>

namespace banyan {

namespace detail {
template <typename... Parts>
std::string concat(const Parts&... parts) {
  std::ostringstream out;
  (out << ... << parts);
  return out.str();
}
[[noreturn]] void throw_value_error(const std::string& message);
[[noreturn]] void throw_logic_error(const char* file, int line, const std::string& message);
}  // namespace detail

// A file that cannot be read, written or trusted; the text starts with the path (Python: OSError).
class FileError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

}  // namespace banyan

// BANYAN_CHECK(budget >= 1, "[plan] budget: wanted >= 1 token, got ", budget);
#define BANYAN_CHECK(condition, ...)                                              \
  do {                                                                            \
    if (!(condition)) [[unlikely]]                                                \
      ::banyan::detail::throw_value_error(::banyan::detail::concat(__VA_ARGS__)); \
  } while (false)

// For what only a bug in banyan can break.
#define BANYAN_ASSERT(condition, ...)                                 \
  do {                                                                \
    if (!(condition)) [[unlikely]]                                    \
      ::banyan::detail::throw_logic_error(                            \
          __FILE__, __LINE__, ::banyan::detail::concat(__VA_ARGS__)); \
  } while (false)
