#include "core/io/hash.h"

#include <xxhash.h>

#include <algorithm>
#include <bit>
#include <cstring>
#include <vector>

#include "core/io/file.h"

namespace tessera::io {

static_assert(std::endian::native == std::endian::little, "files and hashes are little-endian");

void ParamsHasher::Free::operator()(XXH3_state_s* s) const { XXH3_freeState(s); }

ParamsHasher::ParamsHasher() : state_(XXH3_createState()) {
  TESSERA_CHECK(state_ != nullptr, "params_xxh128: out of memory");
  XXH3_128bits_reset(state_.get());
}
ParamsHasher::~ParamsHasher() = default;
ParamsHasher::ParamsHasher(ParamsHasher&&) noexcept = default;

void ParamsHasher::add(std::string_view name, DType dtype, const Shape& shape,
                       std::span<const std::byte> bytes) {
  TESSERA_CHECK(!any_ || name > std::string_view(last_),
                "params_xxh128: {} after {}; add tensors once each, by name", quote(name),
                quote(last_));
  any_ = true;
  last_ = name;
  auto feed = [&](const void* data, size_t n) {
    if (n) XXH3_128bits_update(state_.get(), data, n);
  };
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
      {static_cast<const std::byte*>(dense.raw()), dense.nbytes()});
}

std::string ParamsHasher::hex() const {
  XXH128_canonical_t canonical;
  XXH128_canonicalFromHash(&canonical, XXH3_128bits_digest(state_.get()));
  std::string out;
  for (unsigned char byte : canonical.digest) out += fmt::format("{:02x}", byte);
  return out;
}

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
  TESSERA_CHECK(t.device().is_cpu(), "{}: tensor {} ({}) is not on the cpu; copy it there first",
                who, quote(name), describe(t));
  TESSERA_CHECK(!(t.layers() & bit(Layer::kSharding)),
                "{}: tensor {} ({}) is sharded; gather it first", who, quote(name), describe(t));
  Tensor plain = t.detach();
  return plain.is_contiguous() ? plain : plain.contiguous();
}

}  // namespace tessera::io
