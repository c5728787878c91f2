// What stands behind a mesh handle. Decisions about ops live here, since they hold for one rank of
// one mesh: no lock, no global.
#pragma once
#include <map>

#include "dtensor/decision.h"
#include "dtensor/redistribute.h"

namespace tessera {

struct DeviceMesh::State : RefCounted {
  std::vector<std::string> axes;
  Coordinates sizes, coordinate;
  std::vector<Ref<ProcessGroup>> groups;
  std::map<std::vector<std::string>, DeviceMesh> slices;
  DecisionCache decisions;
  RouteCache routes;
};

}  // namespace tessera
