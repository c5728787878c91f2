// Attributes of primitives that work along one dim, as kernels read them: indexing, sorting, scans.
// Such an op sees its operands as [outer, n, inner], where n is the extent of that dim.
#pragma once
#include "core/primitive/primitive.h"

namespace tessera {

struct DimAttributes : Primitive {
  DimAttributes(const OpInfo& op, int dim) : Primitive(op), dim(dim) {}
  void attributes(AttributeVisitor& v) const override { v.integer("dim", dim); }
  const int dim;
};

/// Sorts along `dim` and keeps the first `count`.
struct SortAttributes : DimAttributes {
  SortAttributes(const OpInfo& op, int dim, int64_t count, bool descending)
      : DimAttributes(op, dim), count(count), descending(descending) {}
  void attributes(AttributeVisitor& v) const override {
    v.integer("dim", dim), v.integer("count", count), v.integer("descending", descending);
  }
  const int64_t count;
  const bool descending;
};

/// Runs along `dim`, from its end when `reverse`.
struct ScanAttributes : DimAttributes {
  ScanAttributes(const OpInfo& op, int dim, bool reverse)
      : DimAttributes(op, dim), reverse(reverse) {}
  void attributes(AttributeVisitor& v) const override {
    v.integer("dim", dim), v.integer("reverse", reverse);
  }
  const bool reverse;
};

struct SearchAttributes : Primitive {
  SearchAttributes(const OpInfo& op, bool right) : Primitive(op), right(right) {}
  void attributes(AttributeVisitor& v) const override { v.integer("right", right); }
  const bool right;
};

struct WrapIndexAttributes : Primitive {
  WrapIndexAttributes(const OpInfo& op, int64_t extent) : Primitive(op), extent(extent) {}
  void attributes(AttributeVisitor& v) const override { v.integer("extent", extent); }
  const int64_t extent;
};

/// A shape seen as [outer, n, inner] around one of its dims.
struct Around {
  int64_t outer = 1, n = 1, inner = 1;
  Around(const Shape& s, int dim) {
    for (int d = 0; d < s.size(); ++d) (d < dim ? outer : d == dim ? n : inner) *= s[d];
  }
};

/// Loops of an op along `dim`: that dim is a whole loop of every operand and result (a loop of its
/// own where extents differ), the other dims are shared loops.
AxisMap along_dim_axes(MetaSpan in, std::span<const Meta> out, int dim);

}  // namespace tessera
