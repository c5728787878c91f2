"""Writes and reads a safetensors file with nothing but the standard library and PyTorch.

A file is an 8-byte little-endian header length, a JSON header, then the raw data in C order. The header maps each name
to {"dtype", "shape", "data_offsets"}; `__metadata__` maps strings to strings. The header is padded with spaces to a
multiple of 8 so that the data are aligned.
"""

import json
import struct

import torch

DTYPE_NAMES = {
    torch.bool: "BOOL",
    torch.uint8: "U8",
    torch.int32: "I32",
    torch.int64: "I64",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float32: "F32",
    torch.float64: "F64",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
}


def save(path, tensors, metadata):
    """Writes `tensors` (name -> tensor) in the order given; `metadata` values become strings."""
    header = {"__metadata__": {key: str(value) for key, value in metadata.items()}}
    chunks, offset = [], 0
    for name, tensor in tensors.items():
        data = _bytes(tensor)
        header[name] = {
            "dtype": DTYPE_NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [offset, offset + len(data)],
        }
        chunks.append(data)
        offset += len(data)
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb") as file:
        file.write(struct.pack("<Q", len(text)))
        file.write(text)
        file.writelines(chunks)


def load(path):
    """Returns (name -> tensor, metadata)."""
    dtypes = {name: dtype for dtype, name in DTYPE_NAMES.items()}
    with open(path, "rb") as file:
        header = json.loads(file.read(struct.unpack("<Q", file.read(8))[0]))
        data = file.read()
    metadata = header.pop("__metadata__", {})
    tensors = {}
    for name, entry in header.items():
        begin, end = entry["data_offsets"]
        dtype = dtypes[entry["dtype"]]
        if begin == end:
            tensors[name] = torch.empty(entry["shape"], dtype=dtype)
        else:
            raw = bytearray(data[begin:end])
            tensors[name] = torch.frombuffer(raw, dtype=dtype).reshape(entry["shape"])
    return tensors, metadata


def _bytes(tensor):
    flat = tensor.detach().contiguous().flatten()
    return flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b""
