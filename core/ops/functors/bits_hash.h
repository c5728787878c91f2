// A hash of 128 bits of the bytes of a tensor, as two sums of terms, one for each word of 8 bytes.
// Sums of integers have no order, so that threads, blocks and devices get the same bits however
// they share the words. Include prelude.h first.
namespace tessera::fn {

/// The two sums, modulo 2^64.
struct BitsHash {
  unsigned long long first = 0, second = 0;
};

/// Adds the terms of word `i`:
///   h = word + (i + 1) k,  f(h) = ((h ^ h >> 32) c) ^ (((h ^ h >> 32) c) >> 32),
///   first += f(h),  second += f(f(h) + k).
/// f is a bijection, so two tensors that differ in one word alone have other sums, both; others
/// have equal ones by chance, with a probability of about 2^-128.
TESSERA_FN void add_word(BitsHash& hash, unsigned long long word, unsigned long long i) {
  constexpr unsigned long long k = 0x9e3779b97f4a7c15ull, c = 0xd6e8feb86659fd93ull;
  unsigned long long h = word + (i + 1) * k;
  h = (h ^ h >> 32) * c;
  h ^= h >> 32;
  hash.first += h;
  h += k;
  h = (h ^ h >> 32) * c;
  hash.second += h ^ h >> 32;
}

/// Word `i` of `bytes` bytes: its first byte is the lowest, and zeros stand behind the last. T has
/// as many bytes as `data` is aligned to, 8 at most.
template <class T>
TESSERA_FN unsigned long long word_of(const void* data, unsigned long long i,
                                      unsigned long long bytes) {
  constexpr unsigned long long kMask = ~0ull >> (64 - 8 * sizeof(T));  // T may have a sign
  unsigned long long word = 0;
  if (8 * i + 8 <= bytes) {
    const T* parts = static_cast<const T*>(data) + i * (8 / sizeof(T));
    for (int b = 0; b < int(8 / sizeof(T)); ++b)
      word |= (static_cast<unsigned long long>(parts[b]) & kMask) << (8 * sizeof(T) * b) % 64;
    return word;
  }
  const unsigned char* rest = static_cast<const unsigned char*>(data) + 8 * i;
  for (int b = 0; 8 * i + b < bytes; ++b) word |= static_cast<unsigned long long>(rest[b]) << 8 * b;
  return word;
}

}  // namespace tessera::fn
