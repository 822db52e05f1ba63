// Reads dotted keys of the resolved tree into fields, each with a check of its type.
#pragma once

#include <algorithm>
#include <cstdint>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "banyan/core/error.h"

namespace banyan::train {

using Json = nlohmann::json;

// What a field of type T takes, for the message and the check.
template <typename T>
struct Wanted;
template <>
struct Wanted<bool> {
  static constexpr const char* kName = "a bool";
  static bool fits(const Json& value) { return value.is_boolean(); }
};
template <>
struct Wanted<int64_t> {
  static constexpr const char* kName = "an integer";
  static bool fits(const Json& value) { return value.is_number_integer(); }
};
template <>
struct Wanted<uint64_t> {
  static constexpr const char* kName = "a non-negative integer";
  static bool fits(const Json& value) { return value.is_number_unsigned(); }
};
template <>
struct Wanted<double> {
  static constexpr const char* kName = "a number";
  static bool fits(const Json& value) { return value.is_number(); }
};
template <>
struct Wanted<std::string> {
  static constexpr const char* kName = "a string";
  static bool fits(const Json& value) { return value.is_string(); }
};
template <typename T>
struct Wanted<std::vector<T>> {
  static constexpr const char* kName = "a list of numbers";
  static bool fits(const Json& value) {
    if (!value.is_array()) return false;
    for (const Json& item : value) {
      if (!item.is_number()) return false;
    }
    return true;
  }
};

template <>
struct Wanted<std::vector<std::string>> {
  static constexpr const char* kName = "a list of texts";
  static bool fits(const Json& value) {
    if (!value.is_array()) return false;
    return std::all_of(
        value.begin(), value.end(), [](const Json& item) { return item.is_string(); });
  }
};

// The keys below a prefix ("trainer.") of the tree, which must outlive it. read() throws
//   [config] <key>: wanted <type>, got <value>
class ConfigNode {
 public:
  ConfigNode(const Json& root, std::string prefix) : root_(root), prefix_(std::move(prefix)) {}

  const std::string& prefix() const { return prefix_; }

  template <typename T>
  void read(const std::string& key, T& field) const {
    const Json* value = find(key);
    BANYAN_CHECK(value != nullptr,
                 "[config] ",
                 prefix_ + key,
                 ": wanted ",
                 Wanted<T>::kName,
                 ", got nothing");
    BANYAN_CHECK(Wanted<T>::fits(*value),
                 "[config] ",
                 prefix_ + key,
                 ": wanted ",
                 Wanted<T>::kName,
                 ", got ",
                 value->dump());
    field = value->get<T>();
  }

  // A null or absent value leaves the field empty.
  template <typename T>
  void read(const std::string& key, std::optional<T>& field) const {
    const Json* value = find(key);
    if (value == nullptr || value->is_null()) return;
    T present{};
    read(key, present);
    field = std::move(present);
  }

 private:
  const Json* find(const std::string& key) const {
    const Json* node = &root_;
    std::string path = prefix_ + key;
    size_t begin = 0;
    while (begin <= path.size()) {
      const size_t dot = std::min(path.find('.', begin), path.size());
      const auto found =
          node->is_object() ? node->find(path.substr(begin, dot - begin)) : node->end();
      if (!node->is_object() || found == node->end()) return nullptr;
      node = &*found;
      begin = dot + 1;
    }
    return node;
  }

  const Json& root_;
  std::string prefix_;
};

}  // namespace banyan::train
