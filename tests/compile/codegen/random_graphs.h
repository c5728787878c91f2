// Random programs for fused kernels: pointwise ops, masks, reductions over various dims, norms and
// softmaxes, dropout, views that overlap, writes in place and gradients, in all dtypes, on tensors
// whose dims are axes of the program or 1. The seed alone determines the ops, so the same program
// can be run at several sizes.
#pragma once
#include <algorithm>
#include <bit>
#include <cmath>
#include <random>

#include "core/core.h"

namespace tessera::test {

class RandomProgram {
 public:
  static constexpr int kAxes = 3;

  /// `size`: the extent of one of the axes; 0: the program has its own.
  explicit RandomProgram(uint64_t seed, int64_t size = 0);

  /// Runs the same ops at each call, on `inputs` and `state`, with keys from `generator`.
  Tensors run();

  std::vector<Tensor> inputs, state;
  Generator generator;

 private:
  // What is known of a value's bits. Numbers that are multiples of 2^-fraction below 2^magnitude
  // have exact sums as long as both fit in the digits of their dtype.
  struct Entry {
    Tensor t;
    bool exact = true;  // no order of sums changes a bit of it, but for the sign of zeros
    bool grid = false;
    int fraction = 0, magnitude = 0;
  };
  enum class Kind : uint8_t { kReal, kWhole, kTruth };

  uint64_t pick(uint64_t n) { return random_() % n; }
  bool one_in(uint64_t n) { return pick(n) == 0; }
  int64_t axis() { return int64_t(pick(kAxes)); }
  static Kind kind_of(const Entry& e) {
    return is_floating(e.t.dtype()) ? Kind::kReal
           : e.t.dtype() == kBool   ? Kind::kTruth
                                    : Kind::kWhole;
  }
  static int digits(DType t) {
    return t == kF64 ? 53 : t == kF32 ? 24 : t == kF16 ? 11 : t == kBF16 ? 8 : 62;
  }
  void add(Tensor t, bool exact) { pool_.push_back({std::move(t), exact}); }
  void add(Tensor t, const Entry& e) { add(std::move(t), e.exact); }
  void add_grid(Tensor t, const Entry& e, int fraction, int magnitude) {
    const bool fits = e.grid && fraction + magnitude <= digits(t.dtype());
    pool_.push_back({std::move(t), e.exact, fits, fraction, magnitude});
  }
  // Newer values more often.
  Entry newer() {
    const size_t n = pool_.size();
    return pool_[std::max(random_() % n, random_() % n)];
  }
  Entry of(Kind kind);
  Entry real() { return of(Kind::kReal); }
  Entry truth() { return of(Kind::kTruth); }
  // Bounded, so that no sum or product runs away: |x| < 2.
  Entry tame(Entry e) {
    if (e.grid && e.magnitude <= 1) return e;
    return {tanh(e.t), e.exact};
  }

  Shape shape_of(uint64_t axes) const;
  Tensor values(const Shape& shape, DType dtype);
  Tensor laid_out(const Tensor& dense);
  void make_input();

  void step();
  void unary();
  void binary();
  void whole();
  void mask();
  void reduction();
  void softmax_like();
  void norm_like();
  void convert();
  void view();
  void shifted();
  void write();
  void update();
  void draw();
  void other();
  Tensor loss();

  uint64_t seed_;
  std::mt19937_64 random_;
  int64_t extents_[kAxes];
  int64_t counted_[kAxes];                        // the same for every size, and no less
  bool differentiate_ = false, special_ = false;  // special: NaN, infinities, denormals
  std::vector<Entry> pool_;
  std::vector<Tensor> more_;  // results that are no part of the pool: other shapes
  bool state_exact_ = true;
  std::vector<bool> grids_;  // by input

 public:
  /// By result of the last run: whether every order of sums gives its bits.
  std::vector<bool> exact;
  bool state_exact() const { return state_exact_; }
};

}  // namespace tessera::test
