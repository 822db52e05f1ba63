#include "banyan/parallel/collectives.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <cstring>
#include <numeric>
#include <utility>

#include "banyan/core/error.h"

namespace banyan::parallel {
namespace {

at::ScalarType sum_type(const at::Tensor& tensor) {
  return tensor.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
}

std::string shape_of(const at::Tensor& tensor) {
  return detail::concat(tensor.sizes(), " ", at::toString(tensor.scalar_type()));
}

at::Tensor tensor_of(const std::string& bytes, int64_t size) {
  at::Tensor out = at::zeros({size}, at::kByte);
  if (!bytes.empty()) std::memcpy(out.data_ptr(), bytes.data(), bytes.size());
  return out;
}

int64_t bytes_of(const at::Tensor& tensor) { return tensor.numel() * tensor.element_size(); }

}  // namespace

Collectives::Collectives(std::string name,
                         std::vector<int64_t> ranks,
                         int64_t rank,
                         std::shared_ptr<Transport> transport)
    : name_(std::move(name)),
      ranks_(std::move(ranks)),
      rank_(rank),
      transport_(std::move(transport)) {
  BANYAN_ASSERT(!ranks_.empty() && rank >= 0 && rank < size(), "place ", rank, " of ", size());
  BANYAN_ASSERT(is_alone() || transport_ != nullptr, "group ", name_, " without a transport");
}

// What `call` throws comes out as RankError.
template <typename Call>
void Collectives::named(const char* op, const at::Tensor& tensor, const Call& call) const {
  try {
    call();
  } catch (const std::exception& error) {
    std::string others;
    for (int64_t i = 0; i < size(); ++i) {
      if (i == rank_) continue;
      others += detail::concat(others.empty() ? "" : ", ", ranks_[i]);
    }
    const std::string reason = error.what();
    throw RankError(detail::concat("[parallel] ",
                                   op,
                                   " of ",
                                   shape_of(tensor),
                                   " in group ",
                                   name_,
                                   ": rank ",
                                   ranks_[rank_],
                                   " waited for rank",
                                   size() > 2 ? "s " : " ",
                                   others,
                                   " in vain: ",
                                   reason.substr(0, reason.find('\n'))));
  }
}

template <typename Call>
void Collectives::run(const char* op, const at::Tensor& tensor, int64_t bytes, const Call& call) {
  named(op, tensor, call);
  Traffic& traffic = traffic_[op];
  ++traffic.calls;
  traffic.bytes += bytes;
}

at::Tensor Collectives::all_to_all(const at::Tensor& in,
                                   const std::vector<int64_t>& out_sizes,
                                   const std::vector<int64_t>& in_sizes) {
  if (is_alone()) return in;
  at::Tensor source = in.contiguous();
  std::vector<int64_t> shape = in.sizes().vec();
  shape[0] = std::accumulate(out_sizes.begin(), out_sizes.end(), int64_t{0});
  at::Tensor out = at::empty(shape, in.options());
  const int64_t rows = in.size(0);
  const int64_t row_bytes = rows == 0 ? 0 : bytes_of(in) / rows;
  run("all_to_all", in, (rows - in_sizes[rank_]) * row_bytes, [&] {
    transport_->all_to_all(out, source, out_sizes, in_sizes);
  });
  return out;
}

at::Tensor Collectives::all_gather(const at::Tensor& in) {
  std::vector<int64_t> shape = in.sizes().vec();
  shape.insert(shape.begin(), size());
  if (is_alone()) return in.reshape(shape);
  at::Tensor source = in.contiguous();
  at::Tensor out = at::empty(shape, in.options());
  run("all_gather", in, bytes_of(in) * (size() - 1), [&] {
    at::Tensor flat = out.view({-1});
    at::Tensor flat_in = source.view({-1});
    transport_->all_gather(flat, flat_in);
  });
  return out;
}

at::Tensor Collectives::reduce_scatter_sum(const at::Tensor& in) {
  BANYAN_ASSERT(in.dim() == 1 && in.numel() % size() == 0,
                "reduce_scatter_sum of ",
                shape_of(in),
                " over ",
                size());
  if (is_alone()) return in.to(sum_type(in));
  const int64_t piece = in.numel() / size();
  const std::vector<int64_t> sizes(size(), piece);
  const at::Tensor pieces = all_to_all(in, sizes, sizes).view({size(), piece});
  at::Tensor sum = pieces[0].to(sum_type(in), /*non_blocking=*/false, /*copy=*/true);
  for (int64_t r = 1; r < size(); ++r) sum.add_(pieces[r]);
  return sum;
}

void Collectives::all_reduce_sum(at::Tensor& tensor) {
  if (is_alone() || tensor.numel() == 0) return;
  BANYAN_ASSERT(tensor.is_contiguous(), "all_reduce_sum of a tensor that is not contiguous");
  at::Tensor flat = tensor.view({-1});
  const int64_t padded = (flat.numel() + size() - 1) / size() * size();
  at::Tensor in = flat;
  if (padded != flat.numel()) {
    in = at::zeros({padded}, flat.options());
    in.narrow(0, 0, flat.numel()).copy_(flat);
  }
  const at::Tensor sum = reduce_scatter_sum(in);
  const at::Tensor whole = all_gather(sum.to(tensor.scalar_type())).view({-1});
  flat.copy_(whole.narrow(0, 0, flat.numel()));
}

void Collectives::broadcast(at::Tensor& tensor, int64_t root) {
  if (is_alone() || tensor.numel() == 0) return;
  BANYAN_ASSERT(tensor.is_contiguous(), "broadcast of a tensor that is not contiguous");
  run("broadcast", tensor, rank_ == root ? bytes_of(tensor) : 0, [&] {
    transport_->broadcast(tensor, root);
  });
}

void Collectives::send(const at::Tensor& tensor, int64_t to, int64_t tag) {
  BANYAN_ASSERT(to != rank_, "send to oneself");
  at::Tensor source = tensor.contiguous();
  run("send", tensor, bytes_of(tensor), [&] { transport_->send(source, to, tag); });
}

std::function<void()> Collectives::start_send(const at::Tensor& tensor, int64_t to, int64_t tag) {
  BANYAN_ASSERT(to != rank_, "send to oneself");
  at::Tensor source = tensor.contiguous();
  std::function<void()> wait;
  run("send", tensor, bytes_of(tensor), [&] { wait = transport_->start_send(source, to, tag); });
  return [this, source, wait] { named("send", source, wait); };
}

void Collectives::receive(at::Tensor& tensor, int64_t from, int64_t tag) {
  BANYAN_ASSERT(from != rank_ && tensor.is_contiguous(), "receive from oneself, or into a view");
  run("receive", tensor, 0, [&] { transport_->receive(tensor, from, tag); });
}

std::vector<std::string> Collectives::all_gather_bytes(const std::string& bytes) {
  if (is_alone()) return {bytes};
  at::Tensor length = at::zeros({1}, at::kLong);
  *length.mutable_data_ptr<int64_t>() = static_cast<int64_t>(bytes.size());
  const at::Tensor lengths = all_gather(length).contiguous();
  const int64_t* each = lengths.const_data_ptr<int64_t>();
  const int64_t most = *std::max_element(each, each + size());
  std::vector<std::string> out(size());
  if (most == 0) return out;
  const at::Tensor all = all_gather(tensor_of(bytes, most));
  for (int64_t r = 0; r < size(); ++r) {
    out[r].assign(static_cast<const char*>(all[r].const_data_ptr()), each[r]);
  }
  return out;
}

std::vector<double> Collectives::all_gather_number(double value) {
  if (is_alone()) return {value};
  at::Tensor one = at::zeros({1}, at::kDouble);
  *one.mutable_data_ptr<double>() = value;
  const at::Tensor all = all_gather(one).contiguous();
  const double* begin = all.const_data_ptr<double>();
  return {begin, begin + size()};
}

std::string Collectives::broadcast_bytes(const std::string& bytes, int64_t root) {
  if (is_alone()) return bytes;
  at::Tensor length = at::zeros({1}, at::kLong);
  *length.mutable_data_ptr<int64_t>() = static_cast<int64_t>(bytes.size());
  broadcast(length, root);
  const int64_t size = *length.const_data_ptr<int64_t>();
  at::Tensor content = tensor_of(rank_ == root ? bytes : "", size);
  broadcast(content, root);
  return {static_cast<const char*>(content.const_data_ptr()), static_cast<size_t>(size)};
}

bool Collectives::any(bool value) {
  const std::vector<double> all = all_gather_number(value ? 1.0 : 0.0);
  return std::any_of(all.begin(), all.end(), [](double each) { return each != 0.0; });
}

}  // namespace banyan::parallel
