#include "banyan/checkpoint/state_reader.h"

#include <ATen/ops/empty.h>

#include <algorithm>
#include <set>

#include "banyan/core/error.h"

namespace banyan::checkpoint {
namespace {

using ::banyan::detail::concat;

[[noreturn]] void refuse(const std::string& file,
                         const std::string& tensor,
                         const std::string& why) {
  throw FileError(concat(file, ": ", tensor, ": ", why));
}

int64_t numel_of(const std::vector<int64_t>& shape) {
  int64_t numel = 1;
  for (const int64_t size : shape) numel *= size;
  return numel;
}

void check_type(const io::SafetensorsFile& file,
                const io::TensorEntry& entry,
                const WantedTensor& wanted) {
  if (wanted.dtype == entry.dtype) return;
  refuse(file.path(),
         wanted.name,
         concat("type: the model has ", wanted.dtype, ", the file ", entry.dtype));
}

void check_shape(const std::string& file,
                 const std::vector<int64_t>& found,
                 const WantedTensor& wanted) {
  if (wanted.shape == found) return;
  refuse(file,
         wanted.name,
         concat("shape: the model has ",
                at::IntArrayRef(wanted.shape),
                ", the file ",
                at::IntArrayRef(found)));
}

}  // namespace

StateReader::StateReader(const std::string& path,
                         const Manifest& manifest,
                         const std::vector<WantedTensor>& wanted) {
  if (manifest.is_in_pieces()) {
    open_pieces(path, manifest, wanted);
  } else {
    open_whole(path, wanted);
  }
}

void StateReader::open_whole(const std::string& path, const std::vector<WantedTensor>& wanted) {
  std::map<std::string, size_t> num_wanted;
  for (const WantedTensor& each : wanted) {
    std::unique_ptr<io::SafetensorsFile>& file = files_[each.file];
    if (!file) file = std::make_unique<io::SafetensorsFile>(path + "/" + each.file);
    ++num_wanted[each.file];
    const auto found = file->entries().find(each.name);
    if (found == file->entries().end()) refuse(file->path(), each.name, "missing");
    check_shape(file->path(), found->second.shape, each);
    check_type(*file, found->second, each);
    places_[each.name] = {each.shape, {}, each.file, {{each.file, 0, numel_of(each.shape)}}};
  }
  for (const auto& [name, file] : files_) {
    if (file->entries().size() == num_wanted[name]) continue;
    throw FileError(concat(
        file->path(), ": wanted ", num_wanted[name], " tensors, got ", file->entries().size()));
  }
}

// A piece is a 1-D tensor under the name of the whole.
void StateReader::open_pieces(const std::string& path,
                              const Manifest& manifest,
                              const std::vector<WantedTensor>& wanted) {
  const std::string where = path + "/" + kManifestFile;
  for (const WantedTensor& each : wanted) {
    const auto found = manifest.tensors.find(each.name);
    if (found == manifest.tensors.end()) refuse(where, each.name, "missing");
    TensorPlace place = found->second;
    check_shape(where, place.global_shape, each);
    std::sort(place.pieces.begin(), place.pieces.end(), [](const Piece& a, const Piece& b) {
      return a.begin < b.begin;
    });
    int64_t next = 0;
    for (const Piece& piece : place.pieces) {
      if (!manifest.files.contains(piece.file)) {
        refuse(where, each.name, concat("no ", piece.file, " among the files"));
      }
      std::unique_ptr<io::SafetensorsFile>& file = files_[piece.file];
      if (!file) file = std::make_unique<io::SafetensorsFile>(path + "/" + piece.file);
      const auto entry = file->entries().find(each.name);
      if (entry == file->entries().end()) refuse(file->path(), each.name, "missing");
      check_type(*file, entry->second, each);
      if (piece.begin != next || entry->second.shape != std::vector<int64_t>{piece.count}) {
        refuse(
            file->path(),
            each.name,
            concat("wanted the numbers from ", next, ", got ", piece.count, " from ", piece.begin));
      }
      next += piece.count;
    }
    if (next != numel_of(each.shape)) {
      refuse(where, each.name, concat("wanted ", numel_of(each.shape), " numbers, got ", next));
    }
    places_[each.name] = std::move(place);
  }
  if (manifest.tensors.size() != wanted.size()) {
    throw FileError(
        concat(where, ": wanted ", wanted.size(), " tensors, got ", manifest.tensors.size()));
  }
}

at::Tensor StateReader::read(const std::string& name) const {
  const TensorPlace& place = places_.at(name);
  if (place.pieces.size() == 1) {
    return files_.at(place.pieces[0].file)->read(name).view(place.global_shape);
  }
  return read_run(name, 0, numel_of(place.global_shape)).view(place.global_shape);
}

at::Tensor StateReader::read_part(const std::string& name,
                                  int64_t dim,
                                  int64_t begin,
                                  int64_t count) const {
  return read(name).narrow(dim, begin, count);
}

at::Tensor StateReader::read_run(const std::string& name, int64_t begin, int64_t count) const {
  const std::vector<Piece>& pieces = places_.at(name).pieces;
  at::Tensor out;
  for (const Piece& piece : pieces) {
    const int64_t from = std::max(begin, piece.begin);
    const int64_t to = std::min(begin + count, piece.begin + piece.count);
    if (from >= to) continue;
    const at::Tensor read = files_.at(piece.file)->read(name).view({-1});
    if (!out.defined()) out = at::empty({count}, read.options());
    out.narrow(0, from - begin, to - from).copy_(read.narrow(0, from - piece.begin, to - from));
  }
  return out;
}

}  // namespace banyan::checkpoint
