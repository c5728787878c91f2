#include "compile/codegen/body.h"

#include <fmt/format.h>

#include <algorithm>

#include "compile/codegen/functors.h"
#include "core/base/error.h"

namespace tessera::compiler {
namespace {

LoopMask moving(const Access& a) {
  LoopMask m = 0;
  for (size_t l = 0; l < a.strides.size(); ++l)
    if (a.strides[l] != 0) m |= 1u << l;
  return m;
}

class Checker {
 public:
  explicit Checker(const Body& body) : b_(body) {}

  void run() {
    TESSERA_ASSERT(b_.extents.size() <= size_t(kMaxDims), "body: {} loops, at most {}",
                   b_.extents.size(), kMaxDims);
    for (int64_t n : b_.extents) TESSERA_ASSERT(n > 0, "body: a loop of extent {}", n);
    for (const Access& a : b_.operands) check_access(a, "operand");
    for (at_ = 0; at_ < b_.instrs.size(); ++at_) check_instr(b_.instrs[at_]);
    TESSERA_ASSERT(!b_.stores.empty(), "body: nothing is stored");
    for (const Store& s : b_.stores) check_store(s);
  }

 private:
  template <class... A>
  void require(bool holds, fmt::format_string<A...> format, A&&... args) const {
    TESSERA_ASSERT(holds, "body: v{}: {}", at_, fmt::format(format, std::forward<A>(args)...));
  }
  const Instr& operand(InstrId id) const {
    require(id >= 0 && size_t(id) < at_, "reads v{}", id);
    return b_.instrs[size_t(id)];
  }
  void check_access(const Access& a, const char* what) const {
    TESSERA_ASSERT(a.strides.size() == b_.extents.size(), "body: {} with {} strides in {} loops",
                   what, a.strides.size(), b_.extents.size());
    for (int64_t s : a.strides) TESSERA_ASSERT(s >= 0, "body: {} with stride {}", what, s);
  }
  void check_loops(const Instr& i, LoopMask expected) const {
    require(i.loops == expected, "varies with loops {:b}, its operands give {:b}", i.loops,
            expected);
  }

  void check_instr(const Instr& i) const {
    switch (i.kind) {
      case InstrKind::kLoad: {
        require(i.operand >= 0 && size_t(i.operand) < b_.operands.size(), "loads operand {}",
                i.operand);
        const Access& a = b_.operands[size_t(i.operand)];
        require(i.dtype == a.dtype, "is {}, operand {} is {}", name_of(i.dtype), i.operand,
                name_of(a.dtype));
        return check_loops(i, moving(a));
      }
      case InstrKind::kConstant: return check_loops(i, 0);
      case InstrKind::kIndex:
        require(i.loop >= 0 && size_t(i.loop) < b_.extents.size() && i.dtype == kI64,
                "is the {} index of loop {}", name_of(i.dtype), i.loop);
        return check_loops(i, 1u << i.loop);
      case InstrKind::kPointwise: return check_pointwise(i);
      case InstrKind::kCast:
        require(i.in.size() == 1, "casts {} values", i.in.size());
        return check_loops(i, operand(i.in[0]).loops);
      case InstrKind::kReduce: return check_reduce(i);
    }
  }

  void check_pointwise(const Instr& i) const {
    LoopMask loops = 0;
    for (InstrId id : i.in) loops |= operand(id).loops;
    check_loops(i, loops);
    const Functor* functor = find_functor(i.op);
    require(functor || i.op == "where", "there is no pointwise op {}", i.op);
    int arity = functor ? functor->arity : 3;
    require(i.in.size() == size_t(arity), "{} of {} operands", i.op, i.in.size());
    DType last = operand(i.in.back()).dtype;
    for (size_t k = 0; k < i.in.size(); ++k) {
      bool condition = i.op == "where" && k == 0;
      DType expected = condition ? kBool : last, given = operand(i.in[k]).dtype;
      require(given == expected, "{}: operand {} is {}, not {}", i.op, k, name_of(given),
              name_of(expected));
    }
    DType result = functor && functor->to_bool ? kBool : last;
    require(i.dtype == result, "{} of {} is {}, not {}", i.op, name_of(last), name_of(result),
            name_of(i.dtype));
  }

  void check_reduce(const Instr& i) const {
    require(i.in.size() == 1, "reduces {} values", i.in.size());
    const Instr& x = operand(i.in[0]);
    require(i.reduced != 0 && i.reduced >> b_.extents.size() == 0, "reduces loops {:b}", i.reduced);
    check_loops(i, x.loops & ~i.reduced);
    DType result = x.dtype;
    if (i.reduce == ReduceKind::kAny || i.reduce == ReduceKind::kAll)
      result = x.dtype == kU8 ? kU8 : kBool;
    else if (i.reduce <= ReduceKind::kProd && is_integral(x.dtype))
      result = kI64;
    require(i.dtype == result, "{} of {} is {}, not {}", name_of(i.reduce), name_of(x.dtype),
            name_of(result), name_of(i.dtype));
  }

  // Checks that no two elements share an address: in the order of strides, each stride must be
  // larger than the span of all smaller ones.
  void check_store(const Store& s) const {
    check_access(s.to, "store");
    TESSERA_ASSERT(s.value >= 0 && size_t(s.value) < b_.instrs.size(), "body: stores v{}", s.value);
    const Instr& v = b_.instrs[size_t(s.value)];
    TESSERA_ASSERT(v.dtype == s.to.dtype, "body: v{} is {}, stored as {}", s.value,
                   name_of(v.dtype), name_of(s.to.dtype));
    std::vector<std::pair<int64_t, int64_t>> steps;  // stride, extent
    for (size_t l = 0; l < b_.extents.size(); ++l) {
      if (b_.extents[l] == 1) continue;
      TESSERA_ASSERT(s.to.strides[l] != 0 || !(v.loops >> l & 1),
                     "body: v{} varies with loop {}, where it is stored does not", s.value, l);
      if (s.to.strides[l] != 0) steps.emplace_back(s.to.strides[l], b_.extents[l]);
    }
    std::sort(steps.begin(), steps.end());
    int64_t reach = 0;
    for (auto [stride, extent] : steps) {
      TESSERA_ASSERT(stride > reach, "body: two elements of v{} are stored in one place", s.value);
      reach += stride * (extent - 1);
    }
  }

  const Body& b_;
  size_t at_ = 0;
};

std::string access_text(const Access& a) {
  return fmt::format("{}{}", name_of(a.dtype),
                     tessera::to_string(std::span(a.strides.begin(), a.strides.end())));
}
// The text is exact: it has floats by their bits.
std::string constant_text(const Instr& i) {
  if (is_integral(i.dtype)) return fmt::format("{}", i.value.integer());
  return fmt::format("{:a}", i.value.real());
}

std::string instr_text(const Instr& i) {
  auto list = [&] {
    std::string text;
    for (InstrId id : i.in) text += fmt::format("{}v{}", text.empty() ? "" : ", ", id);
    return text;
  };
  switch (i.kind) {
    case InstrKind::kLoad: return fmt::format("load {}", i.operand);
    case InstrKind::kConstant: return constant_text(i);
    case InstrKind::kIndex: return fmt::format("index {}", i.loop);
    case InstrKind::kPointwise: return fmt::format("{}({})", i.op, list());
    case InstrKind::kCast: return fmt::format("cast({})", list());
    case InstrKind::kReduce:
      return fmt::format("{}({}) over {:b}", name_of(i.reduce), list(), i.reduced);
  }
  return "";
}

}  // namespace

void check(const Body& body) { Checker(body).run(); }

std::string to_string(const Body& body) {
  std::string text = "loops" + tessera::to_string(std::span(body.extents)) + "\n";
  for (size_t i = 0; i < body.operands.size(); ++i)
    text += fmt::format("operand {}: {}\n", i, access_text(body.operands[i]));
  for (size_t i = 0; i < body.instrs.size(); ++i) {
    const Instr& v = body.instrs[i];
    text += fmt::format("v{} = {} : {} loops {:b}\n", i, instr_text(v), name_of(v.dtype), v.loops);
  }
  for (const Store& s : body.stores)
    text += fmt::format("store v{} to {}\n", s.value, access_text(s.to));
  return text;
}

}  // namespace tessera::compiler
