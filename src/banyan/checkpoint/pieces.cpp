#include "banyan/checkpoint/pieces.h"

#include "banyan/core/error.h"
#include "banyan/io/safetensors.h"

namespace banyan::checkpoint {

parallel::Fsdp* parts_of(const ParamTable& params) {
  return dynamic_cast<parallel::Fsdp*>(params.keeper());
}

std::string piece_file(int64_t rank, int64_t num_ranks) {
  return ::banyan::detail::concat("state/rank_", rank, "_of_", num_ranks, ".safetensors");
}

void write_pieces(const std::string& path, parallel::Fsdp& fsdp, optim::AdamW& optimizer) {
  if (!fsdp.replica().is_first()) return;
  const int64_t rank = fsdp.shard().rank();
  const std::vector<Param>& parts = fsdp.parts().params();
  std::vector<io::NamedTensor> tensors;
  for (const parallel::OwnedRange& own : fsdp.owned(rank)) {
    const std::string& name = fsdp.whole().params()[own.param].name;
    const auto run = [&](const at::Tensor& part) { return part.narrow(0, own.at, own.count); };
    tensors.push_back({name, run(parts[own.unit].master)});
    tensors.push_back({first_moment(name), run(optimizer.first_moments()[own.unit])});
    tensors.push_back({second_moment(name), run(optimizer.second_moments()[own.unit])});
  }
  io::write_safetensors(path + "/" + piece_file(rank, fsdp.shard().size()), tensors);
}

void add_places(const parallel::Fsdp& fsdp, Manifest& manifest) {
  const int64_t size = fsdp.shard().size();
  for (int64_t rank = 0; rank < size; ++rank) {
    const std::string file = piece_file(rank, size);
    for (const parallel::OwnedRange& own : fsdp.owned(rank)) {
      const Param& param = fsdp.whole().params()[own.param];
      for (const std::string& name :
           {param.name, first_moment(param.name), second_moment(param.name)}) {
        TensorPlace& place = manifest.tensors[name];
        place.global_shape = param.master.sizes().vec();
        place.pieces.push_back({file, own.begin, own.count});
      }
    }
  }
}

}  // namespace banyan::checkpoint
