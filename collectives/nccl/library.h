// NCCL, loaded when collectives on cards first ask for it: nothing is linked. Invariant: the table
// is complete or absent, and where it is absent one line says why and what to do.
#pragma once
#include <string>

#include "collectives/nccl/api.h"
#include "core/backend/cuda/library.h"

namespace tessera::nccl {

/// Throws BugError: what NCCL calls an error is an answer for callers, who ask by result().
[[noreturn]] void raise(Result result, const char* symbol);

struct Functions {
#define FUNCTION(member, symbol, parameters) \
  cuda::detail::FunctionOf<Result, void parameters>::Type member{#symbol};
#include "collectives/nccl/functions.def"
#include "collectives/nccl/window_functions.def"
#undef FUNCTION
  const char* (*error_string)(Result) = nullptr;
  const char* (*last_error)(Comm) = nullptr;
  bool has_windows = false;  // the functions of window_functions.def, or none of them
  std::string path;
  int version = 0;  // 22809 is 2.28.9
};

/// Null where why_not() says why.
const Functions* functions();
/// Why there is no NCCL, in one line; empty where there is one.
const std::string& why_not();

}  // namespace tessera::nccl
