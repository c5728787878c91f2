// Attributes of creation ops and random draws, as kernels read them.
#pragma once
#include "core/ops/scalar.h"
#include "core/primitive/attributes.h"

namespace tessera {

/// Writes a number as an integer or a real one, whichever it is.
inline void scalar_field(FieldWriter& f, std::string_view name, const Scalar& x) {
  x.kind() == kF64 ? f.visitor().real(name, x.real()) : f.visitor().integer(name, x.integer());
}
inline void scalar_field(FieldReader& f, std::string_view name, Scalar& x) {
  AttributeReader& r = f.reader();
  x = r.is_integer(name) ? Scalar(r.integer(name)) : Scalar(r.real(name));
}

struct FullAttributes {
  Shape shape;
  Scalar value = 0;
  DType dtype = kF32;
  Device device;
  static void fields(auto& a, auto& f) {
    f("shape", a.shape), scalar_field(f, "value", a.value), f("dtype", a.dtype);
    f("device", a.device);
  }
};

struct ArangeAttributes {
  int64_t count = 0;
  Scalar begin = 0, step = 1;  // both integers where the op's numbers are: exact beyond 2^53
  DType dtype = kI64;
  Device device;
  static void fields(auto& a, auto& f) {
    f("count", a.count), scalar_field(f, "begin", a.begin), scalar_field(f, "step", a.step);
    f("dtype", a.dtype), f("device", a.device);
  }
};

enum class RandomKind : uint8_t { kUniform, kNormal, kInteger };

/// Element (i, j, ..) of the result is element (begin + i, ..) of a global tensor of extents
/// `global`.
struct RandomAttributes {
  RandomKind kind = RandomKind::kUniform;  // which op it is
  Shape shape;
  Dims begin;
  Shape global;
  int64_t low = 0, high = 0;
  DType dtype = kF32;
  Device device;
  static void fields(auto& a, auto& f) {
    f("shape", a.shape), f("begin", a.begin), f("global", a.global), f.any("low", a.low);
    f.any("high", a.high), f("dtype", a.dtype), f("device", a.device);
  }
};

/// Operands x, key and, where `by_sample`, the sample numbers of dim 0. `begin` and `global` as
/// above; empty: not split.
struct DropoutAttributes {
  double p = 0;
  bool by_sample = false;
  Dims begin = {};
  Shape global = {};
  /// Elements whose random words are below this are dropped.
  uint32_t threshold() const { return uint32_t(p * 4294967296.0); }
  /// What the others are multiplied by.
  double kept() const { return 1 / (1 - p); }
  static void fields(auto& a, auto& f) {
    f("p", a.p), f("by_sample", a.by_sample), f("begin", a.begin), f("global", a.global);
  }
};

}  // namespace tessera
