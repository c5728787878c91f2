#include "tests/collectives/verbs.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <vector>

#include "collectives/reduction.h"
#include "core/dispatch/copy.h"
#include "core/dispatch/default_device.h"
#include "core/tensor/element.h"

namespace tessera::test {
namespace {

/// The values of a tensor that repeat after three elements, as value_of gives them for one rank.
/// Such tensors are written and compared by whole blocks, because tensors of 8 ranks have millions
/// of elements, and a sanitizer checks every access.
struct Repeating {
  static constexpr int64_t kPeriod = 3;
  explicit Repeating(auto value) : of{value(0), value(1), value(2)} {}
  double operator()(int64_t i) const { return of[size_t(i % kPeriod)]; }

  std::array<double, kPeriod> of;
};

void write(const Tensor& t, int64_t i, double value) {
  write_real(static_cast<char*>(t.raw()) + size_t(i) * size_of(t.dtype()), t.dtype(), value);
}

double read(const Tensor& t, int64_t i) {
  return read_real(static_cast<const char*>(t.raw()) + size_t(i) * size_of(t.dtype()), t.dtype());
}

Tensor filled(Tensor t, const Repeating& value) {
  if (!t.device().is_cpu()) {
    copy_values(t, transferred(filled(empty(t.shape(), t.dtype(), kCPU), value), t.device()));
    t.storage()->bump_version();
    return t;
  }
  const int64_t first = std::min(t.numel(), Repeating::kPeriod);
  for (int64_t i = 0; i < first; ++i) write(t, i, value(i));
  auto* p = static_cast<char*>(t.raw());
  const size_t bytes = size_t(t.numel()) * size_of(t.dtype());
  for (size_t done = size_t(first) * size_of(t.dtype()); done < bytes;) {
    const size_t more = std::min(done, bytes - done);
    std::memcpy(p + done, p, more);
    done += more;
  }
  return t;
}

/// Whether each element of t has the bits of the third element before it.
bool repeats(const Tensor& t) {
  if (t.numel() <= Repeating::kPeriod) return true;
  const auto* p = static_cast<const char*>(t.raw());
  const size_t period = size_t(Repeating::kPeriod) * size_of(t.dtype());
  return std::memcmp(p, p + period, size_t(t.numel()) * size_of(t.dtype()) - period) == 0;
}

/// Element i of rank r's tensor: 1 to 3, so that products over 8 ranks stay exact in bf16's and
/// u8's range as computed by the reference below.
double value_of(DType dtype, int r, int64_t i) {
  if (dtype == kBool) return double((r + i) % 3 == 0);
  return double(1 + (r * 7 + i * 5) % 3);
}

double combine(ReduceOp op, DType dtype, double a, double b) {
  auto ia = int64_t(a), ib = int64_t(b);
  switch (op) {
    case ReduceOp::kSum:
    case ReduceOp::kAvg: return dtype == kBool ? double(ia | ib) : a + b;
    case ReduceOp::kProduct: return a * b;
    case ReduceOp::kMin: return std::min(a, b);
    case ReduceOp::kMax: return std::max(a, b);
    case ReduceOp::kBitAnd: return double(ia & ib);
    case ReduceOp::kBitOr: return double(ia | ib);
    case ReduceOp::kBitXor: return double(ia ^ ib);
  }
  return 0;
}

double rounded(DType dtype, double v) {
  double word = 0;
  write_real(&word, dtype, v);
  return read_real(&word, dtype);
}

double reduced(ReduceOp op, DType dtype, int size, auto value) {
  double acc = value(0);
  for (int r = 1; r < size; ++r) acc = combine(op, dtype, acc, value(r));
  return rounded(dtype, op == ReduceOp::kAvg ? (is_floating(dtype) && dtype != kF64
                                                    ? double(float(acc) / float(size))
                                                    : acc / size)
                                             : acc);
}

void expect(const char* verb, ProcessGroup& g, const Tensor& result, auto value) {
  const Tensor t = transferred(result, kCPU);
  int64_t n = t.numel();
  if constexpr (std::is_same_v<decltype(value), Repeating>)
    if (repeats(t)) n = std::min(n, Repeating::kPeriod);
  for (int64_t i = 0; i < n; ++i) {
    double got = read(t, i), want = value(i);
    TESSERA_CHECK(got == want, "{}: {} of {} ranks, rank {}, {} element {}: got {}, expected {}",
                  verb, g.backend(result.device()), g.size(), g.rank(), describe(t), i, got, want);
  }
}

class Verbs {
 public:
  Verbs(ProcessGroup& g, DType dtype, int64_t n, Memory memory)
      : g_(g), dtype_(dtype), n_(n), rank_(g.rank()), size_(g.size()), memory_(memory) {}

  void reductions() {
    for (int o = 0; o < kNumReduceOps; ++o) {
      auto op = ReduceOp(o);
      if (!detail::reducible(op, dtype_)) continue;
      auto want = Repeating([&](int64_t i) {
        return reduced(op, dtype_, size_, [&](int r) { return value_of(dtype_, r, i); });
      });
      Tensor t = mine(n_);
      g_.all_reduce(t, op);
      expect("all_reduce", g_, t, want);
      t = mine(n_);
      int root = o % size_;
      g_.reduce(t, root, op);
      expect("reduce", g_, t, rank_ == root ? want : values(rank_));
      Tensor in = mine(n_ * size_), out = room(n_);
      g_.reduce_scatter(out, in, op);
      expect("reduce_scatter", g_, out, Repeating([&](int64_t i) { return want(rank_ * n_ + i); }));
    }
  }

  // Operand and result overlap in part; either of them begins first.
  void overlapping_reductions() {
    constexpr int64_t kShift = 7;
    auto reduce = [&](CollKind kind, ReduceOp op, int peer, bool in_first) {
      const int64_t given = kind == CollKind::kReduceScatter ? n_ * size_ : n_;
      const Tensor memory = room(given + kShift);
      auto part = [&](int64_t begin, int64_t n) {
        return Tensor(Meta::contiguous({n}, dtype_, default_device()), memory.storage(), begin);
      };
      const Tensor in = filled(part(in_first ? 0 : kShift, given), values(rank_));
      const Tensor out = part(in_first ? kShift : 0, n_);
      const bool takes = kind != CollKind::kReduce || rank_ == peer;
      g_.submit({.kind = kind,
                 .op = op,
                 .peer = peer,
                 .in = {&in, 1},
                 .out = {&out, takes ? size_t{1} : size_t{0}}});
      if (!takes) return;
      const int64_t first = kind == CollKind::kReduceScatter ? rank_ * n_ : 0;
      expect("overlapping reduction", g_, out, Repeating([&](int64_t i) {
               return reduced(op, dtype_, size_,
                              [&](int r) { return value_of(dtype_, r, first + i); });
             }));
    };
    for (int o = 0; o < kNumReduceOps; ++o) {
      if (!detail::reducible(ReduceOp(o), dtype_)) continue;
      for (CollKind kind : {CollKind::kAllReduce, CollKind::kReduce, CollKind::kReduceScatter})
        for (bool in_first : {true, false})
          reduce(kind, ReduceOp(o), kind == CollKind::kReduce ? o % size_ : -1, in_first);
    }
  }

  void uneven_reduce_scatter() {
    if (!has_maximum()) return;
    Tensors in;
    for (int r = 0; r < size_; ++r) in.push_back(mine(n_ + r));
    Tensor out = room(n_ + rank_);
    g_.reduce_scatter(out, in, ReduceOp::kMax);
    expect("reduce_scatter", g_, out, Repeating([&](int64_t i) {
             return reduced(ReduceOp::kMax, dtype_, size_,
                            [&](int r) { return value_of(dtype_, r, i); });
           }));
  }

  void rooted() {
    for (int root = 0; root < size_; ++root) {
      Tensor t = mine(n_);
      g_.broadcast(t, root);
      expect("broadcast", g_, t, values(root));
      Tensor out = room(n_ * size_);
      t = mine(n_);
      g_.gather(rank_ == root ? std::span<const Tensor>(&out, 1) : std::span<const Tensor>(), t,
                root);
      if (rank_ == root)
        expect("gather", g_, out, [&](int64_t i) { return value_of(dtype_, int(i / n_), i % n_); });
      Tensors pieces;
      if (rank_ == root)
        for (int r = 0; r < size_; ++r) pieces.push_back(filled(room(n_), values(r + 1)));
      t = mine(n_);
      g_.scatter(t, pieces, root);
      expect("scatter", g_, t, values(rank_ + 1));
    }
  }

  void gathers() {
    Tensor in = mine(n_), out = room(n_ * size_);
    g_.all_gather(out, in);
    expect("all_gather", g_, out, [&](int64_t i) { return value_of(dtype_, int(i / n_), i % n_); });
    Tensors list;
    for (int r = 0; r < size_; ++r) list.push_back(room(n_ + r));
    g_.all_gather(list, mine(n_ + rank_));
    for (int r = 0; r < size_; ++r) expect("all_gather", g_, list[size_t(r)], values(r));
  }

  void all_to_all() {
    Tensor in = mine(n_ * size_), out = room(n_ * size_);
    auto want = [&](int64_t i) { return value_of(dtype_, int(i / n_), rank_ * n_ + i % n_); };
    g_.all_to_all(out, in);
    expect("all_to_all", g_, out, want);
    g_.all_to_all(in, in);  // in place
    expect("all_to_all", g_, in, want);
    // Rank r sends (r + to) % 3 * n elements to rank `to`.
    std::vector<int64_t> to, from;
    int64_t total_in = 0, total_out = 0;
    for (int r = 0; r < size_; ++r) {
      to.push_back((rank_ + r) % 3 * n_);
      from.push_back((r + rank_) % 3 * n_);
      total_in += to.back();
      total_out += from.back();
    }
    out = room(total_out);
    g_.all_to_all(out, mine(total_in), from, to);
    std::vector<double> expected;
    for (int r = 0; r < size_; ++r) {
      int64_t begin = 0;
      for (int k = 0; k < rank_; ++k) begin += (r + k) % 3 * n_;
      for (int64_t i = 0; i < from[size_t(r)]; ++i)
        expected.push_back(value_of(dtype_, r, begin + i));
    }
    expect("all_to_all", g_, out, [&](int64_t i) { return expected[size_t(i)]; });
  }

  void messages() {
    if (size_ == 1) return;
    int next = (rank_ + 1) % size_, previous = (rank_ + size_ - 1) % size_;
    Tensor out = mine(n_), in = room(n_);
    Ref<Work> sent = g_.send_async(out, next);
    g_.recv(in, previous);
    sent->wait();
    expect("recv", g_, in, values(previous));
  }

  void pending() {
    // The program does not explicitly wait for these results.
    Tensor a = mine(n_), out = room(n_ * size_);
    if (has_maximum()) g_.all_reduce_async(a, ReduceOp::kMax);
    g_.all_gather_async(out, a);
    expect("all_gather_async", g_, out, [&](int64_t i) {
      if (!has_maximum()) return value_of(dtype_, int(i / n_), i % n_);
      return reduced(ReduceOp::kMax, dtype_, size_,
                     [&](int r) { return value_of(dtype_, r, i % n_); });
    });
  }

 private:
  bool has_maximum() const { return detail::reducible(ReduceOp::kMax, dtype_); }
  /// The elements of rank r's tensor.
  Repeating values(int r) const {
    return Repeating([&](int64_t i) { return value_of(dtype_, r, i); });
  }
  Tensor room(int64_t n) const {
    if (memory_ == Memory::kOwn) return empty({n}, dtype_, default_device());
    const Device device = default_device();
    return Tensor(Meta::contiguous({n}, dtype_, device),
                  g_.allocate(size_t(n) * size_of(dtype_), device));
  }
  Tensor mine(int64_t n) const { return filled(room(n), values(rank_)); }

  ProcessGroup& g_;
  DType dtype_;
  int64_t n_;
  int rank_, size_;
  Memory memory_;
};

Tensor of_group(ProcessGroup& g, int64_t n) {
  return Tensor(Meta::contiguous({n}, kF32, {}), g.allocate(size_t(n) * 4));
}

}  // namespace

void check_verbs(ProcessGroup& group, DType dtype, int64_t n, Memory memory) {
  Verbs v(group, dtype, n, memory);
  v.reductions();
  v.overlapping_reductions();
  v.uneven_reduce_scatter();
  v.rooted();
  v.gathers();
  v.all_to_all();
  v.messages();
  v.pending();
  group.barrier();
}

void check_all_verbs(ProcessGroup& group, int64_t n, Memory memory) {
  for (DType dtype : kAllDTypes) check_verbs(group, dtype, n, memory);
}

void check_ways(ProcessGroup& g) {
  for (int64_t n : {3, 1000, 20'000, 300'000}) {
    Tensor want = empty({n}), own = empty({n}), group = of_group(g, n), odd = of_group(g, n + 3);
    auto fill = [&](float* p) {
      for (int64_t i = 0; i < n; ++i) p[i] = std::sin(float(g.rank() * 1000 + i)) / 3;
    };
    fill(want.data<float>());
    g.all_reduce(want);
    // Not at the start of a line; and one rank's elsewhere than the others'.
    Tensor shifted(Meta::contiguous({n}, kF32, {}), odd.storage(), 3);
    for (int call = 0; call < 30; ++call) {
      Tensor mixed = g.rank() == 0 ? own : group;
      for (const Tensor& t : {group, shifted, mixed}) {
        fill(t.data<float>());
        g.all_reduce(t);
        TESSERA_CHECK(std::memcmp(t.data<float>(), want.data<float>(), size_t(n) * 4) == 0,
                      "{} elements, call {}: sums differ from those of staged tensors", n, call);
      }
    }
  }
}

void call_variant(ProcessGroup& g, CollKind kind, int variant, int odd) {
  bool differs = g.rank() == odd;
  if (differs && variant == 1) {
    if (kind == CollKind::kBarrier) return g.broadcast(empty({1}, kU8), 0);
    return g.barrier();
  }
  DType dtype = differs && variant == 3 ? kI32 : kF32;
  int64_t n = differs && variant == 4 ? 12 : 16;
  int size = g.size(), root = differs && variant == 5 ? 1 : 0;
  auto op = differs && variant == 2 ? ReduceOp::kMax : ReduceOp::kSum;
  const Repeating ones([](int64_t) { return 1; });
  Tensor t = filled(empty({n}, dtype, default_device()), ones);
  Tensor wide = filled(empty({n * size}, dtype, default_device()), ones);
  auto one = [](const Tensor& x) { return std::span<const Tensor>(&x, 1); };
  std::span<const Tensor> none;
  bool is_root = g.rank() == root;
  switch (kind) {
    case CollKind::kAllReduce: return g.all_reduce(t, op);
    case CollKind::kReduce: return g.reduce(t, root, op);
    case CollKind::kBroadcast: return g.broadcast(t, root);
    case CollKind::kAllGather: return g.all_gather(wide, t);
    case CollKind::kGather: return g.gather(is_root ? one(wide) : none, t, root);
    case CollKind::kScatter: return g.scatter(t, is_root ? one(wide) : none, root);
    case CollKind::kReduceScatter: return g.reduce_scatter(t, wide, op);
    case CollKind::kAllToAll:
      return g.all_to_all(wide, filled(empty({n * size}, dtype, default_device()), ones));
    case CollKind::kBarrier: return g.barrier();
    case CollKind::kSend:
    case CollKind::kRecv: break;
  }
  // The pair sends and receives; the others join the barrier that would follow.
  if (g.rank() == 0) return g.send(t, 1);
  if (g.rank() == 1) return g.recv(t, 0);
  g.barrier();
}

}  // namespace tessera::test
