// The parts of torch's headers that DeepSpeed's optimizers use. All take four times as long.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/csrc/utils/pybind.h>

namespace torch {
using namespace at;
constexpr auto kFloat32 = at::kFloat;
}  // namespace torch
