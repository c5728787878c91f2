// Attributes of primitives that work along one dim (joining, indexing, sorting, scans), as
// kernels read them. Such an op sees its operands as [outer, n, inner], where n is the extent of
// that dim.
#pragma once
#include "core/primitive/attributes.h"
#include "core/primitive/axis_map.h"

namespace tessera {

struct DimAttributes {
  int dim = 0;
  static void fields(auto& a, auto& f) { f.dim("dim", a.dim); }
};

struct CatAttributes {
  int dim = 0;
  static void fields(auto& a, auto& f) { f.dim("dim", a.dim); }
};

/// Puts the operand at begin, begin + step, .. of a dim of extent `extent`; zeros are elsewhere.
struct UnsliceAttributes {
  int dim = 0;
  int64_t begin = 0, step = 1, extent = 0;
  static void fields(auto& a, auto& f) {
    f.dim("dim", a.dim), f("begin", a.begin), f("step", a.step), f("extent", a.extent);
  }
};

/// Sorts along `dim` and keeps the first `count`.
struct SortAttributes {
  int dim = 0;
  int64_t count = 0;
  bool descending = false;
  static void fields(auto& a, auto& f) {
    f.dim("dim", a.dim), f("count", a.count), f("descending", a.descending);
  }
};

/// Runs along `dim`, from its end when `reverse`.
struct ScanAttributes {
  int dim = 0;
  bool reverse = false;
  static void fields(auto& a, auto& f) { f.dim("dim", a.dim), f("reverse", a.reverse); }
};

struct SearchAttributes {
  bool right = false;
  static void fields(auto& a, auto& f) { f("right", a.right); }
};

struct WrapIndexAttributes {
  int64_t extent = 0;
  static void fields(auto& a, auto& f) { f("extent", a.extent); }
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
