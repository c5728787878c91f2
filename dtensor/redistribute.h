// From one layout to another: which axis changes how, in which order, and the collectives that do
// it. The route is the cheapest in bytes received by a rank, found over all orders in which the
// axes may change; it depends on shapes and layouts alone, so every rank takes the same one.
#pragma once
#include <memory>

#include "dtensor/bounded_cache.h"
#include "dtensor/mesh.h"

namespace tessera {

/// One axis changes its placement.
struct Step {
  int axis;
  Placement from, to;
};
using Route = SmallVector<Step, 4>;

/// True when the step moves values between ranks.
bool communicates(const Step& step, const Coordinates& sizes);
/// Throws ShardingError when `to` does not fit the shape, or asks one kind of Partial to become
/// another.
Route plan_route(const Shape& global, const Layout& from, const Layout& to,
                 const Coordinates& sizes);
/// As plan_route, remembered by the mesh.
const Route& cached_route(const Shape& global, const Layout& from, const Layout& to,
                          const DeviceMesh& mesh);
/// Elements that a rank receives on the route, on average, and a price for each collective.
double route_cost(const Shape& global, Layout from, const Route& route, const Coordinates& sizes);

/// Takes this rank's piece of a tensor of shape `global` from layout `from` along `route`. The
/// piece is plain; the result may share its memory.
Tensor run_route(const Shape& global, Layout from, const Route& route, Tensor local,
                 const DeviceMesh& mesh);

/// What a mesh remembers; bounded. A route holds until BoundedCache::kCapacity others are made.
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
