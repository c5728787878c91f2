// Changes a tensor from one layout to another: which axis changes how, in which order, and by which
// collectives. The route is the cheapest in bytes received by a rank, over all orders in which the
// axes may change. It depends only on shapes and layouts, so every rank takes the same one.
#pragma once
#include <memory>

#include "dtensor/bounded_cache.h"
#include "dtensor/mesh.h"

namespace tessera {

/// A step in which one axis changes its placement.
struct Step {
  int axis;
  Placement from, to;
};
using Route = SmallVector<Step, 4>;

/// True when the step moves values between ranks.
bool communicates(const Step& step, const Coordinates& sizes);
/// Returns the cheapest route. Throws ShardingError when `to` does not fit the shape, or asks to
/// change one kind of Partial to another.
Route plan_route(const Shape& global, const Layout& from, const Layout& to,
                 const Coordinates& sizes);
/// Returns plan_route's result, cached by the mesh.
const Route& cached_route(const Shape& global, const Layout& from, const Layout& to,
                          const DeviceMesh& mesh);
/// The number of elements that a rank receives on the route, on average, plus a price for each
/// collective.
double route_cost(const Shape& global, Layout from, const Route& route, const Coordinates& sizes);

/// Converts this rank's piece of a tensor of shape `global` from layout `from` along `route`. The
/// piece is plain; the result may share its memory.
Tensor run_route(const Shape& global, Layout from, const Route& route, Tensor local,
                 const DeviceMesh& mesh);

/// The routes of a mesh; their number is bounded. A route is valid until BoundedCache::kCapacity
/// others are made.
class RouteCache {
 public:
  const Route& find(const Shape& global, const Layout& from, const Layout& to,
                    const Coordinates& sizes);
  size_t size() const { return entries_.size(); }

 private:
  struct Entry {
    Shape global;
    Layout from, to;
    Route route;
  };
  BoundedCache<Entry> entries_;
};

}  // namespace tessera
