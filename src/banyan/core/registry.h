// Registry<T>: names to T, filled by explicit calls from a list file (static initialisers get
// dropped from static libraries). A duplicate name throws; an unknown name throws and prints the
// known ones. Torch-free.
#pragma once

#include <map>
#include <string>
#include <vector>

#include "banyan/core/error.h"

namespace banyan {

template <typename T>
class Registry {
 public:
  // `kind` names what is registered in messages: "policy loss", "model".
  explicit Registry(std::string kind) : kind_(std::move(kind)) {}

  void add(const std::string& name, T entry) {
    BANYAN_ASSERT(entries_.emplace(name, std::move(entry)).second, kind_, " '", name, "' twice");
  }

  const T& get(const std::string& name) const {
    const auto found = entries_.find(name);
    BANYAN_CHECK(
        found != entries_.end(), "[", kind_, "] wanted one of ", known(), ", got '", name, "'");
    return found->second;
  }

  std::vector<std::string> names() const {
    std::vector<std::string> out;
    for (const auto& [name, entry] : entries_) out.push_back(name);
    return out;
  }

 private:
  std::string known() const {
    std::string out;
    for (const auto& [name, entry] : entries_) out += (out.empty() ? "" : ", ") + name;
    return out;
  }

  std::string kind_;
  std::map<std::string, T> entries_;
};

}  // namespace banyan
