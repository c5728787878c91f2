// Attributes of pooling, as kernels read them. Window o of a spatial dim begins at o stride -
// padding and has `kernel` places, `dilation` apart; adaptive windows cut a dim into as many parts
// as it has windows, [floor(o in / out), ceil((o + 1) in / out)).
#pragma once
#include <algorithm>

#include "core/primitive/attributes.h"

namespace tessera {

/// Places first, first + step, ... below end.
struct PoolWindow {
  int64_t first, end, step;
};

struct PoolAttributes {
  /// One number for each spatial dim; `windows` is the extent of the result, and all that an
  /// adaptive pool reads.
  struct Windows {
    Dims windows, kernel, stride, padding, dilation;
    bool adaptive = false;
    /// An average divides by `divisor` where that is not 0, otherwise by the number of places of
    /// the window, those in the padding included where `count_padding`.
    bool count_padding = true;
    int64_t divisor = 0;

    int spatial() const { return windows.size(); }
    /// Window `o` of dim `i` without its places outside of an input of that extent.
    PoolWindow at(int i, int64_t o, int64_t extent) const {
      if (adaptive)
        return {o * extent / windows[i], ((o + 1) * extent + windows[i] - 1) / windows[i], 1};
      int64_t first = o * stride[i] - padding[i], d = dilation[i];
      int64_t end = std::min(first + (kernel[i] - 1) * d + 1, extent);
      if (first < 0) first += (-first + d - 1) / d * d;
      return {first, end, d};
    }
    /// The number of places by which an average over window `o` of dim `i` divides.
    int64_t counted(int i, int64_t o, int64_t extent) const {
      if (!adaptive && count_padding) {
        int64_t first = o * stride[i] - padding[i];
        return std::min(first + kernel[i], extent + padding[i]) - first;
      }
      PoolWindow w = at(i, o, extent);
      return w.end - w.first;
    }
    /// The fields that every pool has.
    static void places(auto& a, auto& f) {
      f("windows", a.windows), f("kernel", a.kernel), f("stride", a.stride);
      f("padding", a.padding), f("dilation", a.dilation);
    }
    static void fields(auto& a, auto& f) {
      places(a, f);
      f("adaptive", a.adaptive), f("count_padding", a.count_padding), f.any("divisor", a.divisor);
    }
  };
  Windows windows;
  Dims size = {};  // the spatial extents of the input, where no operand has them
  static void fields(auto& a, auto& f) { f.within(a.windows), f("size", a.size); }
};

/// The largest u8 of each window; windows are not adaptive.
struct QuantizedPoolAttributes {
  PoolAttributes::Windows windows;
  static void fields(auto& a, auto& f) { PoolAttributes::Windows::places(a.windows, f); }
};

}  // namespace tessera
