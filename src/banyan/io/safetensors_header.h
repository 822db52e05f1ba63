// The header of a safetensors file, parsed and checked as a whole before any buffer that it
// describes exists.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <string_view>

#include "banyan/io/safetensors.h"

namespace banyan::io {

inline constexpr uint64_t kMaxHeaderBytes = uint64_t{16} << 20;
inline constexpr size_t kMaxDims = 64;
inline constexpr size_t kMaxNameBytes = 1024;

struct SafetensorsHeader {
  std::map<std::string, TensorEntry> entries;
  std::map<std::string, std::string> metadata;
};

// `text` is the header without its length field; `num_data_bytes` is what follows it in the file.
// The entries that come back tile [0, num_data_bytes) exactly. Throws FileError "<path>: <tensor or
// header>: <reason>".
SafetensorsHeader parse_header(const std::string& path,
                               std::string_view text,
                               uint64_t num_data_bytes);

// Reason why `name` cannot name a tensor, or nullptr. Names are keys, never paths.
const char* refuse_name(std::string_view name);

}  // namespace banyan::io
