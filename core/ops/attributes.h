// Attributes of primitives that kernels read. The mathematics of each op stays in its .cpp, in a class derived from these.
#pragma once
#include "core/primitive/primitive.h"

namespace tessera {

struct CatAttributes : Primitive {
  CatAttributes(OpId id, int dim) : Primitive(id), dim(dim) {}
  const int dim;
};

struct UnsliceAttributes : Primitive {
  UnsliceAttributes(OpId id, int dim, int64_t begin, int64_t step, int64_t extent)
      : Primitive(id), dim(dim), begin(begin), step(step), extent(extent) {}
  const int dim;
  const int64_t begin, step, extent;
};

enum class ReduceKind : uint8_t { kSum, kProd, kMax, kMin, kAny, kAll };

/// Reduces the dims whose bit is set in `mask`.
struct ReduceAttributes : Primitive {
  ReduceAttributes(OpId id, ReduceKind kind, uint32_t mask, bool keepdim)
      : Primitive(id), kind(kind), mask(mask), keepdim(keepdim) {}
  const ReduceKind kind;
  const uint32_t mask;
  const bool keepdim;
};

struct FullAttributes : Primitive {
  FullAttributes(OpId id, const Shape& shape, double value, DType dtype, Device device)
      : Primitive(id), shape(shape), value(value), dtype(dtype), device(device) {}
  const Shape shape;
  const double value;
  const DType dtype;
  const Device device;
};

struct ArangeAttributes : Primitive {
  ArangeAttributes(OpId id, int64_t count, double begin, double step, DType dtype, Device device)
      : Primitive(id), count(count), begin(begin), step(step), dtype(dtype), device(device) {}
  const int64_t count;
  const double begin, step;
  const DType dtype;
  const Device device;
};

}  // namespace tessera
