// Every pointwise op as one functor: a name and a scalar formula. One text, used four ways: eager
// CPU, eager CUDA, generated CPU and generated CUDA; so it includes nothing, and its includer
// supplies prelude.h and the math functions first. Invariant: formulas are branch-free (selects
// only), so that loops over them vectorise. A new op is a functor here, in the list of its kind at
// the end, and a row in core/ops/pointwise.cpp. One op a line. Those that look up in tables say
// that loops over floats take them in_groups (group.h).
// clang-format off
namespace tessera::functors {

// --- one float operand; integers are converted to the default float first ---
struct Exp { static constexpr const char* name = "exp"; template <class T> TESSERA_FN T apply(T x) { return fn::exp(x); } };
struct Exp2 { static constexpr const char* name = "exp2"; template <class T> TESSERA_FN T apply(T x) { return fn::exp2(x); } };
struct Expm1 { static constexpr const char* name = "expm1"; template <class T> TESSERA_FN T apply(T x) { return fn::expm1(x); } };
struct Log { static constexpr const char* name = "log"; template <class T> TESSERA_FN T apply(T x) { return fn::log(x); } };
struct Log2 { static constexpr const char* name = "log2"; template <class T> TESSERA_FN T apply(T x) { return fn::log2(x); } };
struct Log10 { static constexpr const char* name = "log10"; template <class T> TESSERA_FN T apply(T x) { return fn::log10(x); } };
struct Log1p { static constexpr const char* name = "log1p"; template <class T> TESSERA_FN T apply(T x) { return fn::log1p(x); } };
struct Sin { static constexpr const char* name = "sin"; template <class T> TESSERA_FN T apply(T x) { return fn::sin(x); } };
struct Cos { static constexpr const char* name = "cos"; template <class T> TESSERA_FN T apply(T x) { return fn::cos(x); } };
struct Tan { static constexpr const char* name = "tan"; template <class T> TESSERA_FN T apply(T x) { return fn::tan(x); } };
struct Asin { static constexpr const char* name = "asin"; template <class T> TESSERA_FN T apply(T x) { return fn::asin(x); } };
struct Acos { static constexpr const char* name = "acos"; template <class T> TESSERA_FN T apply(T x) { return fn::acos(x); } };
struct Atan { static constexpr const char* name = "atan"; template <class T> TESSERA_FN T apply(T x) { return fn::atan(x); } };
struct Sinh { static constexpr const char* name = "sinh"; template <class T> TESSERA_FN T apply(T x) { return fn::sinh(x); } };
struct Cosh { static constexpr const char* name = "cosh"; template <class T> TESSERA_FN T apply(T x) { return fn::cosh(x); } };
struct Tanh { static constexpr const char* name = "tanh"; template <class T> TESSERA_FN T apply(T x) { return fn::tanh(x); } };
struct Asinh { static constexpr const char* name = "asinh"; template <class T> TESSERA_FN T apply(T x) { return fn::asinh(x); } };
struct Acosh { static constexpr const char* name = "acosh"; template <class T> TESSERA_FN T apply(T x) { return fn::acosh(x); } };
struct Atanh { static constexpr const char* name = "atanh"; template <class T> TESSERA_FN T apply(T x) { return fn::atanh(x); } };
struct Erf { static constexpr const char* name = "erf"; template <class T> TESSERA_FN T apply(T x) { return fn::erf(x); } };
struct Erfc { static constexpr const char* name = "erfc"; template <class T> TESSERA_FN T apply(T x) { return fn::erfc(x); } };
struct Erfinv { static constexpr const char* name = "erfinv"; template <class T> TESSERA_FN T apply(T x) { return fn::erfinv(x); } };
struct Lgamma { static constexpr const char* name = "lgamma"; template <class T> TESSERA_FN T apply(T x) { return fn::lgamma(x); } };
struct Digamma { static constexpr const char* name = "digamma"; template <class T> TESSERA_FN T apply(T x) { return fn::digamma(x); } };
struct Trigamma { static constexpr const char* name = "trigamma"; template <class T> TESSERA_FN T apply(T x) { return fn::trigamma(x); } };
struct Sqrt { static constexpr const char* name = "sqrt"; template <class T> TESSERA_FN T apply(T x) { return fn::sqrt(x); } };
struct Rsqrt { static constexpr const char* name = "rsqrt"; template <class T> TESSERA_FN T apply(T x) { return T(1) / fn::sqrt(x); } };
struct Reciprocal { static constexpr const char* name = "reciprocal"; template <class T> TESSERA_FN T apply(T x) { return T(1) / x; } };
struct Sigmoid { static constexpr const char* name = "sigmoid"; static constexpr bool in_groups = true; template <class T> TESSERA_FN T apply(T x) { return fn::sigmoid(x); } };
struct LogSigmoid { static constexpr const char* name = "logsigmoid"; template <class T> TESSERA_FN T apply(T x) { return fn::logsigmoid(x); } };
struct Softplus { static constexpr const char* name = "softplus"; template <class T> TESSERA_FN T apply(T x) { return fn::softplus(x); } };
struct Silu { static constexpr const char* name = "silu"; static constexpr bool in_groups = true; template <class T> TESSERA_FN T apply(T x) { return fn::silu(x); } };
struct Mish { static constexpr const char* name = "mish"; template <class T> TESSERA_FN T apply(T x) { return fn::mish(x); } };
struct Gelu { static constexpr const char* name = "gelu"; static constexpr bool in_groups = true; template <class T> TESSERA_FN T apply(T x) { return fn::gelu(x); } };
struct GeluTanh { static constexpr const char* name = "gelu_tanh"; static constexpr bool in_groups = true; template <class T> TESSERA_FN T apply(T x) { return fn::gelu_tanh(x); } };

// --- one operand of any dtype, result of the same ---
struct Neg { static constexpr const char* name = "neg"; template <class T> TESSERA_FN T apply(T x) { return fn::negated(x); } };
struct Abs { static constexpr const char* name = "abs"; template <class T> TESSERA_FN T apply(T x) { return fn::abs(x); } };
struct Sign { static constexpr const char* name = "sign"; template <class T> TESSERA_FN T apply(T x) { return x > T(0) ? T(1) : x < T(0) ? T(-1) : T(0); } };
struct Square { static constexpr const char* name = "square"; template <class T> TESSERA_FN T apply(T x) { return x * x; } };
struct Relu { static constexpr const char* name = "relu"; template <class T> TESSERA_FN T apply(T x) { return x < T(0) ? T(0) : x; } };
struct Floor { static constexpr const char* name = "floor"; template <class T> TESSERA_FN T apply(T x) { return fn::floor(x); } };
struct Ceil { static constexpr const char* name = "ceil"; template <class T> TESSERA_FN T apply(T x) { return fn::ceil(x); } };
struct Trunc { static constexpr const char* name = "trunc"; template <class T> TESSERA_FN T apply(T x) { return fn::trunc(x); } };
struct Round { static constexpr const char* name = "round"; template <class T> TESSERA_FN T apply(T x) { return fn::rint(x); } };  // half to even

// --- predicates of one operand ---
struct IsNan { static constexpr const char* name = "isnan"; template <class T> TESSERA_FN bool apply(T x) { return x != x; } };
struct IsInf { static constexpr const char* name = "isinf"; template <class T> TESSERA_FN bool apply(T x) { return x - x != x - x && x == x; } };
struct IsFinite { static constexpr const char* name = "isfinite"; template <class T> TESSERA_FN bool apply(T x) { return x - x == x - x; } };
struct LogicalNot { static constexpr const char* name = "logical_not"; template <class T> TESSERA_FN bool apply(T x) { return x == T(0); } };

// --- two operands of one dtype ---
struct Add { static constexpr const char* name = "add"; template <class T> TESSERA_FN T apply(T a, T b) { return a + b; } };
struct Sub { static constexpr const char* name = "sub"; template <class T> TESSERA_FN T apply(T a, T b) { return a - b; } };
struct Mul { static constexpr const char* name = "mul"; template <class T> TESSERA_FN T apply(T a, T b) { return a * b; } };
// NaN in either operand gives NaN, as in PyTorch.
struct Maximum { static constexpr const char* name = "maximum"; template <class T> TESSERA_FN T apply(T a, T b) { return a > b || a != a ? a : b; } };
struct Minimum { static constexpr const char* name = "minimum"; template <class T> TESSERA_FN T apply(T a, T b) { return a < b || a != a ? a : b; } };
struct FloorDivide { static constexpr const char* name = "floor_divide"; template <class T> TESSERA_FN T apply(T a, T b) { return fn::floor_divide(a, b); } };
struct Remainder { static constexpr const char* name = "remainder"; template <class T> TESSERA_FN T apply(T a, T b) { return fn::remainder(a, b); } };  // sign of b
struct Fmod { static constexpr const char* name = "fmod"; template <class T> TESSERA_FN T apply(T a, T b) { return fn::fmod(a, b); } };                // sign of a
struct Pow { static constexpr const char* name = "pow"; template <class T> TESSERA_FN T apply(T a, T b) { return fn::pow(a, b); } };

// --- two float operands ---
struct Div { static constexpr const char* name = "div"; template <class T> TESSERA_FN T apply(T a, T b) { return a / b; } };
struct Atan2 { static constexpr const char* name = "atan2"; template <class T> TESSERA_FN T apply(T a, T b) { return fn::atan2(a, b); } };
struct LeakyRelu { static constexpr const char* name = "leaky_relu"; template <class T> TESSERA_FN T apply(T x, T slope) { return x > T(0) ? x : x * slope; } };
struct Elu { static constexpr const char* name = "elu"; template <class T> TESSERA_FN T apply(T x, T alpha) { return x > T(0) ? x : alpha * fn::expm1(x); } };
// Derivatives: cotangent first, then the operand (x) or the result (y) that the formula reads.
struct TanhGrad { static constexpr const char* name = "tanh_grad"; template <class T> TESSERA_FN T apply(T g, T y) { return g * (T(1) - y * y); } };
struct SigmoidGrad { static constexpr const char* name = "sigmoid_grad"; template <class T> TESSERA_FN T apply(T g, T y) { return g * ((T(1) - y) * y); } };
struct ReluGrad { static constexpr const char* name = "relu_grad"; template <class T> TESSERA_FN T apply(T g, T y) { return y > T(0) ? g : T(0); } };
struct GeluGrad { static constexpr const char* name = "gelu_grad"; static constexpr bool in_groups = true; template <class T> TESSERA_FN T apply(T g, T x) { return g * fn::gelu_grad(x); } };
struct GeluTanhGrad { static constexpr const char* name = "gelu_tanh_grad"; static constexpr bool in_groups = true; template <class T> TESSERA_FN T apply(T g, T x) { return g * fn::gelu_tanh_grad(x); } };

// --- comparisons and logic: bool results ---
struct Eq { static constexpr const char* name = "eq"; template <class T> TESSERA_FN bool apply(T a, T b) { return a == b; } };
struct Ne { static constexpr const char* name = "ne"; template <class T> TESSERA_FN bool apply(T a, T b) { return a != b; } };
struct Lt { static constexpr const char* name = "lt"; template <class T> TESSERA_FN bool apply(T a, T b) { return a < b; } };
struct Le { static constexpr const char* name = "le"; template <class T> TESSERA_FN bool apply(T a, T b) { return a <= b; } };
struct Gt { static constexpr const char* name = "gt"; template <class T> TESSERA_FN bool apply(T a, T b) { return a > b; } };
struct Ge { static constexpr const char* name = "ge"; template <class T> TESSERA_FN bool apply(T a, T b) { return a >= b; } };
struct LogicalAnd { static constexpr const char* name = "logical_and"; template <class T> TESSERA_FN bool apply(T a, T b) { return (a != T(0)) & (b != T(0)); } };
struct LogicalOr { static constexpr const char* name = "logical_or"; template <class T> TESSERA_FN bool apply(T a, T b) { return (a != T(0)) | (b != T(0)); } };
struct LogicalXor { static constexpr const char* name = "logical_xor"; template <class T> TESSERA_FN bool apply(T a, T b) { return (a != T(0)) != (b != T(0)); } };

// --- bits: integer and bool operands ---
struct BitwiseNot { static constexpr const char* name = "bitwise_not"; template <class T> TESSERA_FN T apply(T a) { return ~a; } };
struct BitwiseAnd { static constexpr const char* name = "bitwise_and"; template <class T> TESSERA_FN T apply(T a, T b) { return a & b; } };
struct BitwiseOr { static constexpr const char* name = "bitwise_or"; template <class T> TESSERA_FN T apply(T a, T b) { return a | b; } };
struct BitwiseXor { static constexpr const char* name = "bitwise_xor"; template <class T> TESSERA_FN T apply(T a, T b) { return a ^ b; } };
struct ShiftLeft { static constexpr const char* name = "bitwise_left_shift"; template <class T> TESSERA_FN T apply(T a, T b) { return (unsigned long)(b) < sizeof(T) * 8 ? T((unsigned long)(a) << (b & 63)) : T(0); } };  // all bits leave beyond them
struct ShiftRight { static constexpr const char* name = "bitwise_right_shift"; template <class T> TESSERA_FN T apply(T a, T b) { return a >> ((unsigned long)(b) < sizeof(T) * 8 ? b : T(sizeof(T) * 8 - (T(-1) < T(0)))); } };  // the sign stays

// --- three operands ---
struct Clamp { static constexpr const char* name = "clamp"; template <class T> TESSERA_FN T apply(T x, T low, T high) { T y = x < low ? low : x; return y > high ? high : y; } };
struct Lerp { static constexpr const char* name = "lerp"; template <class T> TESSERA_FN T apply(T a, T b, T w) { return w < T(0.5) ? a + w * (b - a) : b - (b - a) * (T(1) - w); } };
struct MulAdd { static constexpr const char* name = "mul_add"; template <class T> TESSERA_FN T apply(T a, T b, T c) { return a * b + c; } };

template <class... F>
struct List {};
using FloatUnary = List<Exp, Exp2, Expm1, Log, Log2, Log10, Log1p, Sin, Cos, Tan, Asin, Acos, Atan, Sinh, Cosh, Tanh, Asinh, Acosh, Atanh,
                        Erf, Erfc, Erfinv, Lgamma, Digamma, Trigamma, Sqrt, Rsqrt, Reciprocal, Sigmoid, LogSigmoid, Softplus, Silu, Mish, Gelu, GeluTanh>;
using AnyUnary = List<Neg, Abs, Sign, Square, Relu, Floor, Ceil, Trunc, Round>;
using Predicate = List<IsNan, IsInf, IsFinite, LogicalNot>;
using AnyBinary = List<Add, Sub, Mul, Maximum, Minimum, FloorDivide, Remainder, Fmod, Pow>;
using FloatBinary = List<Div, Atan2, LeakyRelu, Elu, TanhGrad, SigmoidGrad, ReluGrad, GeluGrad, GeluTanhGrad>;
using Compare = List<Eq, Ne, Lt, Le, Gt, Ge, LogicalAnd, LogicalOr, LogicalXor>;
using BitUnary = List<BitwiseNot>;
using BitBinary = List<BitwiseAnd, BitwiseOr, BitwiseXor, ShiftLeft, ShiftRight>;
using AnyTernary = List<Clamp, MulAdd>;
using FloatTernary = List<Lerp>;

}  // namespace tessera::functors
