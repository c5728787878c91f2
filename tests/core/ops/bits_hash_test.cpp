// The hash of a tensor's bits: its formula, and that no flipped bit is missed.
#include "core/ops/bits_hash.h"

#include <gtest/gtest.h>

#include <cstring>
#include <set>

#include "core/ops/create.h"
#include "core/ops/samples.h"
#include "core/ops/views.h"

namespace tessera {
namespace {

using Hash = std::pair<uint64_t, uint64_t>;

Hash hash_of(const Tensor& t) {
  const Tensor h = bits_hash(t);
  return {uint64_t(h.data<int64_t>()[0]), uint64_t(h.data<int64_t>()[1])};
}

// The formula, word by word, with zeros behind the bytes and their number as the last word.
Hash formula(std::vector<unsigned char> bytes) {
  const size_t count = bytes.size();
  bytes.resize((count + 7) / 8 * 8);
  std::vector<uint64_t> words(bytes.size() / 8);
  if (!words.empty()) std::memcpy(words.data(), bytes.data(), bytes.size());
  words.push_back(count);
  const auto f = [](uint64_t h) {
    h = (h ^ h >> 32) * 0xd6e8feb86659fd93u;
    return h ^ h >> 32;
  };
  const uint64_t k = 0x9e3779b97f4a7c15u;
  Hash sums{0, 0};
  for (size_t i = 0; i < words.size(); ++i) {
    const uint64_t h = f(words[i] + (i + 1) * k);
    sums.first += h, sums.second += f(h + k);
  }
  return sums;
}

Tensor bytes(int64_t n) { return sample_integers({n}, 0, 256, 3).to(kU8); }

TEST(BitsHash, IsItsFormula) {
  for (int64_t n = 0; n < 70; ++n) {
    const Tensor x = bytes(n);
    const auto* p = n ? x.data<uint8_t>() : nullptr;
    EXPECT_EQ(hash_of(x), formula({p, p + n})) << n;
  }
}

TEST(BitsHash, OfBytesWhateverTheDtype) {
  const Tensor x = bytes(48);
  for (DType t : {kF64, kI64, kF32, kI32, kBF16, kF16}) {
    Tensor y = empty({48 / int64_t(size_of(t))}, t);
    std::memcpy(y.raw(), x.data<uint8_t>(), 48);
    EXPECT_EQ(hash_of(y), hash_of(x)) << name_of(t);
  }
}

TEST(BitsHash, OfElementsInTheirOrderWhateverTheStrides) {
  const Tensor x = sample_integers({3, 5}, -9, 9, 1);
  const Tensor turned = transpose(transpose(x, 0, 1).contiguous(), 0, 1);
  ASSERT_FALSE(turned.is_contiguous());
  EXPECT_EQ(hash_of(turned), hash_of(x));
  EXPECT_NE(hash_of(transpose(x, 0, 1)), hash_of(x));
  EXPECT_EQ(hash_of(narrow(bytes(20), 0, 3, 11)), hash_of(narrow(bytes(20), 0, 3, 11).clone()));
}

// Both sums change with each bit, and no two bits change them alike.
TEST(BitsHash, EveryBitCounts) {
  const Tensor x = bytes(27);
  std::set<uint64_t> first{hash_of(x).first}, second{hash_of(x).second};
  for (int bit = 0; bit < 27 * 8; ++bit) {
    Tensor y = x.clone();
    y.data<uint8_t>()[bit / 8] ^= uint8_t(1 << bit % 8);
    first.insert(hash_of(y).first), second.insert(hash_of(y).second);
  }
  EXPECT_EQ(first.size(), 1u + 27 * 8);
  EXPECT_EQ(second.size(), 1u + 27 * 8);
}

TEST(BitsHash, OrderAndLengthCount) {
  std::set<Hash> all;
  for (int64_t n = 0; n < 30; ++n) all.insert(hash_of(zeros({n}, {.dtype = kU8})));
  EXPECT_EQ(all.size(), 30u);
  EXPECT_NE(hash_of(from_values<int64_t>({1, 2, 3}, {3})),
            hash_of(from_values<int64_t>({2, 1, 3}, {3})));
}

}  // namespace
}  // namespace tessera
