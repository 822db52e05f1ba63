// The weights of an HF directory: model.safetensors, or shards listed by
// model.safetensors.index.json
// ({"metadata": {"total_size": bytes}, "weight_map": {tensor: shard}}). Shard names come from a
// file, so only plain file names are taken, and index and shards must agree tensor by tensor.
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <optional>
#include <set>

#include "banyan/core/error.h"
#include "banyan/io/files.h"
#include "banyan/io/json.h"
#include "banyan/io/posix_file.h"
#include "banyan/io/safetensors.h"
#include "banyan/io/safetensors_header.h"

namespace banyan::io {
namespace {

constexpr const char* kSingleFile = "model.safetensors";
constexpr const char* kIndexFile = "model.safetensors.index.json";
constexpr size_t kMaxFileNameBytes = 255;

bool exists(const std::string& path) {
  struct stat status;
  return ::stat(path.c_str(), &status) == 0;
}

struct Index {
  std::map<std::string, std::string> shard_of;  // tensor -> file name
  std::optional<uint64_t> total_bytes;
};

void check_shard_name(const std::string& path,
                      const std::string& tensor,
                      const std::string& shard) {
  const char* reason = refuse_name(shard);
  if (!reason && shard.size() > kMaxFileNameBytes) reason = "a file name has at most 255 bytes";
  if (!reason && !shard.ends_with(".safetensors")) reason = "wanted a .safetensors file";
  if (reason) {
    throw FileError(detail::concat(path,
                                   ": ",
                                   printable(tensor),
                                   ": shard '",
                                   printable(shard),
                                   "' is not a plain file name of this folder: ",
                                   reason));
  }
}

Index read_index(const std::string& path) {
  const Json json = parse_json(read_text(path), path);
  if (!json.is_object() || !json.contains("weight_map") || !json["weight_map"].is_object()) {
    throw FileError(path + ": weight_map: wanted an object of tensor names and shard names");
  }
  Index index;
  for (const auto& [tensor, shard] : json["weight_map"].items()) {
    if (!shard.is_string())
      throw FileError(path + ": weight_map: " + printable(tensor) + ": wanted a shard name");
    check_shard_name(path, tensor, shard.get<std::string>());
    index.shard_of[tensor] = shard.get<std::string>();
  }
  if (index.shard_of.empty()) throw FileError(path + ": weight_map: names no tensor");
  if (json.contains("metadata") && json["metadata"].is_object() &&
      json["metadata"].contains("total_size")) {
    const Json& total = json["metadata"]["total_size"];
    if (!total.is_number() || !(total.get<double>() >= 0 && total.get<double>() < 0x1p63)) {
      throw FileError(path + ": metadata.total_size: wanted bytes, got " +
                      total.dump().substr(0, 80));
    }
    index.total_bytes = total.get<uint64_t>();
  }
  return index;
}

}  // namespace

HfWeights::HfWeights(const std::string& directory) : directory_(directory) {
  const std::string single = directory + "/" + kSingleFile;
  const std::string index_path = directory + "/" + kIndexFile;
  if (exists(single)) {
    files_.push_back(std::make_unique<SafetensorsFile>(single));
    for (const auto& [name, entry] : files_[0]->entries()) where_[name] = 0;
    return;
  }
  if (!exists(index_path)) {
    throw FileError(
        detail::concat(directory,
                       ": holds neither ",
                       kSingleFile,
                       " nor ",
                       kIndexFile,
                       " (.bin and .pt files are not read; save the model as safetensors)"));
  }
  const Index index = read_index(index_path);
  std::set<std::string> shards;
  for (const auto& [tensor, shard] : index.shard_of) shards.insert(shard);
  uint64_t total_bytes = 0;
  for (const std::string& shard : shards) {
    const std::string path = directory + "/" + shard;
    if (!exists(path)) throw FileError(path + ": shard is missing (" + kIndexFile + " names it)");
    files_.push_back(std::make_unique<SafetensorsFile>(path));
    for (const auto& [name, entry] : files_.back()->entries()) {
      const auto [other, fresh] = where_.emplace(name, files_.size() - 1);
      if (!fresh) {
        throw FileError(path + ": " + name + ": stands in " + files_[other->second]->path() +
                        " too");
      }
      const auto listed = index.shard_of.find(name);
      if (listed == index.shard_of.end() || listed->second != shard) {
        throw FileError(path + ": " + name + ": the index " +
                        (listed == index.shard_of.end() ? "does not list it"
                                                        : "expects it in " + listed->second));
      }
      total_bytes += entry.end - entry.begin;
    }
  }
  for (const auto& [tensor, shard] : index.shard_of) {
    if (!where_.count(tensor))
      throw FileError(directory + "/" + shard + ": " + tensor + ": is missing from its shard");
  }
  if (index.total_bytes && *index.total_bytes != total_bytes) {
    throw FileError(detail::concat(index_path,
                                   ": metadata.total_size: says ",
                                   *index.total_bytes,
                                   " bytes, the shards hold ",
                                   total_bytes));
  }
}

std::vector<std::string> HfWeights::names() const {
  std::vector<std::string> names;
  for (const auto& [name, file] : where_) names.push_back(name);
  return names;
}

bool HfWeights::contains(const std::string& name) const { return where_.count(name) != 0; }

const TensorEntry& HfWeights::entry(const std::string& name) const {
  const auto found = where_.find(name);
  if (found == where_.end())
    throw FileError(directory_ + ": " + name + ": no file holds this tensor");
  return files_[found->second]->entries().at(name);
}

const SafetensorsFile& HfWeights::file_of(const std::string& name,
                                          const std::vector<int64_t>& shape) const {
  const TensorEntry& stored = entry(name);
  const SafetensorsFile& file = *files_[where_.at(name)];
  if (stored.shape != shape) {
    throw FileError(detail::concat(file.path(),
                                   ": ",
                                   name,
                                   ": wanted shape ",
                                   at::IntArrayRef(shape),
                                   ", got ",
                                   at::IntArrayRef(stored.shape)));
  }
  return file;
}

at::Tensor HfWeights::read(const std::string& name, const std::vector<int64_t>& shape) const {
  return file_of(name, shape).read(name);
}

at::Tensor HfWeights::read_part(const std::string& name,
                                const std::vector<int64_t>& shape,
                                int64_t dim,
                                int64_t begin,
                                int64_t count) const {
  return file_of(name, shape).read_part(name, dim, begin, count);
}

void write_hf_weights(const std::string& directory,
                      const std::vector<NamedTensor>& tensors,
                      uint64_t max_shard_bytes) {
  const std::map<std::string, std::string> metadata = {{"format", "pt"}};
  std::vector<NamedTensor> sorted = tensors;
  std::sort(
      sorted.begin(), sorted.end(), [](const auto& a, const auto& b) { return a.name < b.name; });
  std::vector<std::vector<NamedTensor>> shards(1);
  uint64_t total_bytes = 0;
  uint64_t shard_bytes = 0;
  for (NamedTensor& named : sorted) {
    const uint64_t num_bytes = stored_bytes(named);
    if (!shards.back().empty() && shard_bytes + num_bytes > max_shard_bytes) {
      shards.emplace_back();
      shard_bytes = 0;
    }
    shard_bytes += num_bytes;
    total_bytes += num_bytes;
    shards.back().push_back(std::move(named));
  }
  if (shards.size() == 1) {
    write_safetensors(directory + "/" + kSingleFile, shards[0], metadata);
    return;
  }
  Json weight_map = Json::object();
  for (size_t i = 0; i < shards.size(); ++i) {
    char name[64];
    std::snprintf(name, sizeof(name), "model-%05zu-of-%05zu.safetensors", i + 1, shards.size());
    for (const NamedTensor& named : shards[i]) weight_map[named.name] = name;
    write_safetensors(directory + "/" + name, shards[i], metadata);
  }
  const Json index = {{"metadata", {{"total_size", total_bytes}}}, {"weight_map", weight_map}};
  write_text_atomic(directory + "/" + kIndexFile, index.dump(2) + "\n");
}

}  // namespace banyan::io
