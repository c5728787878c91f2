#include "core/backend/cuda/ops/products.h"

#include <algorithm>
#include <bit>
#include <climits>
#include <cstring>
#include <map>
#include <memory>
#include <mutex>
#include <unordered_map>
#include <utility>

#include "core/backend/cuda/context.h"
#include "core/backend/cuda/cublaslt.h"
#include "core/backend/cuda/library_in_use.h"
#include "core/backend/cuda/product_choice.h"
#include "core/backend/cuda/refusals.h"
#include "core/backend/cuda/stream.h"
#include "core/base/deterministic.h"
#include "core/base/error.h"
#include "core/base/log.h"
#include "core/base/matmul_precision.h"
#include "core/tensor/tensor.h"

namespace tessera::cuda {
namespace {

using blas::Status;

constexpr int64_t kMostCalls = 32;      // for one op; beyond it one launch of our own is better
constexpr size_t kMostProducts = 2048;  // that a thread keeps descriptors of
constexpr int kMostSuggestions = 8;
constexpr uintptr_t kBestAlignment = 256;
constexpr int64_t kAuxMultiple = 8;    // of its leading dimension
constexpr int32_t kAuxAlignment = 16;  // in bytes

thread_local bool own_products = false;

LibraryInUse<CublasLtFunctions>& in_use() {
  static auto& one = *new LibraryInUse<CublasLtFunctions>(
      {cublaslt, cublaslt_is_wanted, why_no_cublaslt, "products"});
  return one;
}

/// A handle for each stream, and so for each thread and card, since handles are used by one thread
/// at a time. Streams are never destroyed, and neither are these.
blas::Handle handle_for(const CublasLtFunctions& f, const Stream& stream) {
  static std::mutex& mutex = *new std::mutex;
  static auto& all = *new std::map<void*, blas::Handle>;
  std::lock_guard lock(mutex);
  blas::Handle& handle = all[stream.handle];
  if (!handle)
    if (const Status s = f.create.result(&handle); s != Status::kSuccess) {
      handle = nullptr;
      in_use().fail(fmt::format("{} failed with {}", f.create.symbol(), blas::name_of(s)));
    }
  return handle;
}

/// A matrix as it lies in column-major memory: `columns` runs of `rows` elements.
struct Side {
  int64_t rows = 0, columns = 0, leading = 0, stride = 0;
  int32_t transposed = 0;
  int32_t alignment = 0;  // of every matrix of the batch, in bytes
};

/// All that a product's descriptors and its choice depend on.
struct Problem {
  int32_t device = 0, deterministic = 0, batch = 1;
  int32_t dtype = 0, dtype_b = 0;  // of a and b, which differ where they have eight bits alone
  int32_t result = 0;              // of d
  Side a, b, d;
  int32_t compute = 0;                                        // the library's number
  int32_t scaled = 0;                                         // by a number for a and one for b
  int32_t adds = 0;                                           // c, which lies as d does
  int32_t epilogue = 0, bias_alignment = 0, aux_leading = 0;  // epilogue: 0 or the library's number
  bool operator==(const Problem& o) const { return std::memcmp(this, &o, sizeof(o)) == 0; }
};
static_assert(std::has_unique_object_representations_v<Problem>);
struct HashProblem {
  size_t operator()(const Problem& p) const {
    return std::hash<std::string_view>()({reinterpret_cast<const char*>(&p), sizeof(p)});
  }
};

std::string text_of(const Problem& p) {
  const auto side = [](const Side& s) {
    return fmt::format("{} x {}{} by {} every {} aligned {}", s.rows, s.columns,
                       s.transposed ? " transposed" : "", s.leading, s.stride, s.alignment);
  };
  const bool tf32 = p.compute == blas::kCompute32FFastTF32;
  const std::string types =
      p.scaled ? fmt::format("{} {} scaled to ", name_of(DType(p.dtype)), name_of(DType(p.dtype_b)))
               : fmt::format("{}{}", name_of(DType(p.dtype)), p.result == p.dtype ? "" : " to ");
  return fmt::format("{}{}{} batch {}: {}; {}; {}{}{}", types,
                     p.result == p.dtype ? "" : name_of(DType(p.result)), tf32 ? " by tf32" : "",
                     p.batch, side(p.a), side(p.b), side(p.d), p.adds ? "; added" : "",
                     p.epilogue ? fmt::format("; epilogue {} with a bias aligned {}, aux by {}",
                                              p.epilogue, p.bias_alignment, p.aux_leading)
                                : "");
}

int blas_type(DType t) {
  switch (t) {
    case kF64: return blas::kR64F;
    case kF32: return blas::kR32F;
    case kF16: return blas::kR16F;
    case kF8E4M3: return blas::kR8E4M3;
    case kF8E5M2: return blas::kR8E5M2;
    default: return blas::kR16BF;
  }
}

/// The descriptors of a product, and how it is computed.
class Product {
 public:
  Product(const CublasLtFunctions& f, const Problem& p)
      : f_(f), wide_(DType(p.dtype) == kF64), adds_(p.adds) {
    f.product_create(&product_, p.compute, wide_ ? blas::kR64F : blas::kR32F);
    set<int32_t>(blas::kProductTransposeA, p.a.transposed ? blas::kTransposed : blas::kAsIs);
    set<int32_t>(blas::kProductTransposeB, p.b.transposed ? blas::kTransposed : blas::kAsIs);
    if (p.epilogue) set(blas::kProductEpilogue, p.epilogue);
    if (p.aux_leading) set(blas::kProductAuxLeading, int64_t(p.aux_leading));
    const std::pair<blas::Layout*, const Side*> sides[] = {{&a_, &p.a}, {&b_, &p.b}, {&d_, &p.d}};
    for (const auto& [layout, side] : sides) {
      const DType type = DType(side == &p.d ? p.result : side == &p.b ? p.dtype_b : p.dtype);
      f.layout_create(layout, blas_type(type), uint64_t(side->rows), uint64_t(side->columns),
                      side->leading);
      if (p.batch == 1) continue;
      f.layout_set(*layout, blas::kLayoutBatchCount, &p.batch, sizeof(p.batch));
      f.layout_set(*layout, blas::kLayoutBatchStride, &side->stride, sizeof(side->stride));
    }
  }
  ~Product() {
    f_.product_destroy.result(product_);
    for (blas::Layout l : {a_, b_, d_}) f_.layout_destroy.result(l);
  }
  Product(const Product&) = delete;
  Product& operator=(const Product&) = delete;

  /// The pointers of the next run, or of what is asked about it: only their alignment counts then.
  void set_pointers(const Epilogue& e) {
    if (e.bias != bias_) set(blas::kProductBias, e.bias);
    if (e.aux != aux_) set(blas::kProductAux, e.aux);
    bias_ = e.bias, aux_ = e.aux;
  }
  void set_scales(const Scales& s) {
    if (s.a != scales_.a) set(blas::kProductScaleA, s.a);
    if (s.b != scales_.b) set(blas::kProductScaleB, s.b);
    scales_ = s;
  }

  std::vector<ProductChoice> suggestions(blas::Handle handle, const Problem& p,
                                         bool deterministic) const {
    blas::Preference wanted = nullptr;
    f_.preference_create(&wanted);
    const auto prefer = [&](int attribute, auto value) {
      f_.preference_set(wanted, attribute, &value, sizeof(value));
    };
    prefer(blas::kPreferenceWorkspaceBytes, uint64_t(product_workspace_bytes(p.device)));
    prefer(blas::kPreferenceAlignmentA, p.a.alignment);
    prefer(blas::kPreferenceAlignmentB, p.b.alignment);
    prefer(blas::kPreferenceAlignmentC, p.d.alignment);
    prefer(blas::kPreferenceAlignmentD, p.d.alignment);
    if (deterministic) prefer(blas::kPreferenceReductions, int32_t(blas::kReductionNone));
    blas::Suggestion all[kMostSuggestions];
    int count = 0;
    const Status s = f_.heuristic.result(handle, product_, a_, b_, d_, d_, wanted, kMostSuggestions,
                                         all, &count);
    f_.preference_destroy(wanted);
    std::vector<ProductChoice> good;
    for (int i = 0; s == Status::kSuccess && i < count; ++i)
      if (all[i].state == Status::kSuccess && (!deterministic || sums_in_one_piece(all[i])))
        good.push_back({all[i].algorithm, all[i].workspace_bytes});
    return good;
  }
  bool fits(blas::Handle handle, const ProductChoice& c) const {
    blas::Suggestion found{};
    return f_.check.result(handle, product_, a_, b_, d_, d_, &c.algorithm, &found) ==
               Status::kSuccess &&
           found.workspace_bytes <= c.workspace_bytes;
  }
  /// `added` is read where the problem adds.
  Status run(blas::Handle handle, const ProductChoice& c, const void* a, const void* b,
             const void* added, void* d, void* workspace, const Stream& stream) const {
    static constexpr float kOne = 1, kZero = 0;
    static constexpr double kWideOne = 1, kWideZero = 0;
    const void* one = wide_ ? static_cast<const void*>(&kWideOne) : &kOne;
    const void* zero = wide_ ? static_cast<const void*>(&kWideZero) : &kZero;
    return f_.matmul.result(handle, product_, one, a, a_, b, b_, adds_ ? one : zero,
                            adds_ ? added : d, d_, d, d_, &c.algorithm, workspace,
                            c.workspace_bytes, handle_of(stream));
  }

  std::optional<ProductChoice> choice;
  bool refused = false;  // the library does not compute it

 private:
  template <class T>
  void set(int attribute, T value) {
    f_.product_set(product_, attribute, &value, sizeof(value));
  }
  bool sums_in_one_piece(const blas::Suggestion& s) const {
    int32_t splits = 0, reduction = 0;
    size_t written = 0;
    f_.algorithm_get(&s.algorithm, blas::kAlgorithmSplits, &splits, sizeof(splits), &written);
    f_.algorithm_get(&s.algorithm, blas::kAlgorithmReduction, &reduction, sizeof(reduction),
                     &written);
    return (splits == 0 || splits == 1) && reduction == blas::kReductionNone;
  }

  const CublasLtFunctions& f_;
  const bool wide_;  // f64
  const bool adds_;
  blas::Product product_ = nullptr;
  blas::Layout a_ = nullptr, b_ = nullptr, d_ = nullptr;
  const void *bias_ = nullptr, *aux_ = nullptr;
  Scales scales_;
};

Product& product_for(const CublasLtFunctions& f, const Problem& p) {
  thread_local std::unordered_map<Problem, std::unique_ptr<Product>, HashProblem> all;
  auto it = all.find(p);
  if (it == all.end()) {
    if (all.size() >= kMostProducts) all.clear();
    it = all.emplace(p, std::make_unique<Product>(f, p)).first;
  }
  return *it->second;
}

// A [rows, columns] matrix with these strides, as the library can state it; false where it cannot.
bool state(Side& to, int64_t rows, int64_t columns, int64_t row_stride, int64_t column_stride) {
  constexpr int64_t kPack = 8;  // any leading dimension is right for one run: a pack fits all
  const auto as_it_lies = [&](int64_t run, int64_t runs, int64_t along, int64_t apart) {
    if ((run != 1 && along != 1) || (runs != 1 && apart < run)) return false;
    to.rows = run, to.columns = runs;
    to.leading = runs == 1 ? (run + kPack - 1) / kPack * kPack : apart;
    return true;
  };
  if (rows > INT_MAX || columns > INT_MAX) return false;
  if (as_it_lies(rows, columns, row_stride, column_stride)) return true;
  to.transposed = 1;
  return as_it_lies(columns, rows, column_stride, row_stride);
}

int32_t alignment_of(const void* data, std::span<const int64_t> strides, int64_t element) {
  uintptr_t bits = reinterpret_cast<uintptr_t>(data) | kBestAlignment;
  for (int64_t s : strides) bits |= uintptr_t(s * element);
  return int32_t(uintptr_t(1) << std::countr_zero(bits));
}

/// A product of a batch with one stride, made as often as `calls` says.
struct Statement {
  Problem problem;
  size_t inner = 0;  // the batch's dim that has the stride
  int64_t calls = 1;
  const Matrices *a = nullptr, *b = nullptr, *d = nullptr;
  const void* added = nullptr;
  bool swapped = false;  // the library's a is the caller's b
};

// The library's number for an epilogue of c, whose transpose it computes: there a is B and b is A.
int32_t number_of(Epilogue::Kind kind) {
  switch (kind) {
    case Epilogue::kNone:
    case Epilogue::kAdd: return 0;
    case Epilogue::kBias: return blas::kEpilogueBias;
    case Epilogue::kGelu: return blas::kEpilogueGeluAuxBias;
    case Epilogue::kGeluGrad: return blas::kEpilogueDGeluBGrad;
    case Epilogue::kSumsOfA: return blas::kEpilogueBGradB;
    case Epilogue::kSumsOfB: return blas::kEpilogueBGradA;
  }
  return 0;
}

// Results are column-major for the library: of one that lies by rows, the transpose is computed.
bool state(Statement& s, const Types& types, std::span<const int64_t> batch, int64_t m, int64_t n,
           int64_t k, const Matrices& c, const Matrices& a, const Matrices& b, const Epilogue& e) {
  Problem& p = s.problem;
  const DType dtype = types.a, to = types.c;
  if (!is_floating(dtype) || m == 0 || n == 0 || k == 0) return false;
  for (size_t i = 0; i < batch.size(); ++i) {
    if (batch[i] == 0) return false;
    s.calls *= batch[i];
    if (batch[i] > batch[s.inner]) s.inner = i;
  }
  if (!batch.empty()) {
    if (batch[s.inner] > INT_MAX) return false;
    s.calls /= batch[s.inner], p.batch = int32_t(batch[s.inner]);
  }
  if (s.calls > kMostCalls) return false;
  const bool swapped = s.swapped = state(p.d, n, m, c.column, c.row) && !p.d.transposed;
  if (swapped) {
    s.a = &b, s.b = &a;
    if (!state(p.a, n, k, b.column, b.row) || !state(p.b, k, m, a.column, a.row)) return false;
  } else {
    p.d = {};
    s.a = &a, s.b = &b;
    if (!state(p.d, m, n, c.row, c.column) || p.d.transposed ||
        !state(p.a, m, k, a.row, a.column) || !state(p.b, k, n, b.row, b.column))
      return false;
  }
  s.d = &c;
  const std::pair<Side*, const Matrices*> sides[] = {{&p.a, s.a}, {&p.b, s.b}, {&p.d, s.d}};
  for (const auto& [side, matrices] : sides) {
    if (!batch.empty()) side->stride = matrices->batch[s.inner];
    const auto element = int64_t(size_of(side == &p.d ? to : dtype));  // a and b have one size
    side->alignment = alignment_of(matrices->data, matrices->batch, element);
  }
  if (e.kind == Epilogue::kAdd) {
    p.adds = 1, s.added = e.addend;
    p.d.alignment = std::min(p.d.alignment, alignment_of(e.addend, {}, 1));
  } else if (e) {
    const bool one = s.calls == 1 && p.batch == 1, gelu = e.aux != nullptr;
    if (!swapped || dtype == kF64 || (!one && e.kind != Epilogue::kBias)) return false;
    if (gelu && (dtype == kF32 || n % kAuxMultiple || alignment_of(e.aux, {}, 1) < kAuxAlignment))
      return false;
    p.epilogue = number_of(e.kind), p.bias_alignment = alignment_of(e.bias, {}, 1);
    p.aux_leading = gelu ? int32_t(n) : 0;
  }
  p.dtype = int32_t(swapped ? types.b : types.a), p.dtype_b = int32_t(swapped ? types.a : types.b);
  p.result = int32_t(to), p.deterministic = deterministic_algorithms();
  p.scaled = is_storage_only(dtype);
  const bool tf32 = dtype == kF32 && float32_matmul_precision() == MatmulPrecision::kHigh;
  p.compute = dtype == kF64 ? blas::kCompute64F
              : tf32        ? blas::kCompute32FFastTF32
                            : blas::kCompute32F;
  return true;
}

/// Scratch of the stream's, aligned as the caching allocator does.
class Scratch {
 public:
  Scratch(size_t bytes, const Stream& stream)
      : memory_(bytes ? empty({int64_t(bytes)}, kU8, stream.device) : Tensor()),
        at_(bytes ? memory_.device_data() : nullptr) {}
  void* at() const { return at_; }

 private:
  Tensor memory_;
  void* at_;
};

std::optional<ChosenProduct> choice_for(const Product& product, const Problem& p,
                                        blas::Handle handle, const Statement& s,
                                        const Stream& stream) {
  const auto suggest = [&](bool deterministic) {
    return product.suggestions(handle, p, deterministic);
  };
  const auto run = [&](const ProductChoice& c) {
    const int64_t elements =
        (p.batch - 1) * p.d.stride + (p.d.columns - 1) * p.d.leading + p.d.rows;
    const Scratch result(size_t(elements) * size_of(DType(p.result)), stream);
    const Scratch workspace(c.workspace_bytes, stream);
    return product.run(handle, c, s.a->data, s.b->data, s.added, result.at(), workspace.at(),
                       stream) == Status::kSuccess;
  };
  const auto fits = [&](const ProductChoice& c) { return product.fits(handle, c); };
  return choose_product(text_of(p), stream, suggest, run, fits);
}

// What a status says of the product, or of the library.
bool is_of_product(Status s) {
  return s == Status::kNotSupported || s == Status::kInvalidValue || s == Status::kArchMismatch;
}

void refuse(Product& product, const Problem& p, const std::string& why) {
  product.refused = true;
  static std::atomic<bool> said = false;
  const std::string line =
      fmt::format("cuda: Tessera's own kernel computes the product {}: {}", text_of(p), why);
  if (!said.exchange(true))
    logging::warn("{}; TESSERA_LOG=info names further ones", line);
  else
    logging::info("{}", line);
}

}  // namespace

OwnProducts::OwnProducts() : before_(std::exchange(own_products, true)) {}
OwnProducts::~OwnProducts() { own_products = before_; }

bool multiplies_eight_bits(const Stream& stream) {
  const Properties& card = properties(stream.device.index);
  return !own_products && in_use().get() && std::pair(card.major, card.minor) >= std::pair(8, 9);
}

bool library_product(const Types& types, std::span<const int64_t> batch, int64_t m, int64_t n,
                     int64_t k, const Matrices& c, const Matrices& a, const Matrices& b,
                     const Stream& stream, const Epilogue& epilogue, const Scales& scales) {
  Statement s;
  if (own_products || !state(s, types, batch, m, n, k, c, a, b, epilogue)) return false;
  const CublasLtFunctions* f = in_use().get();
  if (!f) return false;
  Problem& p = s.problem;
  p.device = stream.device.index;
  CurrentDevice current(p.device);
  const blas::Handle handle = handle_for(*f, stream);
  if (!handle) return false;
  Product& product = product_for(*f, p);
  if (product.refused) return false;
  if (epilogue) product.set_pointers(epilogue);
  if (p.scaled) product.set_scales(s.swapped ? Scales{scales.b, scales.a} : scales);
  std::optional<ProductChoice> choice = product.choice;
  if (!choice) {
    const auto chosen = choice_for(product, p, handle, s, stream);
    if (!chosen) {
      refuse(product, p, "cuBLASLt has no algorithm for it");
      return false;
    }
    choice = chosen->choice;
    if (chosen->for_good) product.choice = choice;
  }
  const Scratch workspace(choice->workspace_bytes, stream);
  const auto element = int64_t(size_of(types.a)), of_result = int64_t(size_of(types.c));
  for (int64_t call = 0; call < s.calls; ++call) {
    int64_t rest = call, at_a = 0, at_b = 0, at_d = 0;
    for (size_t i = batch.size(); i-- > 0;) {
      if (i == s.inner) continue;
      const int64_t index = rest % batch[i];
      rest /= batch[i];
      at_a += index * s.a->batch[i], at_b += index * s.b->batch[i], at_d += index * s.d->batch[i];
    }
    const auto at = [](const void* base, int64_t bytes) {
      return const_cast<char*>(static_cast<const char*>(base) + bytes);
    };
    const Status status =
        product.run(handle, *choice, at(s.a->data, at_a * element), at(s.b->data, at_b * element),
                    at(s.added, s.added ? at_d * of_result : 0), at(s.d->data, at_d * of_result),
                    workspace.at(), stream);
    if (status == Status::kSuccess) continue;
    const std::string why =
        fmt::format("{} failed with {}", f->matmul.symbol(), blas::name_of(status));
    is_of_product(status) ? refuse(product, p, why) : in_use().fail(why);
    return false;
  }
  if (synchronous()) [[unlikely]]
    synchronize(stream);
  return true;
}

}  // namespace tessera::cuda
