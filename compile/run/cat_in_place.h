// Finds results that can be made in the place where a `cat` would copy them. A `cat` that joins the
// results of one op, as they are or with dims exchanged, need not run if the op writes its results
// into the joined value.
#pragma once
#include <unordered_map>
#include <vector>

#include "compile/ir/graph.h"

namespace tessera::compiler {

struct CatInPlace {
  /// Where result i of the op lies in the joined value: a layout, and elements from its beginning.
  struct Piece {
    Meta meta;
    int64_t offset = 0;
  };
  int32_t node = -1;  // the cat that joins them
  std::vector<Piece> pieces;
};

/// For each node whose results are joined in place. Each result is read only by the cat, through
/// views.
std::unordered_map<int32_t, CatInPlace> find_cats_in_place(const Graph& graph);

}  // namespace tessera::compiler
