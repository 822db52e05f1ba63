#include "banyan/io/dtype.h"

#include <array>

namespace banyan::io {
namespace {

// First entry of a scalar type is the one that is written.
constexpr std::array<StoredType, 22> kTypes = {{
    {"BOOL", 8, at::kBool},
    {"U8", 8, at::kByte},
    {"I8", 8, at::kChar},
    {"F8_E5M2", 8, at::kFloat8_e5m2},
    {"F8_E4M3", 8, at::kFloat8_e4m3fn},
    {"F8_E8M0", 8, at::kFloat8_e8m0fnu},
    {"F8_E4M3FNUZ", 8, at::kFloat8_e4m3fnuz},
    {"F8_E5M2FNUZ", 8, at::kFloat8_e5m2fnuz},
    {"I16", 16, at::kShort},
    {"U16", 16, at::kUInt16},
    {"F16", 16, at::kHalf},
    {"BF16", 16, at::kBFloat16},
    {"I32", 32, at::kInt},
    {"U32", 32, at::kUInt32},
    {"F32", 32, at::kFloat},
    {"I64", 64, at::kLong},
    {"U64", 64, at::kUInt64},
    {"F64", 64, at::kDouble},
    {"C64", 64, at::kComplexFloat},
    {"F4", 4, at::kByte},
    {"F6_E2M3", 6, at::kByte},
    {"F6_E3M2", 6, at::kByte},
}};

}  // namespace

const StoredType* find_type(std::string_view name) {
  for (const StoredType& type : kTypes) {
    if (name == type.name) return &type;
  }
  return nullptr;
}

const StoredType* find_type(at::ScalarType scalar) {
  for (const StoredType& type : kTypes) {
    if (scalar == type.scalar) return &type;
  }
  return nullptr;
}

}  // namespace banyan::io
