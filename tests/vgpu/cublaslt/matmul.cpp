// The calls that compute, and those that say how they would. A product is an op of the virtual
// driver's scheduler, which is told of every byte that it reads and writes. The names of these ops,
// which counters and VGPU_FAIL know, are "cublasLt" and the epilogue, "cublasLt GELU_AUX_BIAS", and
// what else is not plain: "cublasLt DEFAULT + C", "cublasLt DEFAULT TF32",
// "cublasLt BIAS F8".
#include <algorithm>
#include <cstring>

#include "tests/vgpu/cublaslt/problem.h"
#include "tests/vgpu/cuda/virtual_driver.h"

namespace vgpu::blas {

namespace {

constexpr uint64_t kWorkspaceAlignment = 256;

struct AlgorithmState {
  uint64_t id, splits, reduction, problem;
};
AlgorithmState read(const Algorithm& algorithm) {
  AlgorithmState s;
  std::memcpy(&s, &algorithm, sizeof(s));
  return s;
}
Algorithm algorithm_of(const Way& way, const Problem& p) {
  const AlgorithmState s{static_cast<uint64_t>(way.id), static_cast<uint64_t>(way.splits),
                         static_cast<uint64_t>(way.reduction), fingerprint(p)};
  Algorithm made{};
  std::memcpy(&made, &s, sizeof(s));
  return made;
}
const Way* way_of(const Algorithm* algorithm, const Problem& p) {
  if (!algorithm) return nullptr;
  const AlgorithmState s = read(*algorithm);
  for (const Way& way : kWays)
    if (s.id == static_cast<uint64_t>(way.id) && s.problem == fingerprint(p)) return &way;
  return nullptr;
}

bool fits(int64_t elements, int type, int alignment) {
  return elements * bytes_of(type) % alignment == 0;
}
/// Leading dimensions and strides suit the way.
bool suits(const Way& way, const Problem& p) {
  if (!way.alignment) return true;
  for (const Matrices* x : {&p.a, &p.b, &p.c, &p.d})
    if (!fits(x->leading, x->type, way.alignment) ||
        (p.batch > 1 && !fits(x->stride, x->type, way.alignment)))
      return false;
  return true;
}

Suggestion suggest(const Way& way, const Problem& p) {
  Suggestion s{};
  s.algorithm = algorithm_of(way, p), s.workspace_bytes = workspace_of(way, p);
  s.state = Status::kSuccess, s.waves = 0.5f;
  return s;
}

Status check_handle(const char* call, Handle handle) {
  if (const Status s = requested(call); s != Status::kSuccess) return s;
  if (!is_handle(handle)) return refuse(Status::kNotInitialized, call, "no handle");
  const int current = vgpu::virtual_driver()->current_device();
  if (current != handle->device)
    return refuse(Status::kInvalidValue, call,
                  "wrong device: a handle of device " + std::to_string(handle->device) + " while " +
                      (current < 0 ? "none" : "device " + std::to_string(current)) + " is current");
  return Status::kSuccess;
}

DevicePtr address(const void* p) { return reinterpret_cast<DevicePtr>(p); }

void add_uses(std::vector<Use>& uses, const Matrices& x, const void* base, int64_t batch,
              VgpuAccess kind) {
  const auto bytes = static_cast<size_t>(bytes_of(x.type));
  for (int64_t i = 0; i < (x.stride == 0 ? 1 : batch); ++i)
    uses.push_back({address(base) + static_cast<size_t>(i * x.stride) * bytes,
                    static_cast<size_t>(x.run()) * bytes, static_cast<size_t>(x.leading) * bytes,
                    static_cast<size_t>(x.runs()), kind});
}
void add_epilogue_uses(std::vector<Use>& uses, const Problem& p, bool writes) {
  const ProductState& s = p.product;
  const auto bytes = static_cast<size_t>(bytes_of(p.d.type));
  const bool bias_is_written = p.sums_result() || p.sums_operand();
  const VgpuAccess kind = writes ? kVgpuWrite : kVgpuRead;
  const auto of_bias = static_cast<size_t>(bytes_of(p.bias_type()));
  if ((p.adds_bias() || bias_is_written) && bias_is_written == writes)
    for (int64_t i = 0; i < (s.bias_batch_stride == 0 ? 1 : p.batch); ++i)
      uses.push_back({address(s.bias) + static_cast<size_t>(i * s.bias_batch_stride) * of_bias,
                      static_cast<size_t>(p.bias_elements()) * of_bias, 0, 1, kind});
  if (!p.has_aux() || p.is_gelu_gradient() == writes) return;
  const size_t bits = p.is_relu() ? 1 : 8 * bytes;
  for (int64_t i = 0; i < p.batch; ++i)
    uses.push_back({address(s.aux) + static_cast<size_t>(i * s.aux_batch_stride) * bits / 8,
                    (static_cast<size_t>(p.m) * bits + 7) / 8,
                    static_cast<size_t>(s.aux_leading) * bits / 8, static_cast<size_t>(p.n), kind});
}

/// Whether two operands of a batch may share memory: what is from the first element to the last is
/// compared.
bool overlap(const Matrices& x, const void* at_x, const Matrices& y, const void* at_y,
             int64_t batch) {
  const auto end = [batch](const Matrices& m, const void* at) {
    const int64_t elements = (batch - 1) * m.stride + (m.runs() - 1) * m.leading + m.run();
    return address(at) + static_cast<DevicePtr>(elements * bytes_of(m.type));
  };
  return address(at_x) < end(y, at_y) && address(at_y) < end(x, at_x);
}

/// "" or what is wrong with the addresses.
std::string wrong_addresses(const Problem& p, const Way& way, const Operands& o,
                            size_t workspace_bytes) {
  struct Named {
    const char* name;
    const void* at;
    const Matrices* x;
  };
  for (const Named& n : {Named{"A", o.a, &p.a}, Named{"B", o.b, &p.b}, Named{"C", o.c, &p.c},
                         Named{"D", o.d, &p.d}}) {
    if (!n.at) return std::string("no address of ") + n.name;
    const int alignment = way.alignment_of(p, n.x->type);
    if (address(n.at) % static_cast<unsigned>(alignment))
      return std::string(n.name) + " is not aligned to " + std::to_string(alignment) +
             " bytes, which algorithm " + std::to_string(way.id) + " needs";
  }
  if (!suits(way, p))
    return "a leading dimension or stride is not aligned to " + std::to_string(way.alignment) +
           " bytes, which algorithm " + std::to_string(way.id) + " needs";
  const uint64_t needed = workspace_of(way, p);
  if (needed > workspace_bytes || (needed && !o.workspace))
    return "a workspace of " + std::to_string(workspace_bytes) + " bytes; algorithm " +
           std::to_string(way.id) + " needs " + std::to_string(needed);
  if (address(o.workspace) % kWorkspaceAlignment)
    return "the workspace is not aligned to " + std::to_string(kWorkspaceAlignment) + " bytes";
  if (overlap(p.a, o.a, p.d, o.d, p.batch) || overlap(p.b, o.b, p.d, o.d, p.batch))
    return "D is in the memory of A or B";
  if (o.c == o.d && p.c.leading != p.d.leading) return "C is D, with another layout";
  if ((p.sums_result() || p.sums_operand()) && (o.alpha != 1 || o.beta != 0))
    return "alpha and beta with the gradient of a bias are not emulated";
  return "";
}

double scalar(const Problem& p, const void* value) {
  return p.product.scale_type == kR64F ? *static_cast<const double*>(value)
                                       : *static_cast<const float*>(value);
}

}  // namespace

}  // namespace vgpu::blas

namespace tessera::cuda {

using namespace vgpu;
using namespace vgpu::blas;

extern "C" {

Status cublasLtMatmulAlgoGetHeuristic(Handle handle, Product product, Layout a, Layout b, Layout c,
                                      Layout d, Preference preference, int most,
                                      Suggestion* suggestions, int* count) {
  if (const Status s = check_handle(__func__, handle); s != Status::kSuccess) return s;
  if (most < 1 || !preference || !suggestions || !count)
    return refuse(Status::kInvalidValue, __func__, "no preference, or no place for suggestions");
  *count = 0;
  Problem p;
  if (const Refusal r = state_problem(p, product, a, b, c, d); r.status != Status::kSuccess)
    return refuse(r.status, __func__, r.why);
  const auto& wanted = static_cast<const PreferenceState&>(*preference);
  if (wanted.search_mode != 0)
    return refuse(Status::kNotSupported, __func__, "search modes are not emulated");
  for (const Way& way : kWays) {
    bool good = suits(way, p) && workspace_of(way, p) <= wanted.workspace_bytes;
    const int least = p.is_f8() ? 16 : std::max(way.alignment, 1);
    for (int32_t alignment : wanted.alignment) good &= alignment % least == 0;
    if (way.reduction != kReductionNone) good &= (wanted.reductions & way.reduction) != 0;
    if (good && *count < most) suggestions[(*count)++] = suggest(way, p);
  }
  return *count ? Status::kSuccess
                : refuse(Status::kNotSupported, __func__, "no algorithm has what is preferred");
}

Status cublasLtMatmulAlgoCheck(Handle handle, Product product, Layout a, Layout b, Layout c,
                               Layout d, const Algorithm* algorithm, Suggestion* result) {
  if (const Status s = check_handle(__func__, handle); s != Status::kSuccess) return s;
  Problem p;
  if (const Refusal r = state_problem(p, product, a, b, c, d); r.status != Status::kSuccess)
    return refuse(r.status, __func__, r.why);
  const Way* way = way_of(algorithm, p);
  if (!way || !suits(*way, p))
    return refuse(Status::kInvalidValue, __func__, "no algorithm, or one of another product");
  const Algorithm kept = result->algorithm;
  *result = suggest(*way, p), result->algorithm = kept;
  return Status::kSuccess;
}

Status cublasLtMatmulAlgoConfigGetAttribute(const Algorithm* algorithm, int attribute, void* value,
                                            size_t bytes, size_t* written) {
  if (!algorithm) return refuse(Status::kInvalidValue, __func__, "no algorithm");
  const AlgorithmState s = read(*algorithm);
  int32_t found;
  switch (attribute) {
    case kAlgorithmId: found = static_cast<int32_t>(s.id); break;
    case kAlgorithmSplits: found = static_cast<int32_t>(s.splits); break;
    case kAlgorithmReduction: found = static_cast<int32_t>(s.reduction); break;
    default:
      return refuse(Status::kInvalidValue, __func__,
                    "attribute " + std::to_string(attribute) + " is not emulated");
  }
  if (bytes ? !value || bytes != sizeof(found) : !written)
    return refuse(Status::kInvalidValue, __func__, "no place for the value, or of another size");
  if (bytes) std::memcpy(value, &found, sizeof(found));
  if (written) *written = sizeof(found);
  return Status::kSuccess;
}

Status cublasLtMatmul(Handle handle, Product product, const void* alpha, const void* a,
                      Layout a_layout, const void* b, Layout b_layout, const void* beta,
                      const void* c, Layout c_layout, void* d, Layout d_layout,
                      const Algorithm* algorithm, void* workspace, size_t workspace_bytes,
                      StreamHandle stream) {
  if (const Status s = check_handle(__func__, handle); s != Status::kSuccess) return s;
  Problem p;
  if (const Refusal r = state_problem(p, product, a_layout, b_layout, c_layout, d_layout);
      r.status != Status::kSuccess)
    return refuse(r.status, __func__, r.why);
  if (!alpha || !beta) return refuse(Status::kInvalidValue, __func__, "no alpha, or no beta");
  const Way* way = way_of(algorithm, p);
  if (!way)
    return refuse(algorithm ? Status::kInvalidValue : Status::kNotSupported, __func__,
                  "no algorithm, or one of another product");
  const Operands o{a, b, c, d, workspace, scalar(p, alpha), scalar(p, beta)};
  if (const std::string why = wrong_addresses(p, *way, o, workspace_bytes); !why.empty())
    return refuse(Status::kInvalidValue, __func__, why);
  Work work{"cublasLt " + epilogue_name(p.product.epilogue) +
                (p.product.compute == kCompute32FFastTF32 ? " TF32" : "") +
                (p.is_f8() ? " F8" : "") + (o.beta != 0 ? " + C" : ""),
            {},
            {}};
  add_uses(work.uses, p.a, a, p.batch, kVgpuRead);
  add_uses(work.uses, p.b, b, p.batch, kVgpuRead);
  for (const void* scale : {p.product.scale_a, p.product.scale_b})
    if (scale) work.uses.push_back({address(scale), sizeof(float), 0, 1, kVgpuRead});
  if (o.beta != 0) add_uses(work.uses, p.c, c, p.batch, kVgpuRead);
  add_epilogue_uses(work.uses, p, false);
  if (const uint64_t needed = workspace_of(*way, p))
    work.uses.push_back({address(workspace), needed, 0, 1, kVgpuWrite});
  add_uses(work.uses, p.d, d, p.batch, kVgpuWrite);
  add_epilogue_uses(work.uses, p, true);
  work.run = [p, way, o] { compute(p, *way, o); };
  const Result r = vgpu::virtual_driver()->submit(stream, &work);
  return r == Result::kSuccess
             ? Status::kSuccess
             : refuse(Status::kExecutionFailed, __func__,
                      "the driver refuses it with " + std::to_string(static_cast<int>(r)));
}
}

}  // namespace tessera::cuda
