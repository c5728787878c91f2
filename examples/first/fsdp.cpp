// Ranks train a model of which each holds a part. A run can be continued from its newest save, on
// any number of ranks, with the losses of a run that was never interrupted:
//   tlaunch --nproc 2 fsdp runs/a 3 && fsdp runs/a 6
#include <tessera/tessera.h>

#include <cstdio>

using namespace tessera;

int main(int argc, char** argv) {
  if (argc != 3) return std::fputs("usage: fsdp FOLDER STEPS\n", stderr), 2;
  auto group = init_process_group();
  manual_seed(3);  // the same data and weights on every rank
  auto dataset = std::make_shared<data::TensorDataset>(randn({256, 32}), randint(0, 4, {256}));
  auto block = [] {
    return nn::sequential(nn::linear(32, 128), nn::gelu(), nn::dropout(0.1), nn::linear(128, 32));
  };
  auto model = nn::sequential(block(), block(), block(), nn::linear(32, 4));
  parallel::fully_shard(model);
  auto opt = optim::AdamW(model->parameters(), {.lr = 1e-3});
  auto loader = parallel::distributed_loader(
      dataset, {.batch_size = 32 / group->size(), .shuffle = true, .repeat = true});

  checkpoint::TrainingState training{.model = model.get(), .optimizer = &opt, .loader = &loader};
  checkpoint::Checkpointer saver(argv[1]);
  int64_t step = 0;
  if (auto from = training.resume(argv[1])) step = from->step;
  while (step < std::stoll(argv[2])) {
    data::Batch batch = *loader.next();
    SampleScope samples(batch.sample_numbers);  // dropout draws by sample, on whichever rank
    Tensor loss = nn::cross_entropy((*model)(batch.inputs), batch.targets);
    opt.zero_grad();
    loss.backward();
    optim::clip_grad_norm_(model->parameters(), 1.0);
    opt.step();
    loss = all_reduce(loss.detach(), group, ReduceOp::kAvg);
    if (group->rank() == 0) std::printf("step %ld  loss %.6f\n", long(step), loss.item<float>());
    if (++step % 3 == 0) training.save(saver, step);
  }
  saver.wait();
}
