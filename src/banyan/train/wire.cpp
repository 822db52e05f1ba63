#include "banyan/train/wire.h"

#include <ATen/ops/empty.h>

#include <algorithm>
#include <utility>

namespace banyan::train {

void WireWriter::put(const at::Tensor& tensor) {
  const int8_t kind = !tensor.defined() ? 0 : tensor.scalar_type() == at::kDouble ? 2 : 1;
  put(kind);
  if (kind == 0) return;
  BANYAN_ASSERT(
      tensor.dim() == 1, "a message takes 1-D tensors, got ", tensor.dim(), " dimensions");
  const at::Tensor wide = tensor.to(at::kCPU, kind == 2 ? at::kDouble : at::kFloat).contiguous();
  const auto num_bytes = static_cast<size_t>(wide.numel()) * wide.element_size();
  put(static_cast<int64_t>(wide.numel()));
  bytes_.append(static_cast<const char*>(wide.const_data_ptr()), num_bytes);
}

void WireReader::get(at::Tensor& tensor) {
  const auto kind = next<int8_t>();
  tensor = at::Tensor();
  if (kind == 0) return;
  const at::ScalarType dtype = kind == 2 ? at::kDouble : at::kFloat;
  const auto count = static_cast<int64_t>(get_size(kind == 2 ? sizeof(double) : sizeof(float)));
  tensor = at::empty({count}, dtype);
  take(tensor.mutable_data_ptr(), static_cast<size_t>(count) * tensor.element_size());
}

void add_new(std::vector<std::string> lines, std::vector<std::string>& to) {
  for (std::string& line : lines) {
    if (std::find(to.begin(), to.end(), line) == to.end()) to.push_back(std::move(line));
  }
}

void put_metrics(const algo::MetricMap& metrics, WireWriter& out) {
  out.put(static_cast<int64_t>(metrics.size()));
  for (const auto& [name, metric] : metrics) {
    out.put(name);
    out.put(metric);
  }
}

algo::MetricMap get_metrics(WireReader& in) {
  algo::MetricMap metrics;
  const auto size = in.next<int64_t>();
  for (int64_t i = 0; i < size; ++i) {
    auto name = in.next<std::string>();
    metrics[name] = in.next<algo::Metric>();
  }
  return metrics;
}

}  // namespace banyan::train
