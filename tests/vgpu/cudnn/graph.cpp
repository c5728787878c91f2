#include "tests/vgpu/cudnn/graph.h"

#include <algorithm>
#include <cstdlib>
#include <map>

namespace vgpu::dnn {

namespace {

// What each computes: 11 one sum after the other; 12 is refused when its plan is made; 13 sums in
// an order that changes from call to call; 15 as 11; 21 with f32 operands rounded to TF32.
constexpr EngineKind kEngines[] = {
    {.index = 12, .note = -1, .workspace = 64, .compiles = false},
    {.index = 21, .note = kNoteTensorCore, .workspace = 0, .only_f32 = true},
    {.index = 11, .note = -1, .workspace = 131},
    {.index = 13, .note = kNoteNondeterministic, .workspace = 1003},
    {.index = 15, .note = -1, .workspace = 7}};
constexpr EngineKind kFallback = {.index = 14, .note = -1, .workspace = 0};

std::string text(const Extents& e) {
  std::string all = "[";
  for (int64_t x : e) all += (all.size() > 1 ? ", " : "") + std::to_string(x);
  return all + "]";
}

bool broadcasts(const TensorInfo& x, const TensorInfo& y) {
  if (x.dims.size() != y.dims.size()) return false;
  for (size_t i = 0; i < x.dims.size(); ++i)
    if (x.dims[i] != 1 && x.dims[i] != y.dims[i]) return false;
  return true;
}

std::string wrong_pointwise(const Operation& op) {
  size_t operands = 2;
  if (op.mode == kExp || op.mode == kLog || op.mode == kIdentity || op.mode == kReciprocalRoot ||
      op.mode == kReluForward || op.mode == kIndex)
    operands = 1;
  if (op.mode == kSelect) operands = 3;
  if (op.in.size() != operands)
    return "pointwise mode " + std::to_string(op.mode) + " takes " + std::to_string(operands) +
           " operands, not " + std::to_string(op.in.size());
  for (const TensorInfo& x : op.in)
    if (!broadcasts(x, op.out))
      return "an operand of " + text(x.dims) + " for a result of " + text(op.out.dims);
  if (op.mode == kIndex &&
      (op.axis < 0 || op.axis >= static_cast<int64_t>(op.out.dims.size()) || op.out.type != kInt32))
    return "positions along dim " + std::to_string(op.axis) + ", as type " +
           std::to_string(op.out.type);
  return "";
}

std::string wrong_matmul(const Operation& op) {
  const Extents &a = op.in[0].dims, &b = op.in[1].dims, &c = op.out.dims;
  const size_t n = c.size();
  bool ok = n >= 2 && a.size() == n && b.size() == n && a[n - 1] == b[n - 2] &&
            a[n - 2] == c[n - 2] && b[n - 1] == c[n - 1];
  for (size_t i = 0; ok && i + 2 < n; ++i)
    ok = (a[i] == c[i] || a[i] == 1) && (b[i] == c[i] || b[i] == 1);
  return ok ? "" : "a product of " + text(a) + " and " + text(b) + " to " + text(c);
}

std::string wrong_conv(const Operation& op) {
  const bool forward = op.kind == kConvForwardOp, data = op.kind == kConvDataOp;
  // x, w, y, of which one is the result.
  const TensorInfo& x = data ? op.out : op.in[0];
  const TensorInfo& w = forward ? op.in[1] : data ? op.in[0] : op.out;
  const TensorInfo& y = forward ? op.out : op.in[1];
  const size_t n = op.stride.size();
  if (x.dims.size() != n + 2 || w.dims.size() != n + 2 || y.dims.size() != n + 2)
    return "a convolution of " + std::to_string(n) + " spatial dims with tensors of " +
           std::to_string(x.dims.size()) + " dims";
  if (w.dims[1] == 0 || x.dims[1] % w.dims[1] || x.dims[0] != y.dims[0] || w.dims[0] != y.dims[1] ||
      w.dims[0] % (x.dims[1] / w.dims[1]))
    return "channels of " + text(x.dims) + ", " + text(w.dims) + " and " + text(y.dims);
  for (size_t i = 0; i < n; ++i) {
    const int64_t room =
        x.dims[i + 2] + op.begin[i] + op.end[i] - ((w.dims[i + 2] - 1) * op.dilation[i] + 1);
    if (room < 0 || y.dims[i + 2] != room / op.stride[i] + 1)
      return "places of " + text(x.dims) + ", " + text(w.dims) + " and " + text(y.dims);
  }
  return "";
}

}  // namespace

int64_t TensorInfo::count() const {
  int64_t n = 1;
  for (int64_t d : dims) n *= d;
  return n;
}

std::vector<EngineKind> engines(bool fallback) {
  if (fallback) return {kFallback};
  std::vector<EngineKind> all(std::begin(kEngines), std::end(kEngines));
  if (const char* first = std::getenv("VGPU_CUDNN_FIRST"))
    std::stable_partition(all.begin(), all.end(),
                          [&](const EngineKind& e) { return e.index == std::atoll(first); });
  return all;
}
const EngineKind* engine_kind(int64_t index) {
  for (const EngineKind& e : kEngines)
    if (e.index == index) return &e;
  return index == kFallback.index ? &kFallback : nullptr;
}

bool is_slow(int64_t index) {
  const char* asked = std::getenv("VGPU_CUDNN_SLOW");
  return asked && ("," + std::string(asked) + ",").find("," + std::to_string(index) + ",") !=
                      std::string::npos;
}

int64_t bytes_of(int type) {
  switch (type) {
    case kFloat:
    case kInt32: return 4;
    case kHalf:
    case kBFloat16: return 2;
    case kBoolean: return 1;
    default: return 0;
  }
}

std::string wrong(const Operation& op) {
  if (op.is_conv()) return wrong_conv(op);
  switch (op.kind) {
    case kPointwiseOp: return wrong_pointwise(op);
    case kMatmulOp: return wrong_matmul(op);
    case kStatisticsOp:
      for (const TensorInfo* sums : {&op.out, &op.squares}) {
        Extents channels(op.in[0].dims.size(), 1);
        if (channels.size() > 1) channels[1] = op.in[0].dims[1];
        if (sums->dims != channels || sums->type != kFloat)
          return "statistics of " + text(op.in[0].dims) + " as type " + std::to_string(sums->type) +
                 " " + text(sums->dims);
      }
      return "";
    case kReductionOp:
      for (size_t i = 0; i < op.out.dims.size(); ++i)
        if (op.in[0].dims.size() != op.out.dims.size() ||
            (op.out.dims[i] != 1 && op.out.dims[i] != op.in[0].dims[i]))
          return "a reduction of " + text(op.in[0].dims) + " to " + text(op.out.dims);
      return "";
    default:
      return op.in[0].count() == op.out.count()
                 ? ""
                 : "a reshape of " + text(op.in[0].dims) + " to " + text(op.out.dims);
  }
}

std::string join(GraphInfo& graph) {
  std::map<int64_t, bool> made;
  std::map<int64_t, TensorInfo> known;
  for (const Operation& op : graph.operations) {
    if (made.contains(op.out.uid))
      return "two operations make tensor " + std::to_string(op.out.uid);
    made[op.out.uid] = true;
    std::vector<const TensorInfo*> all{&op.out};
    for (const TensorInfo& x : op.in) all.push_back(&x);
    for (const TensorInfo* t : all) {
      const TensorInfo& seen = known.emplace(t->uid, *t).first->second;
      if (seen.dims != t->dims || seen.type != t->type)
        return "two tensors have the number " + std::to_string(t->uid);
    }
  }
  std::vector<Operation> ordered;
  std::map<int64_t, bool> done;
  while (ordered.size() < graph.operations.size()) {
    const size_t before = ordered.size();
    for (const Operation& op : graph.operations) {
      if (done[op.out.uid]) continue;
      const bool ready = std::all_of(op.in.begin(), op.in.end(), [&](const TensorInfo& x) {
        return !made.contains(x.uid) || done[x.uid];
      });
      if (ready) ordered.push_back(op), done[op.out.uid] = true;
    }
    if (ordered.size() == before) return "operations that wait for each other";
  }
  graph.operations = std::move(ordered);
  bool conv = false, product = false;
  for (const auto& [uid, t] : known) {
    if (t.is_virtual && !made.contains(uid))
      return "no operation makes the virtual tensor " + std::to_string(uid);
    if (t.by_value)
      graph.numbers.push_back(t);
    else if (!t.is_virtual)
      (made.contains(uid) ? graph.written : graph.read).push_back(t);
  }
  graph.name = "operations";
  for (const Operation& op : graph.operations) {
    conv |= op.is_conv(), product |= op.kind == kMatmulOp;
    if (op.is_conv())
      graph.name = op.kind == kConvForwardOp ? "convolution"
                   : op.kind == kConvDataOp  ? "convolution_data"
                                             : "convolution_filter";
  }
  if (product) graph.name = "products";
  return conv && product ? "convolutions and products in one graph" : "";
}

// As the real library answers for a described H200, which also compiles products of rows that begin
// anywhere; here a caller shows that it asks for none.
std::string unsupported_by_all(const GraphInfo& graph) {
  constexpr int64_t kPack = 8, kWidest = 128;
  const auto sums = std::count_if(graph.operations.begin(), graph.operations.end(),
                                  [](const Operation& op) { return op.kind == kReductionOp; });
  for (const Operation& op : graph.operations) {
    const bool groups = op.is_conv() && op.out.dims[1] != op.in[0].dims[1],
               strides = std::any_of(op.stride.begin(), op.stride.end(),
                                     [](int64_t s) { return s != 1; });
    if (op.kind == kConvDataOp && ((sums > 0 && groups) || (sums > 1 && strides)))
      return "sums behind the gradient of a convolution with groups, or two with strides";
    const bool kept = op.out.type == op.in[0].type || (op.out.is_virtual && op.out.type == kFloat);
    if (op.is_conv() && (op.in[0].type != op.in[1].type || !kept))
      return "tensors of a convolution have types " + std::to_string(op.in[0].type) + ", " +
             std::to_string(op.in[1].type) + " and " + std::to_string(op.out.type);
    if (op.kind != kMatmulOp) continue;
    for (const TensorInfo& x : op.in) {
      if (x.is_virtual) continue;
      if (x.type != kHalf && x.type != kBFloat16)
        return "products of type " + std::to_string(x.type);
      const size_t n = x.dims.size();
      const int64_t width = x.strides[n - 1] == 1 ? x.dims[n - 1] : x.dims[n - 2];
      if (x.strides[n - 1] != 1 && x.strides[n - 2] != 1) return "products of strided rows";
      for (size_t d = 0; d < n; ++d)
        if (x.dims[d] != 1 && x.strides[d] != 1 && (x.strides[d] == 0 || x.strides[d] % kPack))
          return "products of rows that do not each begin at 16 bytes of their own";
      if (width % kPack || width > kWidest) return "heads of width " + std::to_string(width);
      if (x.alignment < 16) return "products of operands aligned to " + std::to_string(x.alignment);
    }
  }
  return "";
}

bool is_f32(const GraphInfo& graph) {
  return std::all_of(graph.read.begin(), graph.read.end(),
                     [](const TensorInfo& t) { return t.type == kFloat; });
}

}  // namespace vgpu::dnn
