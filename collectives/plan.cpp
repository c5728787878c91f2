#include "collectives/plan.h"

#include <cstring>
#include <functional>

#include "collectives/reduction.h"

namespace tessera::detail {
namespace {

using TensorSpan = std::span<const Tensor>;

std::byte* address(const Tensor& t) {
  // This is not raw(): a pending write is waited for when the collective runs, not when it is
  // submitted.
  return static_cast<std::byte*>(t.storage()->data()) + size_t(t.offset()) * size_of(t.dtype());
}

uint64_t mix(uint64_t h, uint64_t v) {  // the finaliser of splitmix64
  h += v + 0x9e3779b97f4a7c15;
  h = (h ^ (h >> 30)) * 0xbf58476d1ce4e5b9;
  h = (h ^ (h >> 27)) * 0x94d049bb133111eb;
  return h ^ (h >> 31);
}

class Builder {
 public:
  Builder(const Collective& c, int rank, int size, Plan& plan, Device device)
      : c_(c), traits_(traits(c.kind)), name_(traits_.name), plan_(plan), device_(device) {
    static_cast<PlanFacts&>(plan_) = {};
    plan_.give.clear();
    plan_.take.clear();
    plan_.kind = c.kind;
    plan_.op = c.op;
    plan_.reduces = traits_.reduces;
    plan_.p2p = traits_.p2p;
    plan_.rank = rank;
    plan_.size = size;
  }

  void build() {
    check_tensors();
    if (traits_.rooted)
      TESSERA_CHECK(c_.peer >= 0 && c_.peer < plan_.size,
                    "{}: root {} is not a rank; expected 0 to {}", name_, c_.peer, plan_.size - 1);
    switch (c_.kind) {
      case CollKind::kAllReduce: reduce_all(); break;
      case CollKind::kReduce: reduce_one(); break;
      case CollKind::kBroadcast: broadcast(); break;
      case CollKind::kAllGather: all_gather(); break;
      case CollKind::kGather: gather(); break;
      case CollKind::kScatter: scatter(); break;
      case CollKind::kReduceScatter: reduce_scatter(); break;
      case CollKind::kAllToAll: all_to_all(); break;
      case CollKind::kBarrier: break;
      case CollKind::kSend:
      case CollKind::kRecv: point_to_point(); break;
    }
    if (plan_.reduces)
      TESSERA_CHECK(reducible(c_.op, plan_.dtype), "{}: no {} of {}; {}", name_, name_of(c_.op),
                    name_of(plan_.dtype),
                    is_storage_only(plan_.dtype)
                        ? "it is a storage format, convert it by .to(kF32) first"
                    : c_.op == ReduceOp::kAvg ? "use sum, or a floating dtype"
                                              : "bitwise operators need an integer dtype");
    CallRecord& r = plan_.record;
    r.kind = c_.kind;
    r.op = plan_.reduces ? c_.op : ReduceOp::kSum;
    r.dtype = plan_.dtype;
    r.peer = traits_.p2p || traits_.rooted ? c_.peer : -1;
    r.site = hash_site(c_.site);
  }

 private:
  bool is_root() const { return c_.peer == plan_.rank; }

  void check_tensors() {
    const Tensor* first = nullptr;
    auto check = [&](TensorSpan tensors, const char* side) {
      for (const Tensor& t : tensors) {
        TESSERA_CHECK(t.defined(), "{}: {} is an undefined tensor", name_, side);
        TESSERA_CHECK(t.device() == device_, "{}: {} is on {}, but this group moves {} tensors",
                      name_, side, to_string(t.device()), to_string(device_));
        TESSERA_CHECK_AS(ShapeError, t.is_contiguous(),
                         "{}: {} {} has strides {}; pass a dense tensor (contiguous())", name_,
                         side, tessera::describe(t), to_string(t.strides()));
        if (!first) first = &t;
        TESSERA_CHECK(t.dtype() == first->dtype(), "{}: dtypes differ, {} and {}; convert one",
                      name_, tessera::describe(*first), tessera::describe(t));
      }
    };
    check(c_.in, "in");
    if (c_.out.data() != c_.in.data() || c_.out.size() != c_.in.size()) check(c_.out, "out");
    if (first) plan_.dtype = first->dtype();
  }

  Part whole(const Tensor& t) const { return {address(t), int64_t(t.nbytes())}; }
  const Tensor& only(TensorSpan tensors, const char* side) const {
    TESSERA_CHECK(tensors.size() == 1, "{}: {} has {} tensors, expected one", name_, side,
                  tensors.size());
    return tensors[0];
  }

  /// Returns equal pieces of one tensor, or one tensor for each rank.
  Parts pieces(TensorSpan tensors, const char* side) const {
    Parts parts;
    int size = plan_.size;
    if (tensors.size() == 1 && size != 1) {
      const Tensor& t = tensors[0];
      TESSERA_CHECK_AS(ShapeError, t.numel() % size == 0,
                       "{}: {} {} does not divide into {} pieces; pass a tensor for each rank",
                       name_, side, tessera::describe(t), size);
      int64_t bytes = int64_t(t.nbytes()) / size;
      for (int r = 0; r < size; ++r) parts.push_back({address(t) + r * bytes, bytes});
      return parts;
    }
    TESSERA_CHECK(int(tensors.size()) == size,
                  "{}: {} has {} tensors, expected one or one for each of {} ranks", name_, side,
                  tensors.size(), size);
    for (const Tensor& t : tensors) parts.push_back(whole(t));
    return parts;
  }
  Parts split(const Tensor& t, std::span<const int64_t> splits, const char* side) const {
    Parts parts;
    int64_t sum = 0;
    TESSERA_CHECK(int(splits.size()) == plan_.size, "{}: {}_splits has {} counts for {} ranks",
                  name_, side, splits.size(), plan_.size);
    for (int64_t n : splits) {
      TESSERA_CHECK(n >= 0, "{}: {}_splits holds {}, a negative count", name_, side, n);
      parts.push_back(
          {address(t) + sum * int64_t(size_of(t.dtype())), n * int64_t(size_of(t.dtype()))});
      sum += n;
    }
    TESSERA_CHECK_AS(ShapeError, sum == t.numel(), "{}: {}_splits add up to {}, but {} is {}",
                     name_, side, sum, side, tessera::describe(t));
    return parts;
  }

  int64_t elements(int64_t bytes) const { return bytes / int64_t(size_of(plan_.dtype)); }
  void same_bytes(const Part& a, const Part& b, const char* what) const {
    TESSERA_CHECK_AS(ShapeError, a.bytes == b.bytes, "{}: {}: {} and {} elements; make them equal",
                     name_, what, elements(a.bytes), elements(b.bytes));
  }
  /// Sets the counts that ranks must agree on to those of `parts`, one for each rank.
  void agree(const Parts& parts) {
    bool even = true;
    uint64_t hash = 0;
    for (const Part& p : parts) {
      even &= p.bytes == parts[0].bytes;
      hash = mix(hash, uint64_t(p.bytes));
      plan_.longest = std::max(plan_.longest, p.bytes);
    }
    plan_.record.form = !even;
    plan_.record.counts = even ? uint64_t(elements(parts[0].bytes)) : hash;
  }
  void agree(const Part& part) {
    plan_.longest = part.bytes;
    plan_.record.counts = uint64_t(elements(part.bytes));
  }
  void must_be_empty(TensorSpan tensors, const char* side) const {
    TESSERA_CHECK(tensors.empty(), "{}: {} is given, but only rank {} (the root) has one", name_,
                  side, c_.peer);
  }

  void reduce_all() {
    const Part& in = plan_.give.emplace_back(whole(only(c_.in, "in")));
    const Part& out = plan_.take.emplace_back(whole(only(c_.out, "out")));
    plan_.takes = true;
    same_bytes(in, out, "in and out differ");
    agree(in);
  }
  void reduce_one() {
    plan_.give = {whole(only(c_.in, "in"))};
    plan_.takes = is_root();
    if (is_root()) {
      plan_.take = {whole(only(c_.out, "out"))};
      same_bytes(plan_.give[0], plan_.take[0], "in and out differ");
    } else {
      must_be_empty(c_.out, "out");
    }
    agree(plan_.give[0]);
  }
  void broadcast() {
    plan_.giver = c_.peer;
    plan_.takes = !is_root();
    Parts& mine = is_root() ? plan_.give : plan_.take;
    mine = {whole(is_root() ? only(c_.in, "in") : only(c_.out, "out"))};
    agree(mine[0]);
  }
  void all_gather() {
    plan_.give = {whole(only(c_.in, "in"))};
    plan_.take = pieces(c_.out, "out");
    plan_.takes = true;
    same_bytes(plan_.give[0], plan_.take[plan_.rank], "in and this rank's piece of out differ");
    agree(plan_.take);
  }
  void gather() {
    plan_.give = {whole(only(c_.in, "in"))};
    plan_.takes = is_root();
    if (is_root()) {
      plan_.take = pieces(c_.out, "out");
      for (const Part& p : plan_.take) same_bytes(plan_.give[0], p, "in and a piece of out differ");
    } else {
      must_be_empty(c_.out, "out");
    }
    agree(plan_.give[0]);
  }
  void scatter() {
    plan_.giver = c_.peer;
    plan_.one_for_each = plan_.takes = true;
    plan_.take = {whole(only(c_.out, "out"))};
    if (is_root()) {
      plan_.give = pieces(c_.in, "in");
      for (const Part& p : plan_.give) same_bytes(plan_.take[0], p, "out and a piece of in differ");
    } else {
      must_be_empty(c_.in, "in");
    }
    agree(plan_.take[0]);
  }
  void reduce_scatter() {
    plan_.give = pieces(c_.in, "in");
    plan_.take = {whole(only(c_.out, "out"))};
    plan_.one_for_each = plan_.takes = true;
    same_bytes(plan_.give[plan_.rank], plan_.take[0], "this rank's piece of in and out differ");
    agree(plan_.give);
  }
  void all_to_all() {
    plan_.one_for_each = plan_.takes = true;
    bool by_splits = !c_.in_splits.empty() || !c_.out_splits.empty();
    bool lists = plan_.size > 1 && (c_.in.size() != 1 || c_.out.size() != 1);
    if (by_splits) {
      plan_.give = split(only(c_.in, "in"), c_.in_splits, "in");
      plan_.take = split(only(c_.out, "out"), c_.out_splits, "out");
    } else {
      plan_.give = pieces(c_.in, "in");
      plan_.take = pieces(c_.out, "out");
    }
    same_bytes(plan_.give[plan_.rank], plan_.take[plan_.rank], "what this rank keeps differs");
    if (!by_splits && !lists) {
      same_bytes(plan_.give[0], plan_.take[0], "in and out differ");
      return agree(plan_.give);
    }
    plan_.record.form = 1;
    plan_.longest = -1;
  }
  void point_to_point() {
    bool sends = c_.kind == CollKind::kSend;
    TESSERA_CHECK(c_.peer >= 0 && c_.peer < plan_.size && c_.peer != plan_.rank,
                  "{}: {} is not another rank; expected 0 to {} without {}", name_, c_.peer,
                  plan_.size - 1, plan_.rank);
    Parts& mine = sends ? plan_.give : plan_.take;
    mine = {whole(sends ? only(c_.in, "in") : only(c_.out, "out"))};
    plan_.takes = !sends;
    agree(mine[0]);
  }

  const Collective& c_;
  const CollTraits& traits_;
  std::string_view name_;
  Plan& plan_;
  const Device device_;
};

bool overlap(const Part& a, const Part& b) {
  std::less<const std::byte*> before;
  return a.bytes && b.bytes && before(a.data, b.data + b.bytes) && before(b.data, a.data + a.bytes);
}

}  // namespace

bool Plan::must_stage() const {
  if (kind == CollKind::kAllReduce)
    return give[0].data != take[0].data && overlap(give[0], take[0]);
  for (int g = 0; g < int(give.size()); ++g)
    for (int t = 0; t < int(take.size()); ++t) {
      if (!overlap(give[g], take[t])) continue;
      // A piece that lies exactly where this rank's own result goes is harmless: it is not written,
      // or only this rank reads it.
      bool own = reduces || take.size() == 1 || t == rank;
      bool mine_alone = !one_for_each || g == rank;
      if (!(give[g].data == take[t].data && own && mine_alone)) return true;
    }
  return false;
}

Slice slice_of(int64_t bytes, int r, int n) {
  const int64_t lines = lines_of(bytes);
  return {std::min(bytes, lines * r / n * kLineBytes),
          std::min(bytes, lines * (r + 1) / n * kLineBytes)};
}

Parts copied(const Parts& pieces, std::vector<std::byte>& memory) {
  int64_t total = 0;
  for (const Part& p : pieces) total += p.bytes;
  memory.resize(size_t(total));
  std::byte* at = memory.data();
  Parts copies = pieces;
  for (Part& p : copies) {
    if (p.bytes) std::memcpy(at, p.data, size_t(p.bytes));
    p.data = at;
    at += p.bytes;
  }
  return copies;
}

void make_plan(const Collective& c, int rank, int size, Plan& plan, Device device) {
  Builder(c, rank, size, plan, device).build();
}

void seal(CallRecord& record, uint64_t seq) {
  record.seq = seq;
  uint64_t packed = uint64_t(record.kind) << 24 | uint64_t(record.op) << 16 |
                    uint64_t(record.dtype) << 8 | record.form;
  uint64_t h = mix(packed | uint64_t(uint32_t(record.peer)) << 32, record.seq);
  record.fingerprint = mix(h, mix(record.counts, record.site));
}

uint64_t hash_site(const CallSite& site) {
  // File names are literals, so within this process their addresses identify them.
  struct Known {
    const char* file = nullptr;
    uint64_t place = 0, hash = 0;
  };
  thread_local Known known[16];
  uint64_t place = uint64_t(site.line()) << 16 | site.column();
  Known& k = known[(site.line() ^ site.column()) % std::size(known)];
  if (k.file != site.file_name() || k.place != place)
    k = {site.file_name(), place, mix(std::hash<std::string_view>()(site.file_name()), place)};
  return k.hash;
}

}  // namespace tessera::detail
