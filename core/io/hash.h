// A hash of a whole model: two models have the same if and only if (up to collisions of 128 bits)
// names, dtypes, shapes and bytes of all their parameters are equal. Invariant: tensors are hashed
// whole and in ascending order of their names, so the hash does not depend on how they were
// sharded, ordered or stored.
#pragma once
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>

#include "core/tensor/named_tensor.h"

struct XXH3_state_s;

namespace tessera::io {

using tessera::NamedTensor;

struct FreeXxh {
  void operator()(XXH3_state_s* s) const;
};

/// A 128-bit hash as a value; prints as 32 lower-case hex digits, as xxh128sum does.
struct Digest {
  uint64_t high = 0, low = 0;
  bool operator==(const Digest&) const = default;
};
std::string to_string(const Digest& d);
/// False unless `text` is 32 lower-case hex digits.
bool parse_digest(std::string_view text, Digest* d);

/// XXH3-128 of a stream of bytes.
class Xxh128 {
 public:
  Xxh128();
  void reset();
  void update(const void* data, size_t bytes);
  Digest digest() const;

 private:
  std::unique_ptr<XXH3_state_s, FreeXxh> state_;
};
Digest xxh128(const void* data, size_t bytes);

/// Tells files apart at little cost: a hash of the size and of at most 256 blocks of 64 KiB, spread
/// evenly, the first and the last bytes among them. A change between the blocks goes unnoticed.
/// Throws UserError.
Digest sampled_xxh128(const std::string& path, const std::string& who);

/// XXH3-128 (Collet, xxHash) over, per tensor: u64 length of the name, the name, the dtype's name
/// ("f32") padded with zeros to 8 bytes, u64 ndim, i64 extents, then the elements in C order; all
/// integers little-endian.
class ParamsHasher {
 public:
  /// Adds a whole tensor. Throws UserError unless names come in strictly ascending byte order.
  void add(std::string_view name, DType dtype, const Shape& shape,
           std::span<const std::byte> bytes);
  /// As above; `t` is on the CPU, whole (not sharded), of any strides.
  void add(std::string_view name, const Tensor& t);
  /// 32 lower-case hex digits, as xxh128sum prints them.
  std::string hex() const;

 private:
  Xxh128 hash_;
  std::string last_;
  bool any_ = false;
};

/// The hash of `tensors` given in any order. Throws UserError when a name occurs twice.
std::string params_xxh128(std::span<const NamedTensor> tensors);

/// `t` as dense CPU values without history: itself when it is that already. Throws UserError,
/// naming `who` and `name`, for sharded tensors, other devices and tensors without values.
Tensor dense_values(const Tensor& t, std::string_view who, std::string_view name);

}  // namespace tessera::io
