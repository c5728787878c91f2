// Prints a scheduled body as CUDA C++. Without reductions, threads take elements of all loops in
// strides of the grid. With reductions inside rows, a block takes a row, its threads take the
// elements of each nest, and partial results are combined in a tree in shared memory. Values are
// computed again where they are needed: registers are cheap, and shared memory is for the trees.
#include <fmt/format.h>

#include <algorithm>

#include "compile/codegen/expressions.h"
#include "compile/codegen/functors.h"
#include "compile/codegen/generate.h"
#include "compile/codegen/schedule.h"

namespace tessera::compiler {
namespace {

class CudaPrinter {
 public:
  CudaPrinter(const Schedule& s, std::string_view name) : s_(s), b_(s.body), name_(name) {}

  std::string run() {
    line("extern \"C\" __global__ void {}(char* const* p) {{", name_);
    ++depth_;
    print_pointers();
    bool rows = false;
    for (const Placed& p : s_.values) rows |= p.used && p.reduce == ReduceAs::kRow;
    rows ? print_rows() : print_elements();
    --depth_;
    line("}}\n");
    return std::move(text_);
  }

 private:
  template <class... A>
  void line(fmt::format_string<A...> format, A&&... args) {
    text_.append(size_t(depth_) * 2, ' ');
    text_ += fmt::format(format, std::forward<A>(args)...);
    text_ += '\n';
  }
  const Instr& instr(InstrId id) const { return b_.instrs[size_t(id)]; }

  void print_pointers() {
    for (size_t k = 0; k < b_.operands.size(); ++k) {
      std::string type = memory_type(b_.operands[k].dtype);
      line("const {}* x{} = reinterpret_cast<const {}*>(p[{}]);", type, k, type, k);
    }
    for (size_t k = 0; k < b_.stores.size(); ++k) {
      std::string type = memory_type(b_.stores[k].to.dtype);
      line("{}* y{} = reinterpret_cast<{}*>(p[{}]);", type, k, type, b_.operands.size() + k);
    }
  }
  // Prints the indices of the loops of `mask` from the linear index `from`; the last loop varies
  // fastest.
  void print_indices(LoopMask mask, const char* from) {
    int64_t inside = 1;
    for (int l = s_.loops() - 1; l >= 0; --l) {
      if (!(mask >> l & 1)) continue;
      line("const long i{} = {} / {} % {};", l, from, inside, b_.extents[size_t(l)]);
      inside *= b_.extents[size_t(l)];
    }
  }
  static std::string offset(const Access& a) {
    std::string text;
    for (size_t l = 0; l < a.strides.size(); ++l)
      if (a.strides[l] != 0)
        text += fmt::format("{}i{} * {}", text.empty() ? "" : " + ", l, a.strides[l]);
    return text.empty() ? "0" : text;
  }

  void print_value(InstrId id) {
    const Instr& i = instr(id);
    std::string text = i.kind == InstrKind::kLoad
                           ? loaded(i.dtype, fmt::format("x{}[{}]", i.operand,
                                                         offset(b_.operands[size_t(i.operand)])))
                       : i.kind == InstrKind::kIndex ? fmt::format("i{}", i.loop)
                                                     : expression(b_, i);
    line("const {} v{} = {};", register_type(i.dtype), id, text);
  }
  void print_store(int k) {
    const Store& s = b_.stores[size_t(k)];
    line("y{}[{}] = {};", k, offset(s.to), stored(s.to.dtype, fmt::format("v{}", s.value)));
  }
  // Collects the values of `place` that `id` needs, operands first.
  void closure(InstrId id, Place place, std::vector<InstrId>& found) const {
    if (s_.at(id).place != place || std::count(found.begin(), found.end(), id)) return;
    if (s_.at(id).reduce == ReduceAs::kNone)
      for (InstrId x : instr(id).in) closure(x, place, found);
    found.push_back(id);
  }

  // ---- one thread for each element ----

  void print_elements() {
    const LoopMask all = s_.outer_mask() | s_.inner_mask();
    line("const long step = long(gridDim.x) * blockDim.x;");
    line("for (long n = long(blockIdx.x) * blockDim.x + threadIdx.x; n < {}; n += step) {{",
         s_.count(all));
    ++depth_;
    print_indices(all, "n");
    for (size_t k = 0; k < b_.instrs.size(); ++k)
      if (s_.values[k].used) print_value(InstrId(k));
    for (size_t k = 0; k < b_.stores.size(); ++k) {
      std::string first;  // where the result does not vary, its first element writes
      for (int l = 0; l < s_.loops(); ++l)
        if (!(moving_loops(b_.stores[k].to) >> l & 1))
          first += fmt::format("{}i{} == 0", first.empty() ? "" : " && ", l);
      if (!first.empty()) line("if ({})", first);
      print_store(int(k));
    }
    --depth_;
    line("}}");
  }

  // ---- one block for each row ----

  void print_rows() {
    print_row_values(Place::kHead, 0);
    line("for (long row = blockIdx.x; row < {}; row += gridDim.x) {{", s_.count(s_.outer_mask()));
    ++depth_;
    print_indices(s_.outer_mask(), "row");
    print_row_values(Place::kRow, 0);
    int stage = 0, last = 0;
    for (const Placed& p : s_.values)
      if (p.used) last = std::max(last, p.stage);
    for (const Nest& n : s_.nests) {
      for (; stage < n.stage; ++stage) print_row_values(Place::kRow, stage + 1);
      print_nest(n);
    }
    for (; stage < last; ++stage) print_row_values(Place::kRow, stage + 1);
    if (!s_.row_stores.empty()) {
      line("if (threadIdx.x == 0) {{");
      ++depth_;
      for (int k : s_.row_stores) print_store(k);
      --depth_;
      line("}}");
    }
    --depth_;
    line("}}");
  }
  void print_row_values(Place place, int stage) {
    for (size_t k = 0; k < b_.instrs.size(); ++k) {
      const Placed& p = s_.values[k];
      if (p.used && p.place == place && p.stage == stage && p.reduce == ReduceAs::kNone)
        print_value(InstrId(k));
    }
  }
  void print_nest(const Nest& n) {
    for (InstrId id : n.reductions)
      line("{} s{} = {}::start<{}>();", total_type(id), id, reduction_type(instr(id).reduce),
           total_type(id));
    line("for (long n = threadIdx.x; n < {}; n += blockDim.x) {{", s_.count(n.loops));
    ++depth_;
    print_indices(n.loops, "n");
    std::vector<InstrId> values;
    for (InstrId id : n.reductions) closure(instr(id).in[0], Place::kElement, values);
    for (int k : n.stores) closure(b_.stores[size_t(k)].value, Place::kElement, values);
    for (InstrId id : values) print_value(id);
    for (InstrId id : n.reductions)
      line("s{} = {}::join(s{}, {}(v{}));", id, reduction_type(instr(id).reduce), id,
           total_type(id), instr(id).in[0]);
    for (int k : n.stores) print_store(k);
    --depth_;
    line("}}");
    for (InstrId id : n.reductions) {
      const Instr& i = instr(id);
      line("const {} v{} = {};", register_type(i.dtype), id,
           converted(is_floating(i.dtype) && i.dtype != kF64 ? kF64 : i.dtype, i.dtype,
                     fmt::format("block_reduce<{}>(s{})", reduction_type(i.reduce), id)));
    }
  }
  // Float sums are kept in double: a thread adds few terms, and only one total is kept for each
  // row.
  std::string total_type(InstrId id) const {
    const Instr& i = instr(id);
    if (i.reduce == ReduceKind::kSum && is_floating(i.dtype)) return "double";
    return register_type(i.reduce == ReduceKind::kMax || i.reduce == ReduceKind::kMin
                             ? instr(i.in[0]).dtype
                             : i.dtype);
  }

  const Schedule& s_;
  const Body& b_;
  const std::string name_;
  std::string text_;
  int depth_ = 0;
};

}  // namespace

std::string print_cuda(const Body& body, std::string_view name) {
  std::optional<Schedule> schedule = make_schedule(body, Target::kCuda);
  if (!schedule) return "";
  for (size_t k = 0; k < schedule->values.size(); ++k) {
    const Placed& p = schedule->values[k];
    const bool array = p.reduce == ReduceAs::kRow && p.place == Place::kElement;
    if (p.used && (p.reduce == ReduceAs::kChunk || array)) return "";
  }
  return CudaPrinter(*schedule, name).run();
}

std::string prologue_cuda() { return prologue_cpp(); }

}  // namespace tessera::compiler
