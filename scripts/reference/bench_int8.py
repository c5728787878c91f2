"""Times inference of a ResNet-50 in PyTorch, in f32 and in eight bits, as `bench int8` does in Tessera: a batch of images, channels
last, one thread. int8 is graph-mode quantization after training (prepare_fx, calibration, convert_fx) with PyTorch's
default choices for x86: u8 activations with histograms, s8 weights by channel, norms, relu and additions fused.

    VENV/bin/python scripts/reference/bench_int8.py --image-size 224 --batch-size 8
"""

import statistics
import time

import bench_common


def add_options(parser):
    parser.add_argument("--image-size", type=int, default=224)
    parser.add_argument("--batch-size", type=int, default=8)


def main():
    options = bench_common.quiet(__doc__, add_options, devices=False)
    import torch
    from resnet import ResNet
    from torch.ao.quantization import get_default_qconfig_mapping
    from torch.ao.quantization.quantize_fx import convert_fx, fuse_fx, prepare_fx

    torch.manual_seed(0)
    model = ResNet(50).to(memory_format=torch.channels_last).eval()
    shape = (options.batch_size, 3, options.image_size, options.image_size)
    x = torch.randn(shape).contiguous(memory_format=torch.channels_last)
    made = {}

    def int8():
        torch.backends.quantized.engine = "x86"
        watched = prepare_fx(model, get_default_qconfig_mapping("x86"), (x,))
        watched(x)
        return convert_fx(watched)

    def folded():
        return fuse_fx(model)  # batch-norm folded into convolutions

    def bf16():
        def run(images):
            with torch.autocast("cpu", torch.bfloat16):
                return model(images)

        return run

    makers = {"fp32": lambda: model, "fp32_folded": folded, "bf16": bf16, "int8": int8}

    def sampler(name):
        def sample():
            with torch.inference_mode(name != "int8"), torch.no_grad():
                if name not in made:
                    made[name] = makers[name]()
                    made[name](x)
                times = []
                for _ in range(3):
                    start = time.perf_counter()
                    made[name](x)
                    times.append((time.perf_counter() - start) * 1e3)
                return statistics.median(times)

        return sample

    bench_common.run("pytorch", {name: sampler(name) for name in makers}, options, bench_common.give_back)


if __name__ == "__main__":
    main()
