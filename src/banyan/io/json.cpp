#include "banyan/io/json.h"

#include <set>
#include <vector>

#include "banyan/core/error.h"

namespace banyan::io {
namespace {

constexpr int kMaxDepth = 64;

}  // namespace

std::string printable(std::string_view text, size_t max_bytes) {
  std::string out;
  for (const char c : text.substr(0, max_bytes)) out += c >= 0x20 && c < 0x7f ? c : '?';
  return text.size() > max_bytes ? out + "..." : out;
}

Json parse_json(const std::string& text, const std::string& where) {
  std::vector<std::set<std::string>> keys;  // of the open objects
  const auto check = [&](int depth, Json::parse_event_t event, Json& value) {
    if (depth > kMaxDepth) {
      throw FileError(detail::concat(where, ": JSON is nested deeper than ", kMaxDepth));
    }
    if (event == Json::parse_event_t::object_start) {
      keys.emplace_back();
    } else if (event == Json::parse_event_t::object_end) {
      keys.pop_back();
    } else if (event == Json::parse_event_t::key) {
      const auto& key = value.get_ref<const std::string&>();
      if (!keys.back().insert(key).second) {
        throw FileError(detail::concat(where, ": key '", key.substr(0, 80), "' stands twice"));
      }
    }
    return true;
  };
  // The parser takes a NUL byte for the end of the text.
  if (text.find('\0') != std::string::npos) {
    throw FileError(where + ": not JSON: a NUL byte stands in the text");
  }
  try {
    return Json::parse(text, check);
  } catch (const Json::exception& error) {
    const std::string reason = error.what();
    throw FileError(where + ": not JSON: " + printable(reason.substr(reason.find("] ") + 2), 200));
  }
}

}  // namespace banyan::io
