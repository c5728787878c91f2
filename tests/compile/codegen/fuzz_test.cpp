// Compares random bodies with the interpreter. tests/support/fuzz.h says how to run others.
#include "tests/support/fuzz.h"

#include <random>

#include "compile/codegen/functors.h"
#include "core/backend/cuda/library.h"
#include "core/core.h"
#include "tests/compile/codegen/compare.h"
#include "tests/support/on_card.h"

namespace tessera::test {

using namespace compiler;
namespace {

class RandomBody {
 public:
  explicit RandomBody(uint64_t seed) : random_(seed), builder_({}) {
    int loops = 1 + int(pick(4));
    constexpr int64_t extents[] = {1, 2, 3, 5, 8, 17, 32, 40, 64, 100};
    int64_t all = 1;
    for (int l = 0; l < loops; ++l) {
      int64_t e = pick(20) == 0 ? 5000 : extents[pick(10)];
      while (all * e > 60000) e = (e + 1) / 2;
      builder_.body.extents.push_back(e), all *= e;
    }
    full_ = (LoopMask(1) << loops) - 1;
    for (int k = 1 + int(pick(4)); k > 0; --k) add_load();
    for (int k = 3 + int(pick(10)); k > 0; --k) add_instr();
    for (int k = 1 + int(pick(3)); k > 0; --k) add_store();
  }
  Body body() const { return builder_.body; }

 private:
  uint64_t pick(uint64_t n) { return random_() % n; }
  const Instr& at(InstrId id) const { return builder_.at(id); }
  InstrId any() {
    InstrId x;
    do x = InstrId(pick(builder_.body.instrs.size()));
    while (is_storage_only(at(x).dtype));  // they are cast and stored only
    return x;
  }

  // Some order of dims; sometimes with gaps.
  Access layout(LoopMask mask, DType dtype) {
    std::vector<size_t> order;
    for (size_t l = 0; l < builder_.body.extents.size(); ++l)
      if (mask >> l & 1) order.push_back(l);
    if (pick(3) == 0) std::shuffle(order.begin(), order.end(), random_);
    Access a{dtype, {}};
    a.strides.resize(builder_.body.extents.size());
    int64_t stride = pick(8) == 0 ? 2 : 1;
    for (size_t k = order.size(); k-- > 0;)
      a.strides[order[k]] = stride, stride *= builder_.body.extents[order[k]];
    return a;
  }
  void note(InstrId, bool inexact) { inexact_.push_back(inexact); }

  void add_load() {
    constexpr DType dtypes[] = {kF32, kF32, kF32, kF32,  kBF16,   kF16,   kF64,
                                kI64, kI32, kU8,  kBool, kF8E4M3, kF8E5M2};
    LoopMask mask = pick(2) ? full_ : LoopMask(pick(full_ + 1));
    const InstrId x = builder_.load(layout(mask, dtypes[pick(std::size(dtypes))]));
    note(x, false);
    if (is_storage_only(at(x).dtype)) note(builder_.cast(x, pick(4) ? kF32 : kBF16), false);
  }
  void add_instr() {
    switch (pick(10)) {
      case 0: return add_load();
      case 1: return add_cast();
      case 2:
      case 3: return add_reduce();
      case 4: return note(builder_.index(int(pick(builder_.body.extents.size()))), false);
      default: return add_pointwise();
    }
  }
  void add_cast() {
    InstrId x = any();
    DType to = kAllDTypes[pick(kNumDTypes)], from = at(x).dtype;
    // The order of a sum may decide to which of two values that are far apart it is rounded.
    if (is_storage_only(to) && inexact_[size_t(x)]) return;
    // The integer that a float beyond the integers becomes is unspecified; so is on which side of 1
    // a sum is.
    const bool bounded = at(x).kind == InstrKind::kLoad;
    if (to == from || (is_integral(to) && is_floating(from) && (!bounded || inexact_[size_t(x)])))
      return;
    note(builder_.cast(x, to), inexact_[size_t(x)]);
    if (is_storage_only(to)) {
      const InstrId stored = InstrId(builder_.body.instrs.size()) - 1;
      if (pick(2)) builder_.store(stored, layout(at(stored).loops, to));
      note(builder_.cast(stored, kF32), false);
    }
  }
  void add_reduce() {
    InstrId x = any();
    LoopMask over = LoopMask(1 + pick(full_));
    auto kind = ReduceKind(pick(6));
    const bool floats = is_floating(at(x).dtype), sums = kind <= ReduceKind::kProd;
    if (inexact_[size_t(x)] && kind >= ReduceKind::kAny) return;
    if (floats && sums) {  // large terms would hide small ones in one order and not in another
      if (kind == ReduceKind::kProd) return;
      x = constrained(x);
    }
    bool inexact = inexact_[size_t(x)] || (floats && kind < ReduceKind::kAny);
    note(builder_.reduce(kind, x, over), inexact);
  }
  InstrId constrained(InstrId x) {
    InstrId low = builder_.constant(-4.0, at(x).dtype);
    note(low, false);
    InstrId high = builder_.constant(4.0, at(x).dtype);
    note(high, false);
    bool inexact = inexact_[size_t(x)];
    x = builder_.op("clamp", {x, low, high});
    note(x, inexact);
    return x;
  }
  InstrId like(InstrId x) {  // another of the same dtype, or a constant
    for (int k = 0; k < 4; ++k) {
      InstrId y = any();
      if (at(y).dtype == at(x).dtype) return y;
    }
    InstrId c = builder_.constant(double(pick(7)) / 4 + 0.25, at(x).dtype);
    note(c, false);
    return c;
  }
  void add_pointwise() {
    static const char* floats[] = {
        "exp",   "log1p",   "tanh",  "sigmoid",    "sqrt", "rsqrt",      "gelu",      "silu",
        "erf",   "sin",     "neg",   "abs",        "sign", "square",     "relu",      "floor",
        "round", "isnan",   "add",   "sub",        "mul",  "div",        "maximum",   "minimum",
        "pow",   "lerp",    "clamp", "gelu_grad",  "lt",   "ge",         "eq",        "logical_and",
        "where", "mul_add", "atan2", "leaky_relu", "cos",  "reciprocal", "remainder", "tanh_grad"};
    static const char* integers[] = {
        "neg",        "abs",     "sign",    "square",      "add", "sub",
        "mul",        "maximum", "minimum", "bitwise_and", "eq",  "bitwise_xor",
        "logical_or", "lt",      "where",   "clamp",       "pow", "bitwise_right_shift"};
    static const char* calm[] = {"neg", "abs", "tanh", "sigmoid", "maximum", "minimum"};
    InstrId x = any();
    if (inexact_[size_t(x)]) {  // small differences stay small
      std::string op = calm[pick(6)];
      InstrId y = op == "maximum" || op == "minimum" ? like(x) : -1;
      return note(y < 0 ? builder_.op(op, {x}) : builder_.op(op, {x, y}), true);
    }
    std::string op = is_floating(at(x).dtype) ? floats[pick(40)] : integers[pick(18)];
    const compiler::Functor* f = compiler::find_functor(op);
    int arity = f ? f->arity : 3;
    SmallVector<InstrId, 3> in{x};
    while (int(in.size()) < arity) in.push_back(like(x));
    for (InstrId id : in)
      if (inexact_[size_t(id)]) return;
    if (op == "where") {
      InstrId condition = -1;
      for (size_t k = 0; k < inexact_.size(); ++k)
        if (at(InstrId(k)).dtype == kBool && !inexact_[k]) condition = InstrId(k);
      if (condition < 0) return;
      return note(builder_.op("where", {condition, in[1], in[2]}), false);
    }
    const bool to_bool = f->to_bool;
    note(arity == 1   ? builder_.op(op, {in[0]}, to_bool)
         : arity == 2 ? builder_.op(op, {in[0], in[1]}, to_bool)
                      : builder_.op(op, {in[0], in[1], in[2]}, to_bool),
         false);
  }
  void add_store() {
    InstrId v = pick(2) ? InstrId(builder_.body.instrs.size()) - 1 : any();
    LoopMask mask = at(v).loops;
    if (pick(6) == 0) mask = full_;
    builder_.store(v, layout(mask, at(v).dtype));
  }

  std::mt19937_64 random_;
  BodyBuilder builder_;
  LoopMask full_ = 0;
  std::vector<bool> inexact_;
};

// Rows that are long and many enough for nests beside each other: softmaxes, norms and similar ops
// one after the other, masked, with picked elements, and results of several of them.
class RandomRows {
 public:
  explicit RandomRows(uint64_t seed) : random_(seed), b_(rows()) {
    const InstrId target = b_.load(1, kI64), z = b_.load(3);
    hit_ = b_.op("eq", {b_.index(1), target}, true);
    x_ = pick(2) ? b_.op("add", {z, b_.load(pick(2) ? 2 : 3)}) : z;
    if (pick(2)) mask();
    if (pick(4) == 0) x_ = b_.op("gelu", {x_});
    for (int k = 1 + int(pick(3)); k > 0; --k) {
      add_step();
      if (pick(4) == 0) b_.store(x_);
    }
    if (pick(3) == 0) b_.store(b_.sum(b_.op("where", {hit_, z, number(0)}), 2));
    if (pick(3) == 0) b_.store(b_.sum(b_.op("abs", {x_}), pick(2) ? 1 : 3));
    if (pick(3) == 0) b_.store(b_.sum(b_.op("square", {x_}), 2));
    b_.store(x_);
  }
  Body body() const { return b_.body; }

 private:
  int64_t pick(uint64_t n) { return int64_t(random_() % n); }
  BodyBuilder rows() {
    switch (pick(12)) {
      case 0: return BodyBuilder({96 + pick(10), 8190 + pick(3000)});
      case 1: return BodyBuilder({6 + pick(14), 4090 + pick(1000)});
      default: return BodyBuilder({6 + pick(125), 256 + pick(800)});
    }
  }
  InstrId number(double v) { return b_.constant(v); }
  InstrId mean(InstrId x) {
    return b_.op("mul", {b_.sum(x, 2), number(1.0 / double(b_.body.extents[1]))});
  }
  void mask() { x_ = b_.op("where", {b_.load(pick(2) ? 2 : 3, kBool), number(-20), x_}); }
  void add_step() {
    switch (pick(5)) {
      case 0: return norm();
      case 1: return grad();
      case 2: x_ = b_.op("sub", {x_, b_.op("where", {hit_, number(1), number(0)})}); return;
      default: return softmax();
    }
  }
  void softmax() {
    const InstrId d = b_.op("sub", {x_, b_.reduce(ReduceKind::kMax, x_, 2)}), e = b_.op("exp", {d});
    switch (pick(5)) {
      case 0: x_ = b_.op("sub", {d, b_.op("log", {b_.sum(e, 2)})}); return;
      case 1: x_ = b_.op("mul", {b_.op("add", {d, e}), b_.sum(e, 2)}); return mask();
      case 2: x_ = b_.op("where", {hit_, number(0), e}); return;
      default: x_ = b_.op("div", {e, b_.sum(e, 2)});
    }
  }
  void norm() {
    const InstrId d = b_.op("sub", {x_, mean(x_)}), var = mean(b_.op("square", {d}));
    x_ = b_.op("mul", {d, b_.op("rsqrt", {b_.op("add", {var, number(1e-3)})})});
  }
  void grad() {
    const InstrId g = b_.load(3), dot = mean(b_.op("mul", {x_, g}));
    x_ = b_.op("mul", {x_, b_.op("sub", {g, dot})});
  }

  std::mt19937_64 random_;
  BodyBuilder b_;
  InstrId x_ = 0, hit_ = 0;
};

struct Bodies {
  std::vector<Body> list;
  std::vector<uint64_t> seeds;
};

Bodies random_bodies(size_t count) {
  const FuzzSeeds asked = fuzz_seeds(count);
  uint64_t seed = asked.first;
  Bodies bodies;
  for (; bodies.list.size() < asked.count; ++seed) {
    Body b = RandomBody(seed).body();
    check(b);
    if (schedulable(b)) bodies.list.push_back(b), bodies.seeds.push_back(seed);
  }
  EXPECT_TRUE(!asked.many() || seed - asked.first < asked.count * 3 / 2) << "most are refused";
  return bodies;
}

TEST(Fuzz, RandomBodies) {
  const Bodies bodies = random_bodies(120);
  compare_with_interpreter(bodies.list, 1e-4, bodies.seeds);
}

TEST(Fuzz, RandomBodiesWithAllResultsStreamed) {
  StreamedFrom all(0);
  const Bodies bodies = random_bodies(120);
  compare_with_interpreter(bodies.list, 1e-4, bodies.seeds);
}

TEST(Fuzz, RandomRowsBesideEachOther) {
  const FuzzSeeds asked = fuzz_seeds(40);
  Bodies bodies;
  size_t beside = 0, in_groups = 0;
  for (uint64_t seed = asked.first; seed < asked.end(); ++seed) {
    bodies.list.push_back(RandomRows(seed).body()), bodies.seeds.push_back(seed);
    const std::string text = print_cpp(bodies.list.back(), "kernel");
    beside += text.find("beside<") != text.npos, in_groups += text.find("staged<") != text.npos;
  }
  EXPECT_TRUE(!asked.many() || beside > asked.count * 3 / 10) << beside;
  EXPECT_TRUE(!asked.many() || in_groups > asked.count / 4) << in_groups;
  compare_with_interpreter(bodies.list, 1e-4, bodies.seeds);
}

// The virtual GPU compiles with the compiler of the CPU, which takes what the vendor's may refuse.
TEST(Fuzz, TextsCompileForCards) {
  if (!cuda::why_no_nvrtc().empty()) GTEST_SKIP() << cuda::why_no_nvrtc();
  std::vector<Body> list = random_bodies(60).list;
  const FuzzSeeds asked = fuzz_seeds(20);
  for (uint64_t seed = asked.first; seed < asked.end(); ++seed)
    list.push_back(RandomRows(seed).body());
  const int printed = compile_for_cards(list);
  EXPECT_TRUE(!asked.many() || size_t(printed) > list.size() * 3 / 5) << printed;
}

TEST_F(OnCard, RandomBodies) {
  const Bodies bodies = random_bodies(60);
  const int laid_out = compare_on_device(card_, bodies.list, 1e-4, bodies.seeds);
  EXPECT_TRUE(bodies.list.size() < 20 || size_t(laid_out) > bodies.list.size() * 3 / 5) << laid_out;
}

}  // namespace
}  // namespace tessera::test
