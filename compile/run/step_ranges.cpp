#include "compile/run/step_ranges.h"

#include <algorithm>
#include <unordered_map>

#include "collectives/ops.h"
#include "compile/codegen/fused.h"
#include "core/base/env.h"
#include "core/tensor/device_runtime.h"

namespace tessera::compiler {
namespace {

constexpr int kFewest = 2;  // steps of a range: a graph of one saves nothing

// Copies between the host and a device are on the device's stream.
Device device_of_range(const Step& s) {
  return s.moves && s.device.is_cpu() ? s.out[0].device() : s.device;
}

// By handle: inputs may share their storage.
using Ids = std::unordered_map<const TensorImpl*, MemoryId>;

// Whether the copy goes on without the host, from and to addresses that stay.
bool moves_beside(const Program& p, const Ids& ids, const Step& s) {
  const Tensor& host = s.in[0].device().is_cpu() ? s.in[0] : s.out[0];
  const Memory& m = p.memories[size_t(ids.at(host.impl()))];
  return (m.kind == Memory::Kind::kArena || m.kind == Memory::Kind::kImplicit) &&
         runtime_of(device_of_range(s)).copies_beside(m.storage->data());
}

bool only_enqueues(const Program& p, const Ids& ids, const Step& s) {
  if (s.moves) return moves_beside(p, ids, s);
  if (!s.kernel || s.uncapturable || !captures_steps(s.device)) return false;
  for (const Tensor& t : s.out)
    if (t.device() != s.device) return false;
  if (s.collective) return !p.alone && captures(*s.prim, s.in, s.out);
  // Kernels of programs may do anything.
  return as_fused(*s.prim) || kernel_table().find(s.device.kind, s.prim->id()).run == s.kernel->run;
}

// The results of collectives that are not captured. A range ends where one is waited for: a wait
// before the range would come too early.
std::vector<bool> results_beside(const Program& p, const Ids& ids) {
  std::vector<bool> beside(p.memories.size());
  for (const Step& s : p.steps)
    if (s.collective && !only_enqueues(p, ids, s))
      for (const Tensor& t : s.out) beside[size_t(ids.at(t.impl()))] = true;
  return beside;
}

void note_touched(const Program& p, const Ids& ids, StepRange& range) {
  std::vector<bool> read(p.memories.size()), written(p.memories.size());
  for (int i = range.begin; i < range.end; ++i) {
    const Step& s = p.steps[size_t(i)];
    for (const Tensor& t : s.in)
      if (t.storage()) read[size_t(ids.at(t.impl()))] = true;
    for (const Tensor& t : s.out) written[size_t(ids.at(t.impl()))] = true;
    range.bumps.insert(range.bumps.end(), s.bumps.begin(), s.bumps.end());
    range.collectives |= s.collective;
  }
  for (size_t m = 0; m < p.memories.size(); ++m)
    if ((read[m] || written[m]) && p.memories[m].kind != Memory::Kind::kNumber)
      range.touched.push_back({MemoryId(m), written[m]});
}

void join_copies(Program& p) {
  std::vector<NumberCopies> joined;
  for (NumberCopies& c : p.copies) {
    for (const StepRange& r : p.ranges)
      if (r.begin <= c.before && c.before < r.end) c.before = r.begin;
    const auto same = std::ranges::find_if(
        joined, [&](const NumberCopies& j) { return j.before == c.before && j.block == c.block; });
    if (same == joined.end()) {
      joined.push_back(std::move(c));
      continue;
    }
    same->numbers.push_back({c.numbers[0].from, c.begin - same->begin});
    same->bytes = c.begin + c.bytes - same->begin;
  }
  p.copies = std::move(joined);
}

}  // namespace

bool captures_steps(Device d) {
  static const bool wanted = env::get_int("TESSERA_COMPILE_CAPTURE", 1, 0, 1) == 1;
  return wanted && !d.is_cpu() && !d.is_meta() && runtime_of(d).captures();
}

void find_ranges(Program& p) {
  Ids ids;
  for (size_t m = 0; m < p.memories.size(); ++m)
    for (const Memory::View& v : p.memories[m].views) ids.emplace(v.tensor.impl(), MemoryId(m));
  const std::vector<bool> beside = results_beside(p, ids);
  const auto waits_beside = [&](const Step& s) {
    return std::ranges::any_of(s.waits, [&](MemoryId m) { return beside[size_t(m)]; });
  };
  // Numbers are copied before a range that reads them, so it is not the one that brings them to the
  // host.
  const auto reads_brought = [&](int step) {
    return std::ranges::any_of(p.copies, [&](const NumberCopies& c) {
      const Memory& m = p.memories[size_t(ids.at(c.numbers[0].from.impl()))];
      return c.before == step && m.kind == Memory::Kind::kArena &&
             !p.arenas[size_t(m.arena)].beside.is_cpu();
    });
  };
  const int count = int(p.steps.size());
  for (int i = 0; i < count;) {
    StepRange range{.device = device_of_range(p.steps[size_t(i)]), .begin = i, .end = i};
    for (; range.end < count; ++range.end) {
      const Step& next = p.steps[size_t(range.end)];
      if (!only_enqueues(p, ids, next) || device_of_range(next) != range.device) break;
      if (range.end > range.begin && (waits_beside(next) || reads_brought(range.end))) break;
    }
    i = std::max(range.end, i + 1);
    if (range.end - range.begin < kFewest) continue;
    note_touched(p, ids, range);
    p.ranges.push_back(std::move(range));
  }
  join_copies(p);
  p.ranges_found = true;
}

uint64_t hash_of_cuts(const Program& p, const ProcessGroup& group, Device device) {
  if (p.ranges.empty()) return 0;
  uint64_t h = 0;
  size_t range = 0, last = p.ranges.size();  // that of a step, if it lies behind its begin
  for (int i = 0; i < int(p.steps.size()); ++i) {
    while (range < p.ranges.size() && p.ranges[range].end <= i) ++range;
    const Step& s = p.steps[size_t(i)];
    if (!s.collective || s.device != device || &group_of(*s.prim) != &group) continue;
    const bool captured = range < p.ranges.size() && p.ranges[range].begin <= i;
    h = (h ^ (!captured ? 1 : range == last ? 2 : 3)) * 0x9e3779b97f4a7c15ull;
    if (captured) last = range;
  }
  return h;
}

}  // namespace tessera::compiler
