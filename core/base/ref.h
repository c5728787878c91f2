// Intrusive shared ownership. A RefCounted object starts with no owner; Ref<T> adds and drops one.
// Invariant: an object is deleted by the Ref that drops its last count, on whatever thread that
// happens.
#pragma once
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <utility>

namespace tessera {

class RefCounted {
 public:
  RefCounted() = default;
  RefCounted(const RefCounted&) = delete;
  RefCounted& operator=(const RefCounted&) = delete;
  virtual ~RefCounted() = default;

  /// Acquires: a thread that finds itself the sole owner sees all that former owners did.
  uint32_t use_count() const { return count_.load(std::memory_order_acquire); }
  void retain() const { count_.fetch_add(1, std::memory_order_relaxed); }
  /// True when the caller dropped the last count and must delete the object.
  bool release() const {
    // The sole owner needs no read-modify-write: no other thread can raise the count from here.
    if (count_.load(std::memory_order_acquire) == 1) return true;
    return count_.fetch_sub(1, std::memory_order_acq_rel) == 1;
  }

 private:
  mutable std::atomic<uint32_t> count_{0};
};

template <class T>
class Ref {
 public:
  Ref() = default;
  Ref(std::nullptr_t) {}
  explicit Ref(T* p) : p_(p) {
    if (p_) p_->retain();
  }
  Ref(const Ref& o) : Ref(o.p_) {}
  Ref(Ref&& o) noexcept : p_(std::exchange(o.p_, nullptr)) {}
  template <class U>
  requires(std::is_convertible_v<U*, T*>) Ref(const Ref<U>& o) : Ref(static_cast<T*>(o.get())) {}
  template <class U>
  requires(std::is_convertible_v<U*, T*>) Ref(Ref<U>&& o)
  noexcept : p_(o.detach()) {}
  Ref& operator=(Ref o) noexcept {
    std::swap(p_, o.p_);
    return *this;
  }
  ~Ref() {
    if (p_ && p_->release()) delete p_;
  }

  T* get() const { return p_; }
  T* operator->() const { return p_; }
  T& operator*() const { return *p_; }
  explicit operator bool() const { return p_ != nullptr; }
  bool operator==(const Ref& o) const { return p_ == o.p_; }
  void reset() { Ref().swap(*this); }
  void swap(Ref& o) noexcept { std::swap(p_, o.p_); }
  /// Gives up the pointer without dropping its count.
  T* detach() { return std::exchange(p_, nullptr); }

 private:
  T* p_ = nullptr;
};

template <class T, class... A>
Ref<T> make_ref(A&&... args) {
  return Ref<T>(new T(std::forward<A>(args)...));
}

}  // namespace tessera
