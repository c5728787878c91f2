// Prints a scheduled body as CUDA C++ in the way that its layout (gpu_layout.h) says: one kernel,
// and a second one that joins what the units of the first have left. Values are computed again
// where they are needed; what is read from memory is kept in registers.
#include <fmt/format.h>

#include <algorithm>

#include "compile/codegen/functors.h"
#include "compile/codegen/gpu_layout.h"
#include "compile/codegen/kernel_text.h"

namespace tessera::compiler {
namespace {

class CudaPrinter : KernelText {
 public:
  CudaPrinter(const Schedule& s, const GpuLayout& layout, std::string_view name, uint64_t numbers)
      : KernelText(s), g_(layout), name_(name), numbers_(numbers) {
    int64_t reach = g_.rows * g_.columns;
    auto look = [&](const Access& a) {
      int64_t last = 0;
      for (size_t l = 0; l < a.strides.size(); ++l) last += (b_.extents[l] - 1) * a.strides[l];
      reach = std::max(reach, last + kMostWidthBytes);
    };
    for (const Access& a : b_.operands) look(a);
    for (const Store& k : b_.stores) look(k.to);
    long_ = reach >= int64_t(1) << 31;
    has_scratch_ = gpu_scratch_bytes(s_, g_) > 0;
  }

  std::string run() {
    begin_kernel(name_, g_.block_threads());
    if (g_.kind == GpuLayout::Kind::kElements)
      print_elements();
    else
      print_units();
    close("}\n");
    if (has_scratch_) {
      begin_kernel(name_ + "_finish", kFinishColumns * kFinishGroups);
      print_finish();
      close("}\n");
    }
    return std::move(text_);
  }

 private:
  static constexpr int64_t kMostWidthBytes = 16;

  void begin_kernel(const std::string& name, int threads) {
    std::string parameters;
    for (size_t k = 0; k < b_.operands.size(); ++k)
      parameters += numbers_ >> k & 1
                        ? fmt::format("{} n{}, ", register_type(b_.operands[k].dtype), k)
                        : fmt::format("const {}* x{}, ", memory_type(b_.operands[k].dtype), k);
    for (size_t k = 0; k < b_.stores.size(); ++k)
      parameters += fmt::format("{}* y{}, ", memory_type(b_.stores[k].to.dtype), k);
    open("extern \"C\" __global__ void __launch_bounds__({}) {}({}char* scratch, bool whole)",
         threads, name, parameters);
  }

  // ---- indices

  const char* index_type() const { return long_ ? "long" : "unsigned"; }
  std::string whole_number(int64_t n) const { return fmt::format("{}{}", n, long_ ? "L" : "u"); }
  int innermost() const { return s_.loops() - 1; }

  // Declares the indices of the loops of `mask` from the linear index `from`, the last loop varying
  // fastest. That of loop `base` is called j: the first of a pack.
  void print_indices(LoopMask mask, const char* from, int base = -1) {
    int64_t inside = 1;
    const int64_t all = s_.count(mask);
    for (int l = s_.loops() - 1; l >= 0; --l) {
      if (!(mask >> l & 1)) continue;
      const int64_t extent = b_.extents[size_t(l)];
      std::string text = from;
      if (inside > 1) text += " / " + whole_number(inside);
      if (inside * extent < all) text += " % " + whole_number(extent);
      line("const {} {}{} = {};", index_type(), l == base ? "j" : "i", l, text);
      inside *= extent;
    }
  }
  // The position of an access. `base`: the loop whose index is that of a pack's first element.
  std::string place(const Access& a, int base = -1) const {
    std::string text;
    for (size_t l = 0; l < a.strides.size(); ++l) {
      if (a.strides[l] == 0) continue;
      if (!text.empty()) text += " + ";
      text += fmt::format("{}{}", int(l) == base ? "j" : "i", l);
      if (a.strides[l] != 1) text += " * " + whole_number(a.strides[l]);
    }
    return text.empty() ? "0" : text;
  }

  // ---- values

  const Access& access_of(InstrId load) const { return b_.operands[size_t(instr(load).operand)]; }
  bool is_load(InstrId id) const { return instr(id).kind == InstrKind::kLoad; }
  bool is_number(InstrId load) const { return numbers_ >> instr(load).operand & 1; }

  // `memory`: where a load finds its element; "": in memory, at the indices of all its loops.
  void print_value(InstrId id, const std::string& memory = "") {
    const Instr& i = instr(id);
    std::string text;
    if (i.kind == InstrKind::kLoad)
      text = is_number(id) ? fmt::format("n{}", i.operand)
             : memory.empty()
                 ? loaded(i.dtype, fmt::format("x{}[{}]", i.operand, place(access_of(id))))
                 : loaded(i.dtype, memory);
    else
      text = i.kind == InstrKind::kIndex ? fmt::format("long(i{})", i.loop) : expression(b_, i);
    line("const {} v{} = {};", register_type(i.dtype), id, text);
  }
  void print_store(int k) {
    const Store& st = b_.stores[size_t(k)];
    line("y{}[{}] = {};", k, place(st.to), stored(st.to.dtype, fmt::format("v{}", st.value)));
  }

  // ---- elements in packs

  // Computes `values` for the pack of elements whose indices are declared, that of the innermost
  // loop as j; feeds reductions and stores results. `pack`: which one of those that the thread
  // holds.
  void print_pack(const std::vector<InstrId>& values, const std::vector<InstrId>& reductions,
                  const std::vector<int>& stores, const std::string& pack) {
    const int v = innermost();
    std::vector<std::string> memory(b_.instrs.size());
    for (InstrId id : values) {
      if (!is_load(id) || is_number(id)) continue;
      const Access& a = access_of(id);
      if (!g_.held.empty() && g_.held[size_t(id)]) {
        memory[size_t(id)] =
            in_packs(s_, g_, a) ? fmt::format("h{}[{}].of[l]", id, pack) : held_single(id, pack);
      } else if (in_packs(s_, g_, a)) {
        line("const auto p{} = load<{}>(x{} + {}, whole);", id, g_.width, instr(id).operand,
             place(a, v));
        memory[size_t(id)] = fmt::format("p{}.of[l]", id);
      } else if (v < 0 || a.strides[size_t(v)] == 0) {
        line("const auto p{} = x{}[{}];", id, instr(id).operand, place(a, v));
        memory[size_t(id)] = fmt::format("p{}", id);
      }
    }
    for (int k : stores)
      if (const Access& to = b_.stores[size_t(k)].to; in_packs(s_, g_, to))
        line("Pack<{}, {}> q{};", memory_type(to.dtype), g_.width, k);
    if (g_.width > 1) {
      line("#pragma unroll");
      open("for (int l = 0; l < {}; ++l)", g_.width);
      line("const {} i{} = j{} + l;", index_type(), v, v);
    } else if (v >= 0) {
      line("const {} i{} = j{};", index_type(), v, v);
    }
    for (InstrId id : values) print_value(id, memory[size_t(id)]);
    for (InstrId id : reductions) {
      const std::string at =
          instr(id).loops & inner() ? fmt::format("[{}{}]", element_of(pack), lane()) : "";
      line("{};", join(instr(id), fmt::format("a{}{}", id, at), fed(instr(id))));
    }
    for (int k : stores) {
      const Store& st = b_.stores[size_t(k)];
      const std::string value = stored(st.to.dtype, fmt::format("v{}", st.value));
      if (in_packs(s_, g_, st.to))
        line("q{}.of[l] = {};", k, value);
      else
        line("{}y{}[{}] = {};", once(st.to), k, place(st.to), value);
    }
    if (g_.width > 1) close();
    for (int k : stores)
      if (const Access& to = b_.stores[size_t(k)].to; in_packs(s_, g_, to))
        line("{}store(y{} + {}, q{}, whole);", once(to), k, place(to, v), k);
  }
  std::string element_of(const std::string& pack) const {
    return g_.width == 1 ? pack : fmt::format("{} * {}", pack, g_.width);
  }
  const char* lane() const { return g_.width == 1 ? "" : " + l"; }
  // Held without packs: each element by itself, or one for all of the pack.
  std::string held_single(InstrId id, const std::string& pack) const {
    const bool varies = innermost() >= 0 && access_of(id).strides[size_t(innermost())] != 0;
    return varies && g_.width > 1 ? fmt::format("h{}[{} * {} + l]", id, pack, g_.width)
                                  : fmt::format("h{}[{}]", id, pack);
  }
  // Where a result does not vary with a loop, its first element writes.
  std::string once(const Access& to) const {
    if (g_.kind != GpuLayout::Kind::kElements) return "";
    std::string text;
    for (int l = 0; l < s_.loops(); ++l)
      if (to.strides[size_t(l)] == 0)
        text += fmt::format("{}i{} == 0", text.empty() ? "" : " && ", l);
    return text.empty() ? "" : "if (" + text + ") ";
  }

  // ---- a thread for each pack of elements

  void print_elements() {
    std::vector<InstrId> values;
    std::vector<int> stores;
    for (size_t k = 0; k < b_.instrs.size(); ++k)
      if (s_.values[k].used) values.push_back(InstrId(k));
    for (size_t k = 0; k < b_.stores.size(); ++k) stores.push_back(int(k));
    const int64_t all = g_.rows * g_.columns;
    line("const {} n = ({}(blockIdx.x) * {} + threadIdx.x) * {};", index_type(), index_type(),
         g_.threads, g_.width);
    line("if (n >= {}) return;", whole_number(all));
    print_indices(s_.outer_mask() | s_.inner_mask(), "n", innermost());
    print_pack(values, {}, stores, "0");
  }

  // ---- a unit for some rows, or for a tile of columns of some rows

  bool in_warps() const { return g_.threads < g_.block_threads(); }
  std::string joined(const Instr& i, const std::string& value) const {
    return in_warps()
               ? fmt::format("warp_join<{}>({})", reduction_type(i.reduce), value)
               : fmt::format("block_join<{}, {}>({})", reduction_type(i.reduce), g_.threads, value);
  }
  template <class F>
  void each_chunk_reduction(F visit) {
    for (size_t k = 0; k < b_.instrs.size(); ++k)
      if (s_.values[k].used && s_.values[k].reduce == ReduceAs::kChunk) visit(InstrId(k));
  }
  bool fed_by_rows(InstrId id) const { return std::ranges::count(s_.row_reductions, id) > 0; }

  void print_units() {
    const int of_block = g_.block_threads() / g_.threads;
    line("const unsigned thread = threadIdx.x{};", in_warps() ? " % kWarp" : "");
    line("const long unit = {};",
         of_block > 1 ? fmt::format("long(blockIdx.x) * {} + threadIdx.x / kWarp", of_block)
                      : "long(blockIdx.x)");
    line("const long tile = unit % {}, group = unit / {};", g_.tiles, g_.tiles);
    if (of_block > 1) line("if (unit >= {}) return;", g_.units());
    print_row_values(Place::kHead, 0);
    each_chunk_reduction([&](InstrId id) {
      const Instr& i = instr(id);
      const std::string start =
          fmt::format("{}::start<{}>()", reduction_type(i.reduce), lane_type(i));
      if (i.loops == 0) return line("{} a{} = {};", lane_type(i), id, start);
      line("{} a{}[{}];", lane_type(i), id, g_.packs * g_.width);
      line("#pragma unroll");
      line("for (int k = 0; k < {}; ++k) a{}[k] = {};", g_.packs * g_.width, id, start);
    });
    line("const long last = (group + 1) * {0} < {1} ? (group + 1) * {0} : {1};", g_.unit_rows,
         g_.rows);
    open("for (long row = group * {}; row < last; ++row)", g_.unit_rows);
    print_row();
    close();
    print_partials();
  }

  void print_row() {
    line("const {} at_row = {}(row);", index_type(), index_type());
    print_indices(s_.outer_mask(), "at_row");
    print_row_values(Place::kRow, 0);
    hold_loads();
    int stage = 0, last = 0;
    for (const Placed& p : s_.values)
      if (p.used) last = std::max(last, p.stage);
    for (const Nest& n : s_.nests) {
      for (; stage < n.stage; ++stage) print_row_values(Place::kRow, stage + 1);
      print_nest(n);
    }
    for (; stage < last; ++stage) print_row_values(Place::kRow, stage + 1);
    const std::string first = g_.tiles > 1 ? "tile == 0" : "";
    if (!s_.row_reductions.empty()) {
      if (!first.empty()) open("if ({})", first);
      for (InstrId id : s_.row_reductions)
        line("{};", join(instr(id), fmt::format("a{}", id), fed(instr(id))));
      if (!first.empty()) close();
    }
    if (!s_.row_stores.empty()) {
      open("if (thread == 0{})", first.empty() ? "" : " && " + first);
      for (int k : s_.row_stores) print_store(k);
      close();
    }
  }
  void print_row_values(Place at_place, int stage) {
    for (size_t k = 0; k < b_.instrs.size(); ++k) {
      const Placed& p = s_.values[k];
      if (p.used && p.place == at_place && p.stage == stage && p.reduce == ReduceAs::kNone)
        print_value(InstrId(k));
    }
  }

  // Opens a loop over the packs of the row or tile that the thread has; `c` is the column.
  void open_packs() {
    if (g_.packs == 0) {
      open("for ({} c = thread * {}; c < {}; c += {})", index_type(), g_.width,
           whole_number(g_.columns), g_.threads * g_.width);
    } else {
      line("#pragma unroll");
      open("for (int k = 0; k < {}; ++k)", g_.packs);
      const std::string tile =
          g_.tiles > 1 ? fmt::format("{}(tile) * {} + ", index_type(), g_.packs) : "";
      line("const {} c = (({}k) * {} + thread) * {};", index_type(), tile, g_.threads, g_.width);
      if (g_.tiles * g_.packs * g_.threads * g_.width != g_.columns)
        line("if (c >= {}) break;", whole_number(g_.columns));
    }
    print_indices(s_.inner_mask(), "c", innermost());
  }
  void hold_loads() {
    if (!std::ranges::count(g_.held, true)) return;
    for (size_t k = 0; k < g_.held.size(); ++k) {
      if (!g_.held[k]) continue;
      const Access& a = access_of(InstrId(k));
      const std::string type = memory_type(a.dtype);
      if (in_packs(s_, g_, a))
        line("Pack<{}, {}> h{}[{}];", type, g_.width, k, g_.packs);
      else
        line("{} h{}[{}];", type, k, a.strides.back() != 0 ? g_.packs * g_.width : g_.packs);
    }
    open_packs();
    for (size_t k = 0; k < g_.held.size(); ++k) {
      if (!g_.held[k]) continue;
      const Access& a = access_of(InstrId(k));
      const int x = instr(InstrId(k)).operand;
      if (in_packs(s_, g_, a)) {
        line("h{}[k] = load<{}>(x{} + {}, whole);", k, g_.width, x, place(a, innermost()));
      } else if (a.strides.back() == 0 || g_.width == 1) {
        line("h{}[k] = x{}[{}];", k, x, place(a, innermost()));
      } else {
        line("#pragma unroll");
        line("for (int l = 0; l < {}; ++l) h{}[k * {} + l] = x{}[{} + l * {}];", g_.width, k,
             g_.width, x, place(a, innermost()), a.strides.back());
      }
    }
    close();
  }

  void print_nest(const Nest& n) {
    std::vector<InstrId> ended;
    for (InstrId id : n.reductions)
      if (at(id).reduce == ReduceAs::kRow) ended.push_back(id);
    for (InstrId id : ended)
      line("{} a{} = {}::start<{}>();", lane_type(instr(id)), id, reduction_type(instr(id).reduce),
           lane_type(instr(id)));
    const std::vector<InstrId> values = element_values(s_, n);
    if (n.loops == inner()) {
      open_packs();
      print_pack(values, n.reductions, n.stores, "k");
      close();
    } else {
      open("for ({0} c = thread; c < {1}; c += {2})", index_type(), whole_number(s_.count(n.loops)),
           g_.threads);
      print_indices(n.loops, "c");
      for (InstrId id : values) print_value(id);
      for (InstrId id : n.reductions)
        line("{};", join(instr(id), fmt::format("a{}", id), fed(instr(id))));
      for (int k : n.stores) print_store(k);
      close();
    }
    for (InstrId id : ended)
      line("const {} v{} = {};", register_type(instr(id).dtype), id,
           finished(instr(id), joined(instr(id), fmt::format("a{}", id))));
  }

  std::string partial(InstrId id) const {
    return fmt::format("reinterpret_cast<{}*>(scratch + {})", lane_type(instr(id)),
                       gpu_scratch_offset(s_, g_, id));
  }
  void print_partials() {
    each_chunk_reduction([&](InstrId id) {
      const Instr& i = instr(id);
      if (i.loops == 0) {
        line("const {} t{} = {};", lane_type(i), id,
             fed_by_rows(id) ? fmt::format("a{}", id) : joined(i, fmt::format("a{}", id)));
        line("if (thread == 0) {}[unit] = t{};", partial(id), id);
        return;
      }
      open_packs();
      line("#pragma unroll");
      line("for (int l = 0; l < {}; ++l) {}[group * {} + c + l] = a{}[k * {} + l];", g_.width,
           partial(id), g_.columns, id, g_.width);
      close();
    });
  }

  // ---- the second kernel

  // Collects what late results need, operands first: `late` values and values of no row.
  void need(InstrId id, std::vector<bool>& needed) const {
    if (needed[size_t(id)]) return;
    needed[size_t(id)] = true;
    if (at(id).reduce == ReduceAs::kNone)
      for (InstrId x : instr(id).in) need(x, needed);
  }
  void print_needed(const std::vector<bool>& needed, bool of_columns) {
    for (size_t k = 0; k < needed.size(); ++k)
      if (needed[k] && at(InstrId(k)).reduce == ReduceAs::kNone &&
          (instr(InstrId(k)).loops != 0) == of_columns)
        print_value(InstrId(k));
  }

  void print_finish() {
    std::vector<bool> needed(b_.instrs.size());
    std::vector<InstrId> arrays;
    std::vector<int> scalar_stores, column_stores;
    for (int k : s_.late_stores) {
      need(b_.stores[size_t(k)].value, needed);
      (moving_loops(b_.stores[size_t(k)].to) ? column_stores : scalar_stores).push_back(k);
    }
    each_chunk_reduction([&](InstrId id) {
      if (!needed[size_t(id)]) return;
      if (instr(id).loops) return arrays.push_back(id);
      join_units(id);
    });
    print_needed(needed, false);
    if (!scalar_stores.empty()) {
      open("if (blockIdx.x == 0 && threadIdx.x == 0)");
      for (int k : scalar_stores) print_store(k);
      close();
    }
    if (column_stores.empty()) return;
    line("const unsigned lane = threadIdx.x % {0}, part = threadIdx.x / {0};", kFinishColumns);
    line("const {} c = {}(blockIdx.x) * {} + lane;", index_type(), index_type(), kFinishColumns);
    for (InstrId id : arrays) join_groups(id);
    if (!arrays.empty()) line("__syncthreads();");
    line("if (part != 0 || c >= {}) return;", whole_number(g_.columns));
    for (InstrId id : arrays) {
      const Instr& i = instr(id);
      line("{} t{} = w{}[0][lane];", total_type(i), id, id);
      line("for (int g = 1; g < {}; ++g) {};", kFinishGroups,
           join(i, fmt::format("t{}", id), fmt::format("w{}[g][lane]", id)));
      line("const {} v{} = {};", register_type(i.dtype), id, finished(i, fmt::format("t{}", id)));
    }
    print_indices(inner(), "c");
    print_needed(needed, true);
    for (int k : column_stores) print_store(k);
  }
  // The total over all units, by all threads of each block.
  void join_units(InstrId id) {
    const Instr& i = instr(id);
    line("{} t{} = {}::start<{}>();", total_type(i), id, reduction_type(i.reduce), total_type(i));
    line("for (long u = threadIdx.x; u < {}; u += {}) {};", g_.units(),
         kFinishColumns * kFinishGroups,
         join(i, fmt::format("t{}", id), fmt::format("{}({}[u])", total_type(i), partial(id))));
    line("const {} v{} = {};", register_type(i.dtype), id,
         finished(i, fmt::format("block_join<{}, {}>(t{})", reduction_type(i.reduce),
                                 kFinishColumns * kFinishGroups, id)));
  }
  // Each part of the threads joins every eighth group of rows.
  void join_groups(InstrId id) {
    const Instr& i = instr(id);
    line("__shared__ {} w{}[{}][{}];", total_type(i), id, kFinishGroups, kFinishColumns);
    line("{} s{} = {}::start<{}>();", total_type(i), id, reduction_type(i.reduce), total_type(i));
    line("if (c < {})", whole_number(g_.columns));
    line("  for (long g = part; g < {}; g += {}) {};", g_.groups_of_rows(), kFinishGroups,
         join(i, fmt::format("s{}", id),
              fmt::format("{}({}[g * {} + c])", total_type(i), partial(id), g_.columns)));
    line("w{}[part][lane] = s{};", id, id);
  }

  const GpuLayout& g_;
  const std::string name_;
  const uint64_t numbers_;  // operands that come by value
  bool long_ = false, has_scratch_ = false;
};

}  // namespace

std::string print_cuda(const Schedule& schedule, const GpuLayout& layout, std::string_view name,
                       uint64_t numbers) {
  return CudaPrinter(schedule, layout, name, numbers).run();
}

std::string print_cuda(const Body& body, std::string_view name) {
  const std::optional<Schedule> schedule = make_schedule(body, Target::kCuda);
  if (!schedule) return "";
  const std::optional<GpuLayout> layout = make_gpu_layout(*schedule);
  return layout ? print_cuda(*schedule, *layout, name, 0) : "";
}

}  // namespace tessera::compiler
