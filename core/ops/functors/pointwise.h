// Every pointwise op as one functor of its name, exp::apply(x), from the column `kernel` of
// core/ops/pointwise.def. The same text serves eager and generated code, on CPUs and in CUDA. So it
// includes nothing but that table (generated code has the text of the table in its place), and a
// file that includes it includes prelude.h and the functions of this folder first.
namespace tessera::functors {

#define TESSERA_OP1(name, kernel, ...) \
  struct name {                        \
    template <class T>                 \
    TESSERA_FN T apply(T x) {          \
      return kernel;                   \
    }                                  \
  };
#define TESSERA_OP2(name, kernel, ...) \
  struct name {                        \
    template <class T>                 \
    TESSERA_FN T apply(T x, T y) {     \
      return kernel;                   \
    }                                  \
  };
#define TESSERA_OP3(name, kernel, ...)  \
  struct name {                         \
    template <class T>                  \
    TESSERA_FN T apply(T x, T y, T z) { \
      return kernel;                    \
    }                                   \
  };
#define TESSERA_PREDICATE(name, kernel, ...) \
  struct name {                              \
    template <class T>                       \
    TESSERA_FN bool apply(T x) {             \
      return kernel;                         \
    }                                        \
  };
#define TESSERA_COMPARISON(name, kernel, ...) \
  struct name {                               \
    template <class T>                        \
    TESSERA_FN bool apply(T x, T y) {         \
      return kernel;                          \
    }                                         \
  };
#include "core/ops/pointwise.def"

}  // namespace tessera::functors
