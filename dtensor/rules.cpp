// The few ops whose parts on the ranks do not follow from an axis map: updates of many tensors at
// once, the norm over all gradients, cross-entropy over a vocabulary that is cut over ranks, and
// the error of batch-norm for a batch that is cut.
#include <algorithm>
#include <limits>

#include "core/dispatch/context.h"
#include "core/ops/create.h"
#include "core/ops/fused_attributes.h"
#include "core/ops/indexing.h"
#include "core/ops/pointwise.h"
#include "core/ops/reduce.h"
#include "core/ops/update.h"
#include "core/ops/update_attributes.h"
#include "core/ops/views.h"
#include "core/primitive/primitive_of.h"
#include "dtensor/dtensor.h"
#include "dtensor/redistribute.h"
#include "dtensor/shard_spec.h"

namespace tessera {
namespace {

constexpr double kLowest = -std::numeric_limits<double>::infinity();

Layout layout_on(const Tensor& t, const DeviceMesh& mesh) {
  const ShardSpec* s = spec_of(t);
  return s ? s->layout : replicated(mesh);
}

// ---- adam, sgd: each rank updates its pieces of parameters. Operands are `lead` scalars and then
// lists of `count` tensors; the state of a parameter takes its layout.

void update_lists(std::span<const Tensor> dst, const PrimRef& prim, Inputs in,
                  const DeviceMesh& mesh, size_t lead, size_t count) {
  Tensors to, pieces;
  for (size_t i = 0; i < in.size(); ++i) {
    if (i < lead) {
      pieces.push_back(full_tensor(in[i]));
      continue;
    }
    const Tensor& param = in[lead + (i - lead) % count];
    const ShardSpec* at = spec_of(param);
    const Layout want = layout_on(param, mesh);
    TESSERA_CHECK_AS(ShardingError,
                     !at || at->mesh == mesh || !spec_of(in[i]) || spec_of(in[i])->mesh == at->mesh,
                     "{}: {} and {} lie over different meshes", prim->name(), describe(param),
                     describe(in[i]));
    if (!at) {
      pieces.push_back(in[i]);
      continue;
    }
    bool moves = !spec_of(in[i]);
    if (!moves)
      for (const Step& s : cached_route(in[i].shape(), spec_of(in[i])->layout, want, at->mesh))
        moves |= communicates(s, at->mesh.sizes());
    TESSERA_CHECK_AS(ShardingError, !moves,
                     "{}: a parameter is {}, its gradient or state {}; redistribute() it first",
                     prim->name(), describe(param), describe(in[i]));
    pieces.push_back(converted_piece(Tensor(in[i]), at->mesh, want));
  }
  for (const Tensor& d : dst) to.push_back(spec_of(d) ? spec_of(d)->local : d);
  tessera::assign(to, prim, pieces);
}

void assign_adam(std::span<const Tensor> dst, const PrimRef& prim, Inputs in,
                 const DeviceMesh& mesh) {
  update_lists(dst, prim, in, mesh, 3, size_t(attributes_of<AdamUpdate>(*prim).count));
}
void assign_sgd(std::span<const Tensor> dst, const PrimRef& prim, Inputs in,
                const DeviceMesh& mesh) {
  update_lists(dst, prim, in, mesh, 2, size_t(attributes_of<SgdUpdate>(*prim).count));
}

// ---- global_norm: each rank computes sums of squares of its rows. Then every rank gets the rows
// of all tensors at once and adds them in the same tree as for an uncut tensor.

// The layout in which `t` is squared: no axis holds a term of it and, where the bits must be those
// of one rank (exact contraction), none holds a part of a row.
Layout layout_of_rows(const ShardSpec& s) {
  Layout rows = s.layout;
  for (Placement& p : rows)
    if (p.is_partial()) p = Replicate();
  if (!context().exact_contraction) return rows;
  for (size_t a = 0; a < rows.size(); ++a) {
    if (!rows[a].is_shard() || rows[a].dim == 0) continue;
    bool cut = std::ranges::any_of(rows, [](const Placement& p) { return p.is_shard(0); });
    rows[a] = cut ? Replicate() : Shard(0);
  }
  return rows;
}

// Reduces `x`, of which the ranks along the marked axes hold terms.
Tensor reduce_over(Tensor x, const SmallVector<bool, 4>& marked, ReduceOp op,
                   const DeviceMesh& mesh) {
  Layout partial = replicated(mesh);
  for (size_t a = 0; a < partial.size(); ++a)
    if (marked[a]) partial[a] = Partial(op);
  Shape shape = x.shape();
  return run_route(shape, partial, cached_route(shape, partial, replicated(mesh), mesh),
                   std::move(x), mesh);
}

// Makes all lists of rows whole by one reduction for each axis: they are concatenated to one vector
// in which each rank puts its part in its place and zeros elsewhere. Adding zeros changes no bit of
// a sum of squares.
void make_whole(std::vector<Tensor>& rows, const DeviceMesh& mesh) {
  SmallVector<bool, 4> spread(size_t(mesh.ndim()), false);
  for (const Tensor& r : rows)
    for (size_t a = 0; a < spread.size(); ++a)
      if (const ShardSpec* s = spec_of(r)) spread[a] |= !s->layout[a].is_replicate();
  std::vector<Tensor> parts;
  int64_t gap = 0;
  auto fill_gap = [&] {
    if (gap > 0) parts.push_back(zeros({std::exchange(gap, 0)}, {kF64, rows[0].device()}));
  };
  for (const Tensor& r : rows) {
    const ShardSpec* s = spec_of(r);
    if (!s) continue;
    Range mine = box_of(r.shape(), s->layout, mesh.sizes(), mesh.coordinate())[0];
    for (size_t a = 0; a < spread.size(); ++a)  // of equal copies only the first counts
      if (spread[a] && s->layout[a].is_replicate() && mesh.coordinate()[a] > 0) mine = {0, 0, 0};
    gap += mine.begin;
    if (mine.size > 0) fill_gap(), parts.push_back(s->local);
    gap += r.size(0) - mine.begin - mine.size;
  }
  fill_gap();
  if (parts.empty()) return;
  Tensor all = reduce_over(cat(parts, 0), spread, ReduceOp::kSum, mesh);
  int64_t begin = 0;
  for (Tensor& r : rows)
    if (spec_of(r)) {
      int64_t count = r.size(0);
      r = narrow(all, 0, begin, count);
      begin += count;
    }
}

bool norm_rule(const PrimRef&, Inputs in, const DeviceMesh& mesh, Tensors& out) {
  std::vector<Tensor> rows;
  for (const Tensor& t : in) {
    const ShardSpec* s = spec_of(t);
    rows.push_back(row_squares(s ? convert(t, mesh, layout_of_rows(*s)) : t));
  }
  make_whole(rows, mesh);
  out.push_back(norm_of_rows(rows));
  return true;
}

// ---- max_magnitude: the maximum of this rank's pieces, then over the axes that cut one of them.

bool max_rule(const PrimRef&, Inputs in, const DeviceMesh& mesh, Tensors& out) {
  SmallVector<bool, 4> cut(size_t(mesh.ndim()), false);
  std::vector<Tensor> pieces;
  for (const Tensor& t : in) {
    const ShardSpec* s = spec_of(t);
    if (!s) {
      pieces.push_back(t);
      continue;
    }
    Layout summed = s->layout;
    for (size_t a = 0; a < summed.size(); ++a) {
      if (summed[a].is_partial()) summed[a] = Replicate();
      cut[a] |= summed[a].is_shard();
    }
    pieces.push_back(converted_piece(Tensor(t), mesh, summed));
  }
  out.push_back(reduce_over(max_magnitude(pieces), cut, ReduceOp::kMax, mesh));
  return true;
}

// ---- cross_entropy of logits [N, V] whose rows and classes may both be cut. Along an axis that
// cuts the classes, three numbers of each row are reduced: the largest logit, then the sum of
// exponentials together with the target's logit. The result is a sum over the axes that cut rows.

struct CrossEntropyCuts {
  Layout logits, targets;
  bool rows = false, classes = false;
};

// Finds the cuts; returns false if the rule does not support them, or there are none.
bool cuts_of(Inputs in, const DeviceMesh& mesh, CrossEntropyCuts& cuts) {
  cuts = {};
  cuts.logits = layout_on(in[0], mesh);
  cuts.targets = replicated(mesh);
  for (size_t a = 0; a < cuts.logits.size(); ++a) {
    const Placement& p = cuts.logits[a];
    if (p.is_partial()) return false;
    cuts.rows |= p.is_shard(0);
    cuts.classes |= p.is_shard(1);
    if (p.is_shard(0)) cuts.targets[a] = p;
  }
  return cuts.rows || cuts.classes;
}

// Reduces over the axes of `layout` that cut `dim`.
Tensor reduce_over(Tensor x, const Layout& layout, int dim, ReduceOp op, const DeviceMesh& mesh) {
  SmallVector<bool, 4> cut(layout.size(), false);
  for (size_t a = 0; a < layout.size(); ++a) cut[a] = layout[a].is_shard(dim);
  return reduce_over(std::move(x), cut, op, mesh);
}

bool cross_entropy_rule(const PrimRef& prim, Inputs in, const DeviceMesh& mesh, Tensors& out) {
  const auto& a = attributes_of<CrossEntropyAttributes>(*prim);
  CrossEntropyCuts cuts;
  if (!cuts_of(in, mesh, cuts)) return false;
  TESSERA_CHECK_AS(ShardingError,
                   may_communicate() || context().communication == Communication::kInLosses,
                   "cross_entropy: logits are {} over mesh ({}), which takes sums over ranks; say "
                   "so with a LossParallel scope (a few numbers for each row), or "
                   "redistribute(logits, {}) first",
                   to_string(cuts.logits), mesh.to_string(), to_string(replicated(mesh)));
  if (cuts.classes && context().exact_contraction) {
    // Sums over parts of a row would have other bits than the kernel on one rank, so rows are made
    // whole.
    Layout rows = cuts.logits;
    for (Placement& p : rows)
      if (p.is_shard(1)) p = Replicate();
    in[0] = convert(in[0], mesh, rows);
    if (!cuts_of(in, mesh, cuts)) return false;
  }
  Metas metas = prim->infer(SmallVector<const Meta*, 2>{&in[0].meta(), &in[1].meta()});
  const int64_t all_classes = in[0].size(1);
  DType t = metas[0].dtype;
  Box box = box_of(in[0].shape(), cuts.logits, mesh.sizes(), mesh.coordinate());
  Tensor x = cast(converted_piece(std::move(in[0]), mesh, cuts.logits), t),
         targets = converted_piece(std::move(in[1]), mesh, cuts.targets);
  auto over = [&](Tensor v, int dim, ReduceOp op) {
    return reduce_over(std::move(v), cuts.logits, dim, op, mesh);
  };
  int64_t rows = x.size(0), classes = x.size(1);
  Tensor counted = ne(targets, a.ignore_index), none = scalar_tensor(0.0, t, x.device());
  // Refuses a target that is no class: no rank would find it.
  Tensor known = gather(zeros({std::max<int64_t>(1, all_classes)}, {t, x.device()}), 0,
                        where(counted, targets, zeros({}, {targets.dtype(), x.device()})));
  Tensor largest = classes > 0 ? amax(x, {1}) : full({rows}, kLowest, {t, x.device()});
  largest = over(std::move(largest), 1, ReduceOp::kMax);
  Tensor shifted = x - unsqueeze(largest, 1), e = exp(shifted);
  Tensor numbers = unsqueeze(arange(0, classes, 1, {kI64, x.device()}) + box[1].begin, 0),
         hot = eq(unsqueeze(targets, 1), numbers);
  Tensor both[] = {sum(e, {1}), sum(where(hot, shifted, none), {1})};
  Tensor meet = over(stack(both, 0), 1, ReduceOp::kSum);
  Tensor total = select(meet, 0, 0), picked = select(meet, 0, 1) + known;

  Tensor scale = scalar_tensor(1.0, t, x.device());
  if (a.mean) scale = 1.0 / over(sum(cast(counted, t)), 0, ReduceOp::kSum);
  Tensor loss = sum(where(counted, log(total) - picked, none)) * scale;
  Layout loss_layout = replicated(mesh);
  for (size_t k = 0; k < cuts.logits.size(); ++k)
    if (cuts.logits[k].is_shard(0)) loss_layout[k] = Partial();
  out.push_back(wrap(mesh, loss_layout, metas[0], loss));
  if (a.with_grad) {
    Tensor p = e / unsqueeze(total, 1);
    Tensor g = where(unsqueeze(counted, 1), (p - cast(hot, t)) * scale, none);
    out.push_back(wrap(mesh, cuts.logits, metas[1], cast(g, metas[1].dtype)));
  }
  return true;
}

// ---- batch_norm follows from its axes, except that the error for a cut batch names what to use.

bool batch_norm_rule(const PrimRef& prim, Inputs in, const DeviceMesh& mesh, Tensors&) {
  const Layout x = layout_on(in[0], mesh);
  for (size_t a = 0; a < x.size(); ++a)
    TESSERA_CHECK_AS(
        ShardingError,
        may_communicate() || mesh.sizes()[a] == 1 || !x[a].is_shard() || x[a].is_shard(1),
        "{}: x is {} over mesh ({}), and its statistics are those of the whole batch. Give each "
        "rank's part, to_local(x), to nn::SyncBatchNorm, which sums statistics over ranks, or "
        "redistribute(x, \"{}\", Replicate()) first",
        prim->name(), describe(in[0]), mesh.to_string(), mesh.axes()[a]);
  return false;
}

}  // namespace

Rule find_rule(OpId op) {
  static const OpId norm = intern_op("global_norm"), largest = intern_op("max_magnitude"),
                    cross_entropy = intern_op("cross_entropy"),
                    batch_norm = intern_op("batch_norm");
  return op == norm            ? norm_rule
         : op == largest       ? max_rule
         : op == cross_entropy ? cross_entropy_rule
         : op == batch_norm    ? batch_norm_rule
                               : nullptr;
}

AssignRule find_assign_rule(OpId op) {
  static const OpId adam = intern_op("adam"), sgd = intern_op("sgd");
  return op == adam ? assign_adam : op == sgd ? assign_sgd : nullptr;
}

}  // namespace tessera
