// The scale of each output and the zero points of a layer of bytes, as the version of oneDNN takes
// them. 2.x keeps them in the attributes of a primitive and scales what it has added the bias to;
// 3.x takes them as operands of each run and adds the bias to what it has scaled.
#pragma once
#include "core/backend/cpu/onednn.h"
#include "core/ops/create.h"

namespace tessera::cpu {

class LayerScaling {
 public:
  LayerScaling() = default;
  /// A result is (scale sum + bias) / unit with scale, bias: f32 [N]. `dims`: those of the weights,
  /// as a mask, by which an output is numbered. A zero point of 0 is none.
  LayerScaling(dnnl::primitive_attr& attr, const Tensor& scale, const Tensor& bias, float unit,
               int dims, int x_zero_point, int y_zero_point)
      : bias_(empty({scale.numel()}, kF32)) {
    const int64_t n = scale.numel();
    const float *s = scale.values<float>(), *b = bias.values<float>();
#if DNNL_VERSION_MAJOR < 3
    static_cast<void>(dims);
    std::vector<float> scales(size_t(n), 0.0f);
    for (int64_t o = 0; o < n; ++o) {
      scales[size_t(o)] = s[o] / unit;
      bias_.data<float>()[o] = b[o] / s[o];
    }
    attr.set_output_scales(1 << 1, scales);
    if (x_zero_point) attr.set_zero_points(DNNL_ARG_SRC, 0, {x_zero_point});
    if (y_zero_point) attr.set_zero_points(DNNL_ARG_DST, 0, {y_zero_point});
#else
    const Tensor scales = empty({n}, kF32);
    for (int64_t o = 0; o < n; ++o) {
      scales.data<float>()[o] = s[o] / unit;
      bias_.data<float>()[o] = b[o] / unit;
    }
    attr.set_scales_mask(DNNL_ARG_WEIGHTS, dims);
    add(DNNL_ARG_ATTR_SCALES | DNNL_ARG_WEIGHTS, scales, dnnl::memory::data_type::f32);
    for (auto [operand, zero_point] :
         {std::pair(DNNL_ARG_SRC, x_zero_point), std::pair(DNNL_ARG_DST, y_zero_point)}) {
      if (!zero_point) continue;
      const Tensor value = empty({1}, kI32);
      value.data<int32_t>()[0] = zero_point;
      attr.set_zero_points_mask(operand, 0);
      add(DNNL_ARG_ATTR_ZERO_POINTS | operand, value, dnnl::memory::data_type::s32);
    }
#endif
  }

  /// f32 [N]: what a run takes as its bias.
  const Tensor& bias() const { return bias_; }

  /// Puts the operands of a run, at most kMost, at `args` and returns how many they are.
  static constexpr int kMost = 3;
  int operands(dnnl_exec_arg_t* args) const {
    int count = 0;
    for (const auto& [argument, memory] : memory_) args[count++] = {argument, memory.get()};
    return count;
  }

 private:
  void add(int argument, const Tensor& values, dnnl::memory::data_type type) {
    values_.push_back(values);
    memory_.emplace_back(
        argument, dnnl::memory({{values.numel()}, type, dnnl::memory::format_tag::a}, engine(),
                               const_cast<void*>(values.raw_values())));
  }

  Tensor bias_;
  std::vector<Tensor> values_;
  std::vector<std::pair<int, dnnl::memory>> memory_;
};

}  // namespace tessera::cpu
