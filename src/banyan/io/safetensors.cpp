// Reading: one open file, positional reads into fresh tensors. Nothing is mapped, so a file that is
// cut or replaced while it is open gives an error, not a signal.
#include "banyan/io/safetensors.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/ne.h>
#include <unistd.h>

#include <bit>

#include "banyan/core/error.h"
#include "banyan/io/posix_file.h"
#include "banyan/io/safetensors_header.h"

namespace banyan::io {

static_assert(std::endian::native == std::endian::little, "safetensors data is little-endian");

SafetensorsFile::SafetensorsFile(const std::string& path) : path_(path) {
  uint64_t num_bytes = 0;
  FileDescriptor file = open_regular(path, &num_bytes);
  uint64_t header_bytes = 0;
  if (num_bytes < sizeof(header_bytes)) {
    throw FileError(detail::concat(
        path, ": header length: the file has ", num_bytes, " bytes, wanted at least 8"));
  }
  read_exactly(file.get(), path, 0, &header_bytes, sizeof(header_bytes));
  const uint64_t rest = num_bytes - sizeof(header_bytes);
  if (header_bytes == 0) throw FileError(path + ": header length: is 0");
  if (header_bytes > kMaxHeaderBytes) {
    throw FileError(detail::concat(
        path, ": header length: ", header_bytes, " is over the limit of ", kMaxHeaderBytes));
  }
  if (header_bytes > rest) {
    throw FileError(detail::concat(
        path, ": header length: ", header_bytes, " is beyond the ", rest, " bytes that follow it"));
  }
  std::string text(header_bytes, '\0');
  read_exactly(file.get(), path, sizeof(header_bytes), text.data(), text.size());
  SafetensorsHeader header = parse_header(path, text, rest - header_bytes);
  entries_ = std::move(header.entries);
  metadata_ = std::move(header.metadata);
  data_begin_ = sizeof(header_bytes) + header_bytes;
  fd_ = file.release();
}

SafetensorsFile::~SafetensorsFile() {
  if (fd_ >= 0) ::close(fd_);
}

const TensorEntry& SafetensorsFile::entry(const std::string& name) const {
  const auto found = entries_.find(name);
  if (found == entries_.end())
    throw FileError(path_ + ": " + name + ": the file holds no such tensor");
  return found->second;
}

// The tensor is [before, dim, behind]: a run of `dim` is one piece of bytes for each of `before`.
at::Tensor SafetensorsFile::read_part(const std::string& name,
                                      int64_t dim,
                                      int64_t begin,
                                      int64_t count) const {
  const TensorEntry& stored = entry(name);
  std::vector<int64_t> shape = stored.shape;
  const auto element = static_cast<int64_t>(c10::elementSize(stored.dtype));
  int64_t before = 1;
  int64_t behind = element;
  for (int64_t d = 0; d < dim; ++d) before *= shape.at(d);
  for (size_t d = dim + 1; d < shape.size(); ++d) behind *= shape[d];
  const int64_t whole = shape.at(dim);
  BANYAN_ASSERT(begin >= 0 && count >= 0 && begin + count <= whole &&
                    stored.end - stored.begin == static_cast<uint64_t>(before * whole * behind),
                "safetensors: part of ",
                name);
  shape[dim] = count;
  at::Tensor tensor = at::empty(shape, stored.dtype);
  auto* to = static_cast<char*>(tensor.data_ptr());
  for (int64_t i = 0; i < before; ++i) {
    read_exactly(fd_,
                 path_,
                 data_begin_ + stored.begin + (i * whole + begin) * behind,
                 to + i * count * behind,
                 static_cast<size_t>(count * behind));
  }
  return tensor;
}

at::Tensor SafetensorsFile::read(const std::string& name) const {
  const TensorEntry& entry = this->entry(name);
  const auto num_bytes = static_cast<int64_t>(entry.end - entry.begin);
  const bool raw = entry.dtype == at::kByte && std::string_view(entry.stored) != "U8";
  at::Tensor tensor = at::empty(raw ? std::vector<int64_t>{num_bytes} : entry.shape, entry.dtype);
  read_exactly(
      fd_, path_, data_begin_ + entry.begin, tensor.data_ptr(), static_cast<size_t>(num_bytes));
  // A bool in memory is 0 or 1; the format allows any byte.
  return entry.dtype == at::kBool ? tensor.view(at::kByte).ne(0) : tensor;
}

}  // namespace banyan::io
