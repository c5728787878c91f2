// bits_hash.cu against the same functor on the host: every alignment, ends within a word, and any
// number of blocks.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>

#include "core/backend/cuda/kernels/reduce.h"
#include "tests/cuda/kernels_device.h"
// Each text needs the one before it.
// clang-format off
#include "core/ops/functors/prelude.h"
#include "core/ops/functors/bits_hash.h"
// clang-format on

namespace tessera::cuda::test {
namespace {

class BitsHash : public KernelTest {};

TEST_F(BitsHash, WordsOfEveryAlignment) {
  std::vector<unsigned char> x(5000);
  for (size_t i = 0; i < x.size(); ++i) x[i] = static_cast<unsigned char>(i * 2654435761u >> 7);
  const Array<unsigned char> in(x);
  for (int unit : {1, 2, 4, 8}) {
    const KernelText text{"bits_hash", {bits_hash_instance(unit)}};
    const std::string name = bits_hash_instance(unit).name;
    for (unsigned long bytes : {0ul, 1ul, 7ul, 8ul, 9ul, 2047ul, 2048ul, 4096ul, 4991ul})
      for (unsigned blocks : {1u, 3u, 260u}) {
        const unsigned long words = (bytes + 7) / 8;
        fn::BitsHash want;
        for (unsigned long i = 0; i < words; ++i) {
          unsigned long long word = 0;
          std::memcpy(&word, x.data() + unit + 8 * i, std::min(8ul, bytes - 8 * i));
          fn::add_word(want, word, i);
        }
        fn::add_word(want, bytes, words);
        const Array<unsigned long> parts(2 * blocks), out(2);
        BitsHashCall c{in.get() + unit, parts.get(), words, bytes, blocks};
        d().launch(d().function(text, name + "_blocks"), Geometry{{blocks, 1, 1}, {256, 1, 1}, 0},
                   c);
        c.in = parts.get(), c.out = out.get();
        d().launch(d().function(text, name + "_join"), Geometry{{1, 1, 1}, {256, 1, 1}, 0}, c);
        EXPECT_EQ(out.read(), (std::vector<unsigned long>{want.first, want.second}))
            << unit << " " << bytes << " " << blocks;
      }
  }
}

}  // namespace
}  // namespace tessera::cuda::test
