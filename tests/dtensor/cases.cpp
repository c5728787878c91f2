#include "tests/dtensor/cases.h"

#include <algorithm>
#include <cmath>

#include "collectives/loopback/run_ranks.h"
#include "core/autograd/autograd.h"
#include "core/dispatch/dispatch.h"
#include "core/ops/contract.h"
#include "core/ops/create.h"
#include "core/ops/fused.h"
#include "core/ops/indexing.h"
#include "core/ops/pointwise.h"
#include "core/ops/random.h"
#include "core/ops/reduce.h"
#include "core/ops/samples.h"
#include "core/ops/views.h"
#include "core/primitive/registry.h"
#include "core/tensor/element.h"

namespace tessera::test {
namespace {

bool is_float(const Tensor& t) { return is_differentiable(t.dtype()); }

double element(const Tensor& dense, int64_t i) {
  return read_real(static_cast<const char*>(dense.raw()) + size_t(i) * size_of(dense.dtype()),
                   dense.dtype());
}

double tolerance_of(const Case& c, DType t) {
  if (c.tolerance) return c.tolerance(t);
  return t == kF64 ? 1e-10 : t == kF32 ? 2e-5 : t == kBF16 ? 2e-2 : 2e-3;
}

Tensor values(Random& random, const Shape& shape) { return sample_values(shape, -1, 1, random()); }
Shape random_shape(Random& random, int dims, int64_t largest = 7) {
  Shape s;
  for (int d = 0; d < dims; ++d) s.push_back(pick(random, 1, largest));
  return s;
}
int random_dims(Random& random, int low, int high) { return int(pick(random, low, high)); }

// `shape` with some dims 1 and some leading ones gone: it broadcasts to `shape`.
Shape broadcastable(Random& random, const Shape& shape) {
  Shape s;
  int drop = int(pick(random, 0, shape.size()));
  if (pick(random, 0, 1)) drop = 0;
  for (int d = drop; d < shape.size(); ++d) s.push_back(pick(random, 0, 2) ? shape[d] : 1);
  return s;
}

Case binary(Random& random) {
  Shape shape = random_shape(random, random_dims(random, 1, 4));
  static constexpr const char* kNames[] = {"add", "sub", "mul", "maximum", "div"};
  int64_t which = pick(random, 0, 4);
  return {kNames[which],
          {values(random, shape), sample_values(broadcastable(random, shape), 0.5, 2, random())},
          [=](const List& in) -> List {
            const Tensor &a = in[0], &b = in[1];
            return {which == 0   ? a + b
                    : which == 1 ? a - b
                    : which == 2 ? a * b
                    : which == 3 ? maximum(a, b)
                                 : a / b};
          }};
}

// A chain over one operand, one dim of which has often extent 1: the bias of linear(n, 1).
Case unary(Random& random) {
  Shape shape = random_shape(random, random_dims(random, 1, 3));
  if (pick(random, 0, 1)) shape[int(pick(random, 0, shape.size() - 1))] = 1;
  int64_t which = pick(random, 0, 3), dim = pick(random, 0, shape.size() - 1);
  Case c{"unary " + std::to_string(which), {values(random, shape)}, [=](const List& in) -> List {
           if (which == 0) return {square(in[0]) * 2.0};
           if (which == 1) return {cast(tanh(in[0]), kF32)};
           if (which == 2) return {sum(in[0], {dim})};
           return {transpose(in[0], 0, dim) + 1.0};
         }};
  c.any_cuts = true;
  return c;
}

// Whether, however the operand is cut, the ranks' pieces of it give their pieces of the result. An
// op on whole rows says so where rows are longer than 1.
bool takes_any_cuts(const Sample& s) {
  if (s.in.size() != 1) return false;
  Shape longer = s.in[0].shape();
  for (int64_t& e : longer) e = std::max<int64_t>(e, 2);
  const Meta meta = Meta::contiguous(longer, s.in[0].dtype(), s.in[0].device()), *in[] = {&meta};
  try {
    if (!(s.prim->infer(in)[0].shape == longer)) return false;
    const AxisMap map = s.prim->axes(in);
    return !map.empty() && std::ranges::all_of(map.factors, [](const Factor& f) {
      return f.kind == Factor::kPass;
    });
  } catch (const UserError&) {
    return false;  // it takes no other shape
  }
}

Case contraction(Random& random) {
  // Each letter is in the first operand, the second, both, and in the result unless summed.
  std::string a, b, out, letters = "abcde";
  std::vector<int64_t> extent;
  for (char c : letters) {
    (void)c;
    extent.push_back(pick(random, 1, 6));
  }
  for (size_t i = 0; i < letters.size(); ++i) {
    int64_t place = pick(random, 0, 4);  // 0: a and out, 1: b and out, 2: all, 3: summed, 4: none
    if (place == 4) continue;
    if (place != 1) a += letters[i];
    if (place != 0) b += letters[i];
    if (place != 3) out += letters[i];
  }
  for (std::string* s : {&a, &b, &out}) std::shuffle(s->begin(), s->end(), random);
  auto shape = [&](const std::string& text) {
    Shape s;
    for (char c : text) s.push_back(extent[size_t(c - 'a')]);
    return s;
  };
  std::string text = a + "," + b + "->" + out;
  return {"contract " + text,
          {values(random, shape(a)), values(random, shape(b))},
          [=](const List& in) -> List { return {contract(text, in[0], in[1])}; }};
}

Case reduction(Random& random) {
  Shape shape = random_shape(random, random_dims(random, 1, 4));
  Dims dims;
  for (int d = 0; d < shape.size(); ++d)
    if (pick(random, 0, 1)) dims.push_back(d);
  if (dims.empty()) dims.push_back(pick(random, 0, shape.size() - 1));
  bool keep = pick(random, 0, 1);
  int64_t which = pick(random, 0, 2);
  return {which == 0   ? "sum"
          : which == 1 ? "mean"
                       : "amax",
          {values(random, shape)},
          [=](const List& in) -> List {
            return {which == 0   ? sum(in[0], dims, keep)
                    : which == 1 ? mean(in[0], dims, keep)
                                 : amax(in[0], dims, keep)};
          }};
}

Case reshaping(Random& random) {
  static const std::vector<std::pair<Shape, Shape>> kPairs = {
      {{4, 6}, {24}},           {{24}, {4, 6}},      {{2, 3, 4}, {6, 4}}, {{6, 4}, {2, 3, 4}},
      {{4, 3, 2}, {4, 6}},      {{4, 6}, {4, 3, 2}}, {{6, 4}, {4, 6}},    {{2, 2, 3, 5}, {4, 15}},
      {{3, 8}, {3, 2, 2, 2}},   {{5, 1, 4}, {5, 4}}, {{12}, {3, 1, 4}},   {{4, 5, 6}, {20, 6}},
      {{2, 4, 9}, {2, 4, 3, 3}}};
  auto [from, to] = kPairs[size_t(pick(random, 0, int64_t(kPairs.size()) - 1))];
  Shape target = to;
  return {"reshape", {values(random, from)}, [=](const List& in) -> List {
            return {reshape(in[0], target)};
          }};
}

Case viewing(Random& random) {
  Shape shape = random_shape(random, 3);
  int64_t which = pick(random, 0, 4), dim = pick(random, 0, 2),
          begin = pick(random, 0, shape[int(dim)] - 1);
  Dims order{0, 1, 2};
  std::shuffle(order.begin(), order.end(), random);
  return {"view " + std::to_string(which), {values(random, shape)}, [=](const List& in) -> List {
            const Tensor& x = in[0];
            if (which == 0) return {permute(x, order)};
            if (which == 1) return {slice(x, dim, begin, x.size(dim))};
            if (which == 2) return {select(x, dim, begin)};
            if (which == 3)
              return {expand(unsqueeze(x, dim), [&] {
                Shape s = x.shape();
                s.insert(int(dim), 4);
                return s;
              }())};
            return {squeeze(unsqueeze(x, dim), dim) * 2.0};
          }};
}

Case joining(Random& random) {
  Shape shape = random_shape(random, 3);
  int64_t dim = pick(random, 0, 2);
  List in;
  for (int64_t i = pick(random, 2, 3); i > 0; --i) {
    Shape s = shape;
    s[int(dim)] = pick(random, 1, 5);
    in.push_back(values(random, s));
  }
  return {"cat", in, [=](const List& parts) -> List { return {cat(parts, dim)}; }};
}

Case row_op(Random& random) {
  Shape shape = random_shape(random, random_dims(random, 2, 3));
  Shape row{shape.back()};
  int64_t which = pick(random, 0, 3), dim = pick(random, 0, shape.size() - 1);
  return {"row op " + std::to_string(which),
          {values(random, shape), values(random, row), values(random, row)},
          [=](const List& in) -> List {
            if (which == 0) return {softmax(in[0], dim)};
            if (which == 1) return {log_softmax(in[0], dim)};
            if (which == 2) return {layer_norm(in[0], in[1], in[2], 1e-5)};
            return {gelu(in[0] * in[1]) + in[2]};
          }};
}

Case table_op(Random& random) {
  int64_t rows = pick(random, 1, 9), width = pick(random, 1, 6);
  Shape ids = random_shape(random, random_dims(random, 1, 2));
  Tensor index = sample_integers(ids, 0, rows, random());
  return {"embedding", {values(random, {rows, width})}, [=](const List& in) -> List {
            if (!in[0].is_sharded()) return {embedding(index, in[0])};
            ReplicatePlain same;
            return {embedding(index, in[0])};
          }};
}

Case loss_op(Random& random) {
  int64_t rows = pick(random, 1, 9), classes = pick(random, 2, 9);
  Tensor targets = sample_integers({rows}, 0, classes, random());
  CrossEntropyOptions o;
  o.reduction = pick(random, 0, 1) ? Reduction::kMean : Reduction::kSum;
  return {"cross_entropy", {values(random, {rows, classes})}, [=](const List& in) -> List {
            if (!in[0].is_sharded()) return {cross_entropy(in[0], targets, o)};
            ReplicatePlain same;
            return {cross_entropy(in[0], targets, o)};
          }};
}

Case attention_op(Random& random) {
  int64_t B = pick(random, 1, 4), H = pick(random, 1, 5), T = pick(random, 1, 6),
          D = pick(random, 1, 4);
  bool causal = pick(random, 0, 1);
  List operands{values(random, {B, H, T, D}), values(random, {B, H, T, D}),
                values(random, {B, H, T, D})};
  const auto some = [&](int64_t extent) { return pick(random, 0, 1) ? extent : 1; };
  if (pick(random, 0, 2)) operands.push_back(values(random, {some(B), some(H), some(T), T}));
  const double dropped = pick(random, 0, 1) ? 0.4 : 0;
  const int64_t seed = pick(random, 0, 100);
  return {"attention", operands, [=](const List& in) -> List {
            const Tensor mask = in.size() > 3 ? in[3] : Tensor();
            manual_seed(uint64_t(seed));  // a rank drops its part of what the whole would
            return {scaled_dot_product_attention(
                in[0], in[1], in[2], {.mask = mask, .causal = causal, .dropout = dropped})};
          }};
}

Case dropping(Random& random) {
  Shape shape = random_shape(random, random_dims(random, 1, 3));
  Tensor key = from_values<int64_t>({int64_t(random() >> 1), 3}, {2});
  return {"dropout", {values(random, shape)}, [=](const List& in) -> List {
            if (!in[0].is_sharded()) return {dropout(in[0], 0.4, key)};
            ReplicatePlain same;
            return {dropout(in[0], 0.4, key)};
          }};
}

// Results and gradients of a fixed combination of them.
struct Run {
  List out, gradients;
};

Run run_case(const Case& c, const List& operands,
             const std::function<Tensor(const Tensor&)>& cotangent) {
  List in;
  for (const Tensor& t : operands) {
    in.push_back(t.detach());
    if (c.smooth && is_float(t)) in.back().requires_grad_();
  }
  Run r;
  r.out = c.run(in);
  List roots, cots;
  // Further results (statistics of a norm) are not always differentiable.
  if (r.out[0].requires_grad()) roots.push_back(r.out[0]), cots.push_back(cotangent(r.out[0]));
  if (!roots.empty()) backward(roots, cots);
  for (const Tensor& t : in) r.gradients.push_back(t.grad());
  return r;
}

Tensor cotangent_values(const Tensor& like, uint64_t key) {
  return cast(sample_values(like.shape(), -1, 1, key), like.dtype());
}

}  // namespace

int64_t pick(Random& random, int64_t low, int64_t high) {
  return low + int64_t(random() % uint64_t(high - low + 1));
}

std::vector<std::vector<MeshAxis>> meshes_of(int ranks) {
  std::vector<std::vector<MeshAxis>> all{{{"a", ranks}}, {{"a", 1}, {"b", ranks}}};
  for (int a = 2; a < ranks; ++a) {
    if (ranks % a) continue;
    all.push_back({{"a", a}, {"b", ranks / a}});
    for (int b = 2; b < ranks / a; ++b)
      if (ranks / a % b == 0) all.push_back({{"a", a}, {"b", b}, {"c", ranks / a / b}});
  }
  return all;
}

std::vector<DeviceMesh> make_meshes(ProcessGroup& group) {
  std::vector<DeviceMesh> meshes;
  for (const auto& axes : meshes_of(group.size()))
    meshes.push_back(init_device_mesh(axes, Ref<ProcessGroup>(&group)));
  return meshes;
}

Layout random_layout(Random& random, const Shape& shape, const DeviceMesh& mesh, bool partial) {
  Layout layout(size_t(mesh.ndim()), Replicate());
  for (Placement& p : layout) {
    int64_t kind = pick(random, 0, 3);
    if (kind >= 2 && shape.size() > 0) {
      p = Shard(int(pick(random, 0, shape.size() - 1)),
                pick(random, 0, 2) ? 1 : pick(random, 2, 3));
      if (!fits(shape, layout, mesh.sizes())) p = Replicate();
    } else if (kind == 1 && partial) {
      p = Partial();
    }
  }
  return layout;
}

Tensor place(const Tensor& value, const DeviceMesh& mesh, const Layout& layout) {
  Layout whole = layout;
  double weight = 1;
  for (size_t a = 0; a < layout.size(); ++a) {
    if (!layout[a].is_partial()) continue;
    double ranks = mesh.sizes()[a], place = mesh.coordinate()[a];
    weight *= 2 * (place + 1) / (ranks * (ranks + 1));
    whole[a] = Replicate();
  }
  Tensor t = distribute(value, mesh, whole);
  if (whole == layout) return t;
  return from_local(to_local(t) * weight, mesh, layout, value.shape());
}

std::vector<Case> registry_cases() {
  std::vector<Case> all;
  for (const OpEntry& entry : op_registry().entries()) {
    int number = 0;
    for (const Sample& s : entry.samples()) {
      if (s.in.empty()) continue;  // creations: see the tests of create
      all.push_back({fmt::format("{} sample {}", entry.name, number++), s.in,
                     [prim = s.prim](const List& in) -> List {
                       List operands = in;
                       Tensors out = dispatch(prim, operands);
                       return List(out.begin(), out.end());
                     },
                     s.smooth, to_string(*s.prim).find("leaves=") != std::string::npos,
                     takes_any_cuts(s)});
    }
  }
  return all;
}

Case random_case(Random& random) {
  switch (pick(random, 0, 11)) {
    case 0: return binary(random);
    case 1: return contraction(random);
    case 2: return reduction(random);
    case 3: return reshaping(random);
    case 4: return viewing(random);
    case 5: return joining(random);
    case 6: return row_op(random);
    case 7: return table_op(random);
    case 8: return loss_op(random);
    case 9: return attention_op(random);
    case 10: return unary(random);
    default: return dropping(random);
  }
}

void check_close(const Tensor& got, const Tensor& want, double tolerance, const std::string& what) {
  TESSERA_ASSERT(got.shape() == want.shape() && got.dtype() == want.dtype(),
                 "{}: {} where {} is due", what, describe(got), describe(want));
  Tensor g = contiguous(got.detach()), w = contiguous(want.detach());
  double largest = 1;
  for (int64_t i = 0; i < w.numel(); ++i)
    if (double v = std::abs(element(w, i)); std::isfinite(v)) largest = std::max(largest, v);
  if (!is_float(want)) tolerance = 0;
  for (int64_t i = 0; i < w.numel(); ++i) {
    double x = element(g, i), y = element(w, i);
    bool same =
        x == y || (std::isnan(x) && std::isnan(y)) || std::abs(x - y) <= tolerance * largest;
    TESSERA_ASSERT(same, "{}: element {} is {}, not {}", what, i, x, y);
  }
}

// The only element of a tensor may be small by chance, which says nothing about the size of its
// terms. In 16 bits, two or three ranks round their parts of the sum: these are about sqrt(n) / 3
// for n products of values in [-1, 1), which have both signs.
double with_parts(const Case& c, const Tensor& want, double tolerance) {
  if (want.numel() != 1 || size_of(want.dtype()) != 2) return tolerance;
  const double half_ulp = want.dtype() == kBF16 ? 0x1p-8 : 0x1p-11;
  return tolerance + 3 * half_ulp * std::sqrt(double(c.terms)) / 3;
}

Outcome check_case(const Case& c, const DeviceMesh& mesh, Random& random) {
  std::vector<Layout> layouts;
  for (const Tensor& t : c.in)
    layouts.push_back(random_layout(random, t.shape(), mesh, is_float(t)));
  return check_placed(c, mesh, layouts, random);
}

Outcome check_placed(const Case& c, const DeviceMesh& mesh, const std::vector<Layout>& layouts,
                     Random& random) {
  uint64_t key = random();
  Run want = run_case(c, c.in, [&](const Tensor& o) { return cotangent_values(o, key); });
  List placed;
  bool partial = false;
  std::string text = c.name + " over (" + mesh.to_string() + ")";
  for (size_t i = 0; i < c.in.size(); ++i) {
    text += fmt::format(" {}{}", to_string(c.in[i].shape()), to_string(layouts[i]));
    partial = partial || std::ranges::any_of(layouts[i], &Placement::is_partial);
    placed.push_back(place(c.in[i], mesh, layouts[i]));
  }
  double tolerance = 1e-10;  // that of the narrowest operand: its terms were rounded
  for (const Tensor& t : c.in)
    if (is_float(t)) tolerance = std::max(tolerance, tolerance_of(c, t.dtype()));
  uint64_t drawn = random();
  auto cotangent = [&](const Tensor& o) {
    Random own{drawn};
    Tensor value = cotangent_values(o, key);
    return place(value, mesh, random_layout(own, o.shape(), mesh, is_float(o)));
  };
  Outcome outcome;
  Run got;
  try {
    try {
      got = run_case(c, placed, cotangent);
      outcome.free = true;
    } catch (const ShardingError&) {
      if (c.any_cuts && !partial) throw;
      AllowCommunication allowed;
      got = run_case(c, placed, cotangent);
    }
    TESSERA_ASSERT(got.out.size() == want.out.size(), "{} results", got.out.size());
    for (size_t k = 0; k < want.out.size(); ++k)
      check_close(
          full_tensor(got.out[k]), want.out[k],
          with_parts(c, want.out[k], std::max(tolerance, tolerance_of(c, want.out[k].dtype()))),
          fmt::format("result {}", k));
    for (size_t i = 0; i < want.gradients.size(); ++i) {
      if (!want.gradients[i].defined()) continue;
      TESSERA_ASSERT(got.gradients[i].defined(), "no gradient of operand {}", i);
      // Terms of a partial cotangent are of the result's dtype.
      check_close(full_tensor(got.gradients[i]), want.gradients[i],
                  with_parts(c, want.gradients[i],
                             std::max(tolerance, tolerance_of(c, want.out[0].dtype()))),
                  fmt::format("gradient {}", i));
      ++outcome.gradients;
    }
  } catch (const CommError&) {
    throw;
  } catch (const std::exception& e) {
    outcome.refused = c.may_refuse && dynamic_cast<const ShapeError*>(&e);
    if (outcome.refused) return outcome;
    throw BugError(text + ": " + e.what());
  }
  return outcome;
}

}  // namespace tessera::test
