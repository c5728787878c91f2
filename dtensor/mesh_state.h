// The state behind a mesh handle. Decisions about ops are kept here, since they are valid for one
// rank of one mesh; this needs no lock and no global variable.
#pragma once
#include <map>

#include "dtensor/propagation.h"
#include "dtensor/redistribute.h"

namespace tessera {

/// The mesh that init_device_mesh made, and its slices that are alive.
struct MeshRoot : RefCounted {
  std::vector<std::string> axes;
  Coordinates sizes, coordinate;
  std::vector<Ref<ProcessGroup>> groups;
  std::map<std::vector<std::string>, DeviceMesh::State*> slices;
};

struct DeviceMesh::State : RefCounted {
  ~State() override {
    // A slice that was refused while it was being made may have the name of another.
    if (auto it = root->slices.find(axes); it != root->slices.end() && it->second == this)
      root->slices.erase(it);
  }

  Ref<MeshRoot> root;
  std::vector<std::string> axes;
  Coordinates sizes, coordinate;
  std::vector<Ref<ProcessGroup>> groups;
  DecisionCache decisions;
  RouteCache routes;
};

}  // namespace tessera
