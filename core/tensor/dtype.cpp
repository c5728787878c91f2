#include "core/tensor/dtype.h"

#include "core/base/error.h"

namespace tessera {

void refuse_promotion(DType a, DType b) {
  const DType stored = is_storage_only(a) ? a : b;
  throw UserError(fmt::format(
      "promote: {} and {} have no common dtype; {} is a storage format, convert it by .to(kF32) "
      "first",
      name_of(a), name_of(b), name_of(stored)));
}

}  // namespace tessera
