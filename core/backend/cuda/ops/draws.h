// What kernels that draw are told of the key.
#pragma once
#include "core/tensor/tensor.h"

namespace tessera::cuda {

/// Sets the key of a call's draw, i64 [2]. One on the card is read there; one of the host goes by
/// value, and nothing is copied.
template <class Call>
void set_key(Call& c, const Tensor& key) {
  if (key.device().is_cpu()) {
    const int64_t* k = key.values<int64_t>();
    c.seed = k[0], c.number = k[1];
  } else {
    c.key = static_cast<const long*>(key.device_data());
  }
}

}  // namespace tessera::cuda
