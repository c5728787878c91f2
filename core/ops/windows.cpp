#include "core/ops/windows.h"

namespace tessera::windows {

void check(std::string_view op, const ConvAttributes::Window& w, int least) {
  const int n = w.stride.size();
  TESSERA_CHECK(n >= least && n <= 3 && w.dilation.size() == n && w.pad_begin.size() == n &&
                    w.pad_end.size() == n,
                "{}: stride {}, dilation {}, padding {} and {}; expected one number for each of {} "
                "to 3 spatial dims",
                op, to_string(w.stride), to_string(w.dilation), to_string(w.pad_begin),
                to_string(w.pad_end), least);
  for (int i = 0; i < n; ++i)
    TESSERA_CHECK(w.stride[i] > 0 && w.dilation[i] > 0,
                  "{}: stride {} and dilation {} must be positive", op, to_string(w.stride),
                  to_string(w.dilation));
  for (const Dims* d : {&w.stride, &w.dilation, &w.pad_begin, &w.pad_end})
    for (int64_t e : *d)
      TESSERA_CHECK(e >= -kMost && e <= kMost, "{}: {} has a number beyond {}", op, to_string(*d),
                    kMost);
}

void check_channels(std::string_view op, const ConvAttributes::Window& w, const Shape& x,
                    const Shape& weight) {
  TESSERA_CHECK_AS(ShapeError, x[1] == weight[1] * w.groups,
                   "{}: x {} has {} channels, weight {} with groups={} takes {}", op, to_string(x),
                   x[1], to_string(weight), w.groups, weight[1] * w.groups);
  TESSERA_CHECK_AS(ShapeError, w.groups == 0 ? weight[0] == 0 : weight[0] % w.groups == 0,
                   "{}: the {} output channels of weight {} do not divide into groups={}", op,
                   weight[0], to_string(weight), w.groups);
}

Shape output(std::string_view op, const ConvAttributes::Window& w, const Shape& x,
             const Shape& weight) {
  Shape s{x[0], weight[0]};
  for (int i = 0; i < w.stride.size(); ++i) {
    TESSERA_CHECK_AS(ShapeError, weight[i + 2] > 0, "{}: weight {} has an empty kernel", op,
                     to_string(weight));
    s.push_back(w.places(i, x[i + 2], weight[i + 2]));
    TESSERA_CHECK_AS(
        ShapeError, s.back() > 0,
        "{}: the kernel of weight {} (dilation {}) does not fit into x {} (padding {}, {})", op,
        to_string(weight), to_string(w.dilation), to_string(x), to_string(w.pad_begin),
        to_string(w.pad_end));
  }
  return s;
}

void check(std::string_view op, const PoolAttributes::Windows& w) {
  const int n = w.spatial();
  TESSERA_CHECK(n >= 1 && n <= 3, "{}: windows {}; expected 1 to 3 spatial dims", op,
                to_string(w.windows));
  for (const Dims* d : {&w.windows, &w.kernel, &w.stride, &w.dilation})
    for (int64_t e : *d)
      TESSERA_CHECK(e > 0 && e <= kMost, "{}: {}; each is 1 to {}", op, to_string(*d), kMost);
  for (int64_t e : w.padding)
    TESSERA_CHECK(e >= -kMost && e <= kMost, "{}: padding {} has a number beyond {}", op,
                  to_string(w.padding), kMost);
  for (const Dims* d : {&w.kernel, &w.stride, &w.padding, &w.dilation})
    TESSERA_CHECK(d->size() == (w.adaptive ? 0 : n), "{}: {} for {} spatial dims", op,
                  to_string(*d), n);
}

// Checks the first window and the last, which tell of the others, unless dilation skips over x.
void check_meet(std::string_view op, const PoolAttributes::Windows& w, const Shape& x) {
  for (int i = 0; i < w.spatial(); ++i) {
    const bool gaps = !w.adaptive && w.dilation[i] > 1;
    const int64_t last = w.windows[i] - 1, step = gaps || last == 0 ? 1 : last;
    for (int64_t o = 0; o <= last; o += step) {
      const PoolWindow at = w.at(i, o, x[i + 2]);
      TESSERA_CHECK_AS(ShapeError, at.first < at.end, "{}: window {} of dim {} is outside of {}",
                       op, o, i + 2, to_string(x));
    }
  }
}

}  // namespace tessera::windows
