// The list of all texts; each family says which instances it has.
#include "core/backend/cuda/kernels/families.h"

#include "core/backend/cuda/kernels/attention.h"
#include "core/backend/cuda/kernels/indexing.h"
#include "core/backend/cuda/kernels/matmul.h"
#include "core/backend/cuda/kernels/pointwise.h"
#include "core/backend/cuda/kernels/random.h"
#include "core/backend/cuda/kernels/reduce.h"
#include "core/backend/cuda/kernels/rows.h"
#include "core/backend/cuda/kernels/scan.h"
#include "core/backend/cuda/kernels/transpose.h"

namespace tessera::cuda {
namespace {

// Texts of one family with at most `each` instances.
void add(std::vector<KernelText>& texts, std::string_view family, std::vector<Instance> instances,
         size_t each) {
  for (size_t i = 0; i < instances.size(); i += each) {
    KernelText text{family, {}};
    for (size_t k = i; k < instances.size() && k < i + each; ++k)
      text.instances.push_back(std::move(instances[k]));
    texts.push_back(std::move(text));
  }
}

std::vector<Instance> pointwise_instances() {
  std::vector<Instance> all;
  for (DType t : kComputedDTypes)
    for (const PointwiseOp& op : pointwise_ops())
      if (is_integral(t) ? op.on_integers : op.on_floats) all.push_back(pointwise_instance(op, t));
  for (DType from : kAllDTypes)
    for (DType to : kAllDTypes)
      if (from != to) all.push_back(cast_instance(from, to));
  for (int bytes : {1, 2, 4, 8}) {
    all.push_back(copy_instance(bytes));
    all.push_back(where_instance(bytes));
  }
  return all;
}

std::vector<Instance> of_bytes(Instance (*make)(int)) {
  std::vector<Instance> all;
  for (int bytes : {1, 2, 4, 8}) all.push_back(make(bytes));
  return all;
}

constexpr DType kFloats[] = {kF16, kBF16, kF32, kF64};

DType compute_type(DType t) { return t == kF64 ? kF64 : is_floating(t) ? kF32 : kI64; }

std::vector<Instance> reduce_instances() {
  std::vector<Instance> all;
  for (DType t : kComputedDTypes) {
    const DType c = compute_type(t);
    for (const char* join : {"sum", "prod", "amax", "amin"}) {
      all.push_back(reduce_instance(join, t, c));
      if (t == c) continue;
      all.push_back(reduce_instance(join, t, t));
      all.push_back(reduce_instance(join, c, t));
    }
    for (const char* join : {"any", "all"}) {
      all.push_back(reduce_instance(join, t, kBool));
      if (t == c) all.push_back(reduce_instance(join, t, t));
      if (t != c) all.push_back(reduce_instance(join, t, c));
    }
  }
  return all;
}

std::vector<Instance> by_dtype(Instance (*make)(bool, DType)) {
  std::vector<Instance> all;
  for (DType t : kComputedDTypes)
    for (bool largest : {true, false}) all.push_back(make(largest, t));
  return all;
}

std::vector<Instance> by_hold(Instance (*make)(DType, RowHold),
                              std::span<const RowHold> (*holds)(DType)) {
  std::vector<Instance> all;
  for (DType t : kFloats)
    for (RowHold hold : holds(t)) all.push_back(make(t, hold));
  return all;
}

std::vector<Instance> indexing_instances() {
  std::vector<Instance> all;
  for (int bytes : {1, 2, 4, 8, 16})
    for (DType index : {kI32, kI64}) all.push_back(indexing_instance(bytes, index));
  return all;
}

std::vector<Instance> segments_instances() {
  std::vector<Instance> all;
  for (const char* join : {"sum", "prod", "amax", "amin"})
    for (DType t : kComputedDTypes) {
      const DType c = compute_type(t);
      all.push_back(segments_instance(join, t, c));
      if (t != c) all.push_back(segments_instance(join, t, t));
    }
  return all;
}

std::vector<Instance> random_instances() {
  std::vector<Instance> all;
  for (DType t : kFloats)
    for (const char* kind : {"rand", "randn"}) all.push_back(random_instance(kind, t));
  for (DType t : {kU8, kI32, kI64}) all.push_back(random_instance("randint", t));
  return all;
}

std::vector<Instance> attention_instances(bool units) {
  std::vector<Instance> all;
  for (DType t : kFloats)
    for (AttentionShape s : attention_shapes(t))
      if (s.units == units)
        for (bool masked : {false, true})
          for (bool dropped : {false, true})
            all.push_back(attention_instance(t, s, masked, dropped));
  return all;
}

std::vector<Instance> scan_instances() {
  std::vector<Instance> all;
  for (DType t : kComputedDTypes)
    for (const char* op : {"cumsum", "cumprod", "cummax", "cummin"})
      all.push_back(scan_instance(op, t));
  for (DType t : kFloats)
    for (const char* op : {"logcumsumexp", "linear_scan"}) all.push_back(scan_instance(op, t));
  return all;
}

template <size_t N>
std::vector<Instance> of_dtypes(Instance (*make)(DType), const DType (&dtypes)[N]) {
  std::vector<Instance> all;
  for (DType t : dtypes) all.push_back(make(t));
  return all;
}

}  // namespace

std::vector<KernelText> all_kernel_texts() {
  std::vector<KernelText> texts;
  add(texts, "pointwise", pointwise_instances(), 24);
  add(texts, "transpose", of_bytes(transpose_instance), 4);
  add(texts, "reduce", reduce_instances(), 12);
  add(texts, "extreme", by_dtype(extreme_instance), 16);
  add(texts, "bits_hash", of_bytes(bits_hash_instance), 4);
  add(texts, "rows", by_hold(rows_instance, row_holds), 1);
  add(texts, "norm_grad", by_hold(norm_grad_instance, norm_grad_holds), 2);
  add(texts, "losses", by_hold(loss_instance, loss_holds), 4);
  add(texts, "indexing", indexing_instances(), 10);
  add(texts, "segments", segments_instances(), 20);
  add(texts, "sparse", of_dtypes(sparse_instance, kFloats), 2);
  add(texts, "sort", by_dtype(sort_instance), 4);
  add(texts, "random", random_instances(), 12);
  add(texts, "dropout", of_dtypes(dropout_instance, kFloats), 4);
  add(texts, "arange", of_dtypes(arange_instance, kComputedDTypes), 8);
  add(texts, "update", of_dtypes(update_instance, {kF32, kF64}), 2);
  for (DType t : kComputedDTypes) add(texts, "matmul", matmul_instances(t), 2);
  add(texts, "attention", attention_instances(false), 1);
  add(texts, "attention_units", attention_instances(true), 1);
  add(texts, "attention_mask", of_dtypes(attention_mask_instance, {kF16, kBF16}), 2);
  add(texts, "scan", scan_instances(), 8);
  add(texts, "pool", of_dtypes(pool_instance, {kF16, kBF16, kF32, kF64, kU8}), 5);
  add(texts, "batch_norm", of_dtypes(batch_norm_instance, kFloats), 4);
  add(texts, "conv", of_dtypes(conv_instance, kFloats), 4);
  return texts;
}

}  // namespace tessera::cuda
