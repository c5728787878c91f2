// What users of oneDNN share: its engine, and a stream for each thread.
#pragma once
#include <oneapi/dnnl/dnnl.hpp>

namespace tessera::cpu {

inline const dnnl::engine& engine() {
  static const dnnl::engine e(dnnl::engine::kind::cpu, 0);
  return e;
}
inline dnnl::stream& stream() {
  thread_local dnnl::stream s(engine());
  return s;
}

}  // namespace tessera::cpu
