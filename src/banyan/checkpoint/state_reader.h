// Reads the state of one model in a checkpoint, however many ranks wrote it: whole tensors in two
// files, or runs of their numbers in one file per rank (manifest.h).
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "banyan/checkpoint/manifest.h"
#include "banyan/io/safetensors.h"

namespace banyan::checkpoint {

// A tensor that must be there.
struct WantedTensor {
  std::string file;  // of a checkpoint of whole tensors
  std::string name;
  std::vector<int64_t> shape;
  at::ScalarType dtype = at::kFloat;
};

class StateReader {
 public:
  // Opens the files of `manifest` below `path`. Throws FileError unless they hold exactly the
  // tensors of `wanted`, with these shapes and types, and every number of them once.
  StateReader(const std::string& path,
              const Manifest& manifest,
              const std::vector<WantedTensor>& wanted);

  at::Tensor read(const std::string& name) const;
  // Rows [begin, begin + count) of a tensor along `dim`.
  at::Tensor read_part(const std::string& name, int64_t dim, int64_t begin, int64_t count) const;
  // Numbers [begin, begin + count) of a tensor, row after row; 1-D.
  at::Tensor read_run(const std::string& name, int64_t begin, int64_t count) const;

 private:
  void open_whole(const std::string& path, const std::vector<WantedTensor>& wanted);
  void open_pieces(const std::string& path,
                   const Manifest& manifest,
                   const std::vector<WantedTensor>& wanted);

  std::map<std::string, std::unique_ptr<io::SafetensorsFile>> files_;
  std::map<std::string, TensorPlace> places_;  // whole tensors have one piece
};

}  // namespace banyan::checkpoint
