#include "banyan/models/json_fields.h"

#include "banyan/core/error.h"

namespace banyan::models {

JsonFields::JsonFields(const io::Json& object, std::string where, std::string prefix)
    : object_(object), where_(std::move(where)), prefix_(std::move(prefix)) {
  if (!object_.is_object()) {
    throw FileError(
        detail::concat(where_, ": ", prefix_, " wanted an object, got ", shown(object_)));
  }
}

const io::Json* JsonFields::find(const char* key) const {
  const auto found = object_.find(key);
  return found == object_.end() || found->is_null() ? nullptr : &*found;
}

int64_t JsonFields::size(const char* key, int64_t limit) const {
  if (!has(key)) refuse(key, "is missing");
  return size_or(key, 0, limit);
}

int64_t JsonFields::size_or(const char* key, int64_t fallback, int64_t limit) const {
  const io::Json* value = find(key);
  if (!value) return fallback;
  const bool fits = value->is_number_unsigned() && value->get<uint64_t>() >= 1 &&
                    value->get<uint64_t>() <= static_cast<uint64_t>(limit);
  if (!fits)
    refuse(key, detail::concat("wanted an integer in [1, ", limit, "], got ", shown(*value)));
  return value->get<int64_t>();
}

std::optional<double> JsonFields::optional_number(const char* key) const {
  const io::Json* value = find(key);
  if (!value) return std::nullopt;
  if (!value->is_number()) refuse(key, "wanted a number, got " + shown(*value));
  return value->get<double>();
}

double JsonFields::number(const char* key) const {
  const std::optional<double> value = optional_number(key);
  if (!value) refuse(key, "is missing");
  return *value;
}

double JsonFields::number_or(const char* key, double fallback) const {
  return optional_number(key).value_or(fallback);
}

bool JsonFields::flag_or(const char* key, bool fallback) const {
  const io::Json* value = find(key);
  if (!value) return fallback;
  if (!value->is_boolean()) refuse(key, "wanted true or false, got " + shown(*value));
  return value->get<bool>();
}

std::string JsonFields::text_or(const char* key, const std::string& fallback) const {
  const io::Json* value = find(key);
  if (!value) return fallback;
  if (!value->is_string()) refuse(key, "wanted a string, got " + shown(*value));
  return value->get<std::string>();
}

void JsonFields::refuse(const std::string& key, const std::string& reason) const {
  throw FileError(where_ + ": " + prefix_ + key + ": " + reason);
}

std::string JsonFields::shown(const io::Json& value) {
  return io::printable(value.dump(-1, ' ', true));
}

}  // namespace banyan::models
