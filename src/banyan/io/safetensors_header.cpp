// A SAX handler for the fixed grammar {name: {dtype, shape, data_offsets}, "__metadata__": {key:
// text}}: nothing is built that the grammar does not name, so depth and memory are bounded by the
// text. Where the reference implementation is laxer (duplicate tensors, extra fields, odd names,
// padding), this one refuses.
#include "banyan/io/safetensors_header.h"

#include <algorithm>
#include <limits>
#include <vector>

#include "banyan/core/error.h"
#include "banyan/io/dtype.h"
#include "banyan/io/json.h"

namespace banyan::io {
namespace {

constexpr const char* kMetadataKey = "__metadata__";

std::string shown(std::string_view name) { return detail::concat('\'', printable(name), '\''); }

class HeaderHandler final : public nlohmann::json_sax<Json> {
 public:
  HeaderHandler(const std::string& path, SafetensorsHeader& header)
      : path_(path), header_(header) {}

  bool null() override { return wrong("null"); }
  bool boolean(bool) override { return wrong("a boolean"); }
  bool number_float(double, const std::string& text) override {
    return wrong("the number " + text.substr(0, 40));
  }
  // The parser calls this for numbers with a minus sign only.
  bool number_integer(int64_t value) override {
    return wrong("the number " + std::to_string(value));
  }
  bool number_unsigned(uint64_t value) override;
  bool string(std::string& value) override;
  bool binary(Json::binary_t&) override { return wrong("binary"); }
  bool start_object(size_t) override;
  bool key(std::string& name) override;
  bool end_object() override;
  bool start_array(size_t) override;
  bool end_array() override;
  bool parse_error(size_t position, const std::string&, const Json::exception& error) override {
    const std::string reason = error.what();
    refuse(detail::concat(
        "not JSON at byte ", position, ": ", printable(reason.substr(reason.find(": ") + 2), 160)));
  }

 private:
  enum class State : uint8_t { kTop, kRoot, kTensor, kShape, kOffsets, kMetadata, kDone };
  enum class Field : uint8_t { kNone, kDtype, kShape, kOffsets };

  [[noreturn]] void refuse(const std::string& reason) const;
  bool wrong(const std::string& got) const;
  void open_field(const std::string& name);
  void finish_tensor();

  const std::string& path_;
  SafetensorsHeader& header_;
  State state_ = State::kTop;
  std::string name_;  // of the tensor or metadata entry that is open
  bool seen_metadata_ = false;

  Field field_ = Field::kNone;
  const StoredType* type_ = nullptr;
  bool has_shape_ = false;
  bool has_offsets_ = false;
  std::vector<int64_t> shape_;
  std::vector<uint64_t> offsets_;
};

void HeaderHandler::refuse(const std::string& reason) const {
  const bool inside = state_ != State::kTop && state_ != State::kDone && !name_.empty();
  throw FileError(path_ + ": " + (inside ? shown(name_) : "header") + ": " + reason);
}

// A value of a type that the place does not take.
bool HeaderHandler::wrong(const std::string& got) const {
  switch (state_) {
    case State::kTop:
    case State::kDone:
      refuse("wanted a JSON object, got " + got);
    case State::kRoot:
      refuse("wanted an object, got " + got);
    case State::kTensor:
      if (field_ == Field::kDtype) refuse("dtype: wanted a string, got " + got);
      refuse(std::string(field_ == Field::kShape ? "shape" : "data_offsets") +
             ": wanted a list, got " + got);
    case State::kShape:
      refuse("shape: wanted integers >= 0, got " + got);
    case State::kOffsets:
      refuse("data_offsets: wanted integers >= 0, got " + got);
    case State::kMetadata:
      refuse("metadata: wanted a string, got " + got);
  }
  return false;
}

bool HeaderHandler::number_unsigned(uint64_t value) {
  if (state_ == State::kShape) {
    if (value > static_cast<uint64_t>(std::numeric_limits<int64_t>::max())) {
      refuse(detail::concat("shape: dimension ", value, " is over 2^63 - 1"));
    }
    if (shape_.size() == kMaxDims) refuse(detail::concat("shape: over ", kMaxDims, " dimensions"));
    shape_.push_back(static_cast<int64_t>(value));
    return true;
  }
  if (state_ == State::kOffsets) {
    if (offsets_.size() == 2) refuse("data_offsets: wanted 2 integers, got more");
    offsets_.push_back(value);
    return true;
  }
  return wrong("the number " + std::to_string(value));
}

bool HeaderHandler::string(std::string& value) {
  if (state_ == State::kTensor && field_ == Field::kDtype) {
    type_ = find_type(value);
    if (!type_) refuse("dtype: the format has no type " + shown(value));
    return true;
  }
  if (state_ == State::kMetadata) {
    header_.metadata[name_] = value;
    return true;
  }
  return wrong("a string");
}

bool HeaderHandler::start_object(size_t) {
  if (state_ == State::kTop) {
    state_ = State::kRoot;
  } else if (state_ == State::kRoot) {
    const bool metadata = name_ == kMetadataKey;
    state_ = metadata ? State::kMetadata : State::kTensor;
    field_ = Field::kNone;
    type_ = nullptr;
    has_shape_ = has_offsets_ = false;
    shape_.clear();
    offsets_.clear();
  } else {
    return wrong("an object");
  }
  return true;
}

bool HeaderHandler::key(std::string& name) {
  if (state_ == State::kTensor) {
    open_field(name);
    return true;
  }
  name_ = name;
  if (state_ == State::kMetadata) {
    if (header_.metadata.count(name)) refuse("metadata: the key stands twice");
    return true;
  }
  if (name == kMetadataKey) {
    if (seen_metadata_) refuse("stands twice");
    seen_metadata_ = true;
    return true;
  }
  if (const char* reason = refuse_name(name)) {
    throw FileError(path_ + ": tensor name " + shown(name) + ": " + reason);
  }
  if (header_.entries.count(name)) refuse("the tensor stands twice");
  return true;
}

void HeaderHandler::open_field(const std::string& name) {
  const auto once = [&](bool seen) {
    if (seen) refuse("field " + shown(name) + " stands twice");
  };
  if (name == "dtype") {
    once(type_ != nullptr);
    field_ = Field::kDtype;
  } else if (name == "shape") {
    once(has_shape_);
    has_shape_ = true;
    field_ = Field::kShape;
  } else if (name == "data_offsets") {
    once(has_offsets_);
    has_offsets_ = true;
    field_ = Field::kOffsets;
  } else {
    refuse("unknown field " + shown(name));
  }
}

bool HeaderHandler::start_array(size_t) {
  if (state_ != State::kTensor || field_ == Field::kDtype) return wrong("a list");
  state_ = field_ == Field::kShape ? State::kShape : State::kOffsets;
  return true;
}

bool HeaderHandler::end_array() {
  state_ = State::kTensor;
  return true;
}

bool HeaderHandler::end_object() {
  if (state_ == State::kTensor) finish_tensor();
  state_ = state_ == State::kRoot ? State::kDone : State::kRoot;
  return true;
}

void HeaderHandler::finish_tensor() {
  if (!type_) refuse("dtype is missing");
  if (!has_shape_) refuse("shape is missing");
  if (!has_offsets_) refuse("data_offsets is missing");
  if (offsets_.size() != 2) {
    refuse(detail::concat("data_offsets: wanted 2 integers, got ", offsets_.size()));
  }
  const auto [begin, end] = std::pair(offsets_[0], offsets_[1]);
  if (begin > end) refuse(detail::concat("data_offsets: ", begin, " is after ", end));
  // The product skips zeros, so [0, 2^62, 2^62] is refused like [2^62, 2^62].
  uint64_t bits = static_cast<uint64_t>(type_->bits);
  bool empty = false;
  for (const int64_t size : shape_) {
    empty |= size == 0;
    if (size != 0 && __builtin_mul_overflow(bits, static_cast<uint64_t>(size), &bits)) {
      refuse("shape: the number of bits overflows 64 bits");
    }
  }
  if (empty) bits = 0;
  if (bits % 8 != 0) refuse(detail::concat("shape: ", bits, " bits do not fill whole bytes"));
  if (bits / 8 != end - begin) {
    refuse(detail::concat(
        "shape and dtype take ", bits / 8, " bytes, data_offsets give ", end - begin));
  }
  header_.entries.emplace(name_, TensorEntry{type_->scalar, type_->name, shape_, begin, end});
}

// Tensors in the order of their bytes must follow each other without gap or overlap, and end at the
// file's end.
void check_coverage(const std::string& path,
                    const std::map<std::string, TensorEntry>& entries,
                    uint64_t num_data_bytes) {
  std::vector<std::pair<const std::string*, const TensorEntry*>> order;
  order.reserve(entries.size());
  for (const auto& [name, entry] : entries) order.emplace_back(&name, &entry);
  std::sort(order.begin(), order.end(), [](const auto& a, const auto& b) {
    return std::pair(a.second->begin, a.second->end) < std::pair(b.second->begin, b.second->end);
  });
  uint64_t expected = 0;
  for (const auto& [name, entry] : order) {
    if (entry->end > num_data_bytes) {
      throw FileError(detail::concat(path,
                                     ": ",
                                     shown(*name),
                                     ": data_offsets: end ",
                                     entry->end,
                                     " is beyond the ",
                                     num_data_bytes,
                                     " bytes of data in the file"));
    }
    if (entry->begin != expected) {
      throw FileError(detail::concat(
          path,
          ": ",
          shown(*name),
          ": data_offsets: begin at ",
          entry->begin,
          entry->begin > expected ? " leave a hole after " : " overlap the data up to ",
          expected));
    }
    expected = entry->end;
  }
  if (expected != num_data_bytes) {
    throw FileError(detail::concat(path,
                                   ": header: tensors end at byte ",
                                   expected,
                                   ", the file holds ",
                                   num_data_bytes,
                                   " bytes of data"));
  }
}

}  // namespace

const char* refuse_name(std::string_view name) {
  if (name.empty()) return "a name must not be empty";
  if (name.size() > kMaxNameBytes) return "a name has at most 1024 bytes";
  if (name == "." || name == "..") return "a name must not be a relative path";
  for (const char c : name) {
    if (c == '/') return "a name must not contain '/'";
    if (static_cast<unsigned char>(c) < 0x20 || c == 0x7f)
      return "a name must not contain control characters";
  }
  return nullptr;
}

SafetensorsHeader parse_header(const std::string& path,
                               std::string_view text,
                               uint64_t num_data_bytes) {
  const auto refuse = [&](const std::string& reason) {
    throw FileError(path + ": header: " + reason);
  };
  if (text.empty() || text.front() != '{') refuse("must start with '{'");
  // The parser takes a NUL byte for the end of the text.
  if (const size_t nul = text.find('\0'); nul != std::string_view::npos) {
    refuse(detail::concat("NUL at byte ", nul));
  }
  const char last = text[text.find_last_not_of(' ')];
  if (last == '\n' || last == '\t' || last == '\r') refuse("padded by something other than spaces");

  SafetensorsHeader header;
  HeaderHandler handler(path, header);
  Json::sax_parse(text.begin(), text.end(), &handler);
  check_coverage(path, header.entries, num_data_bytes);
  return header;
}

}  // namespace banyan::io
