// Invariant: nothing here reads values, except where the extent of a result depends on them.
#include "core/ops/layout.h"

#include <algorithm>
#include <vector>

#include "core/dispatch/copy.h"
#include "core/ops/create.h"
#include "core/ops/indexing.h"
#include "core/ops/pointwise.h"
#include "core/ops/views.h"
#include "core/tensor/extents.h"

namespace tessera {
namespace {

Tensor positions(int64_t begin, int64_t end, const Tensor& x, int64_t step = 1) {
  return arange(begin, end, step, {.device = x.device()});
}

Tensor padded_constant(const Tensor& x, int d, int64_t before, int64_t after, Scalar value) {
  int64_t n = x.shape()[d];
  TESSERA_CHECK_AS(ShapeError,
                   before >= -n && after >= -n &&
                       std::min<int64_t>(before, 0) + std::min<int64_t>(after, 0) >= -n,
                   "pad: {} before and {} after dim {} of {} cut off more than there is", before,
                   after, d, describe(x));
  int64_t first = std::max<int64_t>(-before, 0), last = n - std::max<int64_t>(-after, 0);
  Tensor middle = narrow(x, d, first, last - first);
  Tensors parts;
  auto border = [&](int64_t size) {
    if (size <= 0) return;
    Shape s = x.shape();
    s[d] = size;
    parts.push_back(expand(scalar_tensor(value, x.dtype(), x.device()), s));
  };
  border(before);
  parts.push_back(middle);
  border(after);
  return cat(parts, d);
}

// A vector as a row, a number as a matrix of one.
Tensor at_least_matrix(const Tensor& x) {
  return x.ndim() >= 2 ? x : x.ndim() == 1 ? unsqueeze(x, 0) : reshape(x, {1, 1});
}

// Position of the source of each padded element; they run from -before to n + after.
Tensor padded_positions(const Tensor& x, int d, int64_t before, int64_t after, PadMode mode) {
  int64_t n = x.shape()[d];
  int64_t most = mode == PadMode::kReflect ? n - 1 : mode == PadMode::kCircular ? n : INT64_MAX - n;
  TESSERA_CHECK_AS(ShapeError,
                   before >= 0 && after >= 0 && before <= most && after <= most && n > 0,
                   "pad: {} before and {} after dim {} of {}; this mode takes 0 to {}", before,
                   after, d, describe(x), most);
  Tensor at = positions(-before, n + after, x);
  if (mode == PadMode::kReplicate) return clamp(at, int64_t(0), n - 1);
  if (mode == PadMode::kCircular) return remainder(at, number_beside(x, n, kI64));
  return (n - 1) - abs((n - 1) - abs(at));
}

}  // namespace

Tensor movedim(const Tensor& x, const Dims& from, const Dims& to) {
  TESSERA_CHECK_AS(ShapeError, from.size() == to.size(), "movedim: {} dims to {} places",
                   to_string(from), to_string(to));
  Dims order = Dims::filled(x.ndim(), -1), rest;
  uint32_t moved = 0;
  for (int i = 0; i < from.size(); ++i) {
    int f = wrap_dim(from[i], x.ndim(), "movedim"), t = wrap_dim(to[i], x.ndim(), "movedim");
    TESSERA_CHECK_AS(ShapeError, order[t] < 0 && !(moved >> f & 1),
                     "movedim: {} to {}; name every dim once", to_string(from), to_string(to));
    order[t] = f;
    moved |= 1u << f;
  }
  int next = 0;
  for (int64_t& o : order) {
    if (o >= 0) continue;
    while (moved >> next & 1) ++next;
    o = next++;
  }
  return permute(x, order);
}

Tensor swapaxes(const Tensor& x, int64_t a, int64_t b) { return transpose(x, a, b); }
Tensor broadcast_to(const Tensor& x, const Shape& to) { return expand(x, to); }

Tensors broadcast_tensors(std::span<const Tensor> tensors) {
  Shape s;
  for (const Tensor& t : tensors) s = broadcast(s, t.shape(), "broadcast_tensors");
  Tensors out;
  for (const Tensor& t : tensors) out.push_back(expand(t, s));
  return out;
}

Tensors meshgrid(std::span<const Tensor> vectors) {
  Shape all;
  for (const Tensor& v : vectors) {
    TESSERA_CHECK_AS(ShapeError, v.ndim() <= 1, "meshgrid: {} is not a vector", describe(v));
    all.push_back(v.numel());
  }
  Tensors out;
  for (size_t i = 0; i < vectors.size(); ++i) {
    Shape s = Dims::filled(all.size(), 1);
    s[int(i)] = all[int(i)];
    out.push_back(expand(reshape(vectors[i], s), all));
  }
  return out;
}

Tensor cartesian_prod(std::span<const Tensor> vectors) {
  if (vectors.size() == 1) return vectors[0];
  Tensors columns = meshgrid(vectors);
  for (Tensor& c : columns) c = flatten(c);
  return stack(columns, 1);
}

Tensor vstack(std::span<const Tensor> parts) {
  Tensors rows;
  for (const Tensor& p : parts) rows.push_back(at_least_matrix(p));
  return cat(rows, 0);
}
Tensor hstack(std::span<const Tensor> parts) {
  Tensors in;
  for (const Tensor& p : parts) in.push_back(p.ndim() == 0 ? reshape(p, {1}) : p);
  return cat(in, !in.empty() && in[0].ndim() > 1 ? 1 : 0);
}
Tensor block_diag(std::span<const Tensor> blocks) {
  Tensors rows;
  int64_t width = 0, at = 0;
  for (const Tensor& b : blocks) width += at_least_matrix(b).size(1);
  for (const Tensor& b : blocks) {
    const Tensor m = at_least_matrix(b);
    TESSERA_CHECK_AS(ShapeError, m.ndim() == 2, "block_diag: {} is no matrix", describe(b));
    rows.push_back(pad(m, {at, width - at - m.size(1)}));
    at += m.size(1);
  }
  return cat(rows, 0);
}

Tensor rot90(const Tensor& x, int64_t times, const Dims& dims) {
  TESSERA_CHECK_AS(ShapeError, dims.size() == 2, "rot90: turns between two dims, got {}",
                   to_string(dims));
  const int a = wrap_dim(dims[0], x.ndim(), "rot90"), b = wrap_dim(dims[1], x.ndim(), "rot90");
  TESSERA_CHECK_AS(ShapeError, a != b, "rot90: dims {} of {} are one", to_string(dims),
                   describe(x));
  switch (times & 3) {
    case 1: return transpose(flip(x, b), a, b);
    case 2: return flip(x, {a, b});
    case 3: return transpose(flip(x, a), a, b);
    default: return x;
  }
}

Tensor pixel_shuffle(const Tensor& x, int64_t r) {
  TESSERA_CHECK_AS(ShapeError, r > 0 && x.ndim() >= 3 && x.size(-3) % (r * r) == 0,
                   "pixel_shuffle: {} by {}; takes [.., C r r, H, W]", describe(x), r);
  const int d = x.ndim() - 3;
  Tensor y = unflatten(x, d, {x.size(d) / (r * r), r, r});  // [.., C, r, r, H, W]
  y = movedim(y, {d + 1, d + 2}, {d + 2, d + 4});           // [.., C, H, r, W, r]
  return flatten(flatten(y, d + 3, d + 4), d + 1, d + 2);
}
Tensor pixel_unshuffle(const Tensor& x, int64_t r) {
  TESSERA_CHECK_AS(ShapeError, r > 0 && x.ndim() >= 3 && x.size(-1) % r == 0 && x.size(-2) % r == 0,
                   "pixel_unshuffle: {} by {}; takes [.., C, H r, W r]", describe(x), r);
  const int d = x.ndim() - 3;
  Tensor y = unflatten(x, d + 2, {x.size(d + 2) / r, r});
  y = unflatten(y, d + 1, {x.size(d + 1) / r, r});  // [.., C, H, r, W, r]
  return flatten(movedim(y, {d + 2, d + 4}, {d + 1, d + 2}), d, d + 2);
}

Tensor flip(const Tensor& x, const Dims& dims) {
  Tensor y = x;
  uint32_t seen = 0;
  for (int64_t dim : dims) {
    int d = wrap_dim(dim, x.ndim(), "flip");
    TESSERA_CHECK_AS(ShapeError, !(seen >> d & 1), "flip: dim {} is named twice in {}", d,
                     to_string(dims));
    seen |= 1u << d;
    if (x.ndim() && x.shape()[d] > 1)
      y = index_select(y, d, positions(x.shape()[d] - 1, -1, x, -1));
  }
  return y;
}

Tensor roll(const Tensor& x, const Dims& shifts, const Dims& dims) {
  if (dims.empty()) {
    TESSERA_CHECK_AS(ShapeError, shifts.size() == 1,
                     "roll: {} shifts of the flattened tensor; give one, or dims", shifts.size());
    return reshape(roll(reshape(x, {-1}), shifts, {0}), x.shape());
  }
  TESSERA_CHECK_AS(ShapeError, shifts.size() == dims.size(), "roll: shifts {} for dims {}",
                   to_string(shifts), to_string(dims));
  Tensor y = x;
  for (int i = 0; i < dims.size(); ++i) {
    int d = wrap_dim(dims[i], x.ndim(), "roll");
    int64_t n = x.size(d);
    if (n == 0) continue;
    int64_t shift = ((shifts[i] % n) + n) % n;
    if (shift == 0) continue;
    Tensor parts[] = {narrow(y, d, n - shift, shift), narrow(y, d, 0, n - shift)};
    y = cat(parts, d);
  }
  return y;
}

Tensor repeat(const Tensor& x, const Dims& repeats) {
  TESSERA_CHECK_AS(ShapeError, repeats.size() >= x.ndim(),
                   "repeat: {} for {}; give a number for every dim", to_string(repeats),
                   describe(x));
  Shape s = x.shape();
  while (s.size() < repeats.size()) s.insert(0, 1);
  Tensor y = reshape(x, s);
  for (int d = 0; d < repeats.size(); ++d) {
    TESSERA_CHECK_AS(ShapeError, repeats[d] >= 0, "repeat: {}; numbers are not negative",
                     to_string(repeats));
    if (repeats[d] == 1) continue;
    Shape all = y.shape();
    all[d] = extent_product(all[d], repeats[d], "repeat");
    empty(all, x.dtype(), kMeta);  // refuses what no memory holds, before the parts are listed
    Tensors parts;
    for (int64_t i = 0; i < repeats[d]; ++i) parts.push_back(y);
    y = parts.empty() ? narrow(y, d, 0, 0) : cat(parts, d);
  }
  return y.storage() == x.storage() ? clone(y) : y;
}

Tensor tile(const Tensor& x, const Dims& repeats) {
  Dims all = repeats;
  while (all.size() < x.ndim()) all.insert(0, 1);
  return repeat(x, all);
}

Tensor repeat_interleave(const Tensor& x, int64_t count, int64_t dim) {
  int d = wrap_dim(dim, x.ndim(), "repeat_interleave");
  TESSERA_CHECK_AS(ShapeError, count >= 0 && x.ndim() > 0, "repeat_interleave: {} times {}", count,
                   describe(x));
  return index_select(
      x, d,
      floor_divide(positions(0, extent_product(x.shape()[d], count, "repeat_interleave"), x),
                   number_beside(x, std::max<int64_t>(count, 1), kI64)));
}

Tensor repeat_interleave(const Tensor& x, const Tensor& counts, int64_t dim) {
  int d = wrap_dim(dim, x.ndim(), "repeat_interleave");
  TESSERA_CHECK_AS(ShapeError,
                   counts.ndim() == 1 && x.ndim() > 0 && counts.numel() == x.shape()[d] &&
                       is_integral(counts.dtype()),
                   "repeat_interleave: counts {} for dim {} of {}; give one integer for each",
                   describe(counts), d, describe(x));
  const Tensor c = on_host(contiguous(cast(counts, kI64)));
  std::vector<int64_t> rows;
  for (int64_t i = 0; i < c.numel(); ++i) {
    TESSERA_CHECK(c.values<int64_t>()[i] >= 0,
                  "repeat_interleave: count {} at {}; counts are not negative",
                  c.values<int64_t>()[i], i);
    rows.insert(rows.end(), size_t(c.values<int64_t>()[i]), i);
  }
  return index_select(x, d, from_values<int64_t>(rows, {int64_t(rows.size())}).to(x.device()));
}

Tensors tensor_split(const Tensor& x, int64_t pieces, int64_t dim) {
  int d = wrap_dim(dim, x.ndim(), "tensor_split");
  TESSERA_CHECK_AS(ShapeError, x.ndim() > 0 && pieces >= 1, "tensor_split: {} pieces of {}", pieces,
                   describe(x));
  Tensors out;
  int64_t n = x.shape()[d], at = 0;
  for (int64_t i = 0; i < pieces; ++i) {
    int64_t size = n / pieces + (i < n % pieces);
    out.push_back(narrow(x, d, at, size));
    at += size;
  }
  return out;
}

Tensor unfold(const Tensor& x, int64_t dim, int64_t size, int64_t step) {
  int d = wrap_dim(dim, x.ndim(), "unfold");
  TESSERA_CHECK_AS(ShapeError, x.ndim() > 0 && size >= 1 && step >= 1 && size <= x.shape()[d],
                   "unfold: windows of {} every {} of dim {} of {}", size, step, d, describe(x));
  int64_t count = (x.shape()[d] - size) / step + 1;
  Tensor at = unsqueeze(positions(0, count, x) * step, 1) + positions(0, size, x);
  return movedim(unflatten(index_select(x, d, reshape(at, {-1})), d, {count, size}), {d + 1}, {-1});
}

Tensor diagonal(const Tensor& x, int64_t offset, int64_t a, int64_t b) {
  int i = wrap_dim(a, x.ndim(), "diagonal"), j = wrap_dim(b, x.ndim(), "diagonal");
  TESSERA_CHECK_AS(ShapeError, i != j, "diagonal: dims {} and {} of {} are one", a, b, describe(x));
  int64_t rows = x.shape()[i], columns = x.shape()[j];
  Tensor flat = flatten(movedim(x, {i, j}, {-2, -1}), -2, -1);
  int64_t count = std::max<int64_t>(
      0, std::min(offset < 0 ? rows + offset : rows, offset > 0 ? columns - offset : columns));
  int64_t first = offset < 0 ? -offset * columns : offset;
  if (count == 0) return narrow(flat, -1, 0, 0);
  return slice(flat, -1, first, first + (count - 1) * (columns + 1) + 1, columns + 1);
}

Tensor diag(const Tensor& x, int64_t offset) {
  if (x.ndim() == 2) return diagonal(x, offset);
  TESSERA_CHECK_AS(ShapeError, x.ndim() == 1, "diag: {} is neither a vector nor a matrix",
                   describe(x));
  int64_t n = x.numel() + std::abs(offset);
  if (x.numel() == 0) return expand(scalar_tensor(0, x.dtype(), x.device()), {n, n});
  return reshape(unslice(x, 0, offset < 0 ? -offset * n : offset, n + 1, n * n), {n, n});
}

Tensor diag_embed(const Tensor& x, int64_t offset) {
  TESSERA_CHECK_AS(ShapeError, x.ndim() > 0, "diag_embed: {} has no dim", describe(x));
  const int64_t apart = std::abs(offset), n = extent_sum(x.size(-1), apart, "diag_embed");
  const Tensor values = unsqueeze(pad(x, {0, apart}), offset >= 0 ? -1 : -2),
               row = unsqueeze(positions(0, n, x), 1), column = positions(0, n, x);
  return where(eq(column - row, offset), values, number_beside(x, 0, x.dtype()));
}

Tensor pad(const Tensor& x, const Dims& pads, PadMode mode, Scalar value) {
  TESSERA_CHECK_AS(ShapeError, pads.size() % 2 == 0 && pads.size() <= 2 * x.ndim(),
                   "pad: {} for {}; give pairs, from the last dim on", to_string(pads),
                   describe(x));
  Tensor y = x;
  for (int i = 0; i < pads.size(); i += 2) {
    int d = x.ndim() - 1 - i / 2;
    if (pads[i] == 0 && pads[i + 1] == 0) continue;
    y = mode == PadMode::kConstant
            ? padded_constant(y, d, pads[i], pads[i + 1], value)
            : index_select(y, d, padded_positions(y, d, pads[i], pads[i + 1], mode));
  }
  return y;
}

}  // namespace tessera
