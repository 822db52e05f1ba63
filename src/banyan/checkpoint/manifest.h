// state/manifest.json of a checkpoint: what was written, so that a reader can tell whether it is
// still there.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "banyan/checkpoint/checkpoint.h"
#include "banyan/io/sha256.h"

namespace banyan::checkpoint {

inline constexpr const char* kManifestFile = "state/manifest.json";
inline constexpr const char* kMasterFile = "state/master.safetensors";
inline constexpr const char* kMomentsFile = "state/moments.safetensors";
inline constexpr const char* kAheadFile = "state/ahead.bin";

// Numbers [begin, begin + count) of a tensor, row after row: a 1-D tensor of its name in `file`.
struct Piece {
  std::string file;
  int64_t begin = 0;
  int64_t count = 0;
};

// Where a tensor of the whole model lies: in one file, with an offset of zeros, or in the pieces of
// several ranks.
struct TensorPlace {
  std::vector<int64_t> global_shape;
  std::vector<int64_t> offset;
  std::string file;
  std::vector<Piece> pieces;
};

// The moments of a parameter, among the tensors.
inline std::string first_moment(const std::string& name) { return "m." + name; }
inline std::string second_moment(const std::string& name) { return "v." + name; }

struct Manifest {
  int64_t sequence = 0;  // saves into this folder so far: the newest checkpoint has the largest
  int64_t optimizer_steps = 0;
  TrainerState trainer;
  std::map<std::string, io::FileHash> files;  // relative path -> size and hash, manifest left out
  std::map<std::string, TensorPlace> tensors;

  bool is_in_pieces() const { return !tensors.empty() && !tensors.begin()->second.pieces.empty(); }
};

// Hashes every file under `path` into manifest.files and writes the manifest. Throws FileError.
void write_manifest(const std::string& path, Manifest manifest);

// Reads the manifest without looking at the files. Throws FileError.
Manifest read_manifest(const std::string& path);

// Compares every file with the manifest. Throws FileError "<file>: wanted ..., got ...".
void verify_files(const std::string& path, const Manifest& manifest);

}  // namespace banyan::checkpoint
