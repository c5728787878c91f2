#include "core/ops/contract.h"

#include <string>
#include <unordered_map>

#include "core/dispatch/context.h"
#include "core/dispatch/dispatch.h"
#include "core/dispatch/precision.h"
#include "core/ops/contract_attributes.h"
#include "core/ops/contract_epilogues.h"
#include "core/ops/pointwise.h"
#include "core/ops/reduce.h"
#include "core/ops/samples.h"
#include "core/ops/views.h"
#include "core/primitive/primitive_of.h"

namespace tessera {
namespace {

constexpr auto npos = std::string::npos;

Tensor contract_with(int64_t leaves, std::string_view spec, const Tensor& a, const Tensor& b,
                     const Tensor& grad_buffer = {});

class Contract final : public PrimitiveOf<Contract, ContractAttributes> {
 public:
  double flops(MetaSpan in, std::span<const Meta>) const override {
    double n = 2;
    for (const Factor& f : axes(in).factors) n *= double(f.extent);
    return n;
  }
  static inline const OpInfo kOp{"contract",
                                 {.kind = OpKind::kProduct,
                                  .precision = Precision::kLow,
                                  .operands = 2,
                                  .promotion = Promotion::kAll}};
  explicit Contract(const ContractAttributes& given) : PrimitiveOf(kOp, given), letters_(out) {
    for (char c : a + b)
      if (letters_.find(c) == npos) letters_ += c;
  }
  Metas infer(MetaSpan in) const override {
    auto e = extents(in);
    Shape shape;
    for (size_t i = 0; i < out.size(); ++i) shape.push_back(e[i]);
    return {Meta::contiguous(shape, in[0]->dtype, in[0]->device)};
  }
  AxisMap axes(MetaSpan in) const override {
    AxisMap m;
    auto e = extents(in);
    // 16-bit terms would be rounded before they are added, as often as there are ranks.
    bool whole = leaves && size_of(in[0]->dtype) < 4;
    for (size_t i = 0; i < e.size(); ++i)
      m.add(i < out.size() ? Factor::kPass : whole ? Factor::kWhole : Factor::kSum, e[i]);
    auto loops = [&](const std::string& word) {
      OperandLoops l;
      for (char c : word) l.push_back({int(letters_.find(c))});
      return l;
    };
    m.in.push_back(loops(a)), m.in.push_back(loops(b));
    m.out.push_back(loops(out));
    m.linear_in = leaves ? 0 : 3;  // partial sums would be added in another order
    return m;
  }
  // A rank that holds an aligned part of the outermost summed loop computes a subtree.
  PrimRef localize(const AxisMap& map, std::span<const Range> loops) const override {
    if (!leaves) return nullptr;
    int64_t extent = 1, mine = leaves;
    for (size_t f = out.size(); f < letters_.size(); ++f) extent *= map.factors[f].extent;
    int64_t all = leaves_of(extent);
    bool outermost = true;
    for (char c : a) {
      size_t f = letters_.find(c);
      const Range& r = loops[f];
      if (f < out.size() || r.extent == 1) continue;
      if (r.size != r.extent && r.size > 0) {  // an empty part adds nothing, wherever it is
        int64_t parts = r.extent / r.size;
        TESSERA_CHECK_AS(
            ShapeError,
            outermost && r.extent % r.size == 0 && r.begin % r.size == 0 && all % parts == 0,
            "contract {}: exact contraction sums {} elements in {} leaves; the part "
            "[{}, {}) of '{}', whose extent is {}, is no subtree of them. Cut the "
            "outermost summed loop into 2, 4 or 8 equal parts (pad it), or train "
            "without exact contraction",
            spec(), extent, all, r.begin, r.begin + r.size, c, r.extent);
        mine = all / parts;
      }
      outermost = false;
    }
    return mine == leaves ? nullptr : PrimRef(new Contract({a, b, out, mine}));
  }
  SaveMask saved() const override { return {3, 0}; }
  Tensors vjp(const VjpArgs& v) const override {
    const int64_t n = leaves ? kExactLeaves : 0;
    auto other = [&](const std::string& word, int i, const std::string& result) {
      return v.wants(i) ? contract_with(n, out + "," + word + "->" + result, v.cot[0],
                                        v.in[size_t(1 - i)], v.grad_buffer_of(size_t(i)))
                        : Tensor();
    };
    return {other(b, 0, a), other(a, 1, b)};
  }

 private:
  // By letter. Two operands of eight dims have up to sixteen.
  SmallVector<int64_t, 8> extents(MetaSpan in) const {
    SmallVector<int64_t, 8> found(letters_.size(), -1);
    for (int k = 0; k < 2; ++k) {
      const std::string& word = k ? b : a;
      const Shape& s = in[size_t(k)]->shape;
      TESSERA_CHECK_AS(ShapeError, int(word.size()) == s.size(),
                       "contract {}: operand {} is {}, expected {} dims", spec(), k, to_string(s),
                       word.size());
      for (int d = 0; d < s.size(); ++d) {
        int64_t& x = found[letters_.find(word[size_t(d)])];
        TESSERA_CHECK_AS(ShapeError, x < 0 || x == s[d],
                         "contract {}: shapes {} and {} disagree on '{}'; transpose one?", spec(),
                         to_string(in[0]->shape), to_string(in[1]->shape), word[size_t(d)]);
        x = s[d];
      }
    }
    TESSERA_CHECK(in[0]->dtype == in[1]->dtype,
                  "contract {}: operands are {}; convert them to one dtype", spec(), describe(in));
    return found;
  }
  std::string letters_;  // of the result, then those that are summed
};

// Parsed specs, kept per thread: a program uses few.
PrimRef contract_primitive(std::string_view spec, int64_t leaves = 0) {
  thread_local std::unordered_map<std::string, PrimRef> caches[2];
  thread_local std::string key;
  auto& cache = caches[leaves ? 1 : 0];  // `leaves` is 0 or kExactLeaves
  key.assign(spec);
  if (auto it = cache.find(key); it != cache.end()) return it->second;
  ContractAttributes made{.leaves = leaves};
  made.parse(key);
  return cache.emplace(key, PrimRef(new Contract(made))).first->second;
}

// Sums the letters of `word` that neither the other operand nor the result has.
Tensor sum_own_letters(const Tensor& t, std::string& word, const std::string& other,
                       const std::string& out) {
  Dims dims;
  std::string kept;
  for (size_t i = 0; i < word.size(); ++i) {
    if (other.find(word[i]) == npos && out.find(word[i]) == npos)
      dims.push_back(int64_t(i));
    else
      kept += word[i];
  }
  word = kept;
  return dims.empty() ? t : sum(t, dims);
}

Tensor contract_with(int64_t leaves, std::string_view spec, const Tensor& a, const Tensor& b,
                     const Tensor& grad_buffer) {
  PrimRef prim = contract_primitive(spec, leaves);
  const auto& attributes = attributes_of<ContractAttributes>(*prim);
  Tensor in[] = {a, b};
  auto& [x, y] = in;
  std::string wa = attributes.a, wb = attributes.b;
  bool own = false;
  for (char c : wa) own |= wb.find(c) == npos && attributes.out.find(c) == npos;
  for (char c : wb) own |= wa.find(c) == npos && attributes.out.find(c) == npos;
  if (own) {
    TESSERA_CHECK_AS(ShapeError, int(wa.size()) == x.ndim() && int(wb.size()) == y.ndim(),
                     "contract {}: operands are {} and {}", spec, describe(x), describe(y));
    promote_operands(in);  // a sum rounds, so it is taken in what the product computes in
    x = sum_own_letters(x, wa, attributes.b, attributes.out);
    y = sum_own_letters(y, wb, attributes.a, attributes.out);
    prim = contract_primitive(wa + "," + wb + "->" + attributes.out, leaves);
  }
  return dispatch_into(grad_buffer, prim, in);
}

}  // namespace

PrimRef contract_op(const ContractAttributes& attributes) {
  return PrimRef(new Contract(attributes));
}

ExactContraction::ExactContraction() : on_(context().exact_contraction, true) {}
void ContractAttributes::parse(const std::string& spec) {
  size_t comma = spec.find(','), arrow = spec.find("->");
  TESSERA_CHECK(comma != npos && arrow != npos && comma < arrow,
                "contract: spec \"{}\"; expected two operands as in \"ij,jk->ik\"", spec);
  a = spec.substr(0, comma), b = spec.substr(comma + 1, arrow - comma - 1);
  out = spec.substr(arrow + 2);
  auto unique = [&](const std::string& word) {
    TESSERA_CHECK_AS(ShapeError, word.size() <= kMaxDims,
                     "contract: spec \"{}\": \"{}\" has more than {} dims", spec, word, kMaxDims);
    for (size_t i = 0; i < word.size(); ++i)
      TESSERA_CHECK(word.find(word[i], i + 1) == npos,
                    "contract: spec \"{}\" repeats '{}' in one operand", spec, word[i]);
  };
  unique(a), unique(b), unique(out);
  for (char c : out)
    TESSERA_CHECK(a.find(c) != npos || b.find(c) != npos,
                  "contract: spec \"{}\": '{}' is in no operand", spec, c);
}

Tensor contract(std::string_view spec, const Tensor& a, const Tensor& b) {
  return contract_with(context().exact_contraction ? kExactLeaves : 0, spec, a, b);
}

Tensor matmul(const Tensor& a, const Tensor& b) {
  TESSERA_CHECK_AS(ShapeError, a.ndim() > 0 && b.ndim() > 0,
                   "matmul: operands are {} and {}; 0-d tensors cannot be contracted", describe(a),
                   describe(b));
  int64_t ka = a.size(-1), kb = b.size(b.ndim() > 1 ? -2 : -1);
  TESSERA_CHECK_AS(ShapeError, ka == kb, "matmul: inner dims differ, {} and {}; transpose one?",
                   to_string(a.shape()), to_string(b.shape()));
  int batch_a = std::max(a.ndim() - 2, 0), batch_b = std::max(b.ndim() - 2, 0),
      batch = std::max(batch_a, batch_b);
  Tensor x = a, y = b;
  if (batch_a && batch_b) {  // batch dims must meet letter by letter: expand those of extent 1
    Shape sa, sb;
    for (int d = 0; d < batch_a; ++d) sa.push_back(a.shape()[d]);
    for (int d = 0; d < batch_b; ++d) sb.push_back(b.shape()[d]);
    Shape both = broadcast(sa, sb, "matmul");
    auto meet = [&](const Tensor& t, int dims) {  // its own batch dims, with the extents of both
      Shape to;
      for (int d = batch - dims; d < batch; ++d) to.push_back(both[d]);
      to.push_back(t.size(-2)), to.push_back(t.size(-1));
      return expand(t, to);
    };
    x = meet(a, batch_a), y = meet(b, batch_b);
  }
  // Letters: batch dims aligned to the right from 'a' on, then m, k, n.
  std::string common;
  for (int d = 0; d < batch; ++d) common += char('a' + d);
  std::string sa = common.substr(size_t(batch - batch_a)) + (a.ndim() > 1 ? "xz" : "z");
  std::string sb = common.substr(size_t(batch - batch_b)) + (b.ndim() > 1 ? "zy" : "z");
  return contract(
      sa + "," + sb + "->" + common + (a.ndim() > 1 ? "x" : "") + (b.ndim() > 1 ? "y" : ""), x, y);
}

Tensor linear(const Tensor& x, const Tensor& weight, const Tensor& bias) {
  TESSERA_CHECK_AS(ShapeError, weight.ndim() == 2 && x.ndim() >= 1 && x.size(-1) == weight.size(1),
                   "linear: x {} does not fit weight {} (out, in)", to_string(x.shape()),
                   to_string(weight.shape()));
  constexpr std::string_view specs[] = {
      "k,nk->n",         "ak,nk->an",         "abk,nk->abn",        "abck,nk->abcn",
      "abcdk,nk->abcdn", "abcdek,nk->abcden", "abcdefk,nk->abcdefn"};
  TESSERA_CHECK_AS(ShapeError, x.ndim() <= 7, "linear: x {} has more than 7 dims",
                   to_string(x.shape()));
  Tensor y = contract(specs[x.ndim() - 1], x, weight);
  if (!bias.defined()) return y;
  Tensor sum[] = {std::move(y), bias};
  autocast_operands(Precision::kLow, sum);
  return add(std::move(sum[0]), std::move(sum[1]));
}

Tensor dot(const Tensor& a, const Tensor& b) {
  const DType t = result_type(a, b), wide = is_floating(t) && size_of(t) == 2 ? kF32 : t;
  return cast(sum(cast(a, wide) * cast(b, wide), {-1}), is_floating(t) ? t : kI64);
}

void register_contract_ops(OpRegistry& registry) {
  registry.add("contract", [] {
    auto sample = [](const char* spec, const Shape& a, const Shape& b, int64_t leaves = 0) {
      return Sample{contract_primitive(spec, leaves),
                    {sample_values(a, -1, 1, 1), sample_values(b, -1, 1, 2)}};
    };
    Sample transposed = sample("ij,jk->ik", {3, 4}, {4, 2});
    transposed.in[1] = permute(sample_values({2, 4}, -1, 1, 2), {1, 0});
    return std::vector<Sample>{sample("ij,jk->ik", {3, 4}, {4, 2}),
                               transposed,
                               sample("btk,nk->btn", {2, 3, 4}, {5, 4}),
                               sample("bthd,bshd->bhts", {2, 3, 2, 4}, {2, 5, 2, 4}),
                               sample("bhts,bshd->bthd", {2, 2, 3, 5}, {2, 5, 2, 4}),
                               sample("btn,btk->nk", {2, 3, 4}, {2, 3, 5}),
                               sample("ij,ij->i", {3, 4}, {3, 4}),
                               sample("i,j->ij", {3}, {4}),
                               sample("btk,nk->btn", {2, 3, 8}, {5, 8}, kExactLeaves),
                               sample("btn,btk->nk", {2, 6, 4}, {2, 6, 5}, kExactLeaves),
                               sample("bij,bjk->bik", {2, 3, 12}, {2, 12, 2}, kExactLeaves)};
  });
}

}  // namespace tessera
