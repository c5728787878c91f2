// OpenBLAS as it is used here: on the calling thread. OpenMP is the one thread pool.
#pragma once
#include <cblas.h>

namespace tessera::cpu {

/// Call before any routine of BLAS or LAPACK.
inline void blas_on_one_thread() {
  [[maybe_unused]] static const bool once = (openblas_set_num_threads(1), true);
}

}  // namespace tessera::cpu
