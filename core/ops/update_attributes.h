// Attributes of optimizer steps: what callers choose and kernels read.
#pragma once
#include "core/primitive/attributes.h"

namespace tessera {

/// Operands of the op are lr, step and scale (0-d f64), then `count` params, grads, m, v; results
/// params, m, v.
struct AdamUpdate {
  double beta1 = 0.9, beta2 = 0.999, eps = 1e-8;
  double weight_decay = 0;
  // True is AdamW (Loshchilov, Hutter 2019); false adds decay to the gradient (Kingma, Ba 2015).
  bool decoupled = true;
  bool if_finite = false;  // nothing changes where scale is infinite or NaN
  int count = 0;           // of parameters, as many as adam_update_ is given
  static void fields(auto& a, auto& f) {
    f("count", a.count), f("beta1", a.beta1), f("beta2", a.beta2), f("eps", a.eps);
    f("weight_decay", a.weight_decay), f("decoupled", a.decoupled);
    f.optional("if_finite", a.if_finite);
  }
};

/// Operands of the op are lr and scale (0-d f64), then `count` params, grads and, with momentum,
/// buffers; results params, buffers.
struct SgdUpdate {
  double momentum = 0, dampening = 0, weight_decay = 0;
  bool nesterov = false;
  bool if_finite = false;  // as above
  bool first = false;      // the first step: buffers hold no values yet
  int count = 0;           // of parameters, as many as sgd_update_ is given
  static void fields(auto& a, auto& f) {
    f("count", a.count), f("momentum", a.momentum), f("dampening", a.dampening);
    f("weight_decay", a.weight_decay), f("nesterov", a.nesterov), f("first", a.first);
    f.optional("if_finite", a.if_finite);
  }
};

}  // namespace tessera
