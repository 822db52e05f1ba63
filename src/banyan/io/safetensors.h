// safetensors: u64 little-endian header length; JSON {name: {dtype, shape, data_offsets: [begin,
// end]},
// "__metadata__": {...}} with offsets from the byte after the header; raw little-endian row-major
// data. The reader checks everything before it allocates (reliability spec section 4) and never
// uses a name as a path.
#pragma once

#include <ATen/core/Tensor.h>

#include <map>
#include <memory>
#include <string>
#include <vector>

namespace banyan::io {

struct TensorEntry {
  at::ScalarType dtype = at::kFloat;  // kByte for the sub-byte types (F4, F6_*)
  const char* stored = "F32";         // the type's name in the file
  std::vector<int64_t> shape;
  uint64_t begin = 0;  // bytes from the start of the data
  uint64_t end = 0;
};

// An open file. Throws FileError "<path>: <tensor or header field>: <reason>".
class SafetensorsFile {
 public:
  explicit SafetensorsFile(const std::string& path);
  ~SafetensorsFile();

  const std::map<std::string, TensorEntry>& entries() const { return entries_; }
  const std::map<std::string, std::string>& metadata() const { return metadata_; }
  const std::string& path() const { return path_; }
  // A fresh tensor with the stored dtype and shape; sub-byte types come as their raw bytes, [end -
  // begin] kByte.
  at::Tensor read(const std::string& name) const;
  // [begin, begin + count) along `dim` of it; nothing else is read. No sub-byte types.
  at::Tensor read_part(const std::string& name, int64_t dim, int64_t begin, int64_t count) const;

 private:
  const TensorEntry& entry(const std::string& name) const;

  std::string path_;
  int fd_ = -1;
  uint64_t data_begin_ = 0;
  std::map<std::string, TensorEntry> entries_;
  std::map<std::string, std::string> metadata_;
};

struct NamedTensor {
  std::string name;
  at::Tensor tensor;
  // The type to write; Undefined: the tensor's own. Converted one tensor at a time while writing.
  at::ScalarType stored = at::ScalarType::Undefined;
};

// The type and the number of bytes that `named` takes in a file.
at::ScalarType stored_type(const NamedTensor& named);
uint64_t stored_bytes(const NamedTensor& named);

// Writes `path` (which must not exist) with names sorted, and fsyncs it. Tensors are made
// contiguous on the CPU one by one. Throws FileError with the system's reason (disk full, ...),
// leaving no file behind.
void write_safetensors(const std::string& path,
                       const std::vector<NamedTensor>& tensors,
                       const std::map<std::string, std::string>& metadata = {});

// All tensors of an HF directory: model.safetensors, or the shards that
// model.safetensors.index.json names. Each is read when asked for.
class HfWeights {
 public:
  explicit HfWeights(const std::string& directory);
  std::vector<std::string> names() const;
  bool contains(const std::string& name) const;
  const TensorEntry& entry(const std::string& name) const;
  // Throws FileError "<file>: <name>: ..." if missing or if the shape differs from `shape`.
  at::Tensor read(const std::string& name, const std::vector<int64_t>& shape) const;
  // The part [begin, begin + count) along `dim` of a tensor of that shape.
  at::Tensor read_part(const std::string& name,
                       const std::vector<int64_t>& shape,
                       int64_t dim,
                       int64_t begin,
                       int64_t count) const;

 private:
  const SafetensorsFile& file_of(const std::string& name, const std::vector<int64_t>& shape) const;

  std::vector<std::unique_ptr<SafetensorsFile>> files_;
  std::map<std::string, size_t> where_;
  std::string directory_;
};

// Writes shards of at most `max_shard_bytes` plus the index when there is more than one.
void write_hf_weights(const std::string& directory,
                      const std::vector<NamedTensor>& tensors,
                      uint64_t max_shard_bytes = 5'000'000'000);

}  // namespace banyan::io
