// libcublasLt.so.13 for machines without a GPU: handles, and descriptors with their attributes. As
// the real library does, these take any value of the right size; a product that cannot be is
// refused when it is asked for. Invariant: an attribute that is not emulated is an error by name.
#include "tests/vgpu/cublaslt/objects.h"

#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <unordered_set>

#include "tests/vgpu/cuda/virtual_driver.h"

namespace vgpu::blas {

namespace {

std::mutex mutex;
std::unordered_set<Handle>& handles() {
  static auto* all = new std::unordered_set<Handle>;
  return *all;
}

/// A member of a descriptor, where its attribute is kept.
struct Place {
  void* at = nullptr;
  size_t bytes = 0;
};
template <class T>
Place place(T& member) {
  return {&member, sizeof(member)};
}

Place find(LayoutState& l, int attribute) {
  switch (attribute) {
    case kLayoutType: return place(l.type);
    case kLayoutOrder: return place(l.order);
    case kLayoutRows: return place(l.rows);
    case kLayoutColumns: return place(l.columns);
    case kLayoutLeading: return place(l.leading);
    case kLayoutBatchCount: return place(l.batch_count);
    case kLayoutBatchStride: return place(l.batch_stride);
    default: return {};
  }
}
Place find(ProductState& p, int attribute) {
  switch (attribute) {
    case kProductCompute: return place(p.compute);
    case kProductScaleType: return place(p.scale_type);
    case kProductPointerMode: return place(p.pointer_mode);
    case kProductTransposeA: return place(p.transpose_a);
    case kProductTransposeB: return place(p.transpose_b);
    case kProductTransposeC: return place(p.transpose_c);
    case kProductFill: return place(p.fill);
    case kProductEpilogue: return place(p.epilogue);
    case kProductBias: return place(p.bias);
    case kProductBiasBatchStride: return place(p.bias_batch_stride);
    case kProductAux: return place(p.aux);
    case kProductAuxLeading: return place(p.aux_leading);
    case kProductAuxBatchStride: return place(p.aux_batch_stride);
    case kProductScaleA: return place(p.scale_a);
    case kProductScaleB: return place(p.scale_b);
    case kProductAuxType: return place(p.aux_type);
    case kProductBiasType: return place(p.bias_type);
    default: return {};
  }
}
Place find(PreferenceState& p, int attribute) {
  switch (attribute) {
    case kPreferenceSearchMode: return place(p.search_mode);
    case kPreferenceWorkspaceBytes: return place(p.workspace_bytes);
    case kPreferenceReductions: return place(p.reductions);
    case kPreferenceAlignmentA: return place(p.alignment[0]);
    case kPreferenceAlignmentB: return place(p.alignment[1]);
    case kPreferenceAlignmentC: return place(p.alignment[2]);
    case kPreferenceAlignmentD: return place(p.alignment[3]);
    default: return {};
  }
}

std::string unknown(int attribute) {
  return "attribute " + std::to_string(attribute) + " is not emulated";
}

template <class State, class Object>
Status set(const char* call, Object* object, int attribute, const void* value, size_t bytes) {
  const Place p = object ? find(static_cast<State&>(*object), attribute) : Place{};
  if (!object) return refuse(Status::kInvalidValue, call, "no descriptor");
  if (!p.at) return refuse(Status::kInvalidValue, call, unknown(attribute));
  if (!value || bytes != p.bytes)
    return refuse(Status::kInvalidValue, call,
                  "attribute " + std::to_string(attribute) + " has " + std::to_string(p.bytes) +
                      " bytes, not " + std::to_string(bytes));
  std::memcpy(p.at, value, bytes);
  return Status::kSuccess;
}
template <class State, class Object>
Status get(const char* call, Object* object, int attribute, void* value, size_t bytes,
           size_t* written) {
  const Place p = object ? find(static_cast<State&>(*object), attribute) : Place{};
  if (!object) return refuse(Status::kInvalidValue, call, "no descriptor");
  if (!p.at) return refuse(Status::kInvalidValue, call, unknown(attribute));
  if (bytes ? !value || bytes != p.bytes : !written)
    return refuse(Status::kInvalidValue, call, "no place for the value, or one of another size");
  if (bytes) std::memcpy(value, p.at, bytes);
  if (written) *written = p.bytes;
  return Status::kSuccess;
}

}  // namespace

Status refuse(Status status, const char* call, const std::string& why) {
  std::fprintf(stderr, "vgpu: %s: %s\n", call, why.c_str());
  return status;
}

Status requested(const char* call) {
  const char* asked = std::getenv("VGPU_FAIL");
  if (!asked) return Status::kSuccess;
  const std::string text = asked;
  const size_t first = text.find(':'), second = text.find(':', first + 1);
  if (text.substr(0, first) != call) return Status::kSuccess;
  static std::atomic<int> calls = 0;
  const int nth = first == text.npos ? 1 : std::atoi(text.c_str() + first + 1);
  if (++calls != nth) return Status::kSuccess;
  const Status status{first == text.npos || second == text.npos
                          ? static_cast<int>(Status::kInternalError)
                          : std::atoi(text.c_str() + second + 1)};
  return refuse(status, call, "fails, as VGPU_FAIL asks");
}

bool is_handle(Handle handle) {
  std::lock_guard lock(mutex);
  return handles().contains(handle);
}

}  // namespace vgpu::blas

namespace tessera::cuda {

using namespace vgpu::blas;

// The library has every function of the table, or this does not link.
__attribute__((used)) void* const vgpu_exported_cublaslt[] = {
#define FUNCTION(member, symbol, parameters) reinterpret_cast<void*>(&symbol),
#include "core/backend/cuda/cublaslt_functions.def"
#undef FUNCTION
};

extern "C" {

size_t cublasLtGetVersion() { return 130100; }
// By this Tessera tells the library from the vendor's, which does not run on the virtual driver.
const char* vgpu_emulation() { return "cublasLt"; }

Status cublasLtCreate(Handle* handle) {
  if (const Status s = requested(__func__); s != Status::kSuccess) return s;
  if (!handle) return refuse(Status::kInvalidValue, __func__, "no place for the handle");
  const int device = vgpu::virtual_driver() ? vgpu::virtual_driver()->current_device() : -1;
  if (device < 0)
    return refuse(Status::kNotInitialized, __func__, "no device is current on this thread");
  *handle = new HandleObject{device};
  std::lock_guard lock(mutex);
  handles().insert(*handle);
  return Status::kSuccess;
}
Status cublasLtDestroy(Handle handle) {
  std::lock_guard lock(mutex);
  if (!handles().erase(handle))
    return refuse(Status::kInvalidValue, __func__, "no handle, or one that was destroyed");
  delete handle;
  return Status::kSuccess;
}

Status cublasLtMatrixLayoutCreate(Layout* layout, int type, uint64_t rows, uint64_t columns,
                                  int64_t leading) {
  if (!layout) return refuse(Status::kInvalidValue, __func__, "no place for the layout");
  auto* made = new LayoutState;
  made->type = type, made->rows = rows, made->columns = columns, made->leading = leading;
  *layout = made;
  return Status::kSuccess;
}
Status cublasLtMatrixLayoutDestroy(Layout layout) {
  delete static_cast<LayoutState*>(layout);
  return Status::kSuccess;
}
Status cublasLtMatrixLayoutSetAttribute(Layout layout, int attribute, const void* value,
                                        size_t bytes) {
  return set<LayoutState>(__func__, layout, attribute, value, bytes);
}
Status cublasLtMatrixLayoutGetAttribute(Layout layout, int attribute, void* value, size_t bytes,
                                        size_t* written) {
  return get<LayoutState>(__func__, layout, attribute, value, bytes, written);
}

Status cublasLtMatmulDescCreate(Product* product, int compute, int scale_type) {
  if (!product) return refuse(Status::kInvalidValue, __func__, "no place for the descriptor");
  auto* made = new ProductState;
  made->compute = compute, made->scale_type = scale_type;
  *product = made;
  return Status::kSuccess;
}
Status cublasLtMatmulDescDestroy(Product product) {
  delete static_cast<ProductState*>(product);
  return Status::kSuccess;
}
Status cublasLtMatmulDescSetAttribute(Product product, int attribute, const void* value,
                                      size_t bytes) {
  return set<ProductState>(__func__, product, attribute, value, bytes);
}
Status cublasLtMatmulDescGetAttribute(Product product, int attribute, void* value, size_t bytes,
                                      size_t* written) {
  return get<ProductState>(__func__, product, attribute, value, bytes, written);
}

Status cublasLtMatmulPreferenceCreate(Preference* preference) {
  if (!preference) return refuse(Status::kInvalidValue, __func__, "no place for the preference");
  *preference = new PreferenceState;
  return Status::kSuccess;
}
Status cublasLtMatmulPreferenceDestroy(Preference preference) {
  delete static_cast<PreferenceState*>(preference);
  return Status::kSuccess;
}
Status cublasLtMatmulPreferenceSetAttribute(Preference preference, int attribute, const void* value,
                                            size_t bytes) {
  return set<PreferenceState>(__func__, preference, attribute, value, bytes);
}
Status cublasLtMatmulPreferenceGetAttribute(Preference preference, int attribute, void* value,
                                            size_t bytes, size_t* written) {
  return get<PreferenceState>(__func__, preference, attribute, value, bytes, written);
}
}

}  // namespace tessera::cuda
