#include "core/ops/contract.h"

#include <string>
#include <unordered_map>

#include "core/dispatch/dispatch.h"
#include "core/ops/attributes.h"
#include "core/ops/layout.h"
#include "core/ops/pointwise.h"
#include "core/ops/reduce.h"
#include "core/ops/samples.h"
#include "core/ops/views.h"

namespace tessera {
namespace {

constexpr auto npos = std::string::npos;

Tensor contract_with(int64_t leaves, std::string_view spec, const Tensor& a, const Tensor& b);
PrimRef parse_contract(const std::string& spec, int64_t leaves);

class Contract final : public ContractAttributes {
 public:
  Contract(std::string a, std::string b, std::string out, int64_t leaves)
      : ContractAttributes(intern_op("contract"), std::move(a), std::move(b), std::move(out),
                           leaves),
        letters_(this->out) {
    for (char c : this->a + this->b)
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
    // Terms in 16 bits would be rounded before they meet: how often depends on the number of ranks.
    bool whole = leaves && size_of(in[0]->dtype) < 4;
    for (size_t i = 0; i < e.size(); ++i)
      m.add(i < out.size() ? Factor::kPass : whole ? Factor::kWhole : Factor::kSum, e[i]);
    auto loops = [&](const std::string& word) {
      OperandLoops l;
      for (char c : word) {
        int f = int(letters_.find(c));
        l.push_back(e[size_t(f)] == 1 ? DimLoops{} : DimLoops{f});
      }
      return l;
    };
    m.in.push_back(loops(a)), m.in.push_back(loops(b));
    m.out.push_back(loops(out));
    m.linear_in = leaves ? 0 : 3;  // a sum that passed through would be added in another order
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
      if (r.size != r.extent && r.size > 0) {  // nothing adds +0, wherever it is
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
    return mine == leaves ? nullptr : PrimRef(new Contract(a, b, out, mine));
  }
  SaveMask saved() const override { return {3, 0}; }
  Tensors vjp(const VjpArgs& v) const override {
    const int64_t n = leaves ? kExactLeaves : 0;
    return {v.wants(0) ? contract_with(n, out + "," + b + "->" + a, v.cot[0], v.in[1]) : Tensor(),
            v.wants(1) ? contract_with(n, out + "," + a + "->" + b, v.cot[0], v.in[0]) : Tensor()};
  }
  void attributes(AttributeVisitor& v) const override {
    v.text("spec", spec());
    if (leaves) v.integer("leaves", leaves);
  }
  PrimRef with_attributes(AttributeReader& a) const override {
    return parse_contract(a.text("spec"), a.has("leaves") ? a.count("leaves") : 0);
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
  std::string spec() const { return a + "," + b + "->" + out; }

  std::string letters_;  // of the result, then those that are summed
};

PrimRef parse_contract(const std::string& spec, int64_t leaves) {
  size_t comma = spec.find(','), arrow = spec.find("->");
  TESSERA_CHECK(comma != npos && arrow != npos && comma < arrow,
                "contract: spec \"{}\"; expected two operands as in \"ij,jk->ik\"", spec);
  std::string a = spec.substr(0, comma), b = spec.substr(comma + 1, arrow - comma - 1),
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
  return PrimRef(new Contract(a, b, out, leaves));
}

// Parsed specs, kept per thread: a program uses few.
PrimRef contract_primitive(std::string_view spec, int64_t leaves = 0) {
  thread_local std::unordered_map<std::string, PrimRef> caches[2];
  thread_local std::string key;
  auto& cache = caches[leaves ? 1 : 0];  // `leaves` is 0 or kExactLeaves
  key.assign(spec);
  if (auto it = cache.find(key); it != cache.end()) return it->second;
  return cache.emplace(key, parse_contract(key, leaves)).first->second;
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

// A letter that an operand repeats walks its diagonal: each becomes one dim, the last.
Tensor diagonals(Tensor t, std::string& word, std::string_view spec) {
  TESSERA_CHECK_AS(ShapeError, int(word.size()) == t.ndim(),
                   "einsum: spec \"{}\": \"{}\" for operand {}", spec, word, describe(t));
  for (size_t i = 0; i < word.size();) {
    size_t j = word.find(word[i], i + 1);
    if (j == npos) {
      ++i;
      continue;
    }
    char letter = word[i];
    TESSERA_CHECK_AS(ShapeError, t.size(int64_t(i)) == t.size(int64_t(j)),
                     "einsum: spec \"{}\" repeats '{}', whose extents in {} differ", spec, letter,
                     describe(t));
    t = diagonal(t, 0, int64_t(i), int64_t(j));
    word.erase(j, 1), word.erase(i, 1), word += letter;
  }
  return t;
}

Tensor contract_with(int64_t leaves, std::string_view spec, const Tensor& a, const Tensor& b) {
  PrimRef prim = contract_primitive(spec, leaves);
  const auto& attributes = static_cast<const ContractAttributes&>(*prim);
  Tensor x = a, y = b;
  if (x.dtype() != y.dtype() && !autocast_meets({x.dtype(), y.dtype()})) {
    DType t = result_type(x, y);
    x = cast(x, t), y = cast(y, t);
  }
  std::string wa = attributes.a, wb = attributes.b;
  bool own = false;
  for (char c : wa) own |= wb.find(c) == npos && attributes.out.find(c) == npos;
  for (char c : wb) own |= wa.find(c) == npos && attributes.out.find(c) == npos;
  if (own) {
    TESSERA_CHECK_AS(ShapeError, int(wa.size()) == x.ndim() && int(wb.size()) == y.ndim(),
                     "contract {}: operands are {} and {}", spec, describe(x), describe(y));
    x = sum_own_letters(x, wa, attributes.b, attributes.out);
    y = sum_own_letters(y, wb, attributes.a, attributes.out);
    prim = contract_primitive(wa + "," + wb + "->" + attributes.out, leaves);
  }
  return dispatch1(prim, operands(std::move(x), std::move(y)));
}

}  // namespace

Tensor contract(std::string_view spec, const Tensor& a, const Tensor& b) {
  return contract_with(context().exact_contraction ? kExactLeaves : 0, spec, a, b);
}

Tensor einsum(std::string_view spec, std::span<const Tensor> operands) {
  std::string text(spec);
  std::erase(text, ' ');
  size_t arrow = text.find("->");
  TESSERA_CHECK(arrow != npos && !operands.empty(),
                "einsum: spec \"{}\" needs \"->\" and at least one operand", spec);
  std::string out = text.substr(arrow + 2), words = text.substr(0, arrow);
  std::vector<std::string> word(1);
  for (char c : words) {
    if (c == ',')
      word.emplace_back();
    else
      word.back() += c;
  }
  TESSERA_CHECK(word.size() == operands.size(), "einsum: spec \"{}\" names {} operands, got {}",
                spec, word.size(), operands.size());
  Tensors x(operands.begin(), operands.end());
  for (size_t i = 0; i < x.size(); ++i) x[i] = diagonals(x[i], word[i], spec);
  Tensor t = x[0];
  std::string have = word[0];
  for (size_t i = 1; i < x.size(); ++i) {
    // Letters still needed: those of later operands and of the result.
    std::string later = out, next;
    for (size_t k = i + 1; k < word.size(); ++k) later += word[k];
    for (char c : have + word[i])
      if (later.find(c) != npos && next.find(c) == npos) next += c;
    if (i + 1 == x.size()) next = out;
    t = contract(have + "," + word[i] + "->" + next, t, x[i]);
    have = next;
  }
  if (x.size() > 1) return t;
  Dims gone, order;
  std::string kept;
  for (size_t i = 0; i < have.size(); ++i) {
    if (out.find(have[i]) == npos)
      gone.push_back(int64_t(i));
    else
      kept += have[i];
  }
  if (!gone.empty()) t = sum(t, gone);
  for (char c : out) {
    TESSERA_CHECK(kept.find(c) != npos, "einsum: spec \"{}\": '{}' is in no operand", spec, c);
    order.push_back(int64_t(kept.find(c)));
  }
  return permute(t, order);
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
  return add(std::move(y), autocast_meets({bias.dtype()}) ? cast(bias, y.dtype()) : bias);
}

Tensor dot(const Tensor& a, const Tensor& b) { return sum(a * b, {-1}); }

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
