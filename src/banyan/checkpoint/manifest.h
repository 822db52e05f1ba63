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

// Where a tensor of the whole model lies; one rank holds all of it today, so offsets are zeros.
struct TensorPlace {
  std::vector<int64_t> global_shape;
  std::vector<int64_t> offset;
  std::string file;
};

struct Manifest {
  int64_t sequence = 0;  // saves into this folder so far: the newest checkpoint has the largest
  int64_t optimizer_steps = 0;
  TrainerState trainer;
  std::map<std::string, io::FileHash> files;  // relative path -> size and hash, manifest left out
  std::map<std::string, TensorPlace> tensors;
};

// Hashes every file under `path` into manifest.files and writes the manifest. Throws FileError.
void write_manifest(const std::string& path, Manifest manifest);

// Reads the manifest without looking at the files. Throws FileError.
Manifest read_manifest(const std::string& path);

// Compares every file with the manifest. Throws FileError "<file>: wanted ..., got ...".
void verify_files(const std::string& path, const Manifest& manifest);

}  // namespace banyan::checkpoint
