// One weight, two forms: the fp32 master that the optimizer moves and the compute form that kernels
// read. Several matrices with one input (q, k, v; gate, up) are fused: one master, one gradient,
// one packed form, and one Param per HF name that is a row range of them.
#pragma once

#include <ATen/core/Tensor.h>

#include <string>
#include <vector>

#include "banyan/core/device.h"
#include "banyan/core/param.h"
#include "banyan/kernels/cpu/gemm.h"
#include "banyan/ops/linear.h"

namespace banyan::nn {

// A matrix [sum of out, in], registered in a ParamTable under one name per row range.
class Weight {
 public:
  struct Part {
    std::string name;  // HF name
    int64_t out = 0;
  };

  // Allocates the master (zeros, or none where the table says so; fp64 when options.dtype is fp64,
  // else fp32) and registers repack
  // and gradient. `with_backward`: the compute form also serves dx = dy W. The table must outlive
  // the weight's use.
  Weight(ParamTable& table,
         std::vector<Part> parts,
         int64_t in,
         const ComputeOptions& options,
         bool with_backward);
  Weight(const Weight&) = delete;
  Weight& operator=(const Weight&) = delete;

  const ops::LinearWeight& compute() const { return compute_; }
  kernels::Panels panels() const;       // of the packed form, borrowed
  at::Tensor& grad() { return grad_; }  // [out, in]; undefined until ParamTable::ensure_grads
  const at::Tensor& master() const { return master_; }

 private:
  at::Tensor master_;
  at::Tensor grad_;
  ops::LinearWeight compute_;
};

// A vector parameter (norm weight, bias; biases may be fused like matrices). Compute form: a plain
// copy.
class Vector {
 public:
  struct Part {
    std::string name;
    int64_t size = 0;
  };

  Vector(ParamTable& table, std::vector<Part> parts, const ComputeOptions& options);
  Vector(const Vector&) = delete;
  Vector& operator=(const Vector&) = delete;

  const at::Tensor& compute() const { return compute_; }
  const uint16_t* bits() const;  // of a bf16 compute form, borrowed
  at::Tensor& grad() { return grad_; }

 private:
  at::Tensor master_;
  at::Tensor grad_;
  at::Tensor compute_;
};

}  // namespace banyan::nn
