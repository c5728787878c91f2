#include "compile/run/cat_in_place.h"

#include <algorithm>

#include "compile/ir/rewrite.h"
#include "core/ops/dim_attributes.h"
#include "core/primitive/primitive_of.h"

namespace tessera::compiler {
namespace {

// Returns the value behind views that have no other reader; kNoValue if one has.
ValueId behind_views(const Graph& g, const Uses& uses, ValueId id) {
  for (;;) {
    int32_t m = uses.producer[size_t(id)];
    if (m == kNoNode || uses.readers[size_t(id)].size() != 1 || uses.output[size_t(id)])
      return kNoValue;
    const Node& n = g.nodes[size_t(m)];
    if (!n.prim->is_view()) return id;
    if (n.in.size() != 1 || n.out.size() != 1) return kNoValue;
    id = n.in[0];
  }
}

// Lays out `made` so that its view `seen` gets the strides `to`. This works only for views that
// exchange dims and add or drop those of extent 1; dims are told apart by their strides.
bool lay_out_as(const Meta& made, const Meta& seen, const Strides& to, Meta& result) {
  result = made;
  if (numel(made.shape) != numel(seen.shape)) return false;
  for (int d = 0; d < made.shape.size(); ++d) {
    if (made.shape[d] == 1) continue;
    int found = -1;
    for (int s = 0; s < seen.shape.size(); ++s)
      if (seen.shape[s] == made.shape[d] && seen.strides[s] == made.strides[d]) found = s;
    if (found < 0) return false;
    result.strides[d] = to[found];
  }
  return true;
}

bool find_cat(const Graph& g, const Uses& uses, int32_t node, int32_t& producer, CatInPlace& cat) {
  const Node& n = g.nodes[size_t(node)];
  const Meta& whole = g[n.out[0]].meta;
  const int dim = attributes_of<CatAttributes>(*n.prim).dim;
  producer = kNoNode;
  int64_t at = 0;
  for (ValueId id : n.in) {
    ValueId made = behind_views(g, uses, id);
    if (made == kNoValue) return false;
    const int32_t m = uses.producer[size_t(made)];
    const Node& from = g.nodes[size_t(m)];
    if (producer == kNoNode) cat.pieces.resize(from.out.size());
    if ((producer != kNoNode && m != producer) || from.out.size() != n.in.size() || is_effect(from))
      return false;
    producer = m;
    CatInPlace::Piece& piece =
        cat.pieces[size_t(std::ranges::find(from.out, made) - from.out.begin())];
    piece.offset = at * whole.strides[dim];
    if (!lay_out_as(g[made].meta, g[id].meta, whole.strides, piece.meta)) return false;
    at += g[id].meta.shape[dim];
  }
  cat.node = node;
  return true;
}

}  // namespace

std::unordered_map<int32_t, CatInPlace> find_cats_in_place(const Graph& graph) {
  std::unordered_map<int32_t, CatInPlace> found;
  Uses uses(graph);
  for (int32_t k = 0; k < int32_t(graph.nodes.size()); ++k) {
    const Node& n = graph.nodes[size_t(k)];
    if (n.prim->name() != "cat" || is_effect(n)) continue;
    int32_t producer;
    if (CatInPlace cat; find_cat(graph, uses, k, producer, cat))
      found.emplace(producer, std::move(cat));
  }
  return found;
}

}  // namespace tessera::compiler
