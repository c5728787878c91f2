#include "examples/train/synthetic.h"

#include <cstring>

#include "core/autograd/autograd.h"
#include "core/ops/random.h"
#include "core/ops/views.h"

namespace tessera::train {
namespace {

// A row is contiguous in memory, whether channels come last or not.
void assign_row(const Tensor& all, int64_t row, const Tensor& values) {
  std::memcpy(static_cast<char*>(all.raw()) + size_t(row) * values.nbytes(), values.raw(),
              values.nbytes());
}

}  // namespace

data::Batch Synthetic::allocate(int64_t rows) const {
  Shape out = target_;
  out.insert(0, rows);
  Tensor inputs;
  if (input_.size() == 3) {
    inputs = permute(empty({rows, input_[1], input_[2], input_[0]}, kF32), {0, 3, 1, 2});
  } else {
    Shape in = input_;
    in.insert(0, rows);
    inputs = empty(in, ids_ ? kI64 : kF32);
  }
  return {.inputs = inputs, .targets = empty(out, kI64)};
}

void Synthetic::read(const data::Sample& sample, int64_t row, const data::Batch& to) const {
  NoGrad off;
  Tensor key = from_values<int64_t>({int64_t(seed_), sample.number}, {2});
  Tensor target_key = from_values<int64_t>({~int64_t(seed_), sample.number}, {2});
  assign_row(to.inputs, row,
             ids_ ? randint(0, classes_, input_, {}, key) : randn(input_, {kF32}, key));
  assign_row(to.targets, row, randint(0, classes_, target_, {}, target_key));
}

}  // namespace tessera::train
