#include "banyan/checkpoint/manifest.h"

#include <algorithm>
#include <filesystem>

#include "banyan/core/error.h"
#include "banyan/io/files.h"
#include "banyan/io/json.h"

namespace banyan::checkpoint {
namespace {

namespace fs = std::filesystem;
using ::banyan::detail::concat;
using io::Json;

constexpr int64_t kFormat = 1;
constexpr const char* kSeal = "sha256";

// A field of a JSON object, of the wanted type.
template <typename T>
T field(const Json& object, const std::string& name, const std::string& where) {
  const auto found = object.is_object() ? object.find(name) : object.end();
  if (!object.is_object() || found == object.end()) {
    throw FileError(concat(where, ": ", name, ": missing"));
  }
  try {
    return found->template get<T>();
  } catch (const Json::exception&) {
    throw FileError(concat(where, ": ", name, ": not of the type that this version writes"));
  }
}

// Names come from a file: only plain relative paths inside the checkpoint are opened.
bool is_inside(const std::string& name) {
  const fs::path path(name);
  if (name.empty() || path.is_absolute() || name.find('\0') != std::string::npos) return false;
  return std::none_of(path.begin(), path.end(), [](const fs::path& part) {
    return part.empty() || part == "." || part == "..";
  });
}

Json to_json(const TensorPlace& place) {
  if (place.pieces.empty()) {
    return {{"global_shape", place.global_shape}, {"offset", place.offset}, {"file", place.file}};
  }
  Json pieces = Json::array();
  for (const Piece& piece : place.pieces) {
    pieces.push_back({{"file", piece.file}, {"begin", piece.begin}, {"count", piece.count}});
  }
  return {{"global_shape", place.global_shape}, {"pieces", pieces}};
}

TensorPlace place_from(const Json& place, const std::string& where) {
  TensorPlace out;
  out.global_shape = field<std::vector<int64_t>>(place, "global_shape", where);
  if (!place.contains("pieces")) {
    out.offset = field<std::vector<int64_t>>(place, "offset", where);
    out.file = field<std::string>(place, "file", where);
    return out;
  }
  for (const Json& piece : field<std::vector<Json>>(place, "pieces", where)) {
    out.pieces.push_back({field<std::string>(piece, "file", where),
                          field<int64_t>(piece, "begin", where),
                          field<int64_t>(piece, "count", where)});
  }
  return out;
}

Json to_json(const Manifest& manifest) {
  Json files = Json::object();
  for (const auto& [name, hash] : manifest.files) {
    files[name] = {{"bytes", hash.num_bytes}, {"sha256", hash.sha256}};
  }
  Json tensors = Json::object();
  for (const auto& [name, place] : manifest.tensors) tensors[name] = to_json(place);
  const TrainerState& trainer = manifest.trainer;
  Json state = {{"optimizer_steps", manifest.optimizer_steps},
                {"skipped_in_a_row", trainer.skipped_in_a_row},
                {"extra", trainer.extra}};
  if (!trainer.unfinished.empty()) state["unfinished"] = trainer.unfinished;
  if (trainer.kl_coef) state["kl_coef"] = *trainer.kl_coef;
  return {{"format", kFormat},
          {"step", trainer.global_step},
          {"sequence", manifest.sequence},
          {"files", files},
          {"tensors", tensors},
          {"trainer", state}};
}

// The manifest's own hash: of its compact text without that field.
std::string seal_of(const Json& json) {
  const std::string text = json.dump();
  io::Sha256 hash;
  hash.update(text.data(), text.size());
  return hash.hex();
}

Json without_seal(Json json, const std::string& where) {
  const auto wanted = field<std::string>(json, kSeal, where);
  json.erase(kSeal);
  const std::string got = seal_of(json);
  if (wanted != got) throw FileError(concat(where, ": sha256: wanted ", wanted, ", got ", got));
  return json;
}

void check_hash(const std::string& path, const io::FileHash& wanted) {
  if (fs::is_symlink(path)) throw FileError(concat(path, ": wanted a file, got a link"));
  std::error_code error;
  const uint64_t num_bytes = fs::file_size(path, error);
  if (error) throw FileError(concat(path, ": ", error.message()));
  if (num_bytes != wanted.num_bytes) {
    throw FileError(concat(path, ": size: wanted ", wanted.num_bytes, " bytes, got ", num_bytes));
  }
  const io::FileHash got = io::hash_file(path);
  if (got.sha256 != wanted.sha256) {
    throw FileError(concat(path, ": sha256: wanted ", wanted.sha256, ", got ", got.sha256));
  }
}

}  // namespace

void write_manifest(const std::string& path, Manifest manifest) {
  manifest.files.clear();
  for (const auto& entry : fs::recursive_directory_iterator(path)) {
    if (!entry.is_regular_file()) continue;
    const std::string name = entry.path().lexically_relative(path).generic_string();
    manifest.files[name] = io::hash_file(entry.path().string());
  }
  Json json = to_json(manifest);
  json[kSeal] = seal_of(json);
  io::write_text_atomic(path + "/" + kManifestFile, json.dump(1) + "\n");
}

Manifest read_manifest(const std::string& path) {
  const std::string where = path + "/" + kManifestFile;
  const Json json = without_seal(io::parse_json(io::read_text(where), where), where);
  const auto format = field<int64_t>(json, "format", where);
  if (format != kFormat) {
    throw FileError(concat(where, ": format: wanted ", kFormat, ", got ", format));
  }
  Manifest manifest;
  manifest.sequence = field<int64_t>(json, "sequence", where);
  manifest.trainer.global_step = field<int64_t>(json, "step", where);
  const auto trainer = field<Json>(json, "trainer", where);
  manifest.optimizer_steps = field<int64_t>(trainer, "optimizer_steps", where);
  manifest.trainer.skipped_in_a_row = field<int64_t>(trainer, "skipped_in_a_row", where);
  manifest.trainer.extra = field<std::string>(trainer, "extra", where);
  if (trainer.contains("unfinished")) {
    manifest.trainer.unfinished = field<std::string>(trainer, "unfinished", where);
  }
  if (trainer.contains("kl_coef")) {
    manifest.trainer.kl_coef = field<double>(trainer, "kl_coef", where);
  }
  const auto files = field<Json>(json, "files", where);
  for (const auto& [name, hash] : files.items()) {
    if (!is_inside(name)) {
      throw FileError(concat(where, ": files: '", io::printable(name), "' leaves the folder"));
    }
    manifest.files[name] = {field<uint64_t>(hash, "bytes", where),
                            field<std::string>(hash, "sha256", where)};
  }
  const auto tensors = field<Json>(json, "tensors", where);
  for (const auto& [name, place] : tensors.items()) {
    manifest.tensors[name] = place_from(place, where);
  }
  if (manifest.is_in_pieces()) return manifest;
  for (const char* name : {kMasterFile, kMomentsFile}) {
    if (!manifest.files.contains(name)) throw FileError(concat(where, ": files: no ", name));
  }
  return manifest;
}

void verify_files(const std::string& path, const Manifest& manifest) {
  for (const auto& [name, hash] : manifest.files) check_hash(path + "/" + name, hash);
}

}  // namespace banyan::checkpoint
