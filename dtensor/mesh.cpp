#include "dtensor/mesh.h"

#include <algorithm>
#include <charconv>

#include "dtensor/mesh_state.h"

namespace tessera {
namespace {

std::string joined(const std::vector<std::string>& names) {
  std::string text;
  for (const std::string& n : names) text += (text.empty() ? "" : ", ") + n;
  return text;
}

}  // namespace

DeviceMesh::State& DeviceMesh::state() const { return static_cast<State&>(*state_); }
int DeviceMesh::ndim() const { return int(state().axes.size()); }
const std::vector<std::string>& DeviceMesh::axes() const { return state().axes; }
const Coordinates& DeviceMesh::sizes() const { return state().sizes; }
const Coordinates& DeviceMesh::coordinate() const { return state().coordinate; }
int DeviceMesh::size() const {
  int n = 1;
  for (int s : state().sizes) n *= s;
  return n;
}
int DeviceMesh::size(std::string_view name) const { return state().sizes[size_t(axis(name))]; }
int DeviceMesh::coordinate(std::string_view name) const {
  return state().coordinate[size_t(axis(name))];
}
const Ref<ProcessGroup>& DeviceMesh::group(int axis) const { return state().groups[size_t(axis)]; }
const Ref<ProcessGroup>& DeviceMesh::group(std::string_view name) const {
  return group(axis(name));
}

bool DeviceMesh::has_axis(std::string_view name) const {
  return std::ranges::find(state().axes, name) != state().axes.end();
}
int DeviceMesh::axis(std::string_view name) const {
  auto it = std::ranges::find(state().axes, name);
  TESSERA_CHECK(it != state().axes.end(), "mesh: no axis \"{}\"; this mesh has {}", name,
                joined(state().axes));
  return int(it - state().axes.begin());
}

DeviceMesh DeviceMesh::operator[](std::string_view axis) const {
  return slice({std::string(axis)});
}

DeviceMesh DeviceMesh::slice(const std::vector<std::string>& names) const {
  if (names == state().axes) return *this;
  auto [it, made] = state().slices.try_emplace(names);
  if (!made && it->second.defined()) return it->second;
  auto part = make_ref<State>();
  int last = -1;
  for (const std::string& name : names) {
    int a = axis(name);
    TESSERA_CHECK(a > last, "mesh: slice {} of {}; name axes once and in the mesh's order",
                  joined(names), joined(state().axes));
    last = a;
    part->axes.push_back(name);
    part->sizes.push_back(state().sizes[size_t(a)]);
    part->coordinate.push_back(state().coordinate[size_t(a)]);
    part->groups.push_back(state().groups[size_t(a)]);
  }
  TESSERA_CHECK(!names.empty(), "mesh: a slice of no axes");
  it->second = DeviceMesh(std::move(part));
  return it->second;
}

std::string DeviceMesh::to_string() const {
  std::string text;
  for (size_t a = 0; a < state().axes.size(); ++a)
    text += fmt::format("{}{}={}", a ? ", " : "", state().axes[a], state().sizes[a]);
  return text;
}

DeviceMesh init_device_mesh(const std::vector<MeshAxis>& axes, Ref<ProcessGroup> group) {
  if (!group) group = world_group();
  auto state = make_ref<DeviceMesh::State>();
  int64_t ranks = 1;
  for (const MeshAxis& a : axes) {
    TESSERA_CHECK(a.size >= 1 && !a.name.empty(), "mesh: axis \"{}\" of {} ranks", a.name, a.size);
    TESSERA_CHECK(std::ranges::find(state->axes, a.name) == state->axes.end(),
                  "mesh: two axes are called \"{}\"", a.name);
    state->axes.push_back(a.name);
    state->sizes.push_back(a.size);
    ranks *= a.size;
  }
  TESSERA_CHECK(!axes.empty(), "mesh: no axes given");
  TESSERA_CHECK(ranks == group->size(), "mesh: {} is {} ranks, but group {} has {}",
                DeviceMesh(state).to_string(), ranks, group->name(), group->size());
  int rest = group->rank();
  for (size_t a = axes.size(); a-- > 0;) {
    state->coordinate.insert(0, rest % axes[a].size);
    rest /= axes[a].size;
  }
  int stride = int(ranks);
  for (size_t a = 0; a < axes.size(); ++a) {
    stride /= axes[a].size;
    int place = state->coordinate[a];
    // One line of an axis: the ranks that agree with this one everywhere else.
    state->groups.push_back(axes.size() == 1 ? group
                                             : group->split(group->rank() - place * stride, place));
  }
  return DeviceMesh(std::move(state));
}

std::vector<MeshAxis> parse_mesh(std::string_view text) {
  std::vector<MeshAxis> axes;
  for (size_t at = 0; at <= text.size();) {
    size_t end = std::min(text.find(',', at), text.size());
    std::string_view part = text.substr(at, end - at);
    size_t equals = part.find('=');
    MeshAxis axis;
    auto bad = [&] {
      return fmt::format("mesh: \"{}\" in \"{}\"; write axes as dp=2,tp=2", part, text);
    };
    TESSERA_CHECK(equals != part.npos && equals > 0, "{}", bad());
    axis.name = part.substr(0, equals);
    const char *first = part.data() + equals + 1, *last = part.data() + part.size();
    auto [rest, error] = std::from_chars(first, last, axis.size);
    TESSERA_CHECK(error == std::errc() && rest == last && axis.size >= 1, "{}", bad());
    axes.push_back(std::move(axis));
    at = end + 1;
  }
  return axes;
}

}  // namespace tessera
