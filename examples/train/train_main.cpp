#include "examples/train/train_main.h"

#include <csignal>
#include <new>

#include "core/base/matmul_precision.h"
#include "core/base/open_files.h"
#include "core/base/output.h"
#include "core/data/image_source.h"
#include "core/tensor/allocator.h"
#include "examples/train/agreement.h"
#include "examples/train/options.h"
#include "examples/train/trainer.h"

namespace tessera {

int train_main(int argc, char** argv) {
  reserve_standard_streams();
  try {
    const train::Parsed parsed = train::parse_options(argc, argv);
    if (parsed.exit_status >= 0) return check_output(), parsed.exit_status;
    set_float32_matmul_precision(parsed.options.precision == "tf32" ? "high" : "highest");
    check_open_files("train", 12);  // data, a checkpoint, a cache, a compiler's pipes
    Ref<ProcessGroup> group = init_process_group({.backend = parsed.options.backend});
    int signal = 0;
    try {
      signal = train::run(parsed.options, group);
    } catch (const train::RanksDisagree& e) {  // on all ranks, with the same text
      if (group->rank() == 0) std::fprintf(stderr, "%s\n", e.what());
      destroy_process_group();
      return 1;
    } catch (const data::CutArchive& e) {
      const std::string text =
          fmt::format("{} (--bad-images skip trains on what comes before that)", e.what());
      group->abort(text);
      throw UserError(text);
    } catch (const data::BadImage& e) {
      const std::string text =
          fmt::format("{} (--bad-images skip leaves such images out)", e.what());
      group->abort(text);
      throw UserError(text);
    } catch (const std::exception& e) {
      group->abort(e.what());  // peers learn the reason now, not at their deadline
      throw;
    }
    destroy_process_group();
    if (signal != 0) std::raise(signal);  // tells the sender that the signal was obeyed
    check_output();
    return 0;
  } catch (const std::bad_alloc&) {  // thrown by libraries; tensors throw errors with sizes
    std::fprintf(stderr,
                 "train: the system refused memory (%ld bytes are held by tensors); use a smaller "
                 "model or batch, or shard the model over more ranks\n",
                 long(cpu_memory_stats().live_bytes));
    return 1;
  } catch (const std::exception& e) {
    std::fprintf(stderr, "%s\n", e.what());
    return 1;
  }
}

}  // namespace tessera
