// Extents and strides of a tensor: up to eight dims, stored inline. Strides count elements, not
// bytes.
#pragma once
#include <concepts>
#include <cstdint>
#include <initializer_list>
#include <iosfwd>
#include <span>
#include <string>

#include "core/base/error.h"

namespace tessera {

inline constexpr int kMaxDims = 8;

class Dims {
 public:
  Dims() = default;
  /// One dim, so that `sum(x, 1)` and `zeros(5)` need no braces.
  template <std::integral T>
  requires(!std::same_as<T, bool>) Dims(T dim) { push_back(int64_t(dim)); }
  Dims(std::initializer_list<int64_t> v) : Dims(std::span<const int64_t>(v.begin(), v.size())) {}
  explicit Dims(std::span<const int64_t> v) {
    for (int64_t x : v) push_back(x);
  }
  static Dims filled(int n, int64_t value) {
    Dims d;
    for (int i = 0; i < n; ++i) d.push_back(value);
    return d;
  }

  int size() const { return size_; }
  bool empty() const { return size_ == 0; }
  int64_t& operator[](int i) { return v_[i]; }
  int64_t operator[](int i) const { return v_[i]; }
  int64_t back() const { return v_[size_ - 1]; }
  int64_t* begin() { return v_; }
  int64_t* end() { return v_ + size_; }
  const int64_t* begin() const { return v_; }
  const int64_t* end() const { return v_ + size_; }
  void push_back(int64_t x) {
    TESSERA_CHECK_AS(ShapeError, size_ < kMaxDims, "tensor: more than {} dims", kMaxDims);
    v_[size_++] = x;
  }
  void insert(int at, int64_t x) {
    push_back(x);
    for (int i = size_ - 1; i > at; --i) std::swap(v_[i], v_[i - 1]);
  }
  void erase(int at) {
    for (int i = at; i + 1 < size_; ++i) v_[i] = v_[i + 1];
    --size_;
  }
  bool operator==(const Dims& o) const {
    if (size_ != o.size_) return false;
    for (int i = 0; i < size_; ++i)
      if (v_[i] != o.v_[i]) return false;
    return true;
  }
  operator std::span<const int64_t>() const { return {v_, size_t(size_)}; }

 private:
  int32_t size_ = 0;
  int64_t v_[kMaxDims];
};

using Shape = Dims;
using Strides = Dims;

/// Number of elements; 1 for the empty shape.
int64_t numel(const Shape& s);
/// "[2, 3]".
std::string to_string(std::span<const int64_t> dims);
inline std::string to_string(const Dims& d) { return to_string(std::span(d.begin(), d.end())); }
/// A number is no list of dims: std::to_string.
template <std::integral T>
std::string to_string(T) = delete;
std::ostream& operator<<(std::ostream& out, const Dims& d);
/// Row-major strides of a dense tensor.
Strides contiguous_strides(const Shape& s);
/// True when elements are laid out densely in row-major order (dims of extent 1 may have any
/// stride).
bool is_contiguous(const Shape& s, const Strides& st);
/// How the dims of a tensor [N, C, ..] follow each other in memory: as in its shape, or with the
/// channels of one place next to each other. Strides say which; shape and indices never change.
enum class MemoryFormat : uint8_t { kContiguous, kChannelsLast };
/// Dense strides with dim 1 innermost; those of `contiguous_strides` for fewer than three dims.
Strides channels_last_strides(const Shape& s);
bool is_channels_last(const Shape& s, const Strides& st);
/// `dim` counted from the end when negative; throws ShapeError naming `op` when out of range.
int wrap_dim(int64_t dim, int ndim, const char* op);
/// NumPy broadcasting of two shapes; throws ShapeError naming `op` and both.
Shape broadcast(const Shape& a, const Shape& b, std::string_view op);
/// Strides with which a tensor of shape `from` is read as one of shape `to` (0 where broadcast).
Strides broadcast_strides(const Shape& from, const Strides& strides, const Shape& to);

/// A contiguous part of an extent: what one rank holds of a dim or computes of a loop.
struct Range {
  int64_t begin = 0, size = 0, extent = 0;
  bool operator==(const Range&) const = default;
};

/// Part number `index` of `whole` cut into `parts` at multiples of `unit` (which divides its size):
/// the parts are as large as ceil(units / parts) units, so the last may be smaller or empty.
Range cut(const Range& whole, int64_t unit, int64_t parts, int64_t index);

}  // namespace tessera
