// Attributes of convolutions, as kernels read them. The three ops of the family run one loop nest
// over n (batch), g (groups), co and ci (channels of a group), o (places of the output) and k
// (places of the kernel), and sum into one of its operands:
//   y[n, g co, o] x[n, g ci, o stride - pad_begin + k dilation] w[g co, ci, k]
// conv sums into y, conv_grad_input into x, conv_grad_weight into w. Places outside of x are zeros.
#pragma once
#include "core/primitive/attributes.h"

namespace tessera {

/// `stride`, `dilation`, `pad_begin`, `pad_end` have one number for each of the 1 to 3 spatial
/// dims; pad_end may be negative, which leaves out the last places of x. `size` holds what the
/// operands do not tell: nothing for conv, the spatial extents of x for conv_grad_input, the
/// extents [ci, k..] of w for conv_grad_weight.
struct ConvAttributes {
  struct Window {
    Dims stride, dilation, pad_begin, pad_end;
    int64_t groups = 1;
    /// Places of the output along spatial dim `i`; 0 or less where the kernel does not fit.
    int64_t places(int i, int64_t extent, int64_t kernel) const {
      int64_t room = extent + pad_begin[i] + pad_end[i] - (dilation[i] * (kernel - 1) + 1);
      return room < 0 ? 0 : room / stride[i] + 1;
    }
    static void fields(auto& a, auto& f) {
      f("stride", a.stride), f("dilation", a.dilation), f("pad_begin", a.pad_begin);
      f.any("pad_end", a.pad_end), f("groups", a.groups);
    }
  };
  Window window;
  Dims size = {};
  int spatial() const { return window.stride.size(); }
  static void fields(auto& a, auto& f) { f.within(a.window), f("size", a.size); }
};

}  // namespace tessera
