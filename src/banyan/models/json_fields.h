// Typed access to the keys of a JSON object from a file, with errors that name file, key, what was
// wanted and what came. A null value counts as absent.
#pragma once

#include <optional>
#include <string>

#include "banyan/io/json.h"

namespace banyan::models {

class JsonFields {
 public:
  // `where` (the file) starts every message; `prefix` ("rope_scaling.") stands before every key.
  JsonFields(const io::Json& object, std::string where, std::string prefix = "");

  bool has(const char* key) const { return find(key) != nullptr; }
  // An integer in [1, limit].
  int64_t size(const char* key, int64_t limit) const;
  int64_t size_or(const char* key, int64_t fallback, int64_t limit) const;
  double number(const char* key) const;
  double number_or(const char* key, double fallback) const;
  std::optional<double> optional_number(const char* key) const;
  bool flag_or(const char* key, bool fallback) const;
  std::string text_or(const char* key, const std::string& fallback) const;
  // The value, or nullptr.
  const io::Json* find(const char* key) const;
  const std::string& where() const { return where_; }

  // Throws FileError "<where>: <prefix><key>: <reason>".
  [[noreturn]] void refuse(const std::string& key, const std::string& reason) const;
  static std::string shown(const io::Json& value);

 private:
  io::Json object_;
  std::string where_;
  std::string prefix_;
};

}  // namespace banyan::models
