"""Residual networks v1.5, with torchvision's names of parameters; `width` and `small_images` as in examples/models/resnet.h."""

import torch
from torch import nn

BLOCKS = {18: [2, 2, 2, 2], 34: [3, 4, 6, 3], 50: [3, 4, 6, 3], 101: [3, 4, 23, 3], 152: [3, 8, 36, 3]}


def conv(inputs, outputs, kernel, stride=1):
    return nn.Conv2d(inputs, outputs, kernel, stride, kernel // 2, bias=False)


class Block(nn.Module):
    def __init__(self, inputs, width, stride, bottleneck):
        super().__init__()
        outputs = 4 * width if bottleneck else width
        self.count = 3 if bottleneck else 2
        if bottleneck:
            layers = [conv(inputs, width, 1), conv(width, width, 3, stride), conv(width, outputs, 1)]
        else:
            layers = [conv(inputs, width, 3, stride), conv(width, outputs, 3)]
        for number, layer in enumerate(layers, 1):
            setattr(self, f"conv{number}", layer)
            setattr(self, f"bn{number}", nn.BatchNorm2d(layer.out_channels))
        self.downsample = None
        if stride != 1 or inputs != outputs:
            self.downsample = nn.Sequential(conv(inputs, outputs, 1, stride), nn.BatchNorm2d(outputs))

    def forward(self, x):
        y = x
        for number in range(1, self.count + 1):
            if number > 1:
                y = torch.relu(y)
            y = getattr(self, f"bn{number}")(getattr(self, f"conv{number}")(y))
        return torch.relu(y + (x if self.downsample is None else self.downsample(x)))


class ResNet(nn.Module):
    def __init__(self, depth=50, classes=1000, width=64, small_images=False):
        super().__init__()
        self.small_images = small_images
        self.conv1 = conv(3, width, 3) if small_images else conv(3, width, 7, 2)
        self.bn1 = nn.BatchNorm2d(width)
        channels, bottleneck = width, depth >= 50
        for stage, blocks in enumerate(BLOCKS[depth]):
            layers = []
            for block in range(blocks):
                stride = 2 if stage > 0 and block == 0 else 1
                layers.append(Block(channels, width << stage, stride, bottleneck))
                channels = (width << stage) * (4 if bottleneck else 1)
            setattr(self, f"layer{stage + 1}", nn.Sequential(*layers))
        self.fc = nn.Linear(channels, classes)

    def forward(self, x):
        x = torch.relu(self.bn1(self.conv1(x)))
        if not self.small_images:
            x = nn.functional.max_pool2d(x, 3, 2, 1)
        for stage in (self.layer1, self.layer2, self.layer3, self.layer4):
            x = stage(x)
        return self.fc(x.mean((2, 3)))
