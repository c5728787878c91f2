// Attributes of primitives that kernels read. The mathematics of each op stays in its .cpp, in a
// class derived from these.
#pragma once
#include <string>

#include "core/ops/scalar.h"
#include "core/primitive/primitive.h"

namespace tessera {

struct CatAttributes : Primitive {
  CatAttributes(const OpInfo& op, int dim) : Primitive(op), dim(dim) {}
  const int dim;
};

struct UnsliceAttributes : Primitive {
  UnsliceAttributes(const OpInfo& op, int dim, int64_t begin, int64_t step, int64_t extent)
      : Primitive(op), dim(dim), begin(begin), step(step), extent(extent) {}
  const int dim;
  const int64_t begin, step, extent;
};

enum class ReduceKind : uint8_t { kSum, kProd, kMax, kMin, kAny, kAll };
/// The name of its op: "amax".
std::string_view name_of(ReduceKind kind);

/// Reduces the dims whose bit is set in `mask`.
struct ReduceAttributes : Primitive {
  ReduceAttributes(const OpInfo& op, ReduceKind kind, uint32_t mask, bool keepdim)
      : Primitive(op), kind(kind), mask(mask), keepdim(keepdim) {}
  const ReduceKind kind;
  const uint32_t mask;
  const bool keepdim;
};

struct FullAttributes : Primitive {
  FullAttributes(const OpInfo& op, const Shape& shape, Scalar value, DType dtype, Device device)
      : Primitive(op), shape(shape), value(value), dtype(dtype), device(device) {}
  const Shape shape;
  const Scalar value;
  const DType dtype;
  const Device device;
};

struct ArangeAttributes : Primitive {
  ArangeAttributes(const OpInfo& op, int64_t count, Scalar begin, Scalar step, DType dtype,
                   Device device)
      : Primitive(op), count(count), begin(begin), step(step), dtype(dtype), device(device) {}
  const int64_t count;
  const Scalar begin, step;  // in integers where both are: exact beyond 2^53
  const DType dtype;
  const Device device;
};

/// The letters of an einsum of two operands; every letter of an operand is in the other or in the
/// result. `leaves` 0: summed in whatever order is fast. Otherwise the summed letters, in the order
/// of `a`, are one loop, cut into leaves_of(extent) equal leaves; a leaf is one chain of fused
/// multiply-adds for each element of the result, and leaves meet in a balanced tree.
struct ContractAttributes : Primitive {
  ContractAttributes(const OpInfo& op, std::string a, std::string b, std::string out,
                     int64_t leaves = 0)
      : Primitive(op), a(std::move(a)), b(std::move(b)), out(std::move(out)), leaves(leaves) {}
  /// The largest power of two up to `leaves` that divides `extent` (at least 1).
  int64_t leaves_of(int64_t extent) const {
    int64_t n = 1;
    while (2 * n <= leaves && extent % (2 * n) == 0) n *= 2;
    return n;
  }
  const std::string a, b, out;
  const int64_t leaves;
};

struct CrossEntropyAttributes : Primitive {
  CrossEntropyAttributes(const OpInfo& op, int64_t ignore_index, bool mean, bool with_grad)
      : Primitive(op), ignore_index(ignore_index), mean(mean), with_grad(with_grad) {}
  const int64_t ignore_index;
  const bool mean, with_grad;
};

/// Operands x, then weight and bias where the op has them; `centred` false is rms-norm.
struct NormAttributes : Primitive {
  NormAttributes(const OpInfo& op, double eps, bool centred, bool has_weight, bool has_bias)
      : Primitive(op), eps(eps), centred(centred), has_weight(has_weight), has_bias(has_bias) {}
  const double eps;
  const bool centred, has_weight, has_bias;
};

struct EmbeddingAttributes : Primitive {
  EmbeddingAttributes(const OpInfo& op, int64_t rows, int64_t padding_idx, Range part = {})
      : Primitive(op), rows(rows), padding_idx(padding_idx), part(part) {}
  const int64_t rows;         // of the table
  const int64_t padding_idx;  // -1: none
  const Range part;  // of a table split by rows: ids outside give zeros; extent 0: not split
};

struct AttentionAttributes : Primitive {
  AttentionAttributes(const OpInfo& op, double scale, bool causal)
      : Primitive(op), scale(scale), causal(causal) {}
  const double scale;
  const bool causal;
};

enum class RandomKind : uint8_t { kUniform, kNormal, kInteger };

/// Element (i, j, ..) of the result is element (begin + i, ..) of a global tensor of extents
/// `global`.
struct RandomAttributes : Primitive {
  RandomAttributes(const OpInfo& op, RandomKind kind, const Shape& shape, const Dims& begin,
                   const Shape& global, int64_t low, int64_t high, DType dtype, Device device)
      : Primitive(op),
        kind(kind),
        shape(shape),
        begin(begin),
        global(global),
        low(low),
        high(high),
        dtype(dtype),
        device(device) {}
  const RandomKind kind;
  const Shape shape;
  const Dims begin;
  const Shape global;
  const int64_t low, high;
  const DType dtype;
  const Device device;
};

/// Operands x, key and, where `by_sample`, the sample numbers of dim 0. `begin`, `global` as above,
/// empty: not split.
struct DropoutAttributes : Primitive {
  DropoutAttributes(const OpInfo& op, double p, bool by_sample, const Dims& begin,
                    const Shape& global)
      : Primitive(op), p(p), by_sample(by_sample), begin(begin), global(global) {}
  const double p;
  const bool by_sample;
  const Dims begin;
  const Shape global;
};

/// Operands lr, step and scale (0-d f64), then `count` params, grads, m, v; results params, m, v.
/// `if_finite`: results are what was there before where scale is not finite.
struct AdamAttributes : Primitive {
  AdamAttributes(const OpInfo& op, int count, double beta1, double beta2, double eps,
                 double weight_decay, bool decoupled, bool if_finite)
      : Primitive(op),
        count(count),
        beta1(beta1),
        beta2(beta2),
        eps(eps),
        weight_decay(weight_decay),
        decoupled(decoupled),
        if_finite(if_finite) {}
  const int count;
  const double beta1, beta2, eps, weight_decay;
  const bool decoupled, if_finite;
};

/// Operands lr and scale (0-d f64), then `count` params, grads and, with momentum, buffers; results
/// params, buffers. `if_finite` as above.
struct SgdAttributes : Primitive {
  SgdAttributes(const OpInfo& op, int count, double momentum, double dampening, double weight_decay,
                bool nesterov, bool first, bool if_finite)
      : Primitive(op),
        count(count),
        momentum(momentum),
        dampening(dampening),
        weight_decay(weight_decay),
        nesterov(nesterov),
        first(first),
        if_finite(if_finite) {}
  const int count;
  const double momentum, dampening, weight_decay;
  const bool nesterov, first, if_finite;
};

}  // namespace tessera
