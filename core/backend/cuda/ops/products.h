// Products by cuBLASLt. A product is stated by descriptors, which a thread keeps by what they say;
// how it is computed is the library's suggestion that was fastest when it was timed, at the
// product's first use on any machine with such a card. Invariants: in deterministic mode nothing is
// timed and no sum is split, so that a sum's order depends on the product alone; what the library
// does not compute, the caller's own kernels do.
#pragma once
#include <cstdint>
#include <span>

#include "core/backend/cuda/kernels/matmul.h"
#include "core/tensor/stream.h"

namespace tessera::cuda {

/// While one lives, Tessera's own kernels compute the products of the calling thread: for tests and
/// measurements that compare the two.
class OwnProducts {
 public:
  OwnProducts();
  ~OwnProducts();
  OwnProducts(const OwnProducts&) = delete;
  OwnProducts& operator=(const OwnProducts&) = delete;

 private:
  bool before_;
};

/// What a product c = a b [m, n] computes besides.
struct Epilogue {
  enum Kind : int32_t {
    kNone,
    kBias,      // bias [n] is added to each row of c
    kGelu,      // so it is; aux becomes that sum, and c its gelu_tanh
    kGeluGrad,  // c is multiplied by gelu_tanh'(aux), and bias [n] becomes the sum of c's rows
    kSumsOfA,   // bias [m] becomes the sums of a's rows
    kSumsOfB,   // bias [n] becomes the sums of b's columns
    kAdd,       // addend, which lies as c does or is c, is added to c
  };
  Kind kind = kNone;
  void* bias = nullptr;
  void* aux = nullptr;  // [m, n], dense by rows
  const void* addend = nullptr;
  explicit operator bool() const { return kind != kNone; }
};

/// The dtypes of a product's operands and of its result: all one, or a and b of 16 bits and c f32,
/// or a and b of eight bits and c f32 or of 16 bits.
struct Types {
  DType a, b, c;
};
/// By which numbers, f32 on the card, a product is multiplied whose operands have eight bits.
struct Scales {
  const void *a = nullptr, *b = nullptr;
};

/// Whether the library is in use and the card multiplies operands of eight bits by it.
bool multiplies_eight_bits(const Stream& stream);

/// Enqueues c = a b on `stream` for every position of a batch of extents `batch`; a is [m, k] and b
/// is [k, n]. f32 is computed as float32_matmul_precision() says. False where nothing was enqueued,
/// or what was is to be overwritten: the library is not in use (one line of the log says why), or
/// it does not compute this. That is so for other dtypes than floats; for empty sums and results;
/// where a matrix has two dims with strides above 1, or rows that overlap (as after expand); where
/// a batch is one of more than kMostCalls batches with one stride each. With an epilogue but kAdd
/// it is also so in f64 and where c lies by columns; with one but kAdd and kBias, for a batch; with
/// GELU, in f32, since how many digits the library's tanh has is not documented, and where n is no
/// multiple of 8, as aux has to be. Operands of eight bits are multiplied by cards from
/// capability 8.9 on, where k and n are multiples of 16, rows of a and columns of b are dense, and
/// the epilogue is none, or a bias of 16 bits as c has.
bool library_product(const Types& types, std::span<const int64_t> batch, int64_t m, int64_t n,
                     int64_t k, const Matrices& c, const Matrices& a, const Matrices& b,
                     const Stream& stream, const Epilogue& epilogue = {},
                     const Scales& scales = {});

}  // namespace tessera::cuda
