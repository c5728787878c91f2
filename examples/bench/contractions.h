// The contractions of a training step as bare library calls: prepared oneDNN matmuls and
// convolutions on operands with the layouts of the step, timed warm and on the same core. Their sum
// is the bound of a step: no framework that computes its contractions with this library can be
// faster.
#pragma once
#include <memory>
#include <string>
#include <vector>

#include "core/tensor/tensor.h"
#include "examples/bench/convolutions.h"

namespace tessera::bench {

/// One loop of a product with its strides in A, B and C, in elements (0: the operand lacks it).
struct ProductLoop {
  int64_t extent = 1, a = 0, b = 0, c = 0;
  bool operator==(const ProductLoop&) const = default;
};

/// C[.., m, n] = sum over k of A[.., m, k] B[.., k, n].
struct Product {
  std::vector<ProductLoop> batch;
  ProductLoop m, n, k;
  std::string spec;   // letters, as "btk,nk->btn"
  bool plain = true;  // false: the layouts fit no matrix; dense ones are timed instead
  bool bf16 = false;  // operands and results, summed in f32; else all is f32
  double flops() const;
  bool operator==(const Product&) const = default;
};

/// Returns the product that contracts operands `a` and `b` along these letters; the result is
/// dense.
Product make_product(const std::string& wa, const std::string& wb, const std::string& out,
                     const Meta& a, const Meta& b);
/// The products of an attention: q k^T, and weights v.
std::vector<Product> attention_products(const Meta& q, const Meta& k, const Meta& v);
/// The four products that a backward of attention needs: g v^T, weights^T g, and the gradient of
/// the scores with k and with q. (A kernel that does not keep the weights computes q k^T again;
/// that is its own choice and not counted.)
std::vector<Product> attention_grad_products(const Meta& g, const Meta& q, const Meta& k,
                                             const Meta& v);
/// Returns the same product with dense row-major operands.
Product dense_form(const Product& p);

/// A product that is prepared for timing, with operands of its own.
class BareProduct {
 public:
  explicit BareProduct(const Product& p);
  ~BareProduct();
  BareProduct(BareProduct&&) noexcept;
  void run();
  /// "brg:avx512_core" and the like.
  std::string implementation() const;

 private:
  struct State;
  std::unique_ptr<State> state_;
};

/// The contractions that a step executes.
struct Contractions {
  std::vector<Product> products;
  std::vector<Convolution> convolutions;
  double flops() const;
};

/// The contractions of a step, each shape prepared once.
class BareStep {
 public:
  /// `dense`: products with dense operands.
  BareStep(const Contractions& all, bool dense);
  /// Runs all of them: products in the step's order, then convolutions in the step's order.
  void run() {
    for (size_t i : order_) prepared_[i].run();
    for (size_t i : convolution_order_) convolutions_[i].run();
  }
  double flops() const { return flops_; }
  /// Prints each shape with its time when it is called repeatedly.
  void print_shapes();

 private:
  std::vector<Product> shapes_;
  std::vector<BareProduct> prepared_;
  std::vector<int64_t> calls_;
  std::vector<size_t> order_;
  std::vector<BareConvolution> convolutions_;
  std::vector<size_t> convolution_order_;
  double flops_ = 0;
};

}  // namespace tessera::bench
