#include "launcher/placement.h"

#include <hwloc.h>
#include <sched.h>
#include <stdlib.h>

#include <algorithm>
#include <map>
#include <memory>

#include "core/base/error.h"

namespace tessera::launcher {
namespace {

using Cpus = std::vector<int>;

struct Topology {
  std::vector<Cpus> cores;   // usable logical CPUs of each physical core, neighbours side by side
  std::vector<int> node_of;  // NUMA node of each core
  bool one_node = false;     // of the whole machine: every core is as near to a card as another
};

Cpus to_list(hwloc_const_bitmap_t set) {
  Cpus cpus;
  for (int i = hwloc_bitmap_first(set); i >= 0; i = hwloc_bitmap_next(set, i)) cpus.push_back(i);
  return cpus;
}

Topology load_topology() {
  // Plugins (graphics, OpenCL, CUDA) would look for devices that do not matter here, which takes
  // long.
  ::setenv("HWLOC_PLUGINS_PATH", "/nonexistent", 0);
  hwloc_topology_t raw = nullptr;
  TESSERA_CHECK(hwloc_topology_init(&raw) == 0, "--bind: hwloc cannot start; use --bind none");
  std::unique_ptr<hwloc_topology, void (*)(hwloc_topology_t)> owner(raw, hwloc_topology_destroy);
  hwloc_topology_set_all_types_filter(raw, HWLOC_TYPE_FILTER_KEEP_NONE);
  hwloc_topology_set_type_filter(raw, HWLOC_OBJ_CORE, HWLOC_TYPE_FILTER_KEEP_ALL);
  // A group holds the cores of a NUMA node; without it all cores belong to all nodes.
  hwloc_topology_set_type_filter(raw, HWLOC_OBJ_GROUP, HWLOC_TYPE_FILTER_KEEP_STRUCTURE);
  TESSERA_CHECK(hwloc_topology_load(raw) == 0,
                "--bind: hwloc cannot read this machine's topology; use --bind none");
  hwloc_bitmap_t allowed = hwloc_bitmap_alloc();
  if (hwloc_get_proc_cpubind(raw, 0, allowed, 0) != 0)
    hwloc_bitmap_copy(allowed, hwloc_topology_get_allowed_cpuset(raw));
  Topology topology;
  hwloc_bitmap_t part = hwloc_bitmap_alloc();
  for (hwloc_obj_t core = nullptr;
       (core = hwloc_get_next_obj_by_type(raw, HWLOC_OBJ_CORE, core)) != nullptr;) {
    hwloc_bitmap_and(part, core->cpuset, allowed);
    if (hwloc_bitmap_iszero(part)) continue;
    topology.cores.push_back(to_list(part));
    int node = core->nodeset ? hwloc_bitmap_first(core->nodeset) : 0;
    topology.node_of.push_back(std::max(0, node));
  }
  if (topology.cores.empty())  // the machine does not report its cores: each CPU counts as one
    for (int cpu : to_list(allowed)) {
      topology.cores.push_back({cpu});
      topology.node_of.push_back(0);
    }
  topology.one_node = hwloc_get_nbobjs_by_type(raw, HWLOC_OBJ_NUMANODE) <= 1;
  hwloc_bitmap_free(part);
  hwloc_bitmap_free(allowed);
  TESSERA_CHECK(!topology.cores.empty(), "--bind: no usable core found; use --bind none");
  return topology;
}

const Topology& topology() {
  static const Topology* loaded = new Topology(load_topology());
  return *loaded;
}

Place join(const std::vector<Cpus>& cores, size_t begin, size_t end) {
  Place place;
  for (size_t i = begin; i < end; ++i)
    place.cpus.insert(place.cpus.end(), cores[i].begin(), cores[i].end());
  std::sort(place.cpus.begin(), place.cpus.end());
  place.cores = int(end - begin);
  return place;
}

/// Divides `cores` equally among `n` ranks, neighbours together; round-robin when there are fewer
/// cores than ranks.
std::vector<Place> deal(const std::vector<Cpus>& cores, int n) {
  std::vector<Place> places;
  size_t share = cores.size() / size_t(n);
  for (size_t r = 0; r < size_t(n); ++r)
    places.push_back(share > 0 ? join(cores, r * share, (r + 1) * share)
                               : join(cores, r % cores.size(), r % cores.size() + 1));
  return places;
}

std::vector<Cpus> cores_of(const Topology& machine, int node) {
  std::vector<Cpus> cores;
  for (size_t c = 0; c < machine.cores.size(); ++c)
    if (machine.node_of[c] == node) cores.push_back(machine.cores[c]);
  return cores;
}

std::string count_cores(size_t n) { return fmt::format("{} core{}", n, n == 1 ? "" : "s"); }

/// Deals the cores of each card's node to the ranks that have a card there. A machine of one node
/// need not say that its cards are there: many virtual machines do not.
std::vector<Place> by_card(const Topology& machine, int nproc, const std::vector<int>& node_of,
                           Placement& placement) {
  std::map<int, std::vector<int>> ranks_on;
  for (int r = 0; r < nproc; ++r) {
    const int node = node_of[size_t(r)];
    ranks_on[node < 0 && machine.one_node ? machine.node_of[0] : node].push_back(r);
  }
  std::vector<Place> places{size_t(nproc)};
  std::string shared;
  for (const auto& [node, ranks] : ranks_on) {
    const std::vector<Cpus> cores = cores_of(machine, node);
    if (cores.empty()) {
      placement.note = fmt::format(
          "--bind gpu: {}, so ranks have equal shares of all {}",
          node < 0 ? fmt::format("the machine does not say which cores are near the card of rank "
                                 "{}",
                                 ranks[0])
                   : fmt::format("no core of NUMA node {}, where the card of rank {} is, may be "
                                 "used",
                                 node, ranks[0]),
          count_cores(machine.cores.size()));
      return deal(machine.cores, nproc);
    }
    const std::vector<Place> shares = deal(cores, int(ranks.size()));
    for (size_t i = 0; i < ranks.size(); ++i) places[size_t(ranks[i])] = shares[i];
    if (ranks.size() > cores.size())
      shared +=
          fmt::format("{}the {} ranks with cards at NUMA node {} share its {}",
                      shared.empty() ? "" : ", ", ranks.size(), node, count_cores(cores.size()));
  }
  if (!shared.empty()) placement.shared = true, placement.note = "--bind gpu: " + shared;
  return places;
}

std::vector<Place> by_node(const Topology& machine, int nproc) {
  std::vector<int> used = machine.node_of;
  std::sort(used.begin(), used.end());
  used.erase(std::unique(used.begin(), used.end()), used.end());
  std::vector<int> ranks_on(used.size());
  for (int r = 0; r < nproc; ++r) ++ranks_on[size_t(r) * used.size() / size_t(nproc)];
  std::vector<Place> places;
  for (int r = 0; r < nproc; ++r) {
    size_t node = size_t(r) * used.size() / size_t(nproc);
    const std::vector<Cpus> cores = cores_of(machine, used[node]);
    Place place = join(cores, 0, cores.size());
    place.cores = std::max(1, int(cores.size()) / ranks_on[node]);
    places.push_back(place);
  }
  return places;
}

}  // namespace

int usable_cores() { return int(topology().cores.size()); }

Placement place_ranks(int nproc, Bind bind, const std::vector<int>& nodes_of_cards) {
  const Topology& machine = topology();
  Placement placement;
  placement.cores = int(machine.cores.size());
  placement.shared = nproc > placement.cores;
  placement.ranks = bind == Bind::kNuma  ? by_node(machine, nproc)
                    : bind == Bind::kGpu ? by_card(machine, nproc, nodes_of_cards, placement)
                                         : deal(machine.cores, nproc);
  if (bind == Bind::kNone)
    for (Place& place : placement.ranks) place.cpus.clear();
  else if (nproc > placement.cores)
    placement.note +=
        fmt::format("{}{} ranks share {}, round-robin", placement.note.empty() ? "" : "; ", nproc,
                    count_cores(size_t(placement.cores)));
  return placement;
}

std::string cpu_list(const std::vector<int>& cpus) {
  std::string text;
  for (size_t i = 0; i < cpus.size();) {
    size_t j = i;
    while (j + 1 < cpus.size() && cpus[j + 1] == cpus[j] + 1) ++j;
    text += fmt::format("{}{}", i ? "," : "", cpus[i]);
    if (j > i) text += fmt::format("-{}", cpus[j]);
    i = j + 1;
  }
  return text;
}

}  // namespace tessera::launcher
