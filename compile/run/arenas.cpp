#include "compile/run/arenas.h"

#include <atomic>
#include <unordered_map>

#include "core/base/log.h"
#include "core/ops/create.h"

namespace tessera::compiler {
namespace {

struct ArenaMemories {
  std::vector<Memory*> memories = {};
  std::vector<Block> blocks = {};
};
// What is copied beside the host has pages of its own, as blocks of pinned memory have.
ArenaMemories memories_of(Program& p, size_t arena) {
  constexpr size_t kPage = 4096;
  const size_t align = p.arenas[arena].beside.is_cpu() ? 1 : kPage;
  ArenaMemories t;
  for (Memory& m : p.memories)
    if (m.kind == Memory::Kind::kArena && size_t(m.arena) == arena) {
      t.memories.push_back(&m);
      t.blocks.push_back({(m.bytes + align - 1) / align * align, m.first, m.last});
    }
  return t;
}

// The arena of ordinary memory of the device.
size_t ordinary(const Program& p, Device device) {
  size_t at = 0;
  while (p.arenas[at].group || p.arenas[at].device != device) ++at;
  return at;
}

void lay_out_arena(Program& p, size_t a) {
  ArenaMemories own = memories_of(p, a);
  ArenaLayout layout = lay_out(own.blocks);
  p.arenas[a].bytes = layout.bytes;
  for (size_t i = 0; i < own.memories.size(); ++i) own.memories[i]->offset = layout.offsets[i];
  if (!p.arenas[a].group || own.memories.empty()) return;
  ArenaMemories rest = memories_of(p, ordinary(p, p.arenas[a].device));
  std::vector<size_t> offsets = fill_gaps(own.blocks, layout, rest.blocks);
  for (size_t i = 0; i < offsets.size(); ++i)
    if (offsets[i] != kNoRoom)
      rest.memories[i]->arena = int(a), rest.memories[i]->offset = offsets[i];
}

// Hashes the size of the arena, and where in it each operand and result of a collective lies.
int64_t hash_of(const Program& p, size_t arena) {
  std::unordered_map<const Storage*, const Memory*> laid;
  for (const Memory& m : p.memories)
    if (m.kind == Memory::Kind::kArena && size_t(m.arena) == arena)
      laid.emplace(m.storage.get(), &m);
  uint64_t h = p.arenas[arena].bytes;
  for (const Step& s : p.steps) {
    if (!s.collective) continue;
    for (auto list : {s.in, s.out})
      for (const Tensor& t : list) {
        const auto m = laid.find(t.storage().get());
        const size_t at = m == laid.end() ? 0 : m->second->offset + 1;
        h = (h ^ (at + size_t(t.offset()) * size_of(t.dtype()))) * 0x9e3779b97f4a7c15ull;
      }
  }
  return int64_t(h >> 2);  // its negative is a number too
}

}  // namespace

void lay_out_arenas(Program& program) {
  for (const bool of_groups : {true, false})
    for (size_t a = program.arenas.size(); a-- > 0;)
      if (bool(program.arenas[a].group) == of_groups) lay_out_arena(program, a);
}

void agree_on_arenas(Program& program) {
  for (size_t a = 0; a < program.arenas.size(); ++a) {
    Arena& arena = program.arenas[a];
    if (!arena.group || arena.device.is_cpu()) continue;
    if (program.alone) {
      arena.differs = true;
      continue;
    }
    const int64_t mine = hash_of(program, a);
    const Tensor all = from_values<int64_t>({mine, -mine}, {2});
    arena.group->all_reduce(all, ReduceOp::kMin, {}, program.site);
    if (all.values<int64_t>()[0] == -all.values<int64_t>()[1]) continue;
    static std::atomic<bool> told = false;
    if (arena.group->rank() == 0 && !told.exchange(true))
      logging::warn(
          "compile: ranks of {} laid out a step's memory differently, so its collectives on {} are "
          "copied through NCCL's buffers",
          arena.group->name(), to_string(arena.device));
    arena.differs = true;
  }
}

}  // namespace tessera::compiler
