// JSON from files, read strictly: valid UTF-8, no duplicate key, bounded depth, nothing after the
// value.
#pragma once

#include <nlohmann/json.hpp>
#include <string>
#include <string_view>

namespace banyan::io {

using Json = nlohmann::json;  // keys sorted, as transformers writes them

// `where` (a path) starts the message of the FileError that bad text throws.
Json parse_json(const std::string& text, const std::string& where);

// Text from a file, made safe for a message: ASCII without control characters, cut to `max_bytes`.
std::string printable(std::string_view text, size_t max_bytes = 80);

}  // namespace banyan::io
