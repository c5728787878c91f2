#include "core/io/hash.h"

#if defined(__x86_64__) && __has_include(<xxh_x86dispatch.h>)
#include <xxh_x86dispatch.h>  // xxhash.h with the instruction set chosen at run time: same hashes
#else
#include <xxhash.h>
#endif

#include <algorithm>
#include <bit>
#include <cstring>
#include <vector>

#include "core/dispatch/copy.h"
#include "core/io/file.h"

namespace tessera::io {

static_assert(std::endian::native == std::endian::little, "files and hashes are little-endian");

void FreeXxh::operator()(XXH3_state_s* s) const { XXH3_freeState(s); }

std::string to_string(const Digest& d) { return fmt::format("{:016x}{:016x}", d.high, d.low); }

bool parse_digest(std::string_view text, Digest* d) {
  if (text.size() != 32) return false;
  uint64_t parts[2] = {};
  for (size_t i = 0; i < 32; ++i) {
    char c = text[i];
    bool digit = c >= '0' && c <= '9';
    if (!digit && !(c >= 'a' && c <= 'f')) return false;
    parts[i / 16] = parts[i / 16] << 4 | uint64_t(digit ? c - '0' : c - 'a' + 10);
  }
  *d = {parts[0], parts[1]};
  return true;
}

Xxh128::Xxh128() : state_(XXH3_createState()) {
  TESSERA_CHECK(state_ != nullptr, "xxh128: out of memory");
  reset();
}
void Xxh128::reset() { XXH3_128bits_reset(state_.get()); }
void Xxh128::update(const void* data, size_t bytes) {
  if (bytes) XXH3_128bits_update(state_.get(), data, bytes);
}
Digest Xxh128::digest() const {
  XXH128_hash_t h = XXH3_128bits_digest(state_.get());
  return {h.high64, h.low64};
}
Digest xxh128(const void* data, size_t bytes) {
  XXH128_hash_t h = XXH3_128bits(bytes ? data : "", bytes);
  return {h.high64, h.low64};
}

Digest sampled_xxh128(const std::string& path, const std::string& who) {
  constexpr uint64_t kBlock = 64 << 10, kMost = 256;
  const File file = File::open(path, who);
  const uint64_t size = file.size(), blocks = std::min(kMost, (size + kBlock - 1) / kBlock);
  std::vector<char> block(kBlock);
  Xxh128 hash;
  hash.update(&size, sizeof size);
  for (uint64_t i = 0; i < blocks; ++i) {
    const uint64_t last = size - std::min(kBlock, size), n = std::min(kBlock, size);
    file.read_at(
        block.data(), n,
        blocks == 1 ? 0 : last / (blocks - 1) * i + last % (blocks - 1) * i / (blocks - 1));
    hash.update(block.data(), n);
  }
  return hash.digest();
}

void ParamsHasher::add(std::string_view name, DType dtype, const Shape& shape,
                       std::span<const std::byte> bytes) {
  TESSERA_CHECK(!any_ || name > std::string_view(last_),
                "params_xxh128: {} after {}; add tensors once each, by name", quote(name),
                quote(last_));
  any_ = true;
  last_ = name;
  auto feed = [&](const void* data, size_t n) { hash_.update(data, n); };
  uint64_t length = name.size(), ndim = uint64_t(shape.size());
  char type[8] = {};
  std::memcpy(type, name_of(dtype).data(), name_of(dtype).size());
  feed(&length, sizeof length);
  feed(name.data(), name.size());
  feed(type, sizeof type);
  feed(&ndim, sizeof ndim);
  feed(shape.begin(), size_t(shape.size()) * sizeof(int64_t));
  feed(bytes.data(), bytes.size());
}

void ParamsHasher::add(std::string_view name, const Tensor& t) {
  Tensor dense = dense_values(t, "params_xxh128", name);
  add(name, dense.dtype(), dense.shape(),
      {static_cast<const std::byte*>(dense.raw_values()), dense.nbytes()});
}

std::string ParamsHasher::hex() const { return to_string(hash_.digest()); }

std::string params_xxh128(std::span<const NamedTensor> tensors) {
  std::vector<const NamedTensor*> sorted;
  for (const NamedTensor& t : tensors) sorted.push_back(&t);
  std::sort(sorted.begin(), sorted.end(), [](auto* a, auto* b) { return a->name < b->name; });
  ParamsHasher hasher;
  for (const NamedTensor* t : sorted) hasher.add(t->name, t->tensor);
  return hasher.hex();
}

Tensor dense_values(const Tensor& t, std::string_view who, std::string_view name) {
  TESSERA_CHECK(t.defined(), "{}: tensor {} has no value; leave it out or initialise it", who,
                quote(name));
  TESSERA_CHECK(!t.device().is_meta(), "{}: tensor {} ({}) has no values", who, quote(name),
                describe(t));
  TESSERA_CHECK(!(t.layers() & bit(Layer::kSharding)),
                "{}: tensor {} ({}) is sharded; gather it first", who, quote(name), describe(t));
  const Tensor plain = on_host(t.detach());
  return plain.is_contiguous() ? plain : plain.contiguous();
}

}  // namespace tessera::io
