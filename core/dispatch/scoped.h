// A value that holds for one scope: of the thread's context, or of anything else.
#pragma once
#include <utility>

namespace tessera {

/// Sets a field for one scope.
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
