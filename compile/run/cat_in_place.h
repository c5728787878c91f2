// Which results can be made where they are joined: `cat` of the results of one op, seen as they are
// or with their dims exchanged, need not run if that op writes its results into the pieces.
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

/// By the node that makes the results. Each of them is read by nothing but the cat, through views.
std::unordered_map<int32_t, CatInPlace> find_cats_in_place(const Graph& graph);

}  // namespace tessera::compiler
