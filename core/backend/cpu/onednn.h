// oneDNN's engine, a stream for each thread, and descriptions of primitives in the form that its
// version asks for: 2.x has descriptors of operations, 3.x has none.
#pragma once
#include <oneapi/dnnl/dnnl.hpp>

#include "core/base/deterministic.h"
#include "core/base/parallel.h"

namespace tessera::cpu {

inline const dnnl::engine& engine() {
  static const dnnl::engine e(dnnl::engine::kind::cpu, 0);
  return e;
}
inline dnnl::stream& stream() {
  thread_local dnnl::stream s(engine());
  return s;
}

/// The description of a forward primitive P: description_of<dnnl::matmul>(attr, a, b, c).
template <class P, class... Args>
typename P::primitive_desc description_of(const dnnl::primitive_attr& attr, const Args&... args) {
  if constexpr (requires { typename P::desc; })
    return typename P::primitive_desc(typename P::desc(args...), attr, engine());
  else
    return typename P::primitive_desc(engine(), args..., attr);
}
/// The same of a backward primitive, which belongs to a forward one.
template <class P, class Forward, class... Args>
typename P::primitive_desc backward_description_of(const dnnl::primitive_attr& attr,
                                                   const Forward& forward, const Args&... args) {
  if constexpr (requires { typename P::desc; })
    return typename P::primitive_desc(typename P::desc(args...), attr, engine(), forward);
  else
    return typename P::primitive_desc(engine(), args..., forward, attr);
}
/// Appends an op that follows a primitive element by element; 2.x scales its result, here by 1.
template <class PostOps>
void append_eltwise(PostOps& then, dnnl::algorithm algorithm, float alpha, float beta) {
  if constexpr (requires { then.append_eltwise(1.0f, algorithm, alpha, beta); })
    then.append_eltwise(1.0f, algorithm, alpha, beta);
  else
    then.append_eltwise(algorithm, alpha, beta);
}
#if DNNL_VERSION_MAJOR < 3
using PoolingForward = dnnl::pooling_v2_forward;
#else
using PoolingForward = dnnl::pooling_forward;
#endif

/// Sets the number of oneDNN's threads while it lives, around the making and around the running of
/// a primitive: one in deterministic mode, since oneDNN may split a sum by threads, and one where
/// `one` says that the work is not worth waking others.
class LibraryThreads {
 public:
  explicit LibraryThreads(bool one = false)
      : before_(one || deterministic_algorithms() ? num_threads() : 1) {
    if (before_ > 1) set_num_threads(1);
  }
  ~LibraryThreads() {
    if (before_ > 1) set_num_threads(before_);
  }
  LibraryThreads(const LibraryThreads&) = delete;
  LibraryThreads& operator=(const LibraryThreads&) = delete;

 private:
  const int before_;
};

}  // namespace tessera::cpu
