#include "core/tensor/shape.h"

#include <algorithm>
#include <ostream>

namespace tessera {

int64_t numel(const Shape& s) {
  int64_t n = 1;
  bool overflow = false;
  for (int64_t e : s) overflow |= __builtin_mul_overflow(n, e, &n);
  TESSERA_CHECK_AS(ShapeError, !overflow || std::ranges::count(s, 0) > 0,
                   "tensor: shape {} has more elements than 64 bits count", to_string(s));
  return n;
}

std::string to_string(std::span<const int64_t> d) {
  std::string text = "[";
  for (size_t i = 0; i < d.size(); ++i) text += (i ? ", " : "") + std::to_string(d[i]);
  return text + "]";
}

std::ostream& operator<<(std::ostream& out, const Dims& d) { return out << to_string(d); }

Strides contiguous_strides(const Shape& s) {
  Strides st = s;
  uint64_t step = 1;  // wraps for shapes that no memory holds; empty() refuses those by name
  for (int i = s.size() - 1; i >= 0; --i) {
    st[i] = int64_t(step);
    step *= uint64_t(std::max<int64_t>(s[i], 1));
  }
  return st;
}

bool is_contiguous(const Shape& s, const Strides& st) {
  uint64_t step = 1;  // wraps only before an extent of 0
  for (int i = s.size() - 1; i >= 0; --i) {
    if (s[i] == 0) return true;
    if (s[i] == 1) continue;
    if (st[i] != int64_t(step)) return numel(s) == 0;
    step *= uint64_t(s[i]);
  }
  return true;
}

namespace {

// Dim 1 moved behind the others.
Dims channels_moved_last(Dims d) {
  if (d.size() < 3) return d;
  int64_t channels = d[1];
  d.erase(1);
  d.push_back(channels);
  return d;
}

}  // namespace

Strides channels_last_strides(const Shape& s) {
  Strides st = contiguous_strides(channels_moved_last(s));
  if (s.size() < 3) return st;
  int64_t channels = st[st.size() - 1];
  st.erase(st.size() - 1);
  st.insert(1, channels);
  return st;
}

bool is_channels_last(const Shape& s, const Strides& st) {
  return is_contiguous(channels_moved_last(s), channels_moved_last(st));
}

int wrap_dim(int64_t dim, int ndim, const char* op) {
  int64_t low = -std::max(ndim, 1), high = std::max(ndim, 1) - 1;
  TESSERA_CHECK_AS(ShapeError, dim >= low && dim <= high,
                   "{}: dim {} of a tensor with {} dims; expected {} to {}", op, dim, ndim, low,
                   high);
  return int(dim < 0 ? dim + std::max(ndim, 1) : dim);
}

Shape broadcast(const Shape& a, const Shape& b, std::string_view op) {
  if (a == b) return a;
  Shape out = a.size() >= b.size() ? a : b;
  const Shape& small = a.size() >= b.size() ? b : a;
  int lead = out.size() - small.size();
  for (int i = 0; i < small.size(); ++i) {
    int64_t& e = out[i + lead];
    TESSERA_CHECK_AS(ShapeError, e == small[i] || e == 1 || small[i] == 1,
                     "{}: shapes {} and {} do not broadcast: dim {} from the end is {} and {}", op,
                     to_string(a), to_string(b), small.size() - i, e, small[i]);
    if (e == 1) e = small[i];
  }
  return out;
}

Strides broadcast_strides(const Shape& from, const Strides& strides, const Shape& to) {
  Strides st = Dims::filled(to.size(), 0);
  int lead = to.size() - from.size();
  for (int i = 0; i < from.size(); ++i)
    st[i + lead] = from[i] == 1 && to[i + lead] != 1 ? 0 : strides[i];
  return st;
}

Range cut(const Range& whole, int64_t unit, int64_t parts, int64_t index) {
  TESSERA_CHECK_AS(ShapeError, unit > 0 && whole.size % unit == 0,
                   "cut: {} elements do not divide into units of {}", whole.size, unit);
  int64_t units = whole.size / unit, each = (units + parts - 1) / parts;
  int64_t begin = std::min(each * index, units), end = std::min(begin + each, units);
  return {whole.begin + begin * unit, (end - begin) * unit, whole.extent};
}

}  // namespace tessera
