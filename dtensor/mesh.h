// A grid of ranks with named axes: {"dp", 4}, {"tp", 2}. Every axis has a process group for each of
// its lines, so a collective over "tp" is among the ranks that differ only in that coordinate.
// Invariant: a mesh is a handle on one rank's view; slices are made once and shared.
#pragma once
#include <string>
#include <string_view>
#include <vector>

#include "collectives/process_group.h"
#include "dtensor/placement.h"

namespace tessera {

class DeviceMesh {
 public:
  struct State;

  /// Makes an undefined mesh; defined() is false.
  DeviceMesh() = default;

  bool defined() const { return bool(state_); }
  /// The number of axes.
  int ndim() const;
  /// The number of ranks, in all or along an axis.
  int size() const;
  int size(std::string_view axis) const;
  const std::vector<std::string>& axes() const;
  const Coordinates& sizes() const;
  /// This rank's coordinate along each axis.
  const Coordinates& coordinate() const;
  int coordinate(std::string_view axis) const;
  /// The ranks of this rank's line along an axis, in the order of their coordinates.
  const Ref<ProcessGroup>& group(int axis) const;
  const Ref<ProcessGroup>& group(std::string_view axis) const;
  /// The number of the axis with this name. Throws UserError that lists the axes.
  int axis(std::string_view name) const;
  bool has_axis(std::string_view name) const;

  /// Returns the mesh of some axes, in this mesh's order, for the ranks that have this rank's
  /// coordinates on the others: mesh["tp"], mesh.slice({"dp", "tp"}).
  DeviceMesh operator[](std::string_view axis) const;
  DeviceMesh slice(const std::vector<std::string>& axes) const;

  /// Returns the mesh of this mesh's axes and those of another slice of the same mesh:
  /// mesh["dp"].joined(mesh["tp"]).
  DeviceMesh joined(const DeviceMesh& other) const;

  /// True for the same axes of the same groups.
  bool operator==(const DeviceMesh& o) const { return state_ == o.state_; }
  /// "dp=2, tp=2".
  std::string to_string() const;

  State& state() const;
  explicit DeviceMesh(Ref<RefCounted> state) : state_(std::move(state)) {}

 private:
  Ref<RefCounted> state_;  // a State
};

struct MeshAxis {
  std::string name;
  int size = 1;
};
/// Arranges the ranks of `group` (null: the world) in a grid: neighbouring ranks are along the last
/// axis. Every rank of the group must call it. Throws UserError unless the product of the sizes is
/// the group's size and the names differ.
DeviceMesh init_device_mesh(const std::vector<MeshAxis>& axes, Ref<ProcessGroup> group = {});
/// Parses "dp=2,tp=2". Throws UserError that names the part which does not parse.
std::vector<MeshAxis> parse_mesh(std::string_view text);

}  // namespace tessera
