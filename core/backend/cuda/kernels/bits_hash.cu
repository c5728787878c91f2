// The hash of functors/bits_hash.h: `blocks` adds the terms of every word, `join` adds what the
// blocks have left. After device.h.
namespace tessera::device {

inline constexpr int kHashThreads = 256;

/// The hash of all threads of the block, for all of them.
TESSERA_FN fn::BitsHash joined(const fn::BitsHash& mine) {
  fn::BitsHash all;
  all.first = block_join<Sum, kHashThreads>(mine.first);
  all.second = block_join<Sum, kHashThreads>(mine.second);
  return all;
}

/// T: what `in` is aligned to.
template <class T>
TESSERA_FN void hash_words(const BitsHashCall& c) {
  fn::BitsHash mine;
  for (unsigned long i = blockIdx.x * kHashThreads + threadIdx.x; i < c.words;
       i += gridDim.x * kHashThreads)
    fn::add_word(mine, fn::word_of<T>(c.in, i, c.bytes), i);
  mine = joined(mine);
  if (threadIdx.x == 0) c.out[2 * blockIdx.x] = mine.first, c.out[2 * blockIdx.x + 1] = mine.second;
}

TESSERA_FN void join_hashes(const BitsHashCall& c) {
  const auto* parts = static_cast<const unsigned long*>(c.in);
  fn::BitsHash all;
  for (unsigned i = threadIdx.x; i < c.parts; i += kHashThreads)
    all.first += parts[2 * i], all.second += parts[2 * i + 1];
  all = joined(all);
  if (threadIdx.x != 0) return;
  fn::add_word(all, c.bytes, c.words);
  c.out[0] = all.first, c.out[1] = all.second;
}

}  // namespace tessera::device

// instances: T
KERNEL(blocks, BitsHashCall, 256) { hash_words<T>(c); }
KERNEL(join, BitsHashCall, 256) { join_hashes(c); }
