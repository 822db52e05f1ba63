// A dict of named fields into a struct: a name that nobody reads is an error with the nearest name
// that somebody does, and a wrong type names the field.
#pragma once

#include <string>
#include <vector>

#include "convert.h"

namespace banyan::bindings {

class Fields {
 public:
  // `what`: what the names belong to, for messages: "engine option".
  Fields(const py::dict& from, const char* what) : from_(from), what_(what) {}

  // None counts as absent.
  template <typename T>
  void read(const char* name, T& into) {
    const py::object value = find(name);
    if (value.is_none()) return;
    try {
      into = value.cast<T>();
    } catch (const py::cast_error&) {
      refuse_value(name, value);
    }
  }
  // The entry, or None; for types that the caller converts.
  py::object find(const char* name);
  [[noreturn]] void refuse_value(const char* name, const py::object& value) const;
  // Throws RequestError 400 for names that were not asked for.
  void finish() const;

 private:
  const py::dict& from_;
  const char* what_;
  std::vector<std::string> known_;
};

}  // namespace banyan::bindings
