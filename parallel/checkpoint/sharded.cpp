#include "parallel/checkpoint/sharded.h"

#include "core/autograd/autograd.h"

namespace tessera::checkpoint {

Piece piece_of(std::string name, const Tensor& t) {
  if (!t.is_sharded()) return whole(std::move(name), t);
  for (const Placement& p : layout_of(t))
    TESSERA_CHECK_AS(ShardingError, !p.is_partial(),
                     "checkpoint: {} is {}, a sum over ranks that is still to be made; "
                     "redistribute() it first",
                     name, describe(t));
  NoGrad off;
  Dims begin;
  for (const Range& r : tessera::box_of(t)) begin.push_back(r.begin);
  return {std::move(name), t.shape(), begin, to_local(t.detach())};
}

}  // namespace tessera::checkpoint
