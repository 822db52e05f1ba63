#include "banyan/core/error.h"

namespace banyan::detail {

void throw_value_error(const std::string& message) { throw std::invalid_argument(message); }

void throw_logic_error(const char* file, int line, const std::string& message) {
  throw std::logic_error(concat("[banyan bug] ", file, ":", line, ": ", message));
}

}  // namespace banyan::detail
