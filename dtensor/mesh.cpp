#include "dtensor/mesh.h"

#include <algorithm>
#include <charconv>

#include "dtensor/mesh_state.h"

namespace tessera {
namespace {

std::string listed(const std::vector<std::string>& names) {
  std::string text;
  for (const std::string& n : names) text += (text.empty() ? "" : ", ") + n;
  return text;
}

std::string text_of(const std::vector<MeshAxis>& axes) {
  std::string text;
  for (const MeshAxis& a : axes)
    text += fmt::format("{}{}={}", text.empty() ? "" : ", ", a.name, a.size);
  return text;
}

DeviceMesh slice_of(const Ref<MeshRoot>& root, const std::vector<std::string>& names) {
  TESSERA_CHECK(!names.empty(), "mesh: a slice of no axes");
  if (auto it = root->slices.find(names); it != root->slices.end())
    return DeviceMesh(Ref<RefCounted>(it->second));
  auto part = make_ref<DeviceMesh::State>();
  part->root = root;
  size_t next = 0;
  for (const std::string& name : names) {
    while (next < root->axes.size() && root->axes[next] != name) ++next;
    TESSERA_CHECK(next < root->axes.size(),
                  "mesh: slice {} of {}; name axes once and in the mesh's order", listed(names),
                  listed(root->axes));
    part->axes.push_back(name);
    part->sizes.push_back(root->sizes[next]);
    part->coordinate.push_back(root->coordinate[next]);
    part->groups.push_back(root->groups[next]);
    ++next;
  }
  root->slices.emplace(names, part.get());
  return DeviceMesh(std::move(part));
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
                listed(state().axes));
  return int(it - state().axes.begin());
}

DeviceMesh DeviceMesh::operator[](std::string_view axis) const {
  return slice({std::string(axis)});
}

DeviceMesh DeviceMesh::slice(const std::vector<std::string>& names) const {
  for (const std::string& name : names) axis(name);  // gives the clear error
  return slice_of(state().root, names);
}

DeviceMesh DeviceMesh::joined(const DeviceMesh& other) const {
  TESSERA_CHECK(state().root == other.state().root,
                "mesh: ({}) and ({}) are not slices of one mesh; slice both from what "
                "init_device_mesh returned",
                to_string(), other.to_string());
  std::vector<std::string> names;
  for (const std::string& name : state().root->axes)
    if (has_axis(name) || other.has_axis(name)) names.push_back(name);
  return slice_of(state().root, names);
}

std::string DeviceMesh::to_string() const {
  std::string text;
  for (size_t a = 0; a < state().axes.size(); ++a)
    text += fmt::format("{}{}={}", a ? ", " : "", state().axes[a], state().sizes[a]);
  return text;
}

DeviceMesh init_device_mesh(const std::vector<MeshAxis>& axes, Ref<ProcessGroup> group) {
  if (!group) group = world_group();
  auto state = make_ref<MeshRoot>();
  int64_t ranks = 1;
  for (const MeshAxis& a : axes) {
    TESSERA_CHECK(a.size >= 1 && !a.name.empty(), "mesh: axis \"{}\" of {} ranks", a.name, a.size);
    TESSERA_CHECK(std::ranges::find(state->axes, a.name) == state->axes.end(),
                  "mesh: two axes are called \"{}\"", a.name);
    state->axes.push_back(a.name);
    state->sizes.push_back(a.size);
    TESSERA_CHECK(!__builtin_mul_overflow(ranks, int64_t(a.size), &ranks),
                  "mesh: {} are too many ranks to count", text_of(axes));
  }
  TESSERA_CHECK(!axes.empty(), "mesh: no axes given");
  TESSERA_CHECK(
      ranks == group->size(),
      "mesh: {} is {} ranks, but group {} has {}; start the program with tlaunch --nproc {}, or "
      "choose sizes whose product is {}",
      text_of(axes), ranks, group->name(), group->size(), ranks, group->size());
  int rest = group->rank();
  for (size_t a = axes.size(); a-- > 0;) {
    state->coordinate.insert(0, rest % axes[a].size);
    rest /= axes[a].size;
  }
  int stride = int(ranks);
  for (size_t a = 0; a < axes.size(); ++a) {
    stride /= axes[a].size;
    int place = state->coordinate[a];
    // One line along an axis: the ranks that have this rank's coordinates on all other axes.
    state->groups.push_back(axes.size() == 1 ? group
                                             : group->split(group->rank() - place * stride, place));
  }
  return slice_of(state, state->axes);
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
