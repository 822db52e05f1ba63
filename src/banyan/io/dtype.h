// The element types of safetensors and the torch types that hold them.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <string_view>

namespace banyan::io {

struct StoredType {
  const char* name;       // as the header writes it
  int64_t bits;           // of one element
  at::ScalarType scalar;  // kByte for sub-byte types: they are read as raw bytes
};

// nullptr if the format has no such type.
const StoredType* find_type(std::string_view name);
const StoredType* find_type(at::ScalarType scalar);

}  // namespace banyan::io
