// Printing as NumPy does: nested brackets, one format for all elements so that columns line up, and
// an ellipsis in dims longer than six once there are more than 1000 elements.
#include <algorithm>
#include <cmath>
#include <functional>
#include <ostream>

#include "core/dispatch/copy.h"
#include "core/dispatch/sharding.h"
#include "core/ops/views.h"
#include "core/tensor/element.h"

namespace tessera {
namespace {

constexpr int64_t kElideAbove = 1000, kEdge = 3;
constexpr int kPrecision = 4;

// How all elements of one tensor are written.
struct Format {
  DType dtype;
  bool scientific = false, whole = true;
  size_t width = 0;
  std::string operator()(const void* p) const {
    if (dtype == kBool) return read_integer(p, dtype) ? "true" : "false";
    if (is_integral(dtype)) return fmt::format("{}", read_integer(p, dtype));
    double v = read_real(p, dtype);
    if (!std::isfinite(v)) return std::isnan(v) ? "nan" : v > 0 ? "inf" : "-inf";
    if (scientific) return fmt::format("{:.{}e}", v, kPrecision);
    return whole ? fmt::format("{:.0f}.", v) : fmt::format("{:.{}f}", v, kPrecision);
  }
};

class Printer {
 public:
  explicit Printer(const Tensor& t) : t_(t), elide_(t.numel() > kElideAbove), format_{t.dtype()} {
    double low = INFINITY, high = 0;
    walk(0, 0, [&](const void* p) {
      double v = std::abs(read_real(p, t_.dtype()));
      if (!std::isfinite(v)) return;
      format_.whole = format_.whole && v == std::floor(v);
      high = std::max(high, v);
      if (v > 0) low = std::min(low, v);
    });
    format_.scientific =
        is_floating(t.dtype()) &&
        (high >= 1e8 ||
         (!format_.whole && (low < 1e-4 || (low < INFINITY && high / low > 1e3 * 1e4))));
    walk(0, 0, [&](const void* p) { format_.width = std::max(format_.width, format_(p).size()); });
  }

  std::string text(int d = 0, int64_t at = 0) const {
    if (d == t_.ndim()) return fmt::format("{:>{}}", format_(element(at)), format_.width);
    std::string inside;
    // Rows are separated by one line, matrices by two, and so on.
    std::string between = d + 1 == t_.ndim() ? ", "
                                             : "," + std::string(size_t(t_.ndim() - d - 1), '\n') +
                                                   std::string(size_t(d) + 1, ' ');
    each(d, [&](int64_t i) {
      if (!inside.empty()) inside += between;
      inside += i < 0 ? "..." : text(d + 1, at + i * t_.strides()[d]);
    });
    return "[" + inside + "]";
  }

 private:
  const void* element(int64_t at) const {
    return static_cast<const char*>(t_.raw_values()) + size_t(at) * size_of(t_.dtype());
  }
  // Positions of dim d that are shown; -1 stands for the ones left out.
  void each(int d, const std::function<void(int64_t)>& f) const {
    int64_t n = t_.shape()[d];
    for (int64_t i = 0; i < n; ++i) {
      if (elide_ && n > 2 * kEdge && i == kEdge) f(-1), i = n - kEdge;
      f(i);
    }
  }
  void walk(int d, int64_t at, const std::function<void(const void*)>& f) const {
    if (d == t_.ndim()) return f(element(at));
    each(d, [&](int64_t i) {
      if (i >= 0) walk(d + 1, at + i * t_.strides()[d], f);
    });
  }

  Tensor t_;
  bool elide_;
  Format format_;
};

}  // namespace

std::string to_string(const Tensor& t) {
  if (!t.defined()) return "undefined";
  std::string what = fmt::format("{}{}", name_of(t.dtype()), to_string(t.shape()));
  if (t.device().is_meta()) return what + " meta";
  const ShardingLayer* sharding = sharding_of(t);
  const Tensor values = sharding ? sharding->whole_value() : t.detach();
  if (!t.device().is_cpu()) what += " " + to_string(t.device());
  return fmt::format("{} {}", Printer(on_host(contiguous(values))).text(), what);
}

std::ostream& operator<<(std::ostream& out, const Tensor& t) { return out << to_string(t); }

}  // namespace tessera
