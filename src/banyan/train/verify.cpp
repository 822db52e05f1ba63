#include "banyan/train/verify.h"

#include <ATen/ops/linalg_vector_norm.h>

#include <algorithm>
#include <cmath>
#include <sstream>

#include "banyan/core/error.h"
#include "banyan/train/exchange.h"

namespace banyan::train {
namespace {

double squared_norm(const at::Tensor& x) {
  const double norm = at::linalg_vector_norm(x, 2, std::nullopt, false, at::kDouble).item<double>();
  return norm * norm;
}

}  // namespace

bool VerifySchedule::due(int64_t update) const {
  if (update == 0) return first;
  return every > 0 && update % every == 0;
}

VerifySchedule verify_schedule(const std::string& verify) {
  if (verify.empty() || verify == "off") return {};
  if (verify == "first") return {.every = 0, .first = true};
  const std::string prefix = "every:";
  const bool is_every = verify.rfind(prefix, 0) == 0;
  const std::string digits = is_every ? verify.substr(prefix.size()) : "";
  const bool is_count =
      !digits.empty() && digits.size() < 10 &&
      std::all_of(
          digits.begin(), digits.end(), [](unsigned char c) { return std::isdigit(c) != 0; }) &&
      std::stoll(digits) > 0;
  BANYAN_CHECK(is_count,
               "[config] actor_rollout_ref.sharing.verify: wanted off, first or every:N, got '",
               verify,
               "'");
  return {.every = std::stoll(digits), .first = true};
}

double verify_bound(at::ScalarType dtype) {
  if (dtype == at::kDouble) return 1e-9;
  return dtype == at::kFloat ? 1e-4 : 5e-2;
}

std::string VerifyResult::line() const {
  std::ostringstream out;
  out << "sharing.verify: gradients with and without sharing differ by " << gradient_error
      << ", losses by " << loss_error << " (relative; at most " << bound << ")";
  if (!passed) out << "; this update and the rest of the run go on without sharing";
  return out.str();
}

std::vector<at::Tensor> clone_gradients(const ParamTable& params) {
  std::vector<at::Tensor> out;
  for (const Param& param : params.params()) out.push_back(param.grad.clone());
  return out;
}

VerifyResult verify_gradients(const std::vector<at::Tensor>& shared,
                              double shared_loss,
                              double dense_loss,
                              at::ScalarType dtype,
                              ParamTable& params,
                              parallel::Collectives* ranks) {
  BANYAN_ASSERT(shared.size() == params.params().size(), "one gradient per parameter");
  double difference = 0.0, whole = 0.0;
  for (size_t i = 0; i < shared.size(); ++i) {
    const at::Tensor& dense = params.params()[i].grad;
    difference += squared_norm(shared[i].sub(dense));
    whole += squared_norm(dense);
  }
  if (!parallel::is_alone(ranks)) {
    const std::vector<double> sums = sum_numbers({difference, whole}, *ranks);
    difference = sums[0];
    whole = sums[1];
  }
  VerifyResult result;
  result.bound = verify_bound(dtype);
  result.gradient_error = whole > 0.0 ? std::sqrt(difference / whole) : std::sqrt(difference);
  result.loss_error = std::abs(shared_loss - dense_loss) / std::max(1.0, std::abs(dense_loss));
  // A comparison with a number that is not finite fails.
  result.passed = result.gradient_error <= result.bound && result.loss_error <= result.bound;
  if (!result.passed) return result;
  for (size_t i = 0; i < shared.size(); ++i) params.params()[i].grad.copy_(shared[i]);
  return result;
}

}  // namespace banyan::train
