// What ranks tell each other besides tensors: plain values one after the other, in the byte order
// of the machine (the ranks of a run are alike). A reader that meets its end is a bug of ours.
// A struct travels by the one list of its members, in banyan::train, that writes and reads it:
//   template <typename Wire, Is<WeightSpan> T> void fields(Wire& wire, T& x) { wire(x.a, x.b); }
#pragma once

#include <ATen/core/Tensor.h>

#include <concepts>
#include <cstdint>
#include <cstring>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "banyan/algo/metric.h"
#include "banyan/core/error.h"

namespace banyan::train {

template <typename T, typename Of>
concept Is = std::same_as<std::remove_const_t<T>, Of>;

class WireWriter {
 public:
  template <typename... T>
  void operator()(const T&... values) {
    (put(values), ...);
  }
  template <typename T>
  void put(const T& value) {
    if constexpr (std::is_trivially_copyable_v<T>) {
      bytes_.append(reinterpret_cast<const char*>(&value), sizeof(T));
    } else {
      fields(*this, value);
    }
  }
  template <typename A, typename B>
  void put(const std::pair<A, B>& both) {
    (*this)(both.first, both.second);
  }
  void put(const std::string& text) {
    put(static_cast<int64_t>(text.size()));
    bytes_ += text;
  }
  template <typename T>
  void put(const std::vector<T>& values) {
    put(static_cast<int64_t>(values.size()));
    if constexpr (std::is_trivially_copyable_v<T>) {
      bytes_.append(reinterpret_cast<const char*>(values.data()), values.size() * sizeof(T));
    } else {
      for (const T& value : values) put(value);
    }
  }
  // fp32 or fp64, 1-D, on any device; undefined stays undefined.
  void put(const at::Tensor& tensor);

  const std::string& bytes() const { return bytes_; }

 private:
  std::string bytes_;
};

class WireReader {
 public:
  explicit WireReader(const std::string& bytes) : bytes_(bytes) {}

  template <typename... T>
  void operator()(T&... values) {
    (get(values), ...);
  }
  template <typename T>
  void get(T& value) {
    if constexpr (std::is_trivially_copyable_v<T>) {
      take(&value, sizeof(T));
    } else {
      fields(*this, value);
    }
  }
  template <typename A, typename B>
  void get(std::pair<A, B>& both) {
    (*this)(both.first, both.second);
  }
  void get(std::string& text) {
    text.resize(get_size(1));
    take(text.data(), text.size());
  }
  template <typename T>
  void get(std::vector<T>& values) {
    if constexpr (std::is_trivially_copyable_v<T>) {
      values.resize(get_size(sizeof(T)));
      take(values.data(), values.size() * sizeof(T));
    } else {
      values.resize(get_size(1));
      for (T& value : values) get(value);
    }
  }
  void get(at::Tensor& tensor);  // on the CPU

  template <typename T>
  T next() {
    T value;
    get(value);
    return value;
  }

 private:
  size_t get_size(size_t element) {
    const auto size = next<int64_t>();
    BANYAN_ASSERT(size >= 0 && static_cast<size_t>(size) <= (bytes_.size() - at_) / element,
                  "a message of ",
                  bytes_.size(),
                  " bytes announces ",
                  size,
                  " elements");
    return static_cast<size_t>(size);
  }
  void take(void* to, size_t count) {
    BANYAN_ASSERT(count <= bytes_.size() - at_, "a message ends early");
    if (count > 0) std::memcpy(to, bytes_.data() + at_, count);
    at_ += count;
  }

  const std::string& bytes_;
  size_t at_ = 0;
};

// Lines of another rank that this one has not said.
void add_new(std::vector<std::string> lines, std::vector<std::string>& to);

// Metrics with their reductions.
void put_metrics(const algo::MetricMap& metrics, WireWriter& out);
algo::MetricMap get_metrics(WireReader& in);

}  // namespace banyan::train
