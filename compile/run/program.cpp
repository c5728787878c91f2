#include "compile/run/program.h"

#include <algorithm>
#include <unordered_map>

#include "collectives/ops.h"
#include "compile/ir/as_strided.h"
#include "compile/run/arenas.h"
#include "compile/run/cat_in_place.h"
#include "compile/run/step_ranges.h"
#include "core/dispatch/call.h"
#include "core/dispatch/copy.h"
#include "core/dispatch/plan_cache.h"

namespace tessera::compiler {
namespace {

// More bytes than any input has: as_strided checks its extent against the storage, which for inputs
// is only known when they are bound.
constexpr size_t kUnboundBytes = size_t(1) << 60;

// The bytes from the first element to the last: a result may have the strides of the view that it
// is written to.
size_t bytes_of(const Meta& m) { return size_t(extent_of(m, 0).size) * size_of(m.dtype); }

class ProgramMaker {
 public:
  explicit ProgramMaker(const Graph& g)
      : g_(g),
        cats_(find_cats_in_place(g)),
        value_(g.values.size()),
        last_read_(g.values.size(), -1) {}

  Program run() {
    s_.arenas.emplace_back();
    find_last_reads();
    add_inputs();
    s_.settings = PlanSettings::of_thread();
    for (node_ = 0; node_ < int(g_.nodes.size()); ++node_) add_node(g_.nodes[size_t(node_)]);
    add_outputs();
    finish_pending();
    lay_out_arenas(s_);
    return std::move(s_);
  }

 private:
  // What is known of a memory while the program is made, and not needed after that.
  struct Use {
    int dies = -1;                     // last node that reads it; node count: it outlives the run
    int64_t base = 0;                  // offset of the input that it begins with
    int pending = -1;                  // the collective that may still write it
    bool maybe = false;                // an input may be pending when the run begins
    SmallVector<int, 2> readers = {};  // collectives that may still read it
  };
  // A collective between its submission and the step that waits for it.
  struct Pending {
    int step = 0, done = -1;
    SmallVector<MemoryId, 4> memories = {};  // of operands and results
    MemoryId result = kNoMemory;
    SmallVector<int, 2> after = {};  // collectives that it waits for itself
  };

  // ---- lifetimes

  bool shape_only(const Node& n, size_t i) const {
    if (i >= 32) return false;
    MetaPointers metas;
    for (ValueId id : n.in) metas.push_back(&g_[id].meta);
    return n.prim->axes(metas).shape_only >> i & 1;
  }

  void find_last_reads() {
    auto read = [&](ValueId id, int k) {
      if (ValueId b = g_[id].buffer; b != kNoBuffer) last_read_[size_t(b)] = k;
    };
    for (int k = 0; k < int(g_.nodes.size()); ++k) {
      const Node& n = g_.nodes[size_t(k)];
      for (size_t i = 0; i < n.in.size(); ++i)
        if (!shape_only(n, i)) read(n.in[i], k);
      for (ValueId id : n.into)
        if (id != kNoValue) read(id, k);
      for (ValueId id : n.out) read(id, k);
    }
    for (ValueId id : g_.outputs) read(id, int(g_.nodes.size()));
  }

  // ---- memories and the tensors that see them

  Memory& memory(MemoryId m) { return s_.memories[size_t(m)]; }
  Use& use(MemoryId m) { return uses_[size_t(m)]; }

  MemoryId add_memory(Memory::Kind kind, size_t bytes, Device device, int dies) {
    MemoryId m = MemoryId(s_.memories.size());
    int now = int(s_.steps.size());
    Ref<Storage> storage = make_ref<Storage>(nullptr, bytes, device, nullptr);
    of_storage_.emplace(storage.get(), m);
    s_.memories.push_back({.kind = kind,
                           .bytes = bytes,
                           .arena = kind == Memory::Kind::kArena ? arena_of(nullptr, device) : 0,
                           .first = now,
                           .last = now,
                           .storage = storage});
    uses_.push_back({.dies = dies});
    return m;
  }

  MemoryId memory_of(const Tensor& t) const {
    return t.storage() ? of_storage_.at(t.storage().get()) : kNoMemory;
  }

  // Returns the one handle for each layout of a memory.
  Tensor see(MemoryId m, const Meta& meta, int64_t offset) {
    Memory& mem = memory(m);
    for (const Memory::View& v : mem.views)
      if (v.tensor.offset() == offset && same_layout(v.tensor.meta(), meta)) return v.tensor;
    mem.views.push_back({Tensor(meta, mem.storage, offset), offset - use(m).base});
    return mem.views.back().tensor;
  }

  // `in_arena`: also where it outlives the run; the output is then a copy.
  Tensor fresh(const Meta& meta, int dies, bool in_arena = false) {
    bool outlives = dies == int(g_.nodes.size()) && !in_arena;
    size_t bytes = bytes_of(meta);
    s_.unplanned_bytes += bytes;
    auto kind = outlives ? Memory::Kind::kOutput : Memory::Kind::kArena;
    return see(add_memory(kind, bytes, meta.device, dies), meta, 0);
  }

  void add_input(Memory::Kind kind, int index, ValueId id) {
    MemoryId m = add_memory(kind, kUnboundBytes, g_[id].meta.device, int(g_.nodes.size()));
    memory(m).index = index;
    use(m).base = g_[id].offset;
    use(m).maybe = true;
    value_[size_t(id)] = see(m, g_[id].meta, g_[id].offset);
  }

  void add_inputs() {
    for (size_t i = 0; i < g_.inputs.size(); ++i)
      add_input(Memory::Kind::kInput, int(i), g_.inputs[i]);
    for (size_t i = 0; i < g_.implicit.size(); ++i)
      add_input(Memory::Kind::kImplicit, int(i), g_.implicit[i].id);
    for (ValueId id : g_.shapes) value_[size_t(id)] = Tensor(g_[id].meta, nullptr);
  }

  // ---- nodes

  void add_node(const Node& n) {
    std::vector<Tensor> in;
    for (size_t i = 0; i < n.in.size(); ++i) {
      const Tensor& t = value_[size_t(n.in[i])];
      in.push_back(shape_only(n, i) ? Tensor(t.meta(), nullptr, t.offset()) : t);
    }
    if (n.into.empty())
      add_pure(n, in);
    else
      add_effect(n, in);
  }

  void define(ValueId id, Tensor t) { value_[size_t(id)] = std::move(t); }
  int dies(ValueId id) const { return last_read_[size_t(g_[id].buffer)]; }

  void add_pure(const Node& n, std::vector<Tensor>& in) {
    if (n.prim->is_view()) {
      Tensors views = n.prim->view(in);
      for (size_t i = 0; i < n.out.size(); ++i) define(n.out[i], handle(views[i]));
      return;
    }
    if (is_joined(n.out)) return;
    SmallVector<int, 4> last;
    for (ValueId id : n.out) last.push_back(dies(id));
    Tensors out = results_of(n, in, last);
    for (size_t i = 0; i < n.out.size(); ++i) define(n.out[i], out[i]);
  }

  Tensor handle(const Tensor& view) {
    MemoryId m = memory_of(view);
    return m == kNoMemory ? view : see(m, view.meta(), view.offset());
  }

  // Plans the results of an op in memory of their own, or over operands that are read for the last
  // time.
  Tensors results_of(const Node& n, std::vector<Tensor>& in, std::span<const int> last) {
    Device device = device_of(*n.prim, in);
    const Kernel& kernel = find_kernel(*n.prim, device);
    Tensors out;
    if (!kernel) {
      ++s_.eager_steps;
      for (size_t i = 0; i < n.out.size(); ++i) out.push_back(fresh(g_[n.out[i]].meta, last[i]));
      emit(n, nullptr, in, out);
      return out;
    }
    bring_numbers(*n.prim, kernel, device, in);
    const KernelCall call = plans_.plan(n.prim, kernel, in);
    make_dense(call, in);
    if (call.plan.any_strides_out && make_joined(call.out, out)) {
      emit(n, &kernel, in, out, call.plan);
      return out;
    }
    SmallVector<MemoryId, 2> taken;
    for (size_t i = 0; i < call.out.size(); ++i) {
      MemoryId m =
          call.plan.in_place ? dying_operand(call.out[i], in, taken, collective(n)) : kNoMemory;
      if (m == kNoMemory) {
        const bool sent = is_collective(*n.prim) && lies_in_group(*n.prim, call.out[i].device);
        out.push_back(fresh(call.out[i], last[i], sent));
        continue;
      }
      taken.push_back(m);
      s_.unplanned_bytes += memory(m).bytes;
      use(m).dies = last[i];
      if (last[i] == int(g_.nodes.size())) memory(m).kind = Memory::Kind::kOutput;
      out.push_back(see(m, call.out[i], 0));
    }
    emit(n, &kernel, in, out, call.plan);
    return out;
  }

  // Puts the results of this node into the memory of the value that a cat would join them to; that
  // memory is made here.
  bool make_joined(const Metas& planned, Tensors& out) {
    auto it = cats_.find(node_);
    if (it == cats_.end()) return false;
    const CatInPlace& cat = it->second;
    for (size_t i = 0; i < planned.size(); ++i) {
      const Meta& m = cat.pieces[i].meta;
      if (!(m.shape == planned[i].shape) || m.dtype != planned[i].dtype || m.strides.back() != 1)
        return false;
    }
    ValueId whole = g_.nodes[size_t(cat.node)].out[0];
    define(whole, fresh(g_[whole].meta, dies(whole)));
    for (const CatInPlace::Piece& p : cat.pieces) {
      s_.unplanned_bytes += bytes_of(p.meta);
      out.push_back(see(memory_of(value_[size_t(whole)]), p.meta, p.offset));
    }
    return true;
  }
  bool is_joined(const ValueIds& out) const { return value_[size_t(out[0])].defined(); }

  // Copies numbers and keys of the host to `device` for a kernel that does not take them by value,
  // or is to be captured.
  void bring_numbers(const Primitive& op, const Kernel& kernel, Device device,
                     std::vector<Tensor>& in) {
    if (device.is_cpu()) return;
    const bool captured = captures_steps(device);
    if (kernel.host_scalars && !captured) return;
    for (Tensor& t : in) {
      if (t.device() == device || !may_be_on_host(op, t.meta()) || !t.storage()) continue;
      if (captured) {
        t = number_on(device, t);
        continue;
      }
      s_.transfers.push_back(transfer_primitive(device));
      const Primitive& prim = *s_.transfers.back();
      const Tensor there = fresh(Meta::contiguous(t.shape(), t.dtype(), device), node_);
      push({.prim = &prim, .kernel = prim.own_kernel(device.kind), .node = node_}, {&t, 1},
           {&there, 1}, false);
      t = there;
    }
  }

  // A place for the value of `t`, which is on the host, in the block of `device`.
  Tensor number_on(Device device, const Tensor& t) {
    constexpr size_t kAlign = 16;
    size_t block = 0;
    while (block < s_.blocks.size() && s_.blocks[block].device != device) ++block;
    if (block == s_.blocks.size()) s_.blocks.push_back({device});
    const Meta meta = Meta::contiguous(t.shape(), t.dtype(), device);
    const MemoryId m =
        add_memory(Memory::Kind::kNumber, bytes_of(meta), device, int(g_.nodes.size()));
    memory(m).index = int(block), memory(m).offset = s_.blocks[block].bytes;
    s_.blocks[block].bytes += (bytes_of(meta) + kAlign - 1) / kAlign * kAlign;
    const int now = int(s_.steps.size());
    memory(memory_of(t)).last = std::max(memory(memory_of(t)).last, now);
    s_.copies.push_back({.before = now,
                         .block = int(block),
                         .begin = memory(m).offset,
                         .bytes = bytes_of(meta),
                         .numbers = {{t, 0}}});
    return see(m, meta, 0);
  }

  void make_dense(const KernelCall& call, std::vector<Tensor>& in) {
    const Primitive& copy = *copy_primitive();
    for (size_t i = 0; i < in.size(); ++i) {
      if (!call.needs_dense(i, in[i]) || !in[i].storage()) continue;
      Meta meta = Meta::contiguous(in[i].shape(), in[i].dtype(), in[i].device());
      Tensor dense = fresh(meta, node_);
      emit_copy(copy, in[i], dense);
      in[i] = dense;
    }
  }

  // Returns the memory of an operand that a result of type `out` may be written over. The operand
  // must have the layout of `out`, be all of its memory, and be read here for the last time and by
  // no operand of another layout.
  MemoryId dying_operand(const Meta& out, std::span<const Tensor> in,
                         std::span<const MemoryId> taken, bool collective) {
    for (const Tensor& t : in) {
      MemoryId m = memory_of(t);
      if (m == kNoMemory || use(m).dies != node_ || memory(m).kind != Memory::Kind::kArena)
        continue;
      if (!same_layout(t.meta(), out) || t.offset() != 0 || memory(m).bytes != bytes_of(out))
        continue;
      if (in_use_elsewhere(m, collective)) continue;
      if (std::find(taken.begin(), taken.end(), m) != taken.end()) continue;
      bool alone = std::all_of(in.begin(), in.end(), [&](const Tensor& o) {
        return o.storage() != t.storage() || harmless(t, o, true);
      });
      if (alone) return m;
    }
    return kNoMemory;
  }

  // True if a pending collective reads the memory: the op would have to wait for it. A pending
  // writer does not matter, since it has to be waited for in any case, except if the op is a
  // collective.
  bool in_use_elsewhere(MemoryId m, bool collective) {
    if (collective && use(m).pending >= 0) return true;
    for (int f : use(m).readers)
      if (f != use(m).pending) return true;
    return false;
  }

  void add_effect(const Node& n, std::vector<Tensor>& in) {
    Tensors to;
    for (size_t i = 0; i < n.out.size(); ++i)
      to.push_back(n.into[i] == kNoValue ? fresh(g_[n.out[i]].meta, dies(n.out[i]))
                                         : value_[size_t(n.into[i])]);
    const Kernel* kernel = nullptr;
    const Device device = device_of(*n.prim, in);
    if (!n.prim->is_view()) kernel = &find_kernel(*n.prim, device);
    if (kernel && *kernel) {
      bring_numbers(*n.prim, *kernel, device, in);
      const KernelCall call = plans_.plan(n.prim, *kernel, in);
      check_destinations(*n.prim, to, call.out);
      make_dense(call, in);
      if (writes_in_place(call, to, in)) {
        emit(n, kernel, in, to, call.plan);
        return end_effect(n, to);
      }
    }
    Tensors results;
    if (n.prim->is_view()) {
      for (const Tensor& t : n.prim->view(in)) results.push_back(handle(t));
    } else {
      SmallVector<int, 4> here(n.out.size(), node_);
      results = results_of(n, in, here);
    }
    for (size_t i = 0; i < to.size(); ++i) emit_copy(*copy_primitive(), results[i], to[i]);
    end_effect(n, to);
  }

  void end_effect(const Node& n, const Tensors& to) {
    SmallVector<MemoryId, 4> bumps;
    for (size_t i = 0; i < to.size(); ++i) {
      define(n.out[i], to[i]);
      Memory& m = memory(memory_of(to[i]));
      if (m.kind != Memory::Kind::kInput && m.kind != Memory::Kind::kImplicit) continue;
      m.written = true;
      bumps.push_back(memory_of(to[i]));
    }
    s_.steps.back().bumps = keep(bumps);
  }

  // ---- steps

  template <class List>
  std::span<const MemoryId> keep(const List& list) {
    if (list.empty()) return {};
    s_.lists.push_back(std::make_unique<MemoryId[]>(list.size()));
    std::copy(list.begin(), list.end(), s_.lists.back().get());
    return {s_.lists.back().get(), list.size()};
  }
  std::span<const Tensor> keep_tensors(std::span<const Tensor> list) {
    s_.operands.push_back(std::make_unique<Tensor[]>(list.size()));
    std::copy(list.begin(), list.end(), s_.operands.back().get());
    return {s_.operands.back().get(), list.size()};
  }

  void emit_copy(const Primitive& copy, const Tensor& from, const Tensor& to) {
    const Kernel& kernel = kernel_table().find(from.device().kind, copy.id());
    push({.device = from.device(), .prim = &copy, .kernel = &kernel, .node = node_}, {&from, 1},
         {&to, 1}, false);
  }

  void emit(const Node& n, const Kernel* kernel, std::span<const Tensor> in,
            std::span<const Tensor> out, const Plan& plan = {}) {
    Step step{.device = device_of(*n.prim, in),
              .prim = n.prim.get(),
              .kernel = kernel,
              .state = plan.state,
              .node = node_,
              .uncapturable = plan.uncapturable || (kernel && kernel->uncapturable)};
    step.workspace.state = plan.state.get();
    if (const size_t bytes = plan.workspace_bytes)
      step.scratch = add_memory(Memory::Kind::kArena, bytes, step.device, node_);
    if (is_collective(*n.prim)) lay_in_group(*n.prim, in, out);
    push(std::move(step), in, out, collective(n));
  }
  static bool collective(const Node& n) {
    return n.role == Role::kCollective || is_collective(*n.prim);
  }

  // Puts what a collective moves into its group's own memory, if it has some. If several groups
  // move it, the first one gets it.
  void lay_in_group(const Primitive& prim, std::span<const Tensor> in,
                    std::span<const Tensor> out) {
    ProcessGroup& group = group_of(prim);
    const Device device = out[0].device();
    if (device.is_cpu() ? !group.has_own_memory() : !lies_in_group(prim, device)) return;
    const int arena = arena_of(&group, device);  // on all ranks, whatever dies where
    auto lay = [&](std::span<const Tensor> list) {
      for (const Tensor& t : list)
        if (Memory& m = memory(memory_of(t));
            m.kind == Memory::Kind::kArena && is_ordinary(s_.arenas[size_t(m.arena)]))
          m.arena = arena;
    };
    lay(in);
    if (!device.is_cpu() || moves_its_result(prim)) lay(out);
  }
  static bool is_ordinary(const Arena& a) { return !a.group && a.beside.is_cpu(); }
  // Whether what a collective on a device reads and writes should be in its group's own memory.
  static bool lies_in_group(const Primitive& prim, Device device) {
    return !device.is_cpu() && uses_windows(prim) && group_of(prim).has_own_memory(device);
  }
  int arena_of(ProcessGroup* group, Device device, Device beside = {}) {
    auto at = std::find_if(s_.arenas.begin(), s_.arenas.end(), [&](const Arena& a) {
      return a.group.get() == group && a.device == device && a.beside == beside;
    });
    if (at == s_.arenas.end())
      at = s_.arenas.insert(
          at, {.group = Ref<ProcessGroup>(group), .device = device, .beside = beside});
    return int(at - s_.arenas.begin());
  }

  // What a card copies to the host: there the next step waits for it.
  void lay_beside(const Tensor& result, Device card) {
    const MemoryId m = memory_of(result);
    if (memory(m).kind != Memory::Kind::kArena || memory(m).arena != 0) return;
    memory(m).arena = arena_of(nullptr, kCPU, card);
    use(m).maybe = true;
  }

  void push(Step step, std::span<const Tensor> in, std::span<const Tensor> out, bool collective) {
    const int now = int(s_.steps.size());
    SmallVector<MemoryId, 4> waits;
    for (const Tensor& t : out) {
      const Use& u = use(memory_of(t));
      auto readers = u.readers;  // finish() removes elements from the list
      for (int f : readers)      // a collective itself waits for the writer of its operand
        if (!(collective && f == u.pending)) finish(f, now, waits);
    }
    for (auto list : {in, out})
      for (const Tensor& t : list)
        if (MemoryId m = memory_of(t); m != kNoMemory) {
          memory(m).last = now;
          if (!collective) wait_for(m, now, waits);
        }
    if (collective) take_off(in, out, now);
    if (step.prim->id() == transfer_id_ && in[0].device().is_cpu() != out[0].device().is_cpu()) {
      const bool down = out[0].device().is_cpu();
      const Device card = down ? in[0].device() : out[0].device();
      step.moves = captures_steps(card);
      if (step.moves && down) lay_beside(out[0], card);
    }
    step.collective = collective;
    step.waits = keep(waits);
    step.in = keep_tensors(in);
    step.out = keep_tensors(out);
    s_.steps.push_back(std::move(step));
  }

  // ---- pending collectives. One is done when something waits for its result; all collectives that
  // it waits for itself are then done too.

  void wait_for(MemoryId m, int now, SmallVector<MemoryId, 4>& waits) {
    if (use(m).pending >= 0) finish(use(m).pending, now, waits);
    if (std::exchange(use(m).maybe, false)) waits.push_back(m);
  }

  void finish(int f, int now, SmallVector<MemoryId, 4>& waits) {
    if (pending_[size_t(f)].done >= 0) return;
    waits.push_back(pending_[size_t(f)].result);
    mark_done(f, now);
    use(pending_[size_t(f)].result).maybe = false;
  }

  void mark_done(int f, int now) {
    Pending& pending = pending_[size_t(f)];
    if (pending.done >= 0) return;
    pending.done = now;
    if (use(pending.result).pending == f)  // it is done, but its event is still set
      use(pending.result).pending = -1, use(pending.result).maybe = true;
    for (MemoryId m : pending.memories) {
      auto& readers = use(m).readers;
      if (auto it = std::find(readers.begin(), readers.end(), f); it != readers.end())
        readers.erase(size_t(it - readers.begin()));
    }
    for (int g : pending.after) mark_done(g, now);
  }

  void take_off(std::span<const Tensor> in, std::span<const Tensor> out, int now) {
    int f = int(pending_.size());
    Pending pending{.step = now};
    for (auto list : {in, out})
      for (const Tensor& t : list) {
        MemoryId m = memory_of(t);
        pending.memories.push_back(m);
        if (use(m).pending >= 0) pending.after.push_back(use(m).pending);
      }
    for (const Tensor& t : in) use(memory_of(t)).readers.push_back(f);
    for (const Tensor& t : out) {
      pending.result = memory_of(t);
      use(pending.result).pending = f;
      use(pending.result).maybe = false;  // the collective itself waits for it
      s_.results.push_back(pending.result);
    }
    pending_.push_back(std::move(pending));
  }

  void finish_pending() {
    for (const Pending& f : pending_) {
      if (f.done < 0) s_.unfinished.push_back(f.result);
      int until = f.done < 0 ? int(s_.steps.size()) - 1 : f.done - 1;
      for (MemoryId m : f.memories) memory(m).last = std::max(memory(m).last, until);
    }
  }

  // ---- the end

  void add_outputs() {
    node_ = int(g_.nodes.size()) - 1;
    std::unordered_map<MemoryId, Tensor> copies;  // of what lies in an arena
    for (ValueId id : g_.outputs) {
      Tensor t = value_[size_t(id)];
      if (const MemoryId m = memory_of(t); memory(m).kind == Memory::Kind::kArena) {
        auto [at, first] = copies.try_emplace(m);
        if (first) at->second = copy_of(m, t);
        t = see(memory_of(at->second), t.meta(), t.offset());
      }
      s_.outputs.push_back(t);
    }
  }
  Tensor copy_of(MemoryId m, const Tensor& t) {
    const int64_t n = int64_t(memory(m).bytes / size_of(t.dtype()));
    const Meta flat = Meta::contiguous({n}, t.dtype(), t.device());
    const Tensor from = see(m, flat, 0), to = fresh(flat, int(g_.nodes.size()));
    emit_copy(*copy_primitive(), from, to);
    return to;
  }

  const Graph& g_;
  const std::unordered_map<int32_t, CatInPlace> cats_;
  Program s_;
  const OpId transfer_id_ = transfer_primitive(kCPU)->id();
  PlanCache plans_;  // of this program alone: equal calls share a state
  int node_ = 0;
  std::vector<Tensor> value_;   // by ValueId
  std::vector<int> last_read_;  // node, by the value that made the memory
  std::vector<Use> uses_;       // by MemoryId
  std::vector<Pending> pending_;
  std::unordered_map<const Storage*, MemoryId> of_storage_;
};

}  // namespace

size_t Program::arena_bytes() const {
  size_t bytes = 0;
  for (const Arena& a : arenas) bytes += a.bytes;
  return bytes;
}

void bind(Memory& m, const Ref<Storage>& storage, int64_t base) {
  m.storage = storage;
  for (Memory::View& v : m.views) {
    v.tensor.impl()->storage = storage;
    v.tensor.impl()->offset = base + v.offset;
  }
}

Range reach_of(const Memory& m) {
  Range all{0, 0, 0};
  for (const Memory::View& v : m.views) {
    Range r = extent_of(v.tensor.meta(), v.offset);
    if (r.size == 0) continue;
    int64_t end = std::max(all.begin + all.size, r.begin + r.size);
    all.begin = std::min(all.begin, r.begin), all.size = end - all.begin;
  }
  return all;
}

Program make_program(const Graph& graph) { return ProgramMaker(graph).run(); }

}  // namespace tessera::compiler
