// A borrowed callable takes two words and allocates nothing. Invariant: it is called only while the
// callable lives.
// Internal: not part of the public interface.
#pragma once
#include <memory>
#include <type_traits>
#include <utility>

namespace tessera {

template <class Signature>
class FunctionRef;

template <class R, class... A>
class FunctionRef<R(A...)> {
 public:
  template <class F>
  requires(!std::is_same_v<std::remove_cvref_t<F>, FunctionRef>) FunctionRef(F&& f) {
    if constexpr (std::is_function_v<std::remove_reference_t<F>>) {
      object_ = reinterpret_cast<void*>(std::addressof(f));
      call_ = [](void* o, A... args) -> R {
        return reinterpret_cast<std::remove_reference_t<F>*>(o)(std::forward<A>(args)...);
      };
    } else {
      object_ = const_cast<void*>(static_cast<const void*>(std::addressof(f)));
      call_ = [](void* o, A... args) -> R {
        return (*static_cast<std::remove_reference_t<F>*>(o))(std::forward<A>(args)...);
      };
    }
  }
  R operator()(A... args) const { return call_(object_, std::forward<A>(args)...); }

 private:
  void* object_;
  R (*call_)(void*, A...);
};

}  // namespace tessera
