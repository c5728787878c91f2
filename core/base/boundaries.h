// Limits at which kernels cut their work: tiles, pieces, blocks, lanes, and where a loop is shared
// among threads. They stand in one table: a kernel takes its limit from it, and a test must run at
// each limit, one short of it and one beyond it (tests/support/boundaries.h says which test).
// Kernels that are compiled for several instruction sets include this file, so none of its
// functions exists at run time.
// Internal: not part of the public interface.
#pragma once
#include <cstdint>

namespace tessera {

enum class Needs : uint8_t { kAnyCpu, kV4, kBf16Dot };

struct Boundary {
  const char* name;   // "family.what"
  int64_t limit = 0;  // in elements of the dim that is cut; 0: two grains of a loop over threads,
                      // or what depends on other extents
  Needs needs = Needs::kAnyCpu;
};

inline constexpr Boundary kBoundaries[] = {
    // Sums and other reductions: lanes and blocks of a row, runs of rows and their columns.
    {"reduce.lanes", 32},
    {"reduce.block", 1024},
    {"reduce.run", 32},
    {"reduce.columns", 256},
    {"reduce.piece", 65536},
    {"reduce.pieces"},
    {"reduce.threads"},
    {"cat.row", 32768},
    {"cat.threads"},
    // Updates of parameters, and the sums of squares that norms of gradients are made of.
    {"update.piece", 32768},
    {"update.threads"},
    {"squares.block", 4096},
    {"squares.threads"},
    // Rows of softmax, losses and norms.
    {"rows.lanes", 32},
    {"softmax.threads"},
    {"softmax_grad.threads"},
    {"cross_entropy.block", 1024},
    {"cross_entropy.streams", int64_t(1) << 24},
    {"cross_entropy.threads"},
    {"norm.threads"},
    {"norm_grad.rows", 64},
    {"norm_grad.threads"},
    {"batch_norm.rows", 512},
    {"batch_norm.piece"},  // of rows with more channels
    {"batch_norm.block", 8},
    {"batch_norm.threads"},
    {"embedding.threads"},
    {"embedding_grad.threads"},
    // Attention: queries and keys of a tile, lanes over keys; heads are what threads share.
    {"attention.rows", 16},
    {"attention.columns", 128},
    {"attention.lanes", 32},
    {"attention.heads"},
    {"attention.wide_heads"},
    {"attention_bf16.rows", 32, Needs::kBf16Dot},
    {"attention_bf16.columns", 128, Needs::kBf16Dot},
    {"attention_bf16.rows_backward", 64, Needs::kBf16Dot},
    {"attention_bf16.columns_backward", 64, Needs::kBf16Dot},
    // Products.
    {"product.one_thread", int64_t(1) << 18},
    {"packed.least", 64, Needs::kV4},
    {"packed.least_elements", int64_t(1) << 17, Needs::kV4},  // of both operands and the result
    {"packed.fit", 0, Needs::kBf16Dot},
    {"packed.rows", 64},
    {"packed.columns", 256, Needs::kV4},  // others sum in leaves, in narrower tiles
    {"packed.tile_rows"},
    {"packed.tile_columns"},
    {"packed.depth"},
    {"packed.shares"},
    {"zero_rows.product", int64_t(1) << 27},
    {"zero_rows.looks", 16},
    {"zero_rows.bytes", 512},
    {"zero_rows.threads"},
    {"zero_rows.finite_threads"},
    {"zero_rows.gather_threads"},
    // Elements one by one, and their positions.
    {"elementwise.threads"},
    {"elementwise.row_threads"},
    {"pointwise.block", 512},
    {"random.chunk", 1024},
    {"random.threads"},
    {"random.row_threads"},
    {"dropout.sample_threads"},
    {"indexing.columns", 1024},
    {"indexing.threads"},
    {"sort.threads"},
    {"argmax.threads"},
    {"scan.threads"},
    // Convolutions and pools.
    {"conv_product.least", 64},
    {"conv_product.pairs", 1024, Needs::kBf16Dot},
    {"conv_nest.threads"},
    {"conv_places.least", 64, Needs::kV4},
    {"conv_places.narrow", 7, Needs::kV4},
    {"conv_places.gather_threads", 0, Needs::kV4},
    {"conv_places.threads", 0, Needs::kV4},
    {"winograd.channels", 32, Needs::kV4},
    {"winograd.most_panels", 64, Needs::kV4},
    {"winograd.panels", 0, Needs::kV4},
    {"winograd.least_tiles", 16, Needs::kV4},
    {"winograd.group", 8, Needs::kV4},
    {"winograd.block", 0, Needs::kV4},
    {"winograd.shares", 0, Needs::kV4},
    {"winograd_weight.least_tiles", 32, Needs::kV4},
    {"winograd_weight.block", 0, Needs::kV4},
    {"winograd_weight.shares", 0, Needs::kV4},
    {"winograd_weight.together", 8, Needs::kBf16Dot},
    {"winograd_weight.threads", 0, Needs::kBf16Dot},
    {"conv_dot.channels", 32, Needs::kBf16Dot},
    {"conv_dot.taps", 16, Needs::kBf16Dot},
    {"conv_dot_rows.least", 64, Needs::kBf16Dot},
    {"conv_dot_rows.tile", 8, Needs::kBf16Dot},
    {"conv_dot_rows.block", 0, Needs::kBf16Dot},
    {"conv_dot_rows.threads", 0, Needs::kBf16Dot},
    {"conv_dot_rows.pointers", 0, Needs::kBf16Dot},
    {"conv_dot_rows.find_threads", 0, Needs::kBf16Dot},
    {"conv_dot_rows.pack_threads", 0, Needs::kBf16Dot},
    {"conv_dot_rows.split_threads", 0, Needs::kBf16Dot},
    {"conv_dot_weight.outputs", 16, Needs::kBf16Dot},
    {"conv_dot_weight.places", 800, Needs::kBf16Dot},
    {"conv_dot_weight.places_of_one_tap", 256, Needs::kBf16Dot},
    {"conv_dot_weight.pairs", 0, Needs::kBf16Dot},
    {"conv_dot_weight.group", 0, Needs::kBf16Dot},
    {"conv_dot_weight.half", 8, Needs::kBf16Dot},
    {"conv_dot_weight.pack_threads", 0, Needs::kBf16Dot},
    {"conv_dot_weight.shares", 0, Needs::kBf16Dot},
    {"pool.threads"},
    {"pool_grad.images"},
    {"average_pool.threads"},
    {"average_pool_grad.images"},
    // Matrices of a batch, sparse rows, bytes.
    {"cholesky.threads"},
    {"solve_triangular.threads"},
    {"qr.threads"},
    {"svd.threads"},
    {"sparse.columns"},
    {"sparse.lanes", 32},
    {"sparse.threads"},
    {"quantize.threads"},
    {"dequantize.threads"},
    // Kernels that compile generates: blocks of a sum, rows of sums over rows, chunks of rows.
    {"generated.sum_block", 4096},
    {"generated.sum_rows", 64},
    {"generated.arrays"},  // rows of a chunk, where all rows make as many chunks as may be
    {"generated.one_row", 65536},
    {"generated.chunk"},
    {"generated.threads"},
    {"generated.beside", 256},
    {"generated.rows_beside", 64},
    {"generated.softmax", 8192},
    {"generated.lanes", 32},
    {"generated.byte_lanes", 64},
    {"generated.totals", int64_t(1) << 17},
    {"streams.row", 64},
    {"generated.row", 65536},
    {"fuse.instructions", 256},
    {"fuse.operands", 48},
    {"decompose.cached", int64_t(1) << 23},
    {"accumulate.threads"},
    // Reductions between ranks, in elements, and what they move, in cache lines. Ranks of a host:
    // what each reduces alone, what goes with the first phase, blocks of a slice, a window of the
    // staging area. Messages: what each rank reduces alone, what does not go through blocks.
    {"trees.block", 1024},
    {"shm.alone", 64},
    {"shm.first_phase", 1024},
    {"shm.block", 256},
    {"shm.window"},
    {"messages.alone", 256},
    {"messages.straight", 256},
    // Checkpoints: buffers of snapshots, hashes of replicas.
    {"snapshot.pages"},
    {"snapshot.units"},
    {"replicas.threads"},
};
inline constexpr int kNumBoundaries = int(sizeof(kBoundaries) / sizeof(kBoundaries[0]));

void no_boundary_has_this_name();  // defined nowhere: a wrong name does not compile

consteval int boundary_index(const char* name) {
  for (int i = 0; i < kNumBoundaries; ++i) {
    const char *a = kBoundaries[i].name, *b = name;
    for (; *a && *a == *b; ++a) ++b;
    if (*a == *b) return i;
  }
  no_boundary_has_this_name();
  return -1;
}

/// The limit that the table has for `name`.
consteval int64_t limit(const char* name) { return kBoundaries[boundary_index(name)].limit; }

}  // namespace tessera
