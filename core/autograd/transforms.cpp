#include <algorithm>

#include "core/autograd/autograd.h"
#include "core/autograd/transforms_core.h"
#include "core/ops/create.h"
#include "core/ops/layout.h"
#include "core/ops/pointwise.h"
#include "core/ops/views.h"

namespace tessera::transforms {
namespace {

Tensor plain(const Level& level, const Tensor& t) {
  bool batched;
  return level.inner(t, batched);
}

bool is_differentiable(const Tensor& t) {
  return t.defined() && tessera::is_differentiable(t.dtype());
}

// Makes the wanted floats of `args` leaves of the level, which are returned; others are undefined.
List make_leaves(Level& level, List& args, const std::vector<bool>& wanted) {
  List leaves(args.size());
  for (size_t i = 0; i < args.size(); ++i)
    if (wanted[i] && is_differentiable(args[i]))
      leaves[i] = args[i] = level.wrap(args[i], false).requires_grad_();
  return leaves;
}

// Sets gradients of inputs that none reached to zeros.
void fill_gradients(List& g, std::span<const Tensor> in) {
  for (size_t i = 0; i < g.size(); ++i)
    if (!g[i].defined() && in[i].defined()) g[i] = zeros_like(in[i]);
}

// Gradients at the level's leaves, as tensors of the level outside; undefined at leaves that no
// gradient reaches.
List backward_at(Level& level, const List& roots, const List& cotangents, const List& leaves,
                 bool keep) {
  List watched;
  for (const Tensor& t : leaves)
    if (t.defined()) watched.push_back(t);
  List result(leaves.size());
  if (roots.empty() || watched.empty()) return result;
  Level::Unrecorded own(level);
  Tensors g = grad(roots, watched, cotangents, {.retain_graph = keep});
  size_t next = 0;
  for (size_t i = 0; i < leaves.size(); ++i)
    if (leaves[i].defined()) {
      const Tensor& reached = g[next++];
      if (reached.defined()) result[i] = plain(level, reached);
    }
  return result;
}

// The unit vectors of the space of `like`, one for each element: [numel, shape].
Tensor basis(const Tensor& like) {
  Shape s = like.shape();
  s.insert(0, like.numel());
  return reshape(eye(like.numel(), like.numel(), {like.dtype(), like.device()}), s);
}

// `f` on each direction of a basis; random draws are the same in each.
List vmap_leading(Function f, const Tensor& in) {
  return vmap_of(f, {&in, 1}, {{0}, {1}, {}, Randomness::kSame});
}

}  // namespace

Recording record(Function f, std::span<const Tensor> in, const std::vector<bool>& wanted) {
  Recording r;
  r.level_ = make_ref<Level>();
  r.in_.assign(in.begin(), in.end());
  {
    Level::Enter enter(*r.level_);
    List args = r.in_;
    r.leaves_ = make_leaves(*r.level_, args, wanted);
    for (const Tensor& t : f(args)) {
      TESSERA_CHECK(t.defined(),
                    "function transform: the function returned an undefined tensor; return tensors "
                    "that have a value");
      r.out_.push_back(r.level_->adopt(t));
      bring_up_to_date({&r.out_.back(), 1});
    }
  }
  for (const Tensor& t : r.out_) r.results_.push_back(plain(*r.level_, t));
  return r;
}

List Recording::pullback(std::span<const Tensor> cotangents) const {
  TESSERA_CHECK(cotangents.size() == out_.size(), "vjp: {} cotangents for {} results",
                cotangents.size(), out_.size());
  List g;
  {
    Level::Enter enter(*level_);
    List roots, cot;
    for (size_t i = 0; i < out_.size(); ++i) {
      const Tensor& c = cotangents[i];
      TESSERA_CHECK_AS(ShapeError,
                       c.defined() && c.shape() == out_[i].shape() && c.dtype() == out_[i].dtype(),
                       "vjp: result {} is {}, its cotangent {}; they must be alike", i,
                       describe(out_[i]), describe(c));
      if (!out_[i].requires_grad()) continue;
      roots.push_back(out_[i]), cot.push_back(level_->adopt(c));
    }
    g = backward_at(*level_, roots, cot, leaves_, true);
  }
  fill_gradients(g, in_);
  return g;
}

ValueAndGrad value_and_grad_of(Function f, std::span<const Tensor> in,
                               const std::vector<bool>& wanted) {
  bool any = false;
  for (size_t i = 0; i < in.size(); ++i) any |= wanted[i] && is_differentiable(in[i]);
  TESSERA_CHECK(any, "grad: the arguments to differentiate by hold no float tensor");
  auto level = make_ref<Level>();
  ValueAndGrad r;
  {
    Level::Enter enter(*level);
    List args(in.begin(), in.end());
    const List leaves = make_leaves(*level, args, wanted);
    List out = f(args);
    for (Tensor& t : out)
      if (t.defined()) t = level->adopt(t);
    TESSERA_CHECK(!out.empty() && out[0].defined(), "grad: the function returned no tensor");
    TESSERA_CHECK_AS(ShapeError, out[0].numel() == 1 && is_differentiable(out[0]),
                     "grad: the function returned {}; it must return one float element. Reduce it "
                     "(sum, mean), or use vjp or jacrev",
                     describe(out[0]));
    List roots;
    if (out[0].requires_grad()) roots.push_back(out[0]);
    r.gradients = backward_at(*level, roots, {}, leaves, false);
    for (const Tensor& t : out) r.values.push_back(t.defined() ? plain(*level, t) : Tensor());
  }
  fill_gradients(r.gradients, in);
  return r;
}

ValuesAndTangents jvp_of(Function f, std::span<const Tensor> in, std::span<const Tensor> tangents) {
  TESSERA_CHECK(in.size() == tangents.size(), "jvp: {} tangents for {} inputs", tangents.size(),
                in.size());
  for (size_t i = 0; i < in.size(); ++i)
    TESSERA_CHECK_AS(ShapeError,
                     in[i].defined() && tangents[i].defined() &&
                         in[i].shape() == tangents[i].shape() &&
                         in[i].dtype() == tangents[i].dtype(),
                     "jvp: input {} is {}, its tangent {}; they must be alike", i, describe(in[i]),
                     describe(tangents[i]));
  Recording primal = record(f, in, std::vector<bool>(in.size(), true));
  List zero;
  for (const Tensor& t : primal.results()) zero.push_back(zeros_like(t));
  // The map u -> J^T u is linear, so differentiating it at any u transposes it to J.
  auto transpose = [&](std::span<const Tensor> u) { return primal.pullback(u); };
  Recording linear = record(transpose, zero, std::vector<bool>(zero.size(), true));
  return {primal.results(), linear.pullback(tangents)};
}

List vmap_of(Function f, std::span<const Tensor> in, const Batching& b) {
  TESSERA_CHECK(b.in_dims.empty() || b.in_dims.size() == b.leaves.size(),
                "vmap: in_dims has {} entries for {} arguments; give one for each",
                b.in_dims.size(), b.leaves.size());
  int64_t size = -1;
  List moved(in.begin(), in.end());
  std::vector<bool> batched(in.size());
  std::string sizes;
  bool agree = true;
  for (size_t argument = 0, i = 0; argument < b.leaves.size(); ++argument) {
    const std::optional<int64_t> dim =
        b.in_dims.empty() ? std::optional<int64_t>(0) : b.in_dims[argument];
    for (size_t end = i + b.leaves[argument]; i < end; ++i) {
      if (!dim || !in[i].defined()) continue;
      TESSERA_CHECK_AS(ShapeError, *dim >= -in[i].ndim() && *dim < in[i].ndim(),
                       "vmap: in_dims[{}] is {}, but the argument is {}; nullopt stands for no "
                       "batch",
                       argument, *dim, describe(in[i]));
      const int64_t extent = in[i].size(*dim);
      sizes += fmt::format("{}{} (argument {})", sizes.empty() ? "" : ", ", extent, argument);
      agree = agree && (size < 0 || extent == size);
      size = extent;
      batched[i] = true;
      moved[i] = movedim(in[i], {*dim}, {0});
    }
  }
  TESSERA_CHECK_AS(ShapeError, agree, "vmap: batches differ in size: {}", sizes);
  TESSERA_CHECK_AS(ShapeError, size != -1,
                   "vmap: no argument has a batch dim; give one in in_dims");
  auto level = Ref<Level>(new Level(size, b.randomness));
  List out;
  std::vector<bool> whole;
  {
    Level::Enter enter(*level);
    for (size_t i = 0; i < moved.size(); ++i)
      if (moved[i].defined()) moved[i] = level->wrap(moved[i], batched[i]);
    for (const Tensor& t : f(moved)) {
      bool has = false;
      out.push_back(t.defined() ? level->inner(t, has) : Tensor());
      whole.push_back(has);
    }
  }
  TESSERA_CHECK(b.out_dims.size() <= 1 || b.out_dims.size() == out.size(),
                "vmap: out_dims has {} entries for {} results; give one, or one for each",
                b.out_dims.size(), out.size());
  for (size_t i = 0; i < out.size(); ++i) {
    Tensor& t = out[i];
    if (!t.defined()) continue;
    if (!whole[i]) {
      Shape s = t.shape();
      s.insert(0, size);
      t = expand(unsqueeze(t, 0), s);
    }
    const int64_t dim = b.out_dims.empty() ? 0 : b.out_dims[b.out_dims.size() == 1 ? 0 : i];
    TESSERA_CHECK_AS(ShapeError, dim >= -t.ndim() && dim < t.ndim(),
                     "vmap: out_dims[{}] is {}, but the result is {} with its batch", i, dim,
                     describe(t));
    if (dim != 0) t = movedim(t, {0}, {dim});
  }
  return out;
}

List jacobians(Mode mode, Function f, std::span<const Tensor> in, const std::vector<bool>& wanted) {
  const char* name = mode == Mode::kReverse ? "jacrev" : "jacfwd";
  Recording primal = record(f, in, wanted);
  TESSERA_CHECK(primal.results().size() == 1,
                "{}: the function returned {} tensors; it must return one, of floats", name,
                primal.results().size());
  const Tensor y = primal.results()[0];
  TESSERA_CHECK(is_differentiable(y), "{}: the function returned {}; it must return floats", name,
                describe(y));
  for (size_t i = 0; i < in.size(); ++i)
    TESSERA_CHECK(!wanted[i] || is_differentiable(in[i]),
                  "{}: input {} is {}; derivatives are by floats", name, i, describe(in[i]));
  auto pull = [&](std::span<const Tensor> u) { return primal.pullback(u); };
  auto shape_by = [&](const Tensor& x) {
    Shape s = y.shape();
    for (int64_t e : x.shape()) s.push_back(e);
    return s;
  };
  auto shaped = [&](const Tensor& j, const Tensor& x) {
    return reshape(j, shape_by(x)).to(y.dtype());
  };
  List result(in.size());
  std::vector<bool> left = wanted;  // wanted inputs that have elements
  for (size_t i = 0; i < in.size(); ++i) {
    left[i] = wanted[i] && in[i].numel() > 0 && y.numel() > 0;
    if (wanted[i] && !left[i]) result[i] = zeros(shape_by(in[i]), {y.dtype(), y.device()});
  }
  if (std::ranges::find(left, true) == left.end()) return result;
  if (mode == Mode::kReverse) {
    List rows = vmap_leading(pull, basis(y));
    for (size_t i = 0; i < in.size(); ++i)
      if (left[i]) result[i] = shaped(rows[i], in[i]);
    return result;
  }
  auto pull_left = [&](std::span<const Tensor> u) {
    List all = primal.pullback(u), g;
    for (size_t i = 0; i < in.size(); ++i)
      if (left[i]) g.push_back(all[i]);
    return g;
  };
  Tensor zero = zeros_like(y);
  Recording linear = record(pull_left, {&zero, 1}, {true});
  for (size_t i = 0; i < in.size(); ++i) {
    if (!left[i]) continue;
    auto push = [&](std::span<const Tensor> direction) {
      List tangents;
      for (size_t k = 0; k < in.size(); ++k)
        if (left[k]) tangents.push_back(k == i ? direction[0] : zeros_like(in[k]));
      return linear.pullback(tangents);
    };
    Tensor columns = vmap_leading(push, basis(in[i]))[0];  // [x's elements, y's dims..]
    result[i] = shaped(movedim(columns, {0}, {-1}), in[i]);
  }
  return result;
}

}  // namespace tessera::transforms
