// Every op of the registry, on each of its samples: what it says of itself (shapes, loops,
// linearity, which values it reads) against what its kernel does, across layouts, dtypes and owners
// of operands. Its gradients are in sweep_gradient_test.cpp, its sharding in
// sweep_sharding_test.cpp.
#include "tests/core/ops/sweep.h"

#include <cstring>
#include <set>

#include "core/dispatch/call.h"
#include "core/dispatch/dispatch.h"
#include "core/dispatch/kernel.h"
#include "core/ops/pointwise.h"
#include "core/ops/views.h"

namespace tessera::sweep {
namespace {

bool has_kernel(const Primitive& p) { return bool(find_kernel(p, kCPU)); }

TEST(Sweep, EveryOpIsRegisteredWithSamplesAndCanRun) {
  std::set<std::string, std::less<>> names;
  for (const OpEntry& e : op_registry().entries()) {
    EXPECT_TRUE(names.insert(e.name).second) << e.name << " is registered twice";
    std::vector<Sample> samples = e.samples();
    EXPECT_FALSE(samples.empty()) << e.name << " has no samples";
    for (const Sample& s : samples) {
      EXPECT_EQ(s.prim->name(), e.name);
      EXPECT_TRUE(s.prim->is_view() || s.prim->decomposable() || has_kernel(*s.prim))
          << e.name << ": no kernel, no decomposition and no view";
    }
  }
  for (int id = 0; id < op_count(); ++id) {
    if (!kernel_table().find(DeviceKind::kCPU, OpId(id))) continue;
    EXPECT_TRUE(names.contains(op_name(OpId(id))))
        << op_name(OpId(id)) << " has a kernel but is not registered";
  }
}

TEST(Sweep, InferEqualsResults) {
  for_each_sample([](const Sample& s) {
    std::vector<Meta> want = infer(*s.prim, s.in);
    List out = run(s.prim, s.in);
    ASSERT_EQ(out.size(), want.size());
    for (size_t i = 0; i < out.size(); ++i) {
      EXPECT_EQ(out[i].shape(), want[i].shape)
          << to_string(out[i].shape()) << " inferred " << to_string(want[i].shape);
      EXPECT_EQ(out[i].dtype(), want[i].dtype);
      EXPECT_TRUE(out[i].device() == want[i].device);
    }
  });
}

TEST(Sweep, MetaTensorsGiveMetaTensors) {
  for_each_sample([](const Sample& s) {
    if (s.in.empty()) return;
    List in;
    for (const Tensor& t : s.in) in.push_back(empty(Meta::contiguous(t.shape(), t.dtype(), kMeta)));
    std::vector<Meta> want = infer(*s.prim, in);
    List out = run(s.prim, in);
    for (size_t i = 0; i < out.size(); ++i) {
      EXPECT_TRUE(out[i].device() == want[i].device);
      EXPECT_EQ(out[i].shape(), want[i].shape);
    }
  });
}

TEST(Sweep, AxisMapsHold) {
  for_each_sample([](const Sample& s) {
    SmallVector<const Meta*, 8> in;
    for (const Tensor& t : s.in) in.push_back(&t.meta());
    std::vector<Meta> out = infer(*s.prim, s.in);
    verify_axes(s.prim->name(), s.prim->axes(in), in, out);
  });
}

TEST(Sweep, AttributesTellSamplesApart) {
  for (const OpEntry& e : op_registry().entries()) {
    std::vector<Sample> samples = e.samples(), again = e.samples();
    for (size_t i = 0; i < samples.size(); ++i) {
      EXPECT_TRUE(same_primitive(*samples[i].prim, *again[i].prim)) << e.name;
      EXPECT_EQ(hash_primitive(*samples[i].prim), hash_primitive(*again[i].prim)) << e.name;
      for (size_t k = 0; k < i;
           ++k) {  // the same call on other samples of equal shapes must be the same op
        if (!same_primitive(*samples[i].prim, *samples[k].prim)) continue;
        List out = run(samples[i].prim, samples[i].in), other = run(samples[k].prim, samples[i].in);
        expect_close(other, out, 0, e.name + ": two primitives that claim to be the same differ");
      }
    }
  }
}

TEST(Sweep, OperandsKeepTheirValues) {
  for_each_sample([](const Sample& s) {
    List before;
    for (const Tensor& t : s.in) before.push_back(clone(t));
    run(s.prim, s.in);
    expect_close(s.in, before, 0, "an operand was overwritten");
  });
}

TEST(Sweep, TemporariesGiveTheSameResults) {
  for_each_sample([](const Sample& s) {
    List want = run(s.prim, s.in);
    Tensors temporaries;  // these have no other owner: kernels may write over them
    for (const Tensor& t : s.in) temporaries.push_back(clone(t));
    Tensors out = dispatch(s.prim, temporaries);
    expect_close(List(out.begin(), out.end()), want, 0, "operands that may be overwritten");
  });
}

TEST(Sweep, AnyLayoutGivesTheSameResults) {
  for_each_sample([](const Sample& s) {
    List dense, strided;
    for (const Tensor& t : s.in) dense.push_back(clone(t)), strided.push_back(restrided(t));
    expect_close(run(s.prim, strided), run(s.prim, dense), 1e-13, "permuted operands with offsets");
    for (size_t i = 0; i < dense.size(); ++i) {
      List one = dense;
      one[i] = strided[i];
      expect_close(run(s.prim, one), run(s.prim, dense), 1e-13,
                   fmt::format("operand {} permuted", i));
    }
  });
}

TEST(Sweep, DecompositionEqualsKernel) {
  for_each_sample([](const Sample& s) {
    if (!s.prim->decomposable() || !has_kernel(*s.prim)) return;
    Tensors out = s.prim->decompose(s.in);
    expect_close(List(out.begin(), out.end()), run(s.prim, s.in), 1e-11, "decomposition");
  });
}

// Runs in `dtype`; ops whose numbers (learning rate, step) are always f64 get them so.
List run_in(const Sample& s, DType dtype, List& in) {
  in = with_dtype(s.in, dtype, false);
  try {
    return run(s.prim, in);
  } catch (const UserError&) {
    in = with_dtype(s.in, dtype, true);
    return run(s.prim, in);
  }
}

bool takes_floats(const Sample& s) {
  for (const Tensor& t : s.in)
    if (is_float(t)) return true;
  return false;
}

List wide(const List& in) {
  List out;
  for (const Tensor& t : in) out.push_back(is_float(t) ? cast(t, kF64) : t);
  return out;
}

// Sums of squares are f64 whatever was summed.
const std::set<std::string_view> kOnlyDouble = {"norm_of_rows"};

TEST(Sweep, SinglePrecisionIsCloseToDouble) {
  for_each_sample([](const Sample& s) {
    if (!takes_floats(s) || kOnlyDouble.contains(s.prim->name())) return;
    List in;
    List out = run_in(s, kF32, in);
    // The same rounded operands in f64: what is left is the rounding of the op itself.
    expect_close(wide(out), wide(run(s.prim, wide(in))), 2e-5, "f32");
  });
}

// Updates keep f32 weights and refuse others.
const std::set<std::string_view> kOnlyWide = {"adam",        "sgd",          "global_norm",
                                              "row_squares", "norm_of_rows", "max_magnitude"};

TEST(Sweep, SixteenBitFloatsAreComputedWideAndRoundedOnce) {
  for (DType dtype : {kBF16, kF16}) {
    double ulp = dtype == kBF16 ? 0x1p-8 : 0x1p-11;
    for_each_sample([&](const Sample& s) {
      if (!takes_floats(s) || kOnlyWide.contains(s.prim->name())) return;
      List in, widened;
      List out = run_in(s, dtype, in);
      for (const Tensor& t : in) widened.push_back(t.dtype() == dtype ? cast(t, kF32) : t);
      List want = run(s.prim, widened);
      for (size_t i = 0; i < out.size(); ++i) {
        if (out[i].dtype() != dtype) continue;
        // Half an ulp from rounding, and room for ties that f32 falls just beside.
        expect_close(cast(out[i], kF64), cast(want[i], kF64), 2 * ulp, std::string(name_of(dtype)));
      }
    });
  }
}

TEST(Sweep, ShapeOnlyOperandsAreNeverRead) {
  for_each_sample([](const Sample& s) {
    AxisMap map = axes(*s.prim, s.in);
    List in = s.in;
    for (size_t i = 0; i < in.size(); ++i)
      if (map.shape_only >> i & 1) in[i] = Tensor(in[i].meta(), nullptr);
    expect_close(run(s.prim, in), run(s.prim, s.in), 0, "operands without values");
  });
}

// f(a + b) = f(a) + f(b) when the operands in `terms` are split so and the others are kept.
void expect_linear(const Sample& s, uint32_t terms, const char* what) {
  List first = s.in, second = s.in;
  for (size_t i = 0; i < s.in.size(); ++i) {
    if (!(terms >> i & 1)) continue;
    ASSERT_TRUE(is_float(s.in[i])) << what << ": operand " << i << " does not hold floats";
    first[i] = weights_like(s.in[i], i);
    second[i] = s.in[i] - first[i];
  }
  List a = run(s.prim, first), b = run(s.prim, second), want = run(s.prim, s.in);
  DType coarsest = kF64;
  for (const List* l : std::initializer_list<const List*>{&s.in, &want})
    for (const Tensor& t : *l) coarsest = is_float(t) ? std::min(coarsest, t.dtype()) : coarsest;
  double tolerance = coarsest == kF64 ? 1e-12 : coarsest == kF32 ? 1e-5 : 0.02;
  for (size_t i = 0; i < want.size(); ++i) {
    expect_close(a[i] + b[i], want[i], tolerance, what);
  }
}

TEST(Sweep, LinearityHolds) {
  for_each_sample([](const Sample& s) {
    AxisMap map = axes(*s.prim, s.in);
    if (map.jointly_linear && takes_floats(s))
      expect_linear(s, ~map.shape_only, "all operands together");
    for (size_t i = 0; i < s.in.size(); ++i)
      if (map.linear_in >> i & 1) expect_linear(s, 1u << i, "one operand");
  });
}

}  // namespace
}  // namespace tessera::sweep
