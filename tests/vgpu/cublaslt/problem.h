// A product as the descriptors state it, checked: what the vendor documents as refused is refused
// here, and some more (rows as the order of results with epilogues, epilogues in f64, alpha other
// than 1 with gradients of biases), so that what runs here should run on cards.
#pragma once
#include <cstdint>
#include <string>

#include "tests/vgpu/cublaslt/objects.h"

namespace vgpu::blas {

/// A batch of matrices in memory.
struct Matrices {
  int type = kR32F;
  int64_t rows = 0, columns = 0, leading = 0, stride = 0;
  bool by_rows = false, transposed = false;
  int64_t runs() const { return by_rows ? rows : columns; }
  int64_t run() const { return by_rows ? columns : rows; }
  int64_t at(int64_t row, int64_t column) const {
    return by_rows ? row * leading + column : row + column * leading;
  }
};
struct Problem {
  Matrices a, b, c, d;
  int64_t m = 0, n = 0, k = 0, batch = 0;
  ProductState product;
  bool adds_bias() const { return product.epilogue & kEpilogueBias; }
  bool has_aux() const { return product.epilogue & 128; }
  bool is_gelu() const { return product.epilogue & kEpilogueGelu; }
  bool is_relu() const { return product.epilogue & kEpilogueRelu; }
  bool is_gelu_gradient() const { return product.epilogue & 64; }
  /// A sum over D's columns goes to the bias pointer.
  bool sums_result() const { return product.epilogue & 16; }
  int bias_type() const;
  /// Factors of eight bits: what their rules ask for is refused otherwise.
  bool is_f8() const;
  bool sums_operand() const { return product.epilogue & (kEpilogueBGradA | kEpilogueBGradB); }
  /// Elements at the bias pointer.
  int64_t bias_elements() const { return product.epilogue == kEpilogueBGradB ? n : m; }
};

bool is_f8(int type);
int bytes_of(int type);
/// "GELU_AUX_BIAS"; "" for what is no epilogue.
std::string epilogue_name(int epilogue);

struct Refusal {
  Status status = Status::kSuccess;
  std::string why;
};
/// Fills `p`, or says why there is no such product.
Refusal state_problem(Problem& p, Product product, Layout a, Layout b, Layout c, Layout d);

/// An algorithm that this library has: how it sums, and what it needs.
struct Way {
  int id, splits, reduction;
  int alignment;  // in bytes, of addresses, leading dimensions and strides; 0: that of an element
  /// The same for a matrix of this product.
  int alignment_of(const Problem& p, int type) const;
};
/// Those that can compute `p`, in the order of suggestions.
extern const Way kWays[4];
uint64_t workspace_of(const Way& way, const Problem& p);
/// Tells problems apart: an algorithm serves the one that it was suggested for.
uint64_t fingerprint(const Problem& p);

/// Computes one product of the batch after the other.
struct Operands {
  const void *a, *b, *c;
  void *d, *workspace;
  double alpha, beta;
};
void compute(const Problem& p, const Way& way, const Operands& o);

}  // namespace vgpu::blas
