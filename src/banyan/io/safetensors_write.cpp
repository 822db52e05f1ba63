// Writing: names sorted, compact header padded by spaces to a multiple of 8 bytes, one tensor in
// flight at a time.
#include <fcntl.h>
#include <unistd.h>

#include <algorithm>

#include "banyan/core/error.h"
#include "banyan/io/dtype.h"
#include "banyan/io/json.h"
#include "banyan/io/posix_file.h"
#include "banyan/io/safetensors.h"
#include "banyan/io/safetensors_header.h"

namespace banyan::io {
namespace {

std::vector<const NamedTensor*> sorted_by_name(const std::vector<NamedTensor>& tensors) {
  std::vector<const NamedTensor*> order;
  for (const NamedTensor& tensor : tensors) order.push_back(&tensor);
  std::sort(
      order.begin(), order.end(), [](const auto* a, const auto* b) { return a->name < b->name; });
  for (size_t i = 0; i < order.size(); ++i) {
    const char* reason = refuse_name(order[i]->name);
    BANYAN_CHECK(!reason, "[safetensors] tensor name '", order[i]->name, "': ", reason);
    BANYAN_CHECK(i == 0 || order[i]->name != order[i - 1]->name,
                 "[safetensors] tensor '",
                 order[i]->name,
                 "' is given twice");
  }
  return order;
}

std::string header_text(const std::vector<const NamedTensor*>& order,
                        const std::map<std::string, std::string>& metadata) {
  std::string text = "{";
  if (!metadata.empty()) text += "\"__metadata__\":" + Json(metadata).dump();
  uint64_t begin = 0;
  for (const NamedTensor* named : order) {
    const StoredType* type = find_type(stored_type(*named));
    BANYAN_CHECK(type,
                 "[safetensors] tensor '",
                 named->name,
                 "': the format has no type for ",
                 stored_type(*named));
    const uint64_t end = begin + stored_bytes(*named);
    text += detail::concat(text.size() > 1 ? "," : "",
                           Json(named->name).dump(),
                           ":{\"dtype\":\"",
                           type->name,
                           "\",\"shape\":",
                           Json(named->tensor.sizes().vec()).dump(),
                           ",\"data_offsets\":[",
                           begin,
                           ",",
                           end,
                           "]}");
    begin = end;
  }
  text += "}";
  text.resize((text.size() + 7) / 8 * 8, ' ');
  BANYAN_CHECK(text.size() <= kMaxHeaderBytes,
               "[safetensors] header: wanted at most ",
               kMaxHeaderBytes,
               " bytes, got ",
               text.size(),
               "; write fewer tensors into one file");
  return text;
}

}  // namespace

at::ScalarType stored_type(const NamedTensor& named) {
  return named.stored == at::ScalarType::Undefined ? named.tensor.scalar_type() : named.stored;
}

uint64_t stored_bytes(const NamedTensor& named) {
  return static_cast<uint64_t>(named.tensor.numel()) * c10::elementSize(stored_type(named));
}

void write_safetensors(const std::string& path,
                       const std::vector<NamedTensor>& tensors,
                       const std::map<std::string, std::string>& metadata) {
  const std::vector<const NamedTensor*> order = sorted_by_name(tensors);
  const std::string header = header_text(order, metadata);
  FileDescriptor file(::open(path.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666));
  if (file.get() < 0) throw_system_error(path, "cannot create");
  try {
    const uint64_t header_bytes = header.size();
    write_all(file.get(), path, &header_bytes, sizeof(header_bytes));
    write_all(file.get(), path, header.data(), header.size());
    for (const NamedTensor* named : order) {
      const at::Tensor plain = named->tensor.to(at::kCPU, stored_type(*named)).contiguous();
      write_all(file.get(), path, plain.data_ptr(), plain.nbytes());
    }
    sync_file(file.get(), path);
    if (!file.close()) throw_system_error(path, "cannot close");
  } catch (...) {
    ::unlink(path.c_str());
    throw;
  }
}

}  // namespace banyan::io
