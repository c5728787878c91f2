// The only inline PTX: powers of two by the unit for them, maxima that keep NaN, pairs of floats
// rounded to 16 bits, asynchronous copies into shared memory, and small tiles of it read into the
// lanes of a warp and multiplied by the matrix units. Printed before device.h; includes nothing.
// The twin below does the same with plain C++ and shuffles for compilers that do not make GPU code
// (the virtual GPU). Invariant: both forms take and give the same numbers in the same lanes; only
// the bits of NaN, the last bits of powers, and the rounding of sums inside one product of tiles
// may differ.
namespace tessera::device {

/// A lane's part of a product of tiles D [16, 8] = A [16, 16] B [16, 8] + C, where A and B hold
/// 16-bit floats by pairs in words and C and D are f32. With g = lane / 4 and t = lane % 4:
/// a[0] = A[g][2t, 2t+1], a[1] = A[g+8][2t, 2t+1], a[2] = A[g][2t+8, 2t+9], a[3] = A[g+8][2t+8,
/// ..], b[0] = B[2t, 2t+1][g], b[1] = B[2t+8, 2t+9][g], c[0], c[1] = C[g][2t, 2t+1], c[2], c[3] =
/// C[g+8][2t, 2t+1]. The lower half of a word is the element with the lower index.
struct FragmentA {
  unsigned word[4];
};
struct FragmentB {
  unsigned word[2];
};
struct FragmentC {
  float of[4];
};
/// A tile of [16, 16] 16-bit floats in shared memory as fragments: words 0 to 3 are an A; of two
/// products whose B are the tile's upper and lower half transposed (columns of B are its rows),
/// words 0 and 2 are the first B and words 1 and 3 the second.
struct FragmentTile {
  unsigned word[4];
};

#ifdef __CUDACC_VER_MAJOR__

/// 2^x within 2^-22 of it; 0 below 2^-126.
TESSERA_FN float about_exp2(float x) {
  float power;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(power) : "f"(x));
  return power;
}
/// The greater of two numbers; NaN where one of them is.
TESSERA_FN float max_or_nan(float a, float b) {
  float most;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(most) : "f"(a), "f"(b));
  return most;
}

/// Two floats rounded to nearest even, as to_bf16 and to_f16 do; `low` is in the lower half.
TESSERA_FN unsigned narrow_pair(float low, float high, fn::BF16) {
  unsigned pair;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
  return pair;
}
TESSERA_FN unsigned narrow_pair(float low, float high, fn::F16) {
  unsigned pair;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
  return pair;
}

TESSERA_FN void multiply_add(FragmentC& c, const FragmentA& a, const FragmentB& b, fn::BF16) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
      "{%0,%1,%2,%3};"
      : "+f"(c.of[0]), "+f"(c.of[1]), "+f"(c.of[2]), "+f"(c.of[3])
      : "r"(a.word[0]), "r"(a.word[1]), "r"(a.word[2]), "r"(a.word[3]), "r"(b.word[0]),
        "r"(b.word[1]));
}
TESSERA_FN void multiply_add(FragmentC& c, const FragmentA& a, const FragmentB& b, fn::F16) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
      "{%0,%1,%2,%3};"
      : "+f"(c.of[0]), "+f"(c.of[1]), "+f"(c.of[2]), "+f"(c.of[3])
      : "r"(a.word[0]), "r"(a.word[1]), "r"(a.word[2]), "r"(a.word[3]), "r"(b.word[0]),
        "r"(b.word[1]));
}

/// Every lane gives an address of 8 elements: row `lane % 8` of the part `lane / 8` of a tile,
/// whose parts are its quarters [8, 8] by columns. Turned: the elements are a column of the
/// quarter.
template <bool kTurned>
TESSERA_FN FragmentTile load_tile(const void* elements) {
  const unsigned shared = static_cast<unsigned>(__cvta_generic_to_shared(elements));
  FragmentTile f;
  if constexpr (kTurned)
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(f.word[0]), "=r"(f.word[1]), "=r"(f.word[2]), "=r"(f.word[3])
                 : "r"(shared)
                 : "memory");
  else
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(f.word[0]), "=r"(f.word[1]), "=r"(f.word[2]), "=r"(f.word[3])
                 : "r"(shared)
                 : "memory");
  return f;
}

/// Copies 16 bytes from global to shared memory without waiting; where `there` is false, zeros.
/// Both addresses are multiples of 16.
TESSERA_FN void copy_async(void* to, const void* from, bool there) {
  const unsigned shared = static_cast<unsigned>(__cvta_generic_to_shared(to));
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared), "l"(from),
               "r"(there ? 16 : 0)
               : "memory");
}
/// Ends a group of copies.
TESSERA_FN void end_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }
/// Waits until all but the last kPending groups of this thread are done; a barrier must follow
/// before other threads read what they brought.
template <int kPending>
TESSERA_FN void wait_copies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

#else  // the twin

TESSERA_FN float about_exp2(float x) { return x < -126.0f ? 0.0f : ::exp2f(x); }
TESSERA_FN float max_or_nan(float a, float b) { return (a > b) | (a != a) ? a : b; }

TESSERA_FN unsigned narrow_pair(float low, float high, fn::BF16) {
  return fn::to_bf16(low).bits | static_cast<unsigned>(fn::to_bf16(high).bits) << 16;
}
TESSERA_FN unsigned narrow_pair(float low, float high, fn::F16) {
  return fn::to_f16(low).bits | static_cast<unsigned>(fn::to_f16(high).bits) << 16;
}

template <class T>
TESSERA_FN void multiply_add_twin(FragmentC& c, const FragmentA& a, const FragmentB& b) {
  const unsigned lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  auto low = [](unsigned word) { return fn::widen(T{static_cast<unsigned short>(word)}); };
  auto high = [](unsigned word) { return fn::widen(T{static_cast<unsigned short>(word >> 16)}); };
  for (unsigned from = 0; from < 4; ++from)
    for (unsigned half = 0; half < 2; ++half) {  // elements 2 from and 2 from + 1 of each half of k
      const unsigned top = __shfl_sync(0xffffffffu, a.word[2 * half], 4 * g + from);
      const unsigned bottom = __shfl_sync(0xffffffffu, a.word[2 * half + 1], 4 * g + from);
      const unsigned left = __shfl_sync(0xffffffffu, b.word[half], 4 * (2 * t) + from);
      const unsigned right = __shfl_sync(0xffffffffu, b.word[half], 4 * (2 * t + 1) + from);
      c.of[0] += low(top) * low(left) + high(top) * high(left);
      c.of[1] += low(top) * low(right) + high(top) * high(right);
      c.of[2] += low(bottom) * low(left) + high(bottom) * high(left);
      c.of[3] += low(bottom) * low(right) + high(bottom) * high(right);
    }
}
TESSERA_FN void multiply_add(FragmentC& c, const FragmentA& a, const FragmentB& b, fn::BF16) {
  multiply_add_twin<fn::BF16>(c, a, b);
}
TESSERA_FN void multiply_add(FragmentC& c, const FragmentA& a, const FragmentB& b, fn::F16) {
  multiply_add_twin<fn::F16>(c, a, b);
}
// Lane 4 g + t reads elements 2 t and 2 t + 1 of row g of each quarter, or element g of its
// columns.
template <bool kTurned>
TESSERA_FN FragmentTile load_tile(const void* elements) {
  const unsigned lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  const auto own = reinterpret_cast<unsigned long>(elements);
  auto element = [&](unsigned quarter, unsigned row, unsigned at) {
    const unsigned long line = __shfl_sync(0xffffffffu, own, 8 * quarter + row);
    return unsigned(reinterpret_cast<const unsigned short*>(line)[at]);
  };
  FragmentTile f;
  for (unsigned q = 0; q < 4; ++q)
    f.word[q] = kTurned ? element(q, 2 * t, g) | element(q, 2 * t + 1, g) << 16
                        : element(q, g, 2 * t) | element(q, g, 2 * t + 1) << 16;
  return f;
}

// Copies at once: a thread that reads too early reads memory of the block that nobody has ordered,
// which the check of shared memory finds.
TESSERA_FN void copy_async(void* to, const void* from, bool there) {
  unsigned* words = static_cast<unsigned*>(to);
  for (int i = 0; i < 4; ++i) words[i] = there ? static_cast<const unsigned*>(from)[i] : 0;
}
TESSERA_FN void end_copies() {}
template <int kPending>
TESSERA_FN void wait_copies() {}

#endif

}  // namespace tessera::device
