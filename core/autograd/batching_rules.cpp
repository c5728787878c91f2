#include "core/autograd/batching_rules.h"

#include <algorithm>
#include <unordered_map>
#include <variant>
#include <vector>

#include "core/autograd/batching.h"
#include "core/ops/create.h"
#include "core/ops/create_attributes.h"
#include "core/ops/fused_attributes.h"
#include "core/ops/indexing.h"
#include "core/ops/layout.h"
#include "core/ops/pointwise.h"
#include "core/ops/views.h"
#include "core/primitive/primitive_of.h"

namespace tessera::batching {
namespace {

// The attributes of an op, which can be changed and made into an op again.
class Attributes final : public AttributeVisitor, public AttributeReader {
 public:
  explicit Attributes(const Primitive& prim) : prim_(prim) { prim.attributes(*this); }
  PrimRef made() { return prim_.with_attributes(*this); }

  void integer(std::string_view name, int64_t v) override { values_.emplace_back(name, v); }
  void real(std::string_view name, double v) override { values_.emplace_back(name, v); }
  void text(std::string_view name, std::string_view v) override {
    values_.emplace_back(name, std::string(v));
  }
  void dims(std::string_view name, std::span<const int64_t> v) override {
    values_.emplace_back(name, std::vector<int64_t>(v.begin(), v.end()));
  }

  bool has(std::string_view name) const override { return find(name) != nullptr; }
  bool is_integer(std::string_view name) const override {
    return std::holds_alternative<int64_t>(*find(name));
  }
  int64_t integer(std::string_view name) override { return at<int64_t>(name); }
  double real(std::string_view name) override { return at<double>(name); }
  std::string text(std::string_view name) override { return at<std::string>(name); }
  std::vector<int64_t> dims(std::string_view name) override {
    return at<std::vector<int64_t>>(name);
  }

  // An integer, which may be one that is not written where it is 0.
  void set(std::string_view name, int64_t v) {
    if (has(name))
      at<int64_t>(name) = v;
    else
      integer(name, v);
  }
  template <class T>
  T& at(std::string_view name) {
    auto* v = const_cast<Value*>(find(name));
    TESSERA_ASSERT(v && std::holds_alternative<T>(*v), "{}: no such attribute {}", prim_.name(),
                   name);
    return std::get<T>(*v);
  }

 private:
  using Value = std::variant<int64_t, double, std::string, std::vector<int64_t>>;
  const Value* find(std::string_view name) const {
    for (auto& [n, v] : values_)
      if (n == name) return &v;
    return nullptr;
  }
  const Primitive& prim_;
  std::vector<std::pair<std::string, Value>> values_;
};

bool any_but_first(std::span<const bool> batched) {
  return std::find(batched.begin() + 1, batched.end(), true) != batched.end();
}

// ---- random draws

// True for draws that fill a new tensor: their one operand is the key. Dropout has x before it.
bool fills(const Primitive& prim) { return prim.traits().operands == 1; }

Result filled(const Call& c) {
  if (c.randomness == Randomness::kSame) return {dispatch(c.prim, c.in), false};
  Attributes a(*c.prim);
  for (auto [name, first] :
       {std::pair{"shape", c.size}, {"begin", int64_t(0)}, {"global", c.size}}) {
    auto& v = a.at<std::vector<int64_t>>(name);
    v.insert(v.begin(), first);
  }
  return {dispatch(a.made(), c.in), true};
}

Result dropped(const Call& c) {
  if (c.randomness == Randomness::kDifferent) {
    if (!c.batched[0]) c.in[0] = with_batch(c.in[0], c.size);
    return {dispatch(c.prim, c.in), true};
  }
  if (!c.batched[0]) return {dispatch(c.prim, c.in), false};
  // One mask for all samples: dropout of ones gives it.
  Tensor x = c.in[0];
  Shape s = x.shape();
  s.erase(0);
  Tensor kept = dispatch1(c.prim, operands(ones(s, {x.dtype(), x.device()}), Tensor(c.in[1])));
  return {{where(ne(kept, 0), x * kept, scalar_tensor(0.0, x.dtype(), x.device()))}, true};
}

// ---- products

std::optional<Result> contract_rule(const Call& c) {
  Attributes a(*c.prim);
  std::string& spec = a.at<std::string>("spec");
  char letter = 'A';
  while (spec.find(letter) != std::string::npos) ++letter;
  spec.insert(spec.find("->") + 2, 1, letter);
  if (c.batched[1]) spec.insert(spec.find(',') + 1, 1, letter);
  if (c.batched[0]) spec.insert(0, 1, letter);
  return Result{dispatch(a.made(), c.in), true};
}

// ---- convolutions

// x [N, C, ..] and y [N, O, ..] have samples; w [O, C, ..] has none.
enum class Role : uint8_t { kSamples, kWeight };
struct ConvRoles {
  Role first, second, result;
};

Tensor join_groups(const Tensor& t, Role role) {
  // Samples: [B, N, C, ..] -> [N, B C, ..]. Weights: [B, O, ..] -> [B O, ..].
  return role == Role::kWeight ? flatten(t, 0, 1) : flatten(movedim(t, {0}, {1}), 1, 2);
}
Tensor part_groups(const Tensor& t, Role role, int64_t size) {
  if (role == Role::kWeight) return unflatten(t, 0, {size, t.size(0) / size});
  return movedim(unflatten(t, 1, {size, t.size(1) / size}), {1}, {0});
}

// Joins the batch to the samples where weights are shared; otherwise each sample becomes a group.
Result convolve(const Call& c, ConvRoles r) {
  const bool shared = r.second == Role::kWeight && !c.batched[1];
  if (shared) {
    Tensor y = dispatch1(c.prim, operands(flatten(c.in[0], 0, 1), Tensor(c.in[1])));
    return {{unflatten(y, 0, {c.size, y.size(0) / c.size})}, true};
  }
  Attributes a(*c.prim);
  int64_t& groups = a.at<int64_t>("groups");
  if (r.first == Role::kSamples && r.second == Role::kWeight && r.result == Role::kSamples &&
      c.prim->name() == "conv" && groups == 1 && !c.batched[0]) {
    Tensor y = dispatch1(c.prim, operands(Tensor(c.in[0]), flatten(c.in[1], 0, 1)));
    return {{part_groups(y, Role::kSamples, c.size)}, true};  // one input, more output channels
  }
  groups *= c.size;
  for (size_t i = 0; i < 2; ++i) {
    if (!c.batched[i]) c.in[i] = with_batch(c.in[i], c.size);
    c.in[i] = join_groups(c.in[i], i ? r.second : r.first);
  }
  return {{part_groups(dispatch1(a.made(), c.in), r.result, c.size)}, true};
}

std::optional<Result> conv_rule(const Call& c) {
  return convolve(c, {Role::kSamples, Role::kWeight, Role::kSamples});
}
std::optional<Result> conv_grad_weight_rule(const Call& c) {
  return convolve(c, {Role::kSamples, Role::kSamples, Role::kWeight});
}

// ---- tables

// Positions i64 [B, n, D] in rows of width D.
Tensor row_positions(const Call& c, size_t ids, int64_t width) {
  Tensor t = c.batched[ids] ? c.in[ids] : with_batch(c.in[ids], c.size);
  t = unsqueeze(cast(flatten(t, 1), kI64), 2);
  return expand(t, {c.size, t.size(1), width});
}
bool whole_table(const EmbeddingAttributes& a) { return a.extent == 0; }

// Each sample has a table of its own. An op on one table is batched by its axis map.
std::optional<Result> embedding_rule(const Call& c) {
  const auto& a = attributes_of<EmbeddingAttributes>(*c.prim);
  if (!c.batched[1] || !whole_table(a) || a.padding_idx >= 0) return std::nullopt;
  const Tensor& table = c.in[1];
  const int64_t width = table.size(2);
  Shape s{c.size};
  for (int d = c.batched[0]; d < c.in[0].ndim(); ++d) s.push_back(c.in[0].shape()[d]);
  s.push_back(width);
  if (c.in[0].ndim() == int(c.batched[0])) return std::nullopt;
  return Result{{reshape(gather(table, 1, row_positions(c, 0, width)), s)}, true};
}

// Operands g [.., D], ids [..].
std::optional<Result> embedding_grad_rule(const Call& c) {
  const auto& a = attributes_of<EmbeddingAttributes>(*c.prim);
  if (!whole_table(a) || c.in[1].ndim() == int(c.batched[1])) return std::nullopt;
  Tensor g = c.batched[0] ? c.in[0] : with_batch(c.in[0], c.size);
  const int64_t width = g.size(-1);
  g = flatten(g, 1, -2);
  Tensor at = row_positions(c, 1, width);
  if (a.padding_idx >= 0)
    g = where(eq(at, a.padding_idx), scalar_tensor(0.0, g.dtype(), g.device()), g);
  Tensor like(Meta::contiguous({c.size, a.rows, width}, g.dtype(), g.device()), nullptr);
  return Result{{scatter_sum(like, 1, at, g)}, true};
}

// ---- attention

// Samples are joined along the batch, so a mask of one for all of a sample's batch is repeated.
Tensor mask_of_batch(const Tensor& mask, int64_t size, int64_t batch) {
  if (mask.size(1) != 1) return mask;
  return expand(mask, {size, batch, mask.size(2), mask.size(3), mask.size(4)});
}
std::optional<Result> attention_rule(const Call& c) {
  const size_t q = c.prim->id() == intern_op("attention_grad"), last = c.in.size() - 1;
  if (attributes_of<AttentionAttributes>(*c.prim).has_mask && c.batched[last])
    c.in[last] = mask_of_batch(c.in[last], c.size, c.in[q].size(c.batched[q]));
  return std::nullopt;
}

void check_randomness(const Call& c) {
  TESSERA_CHECK(c.randomness != Randomness::kError,
                "vmap: {} draws random numbers; say whether samples draw the same or different "
                "ones: vmap(f, {{.randomness = Randomness::kDifferent}})",
                c.prim->name());
}

using Rule = std::optional<Result> (*)(const Call&);
Rule rule_of(OpId op) {
  static const auto* rules = new std::unordered_map<OpId, Rule>{
      {intern_op("contract"), contract_rule},
      {intern_op("attention"), attention_rule},
      {intern_op("attention_grad"), attention_rule},
      {intern_op("conv"), conv_rule},
      {intern_op("conv_grad_input"), conv_rule},
      {intern_op("conv_grad_weight"), conv_grad_weight_rule},
      {intern_op("embedding"), embedding_rule},
      {intern_op("embedding_grad"), embedding_grad_rule},
  };
  auto it = rules->find(op);
  return it == rules->end() ? nullptr : it->second;
}

}  // namespace

std::optional<Result> random_draws(const Call& c) {
  const bool fill = fills(*c.prim);
  // Where the program gives a key or sample numbers per sample, those decide what is drawn.
  const bool dealt = fill ? c.batched[0] : any_but_first(c.batched);
  if (dealt) return std::nullopt;
  if (!fill && attributes_of<DropoutAttributes>(*c.prim).by_sample) {
    if (c.batched[0]) return std::nullopt;
    return Result{dispatch(c.prim, c.in), false};
  }
  check_randomness(c);
  return fill ? filled(c) : dropped(c);
}

// Samples are joined along the batch.
std::optional<Result> dropped_attention(const Call& c) {
  const auto& a = attributes_of<AttentionAttributes>(*c.prim);
  const size_t more = c.in.size() - size_t(a.further()), key = more + a.has_mask;
  if (std::find(c.batched.begin() + int64_t(key), c.batched.end(), true) != c.batched.end())
    return std::nullopt;  // where the program gives those per sample, they decide what is drawn
  if (!a.drop.by_sample) check_randomness(c);
  const bool any = std::find(c.batched.begin(), c.batched.end(), true) != c.batched.end(),
             same = a.drop.by_sample || c.randomness == Randomness::kSame;
  if (!any && same) return Result{dispatch(c.prim, c.in), false};
  if (c.size == 0) return std::nullopt;
  const auto joined = [&](size_t i) {
    return flatten(c.batched[i] ? c.in[i] : with_batch(c.in[i], c.size), 0, 1);
  };
  Tensors in;
  for (size_t i = 0; i < more; ++i) in.push_back(joined(i));
  if (a.has_mask) {
    const size_t q = c.prim->id() == intern_op("attention_grad");
    const Tensor mask = c.batched[more] ? c.in[more] : with_batch(c.in[more], c.size);
    in.push_back(c.batched[more] || c.in[more].size(0) > 1
                     ? flatten(mask_of_batch(mask, c.size, in[q].size(0) / c.size), 0, 1)
                     : c.in[more]);
  }
  in.push_back(c.in[key]);
  PrimRef prim = c.prim;
  if (same) {  // a sample draws by its places in it, as a whole does that is number -1
    Tensor numbers =
        a.drop.by_sample ? c.in.back() : full({1}, int64_t(-1), {kI64, c.in[more - 1].device()});
    in.push_back(flatten(with_batch(numbers, c.size), 0, 1));
    Attributes by_sample(*c.prim);
    by_sample.set("by_sample", 1);
    prim = by_sample.made();
  }
  Tensors out = dispatch(prim, in);
  for (Tensor& t : out) t = unflatten(t, 0, {c.size, t.size(0) / c.size});
  return Result{std::move(out), true};
}

std::optional<Result> by_rule(const Call& c) {
  Rule rule = rule_of(c.prim->id());
  return rule ? rule(c) : std::nullopt;
}

PrimRef leading_dim_primitive(const Primitive& prim, int64_t size) {
  Attributes a(prim);
  bool changed = false;
  auto change = [&](std::string_view name, auto how) {
    if (!a.has(name)) return;
    how(name), changed = true;
  };
  change("dim", [&](auto n) { ++a.at<int64_t>(n); });
  change("mask", [&](auto n) { a.at<int64_t>(n) <<= 1; });
  if (prim.name() != "cast")
    change("to", [&](auto n) {
      auto& v = a.at<std::vector<int64_t>>(n);
      v.insert(v.begin(), size);
    });
  change("order", [&](auto n) {
    auto& v = a.at<std::vector<int64_t>>(n);
    for (int64_t& d : v) ++d;
    v.insert(v.begin(), 0);
  });
  return changed ? a.made() : PrimRef(&prim);
}

Tensor with_batch(const Tensor& t, int64_t size) {
  Shape s = t.shape();
  s.insert(0, size);
  if (is_shape_only(t)) return Tensor(Meta::contiguous(s, t.dtype(), t.device()), nullptr);
  return expand(unsqueeze(t, 0), s);
}

}  // namespace tessera::batching
