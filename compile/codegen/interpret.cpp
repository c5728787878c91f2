// Runs a body with one core op for each instruction. A value has one dim for each loop, of extent 1
// where it does not vary, so broadcasting does the loops.
#include "compile/codegen/body.h"
#include "core/dispatch/context.h"
#include "core/dispatch/copy.h"
#include "core/ops/create.h"
#include "core/ops/pointwise.h"
#include "core/ops/reduce.h"
#include "core/ops/views.h"

namespace tessera::compiler {
namespace {

class Interpreter {
 public:
  Interpreter(const Body& body, std::span<const Tensor> in) : b_(body), in_(in) {}

  void run(std::span<const Tensor> out) {
    for (const Instr& i : b_.instrs) values_.push_back(value(i));
    // Results may lie over operands, so all values are computed before any is stored.
    Tensors stored;
    for (const Store& s : b_.stores) {
      Tensor v = expand(values_[size_t(s.value)], shape_of(stored_loops(s)));
      stored.push_back(b_.instrs[size_t(s.value)].kind == InstrKind::kLoad ? dense_copy(v) : v);
    }
    for (size_t i = 0; i < stored.size(); ++i)
      copy_values(at(out[i], b_.stores[i].to, stored_loops(b_.stores[i])), stored[i]);
  }

 private:
  static LoopMask stored_loops(const Store& s) {
    LoopMask m = 0;
    for (size_t l = 0; l < s.to.strides.size(); ++l) m |= LoopMask(s.to.strides[l] != 0) << l;
    return m;
  }
  Shape shape_of(LoopMask loops) const {
    Shape s;
    for (size_t l = 0; l < b_.extents.size(); ++l)
      s.push_back(loops >> l & 1 ? b_.extents[l] : int64_t(1));
    return s;
  }
  Tensor at(const Tensor& memory, const Access& a, LoopMask loops) const {
    return Tensor({shape_of(loops), Strides(std::span(a.strides.begin(), a.strides.size())),
                   a.dtype, memory.device()},
                  memory.storage(), memory.offset());
  }
  const Tensor& operand(const Instr& i, size_t k = 0) const { return values_[size_t(i.in[k])]; }

  Tensor value(const Instr& i) const {
    Device device = in_.empty() ? Device{} : in_[0].device();
    switch (i.kind) {
      case InstrKind::kLoad:
        return at(in_[size_t(i.operand)], b_.operands[size_t(i.operand)], i.loops);
      case InstrKind::kConstant:
        return reshape(scalar_tensor(i.value, i.dtype, device), shape_of(0));
      case InstrKind::kIndex:
        return reshape(arange(0, b_.extents[size_t(i.loop)], 1, {kI64, device}),
                       shape_of(1u << i.loop));
      case InstrKind::kPointwise: {
        if (i.op == "where") return where(operand(i), operand(i, 1), operand(i, 2));
        Tensors operands;
        for (size_t k = 0; k < i.in.size(); ++k) operands.push_back(operand(i, k));
        return std::move(eager_backend().run(pointwise_primitive(i.op), operands)[0]);
      }
      case InstrKind::kCast: return cast(operand(i), i.dtype);
      case InstrKind::kReduce: return reduce(i);
    }
    return {};
  }

  Tensor reduce(const Instr& i) const {
    const Instr& x = b_.instrs[size_t(i.in[0])];
    Tensor whole = expand(operand(i), shape_of(x.loops | i.reduced));
    Dims dims;
    for (size_t l = 0; l < b_.extents.size(); ++l)
      if (i.reduced >> l & 1) dims.push_back(int64_t(l));
    switch (i.reduce) {
      case ReduceKind::kSum: return sum(whole, dims, true);
      case ReduceKind::kProd: return prod(whole, dims, true);
      case ReduceKind::kMax: return amax(whole, dims, true);
      case ReduceKind::kMin: return amin(whole, dims, true);
      case ReduceKind::kAny: return any(whole, dims, true);
      default: return all(whole, dims, true);
    }
  }

  const Body& b_;
  std::span<const Tensor> in_;
  std::vector<Tensor> values_;
};

}  // namespace

void interpret_body(const Body& body, std::span<const Tensor> in, std::span<const Tensor> out) {
  TESSERA_ASSERT(in.size() == body.operands.size() && out.size() == body.stores.size(),
                 "body: {} operands and {} results for {} and {}", in.size(), out.size(),
                 body.operands.size(), body.stores.size());
  Scoped<LayerMask> below_all_layers(context().enabled, 0);
  EagerScope eager;
  Interpreter(body, in).run(out);
}

}  // namespace tessera::compiler
