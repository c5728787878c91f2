// A field that has another value for one scope: a field of the thread's context, or any other.
#pragma once
#include <utility>

namespace tessera {

/// Sets a field for one scope, and restores it.
template <class T>
class Scoped {
 public:
  Scoped(T& field, T value) : field_(field), old_(std::exchange(field, std::move(value))) {}
  ~Scoped() { field_ = std::move(old_); }
  Scoped(const Scoped&) = delete;
  Scoped& operator=(const Scoped&) = delete;

 private:
  T& field_;
  T old_;
};

}  // namespace tessera
