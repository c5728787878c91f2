"""Writes tests/golden/images.json: encoded pictures with their pixels, and resized pictures, all by Pillow.

Keys: "decoded": list of {name, file, height, width, pixels}, where file is what Pillow wrote and pixels is Pillow's
convert("RGB") of it. "resized": list of {height, width, to_height, to_width, pixels} of the picture that picture() draws.
Bytes are hex texts.

Usage: make_golden_images.py [OUT]   (needs Pillow; stored numbers are from 13.0)
"""

import io
import json
import struct
import sys
import zlib
from pathlib import Path

from PIL import Image


def picture(height, width):
    """Red, green and blue are different ramps with steps; the tests draw the same."""
    image = Image.new("RGB", (width, height))
    for y in range(height):
        for x in range(width):
            image.putpixel((x, y), ((7 * x + 3 * y) % 256, (5 * x * y + 11) % 256, 40 * ((x // 3 + y // 2) % 6)))
    return image


def encoded(image, kind, **options):
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def without_adobe(jpeg):
    """The file without its APP14 segment."""
    at = jpeg.index(b"\xff\xee")
    return jpeg[:at] + jpeg[at + 2 + int.from_bytes(jpeg[at + 2 : at + 4], "big") :]


def png_of_16_bits(color_type, channels, height=5, width=7):
    """Made by hand, as Pillow writes none but grey. Low bytes run through all that rounding could see."""

    def chunk(name, data):
        return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))

    values = [(i * 7919) % 65536 for i in range(height * width * channels)]
    rows = [struct.pack(f">{width * channels}H", *values[y * width * channels :][: width * channels]) for y in range(height)]
    header = struct.pack(">IIBBBBB", width, height, 16, color_type, 0, 0, 0)
    data = zlib.compress(b"".join(b"\0" + row for row in rows))
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", data) + chunk(b"IEND", b"")


def files():
    rgb = picture(13, 17)
    translucent = rgb.convert("RGBA")
    translucent.putalpha(rgb.convert("L"))
    palette = rgb.quantize(20)
    yield "jpeg 4:2:0", encoded(rgb, "JPEG", quality=85)
    yield "jpeg 4:4:4", encoded(rgb, "JPEG", quality=95, subsampling=0)
    yield "jpeg 4:2:2", encoded(rgb, "JPEG", quality=85, subsampling=1)
    yield "jpeg progressive", encoded(rgb, "JPEG", quality=80, progressive=True)
    yield "jpeg grey", encoded(rgb.convert("L"), "JPEG")
    yield "jpeg inks", encoded(rgb.convert("CMYK"), "JPEG", quality=90)
    yield "jpeg inks without Adobe's segment", without_adobe(encoded(rgb.convert("CMYK"), "JPEG", quality=90))
    yield "png", encoded(rgb, "PNG")
    yield "png grey", encoded(rgb.convert("L"), "PNG")
    yield "png translucent", encoded(translucent, "PNG")
    yield "png grey translucent", encoded(translucent.convert("LA"), "PNG")
    yield "png palette", encoded(palette, "PNG")
    yield "png palette with a clear colour", encoded(palette, "PNG", transparency=3)
    yield "png one bit", encoded(rgb.convert("1"), "PNG")
    yield "png 16 bits", png_of_16_bits(2, 3)
    yield "png 16 bits translucent", png_of_16_bits(6, 4)
    yield "png 16 bits grey translucent", png_of_16_bits(4, 2)


def main():
    decoded, resized = [], []
    for name, file in files():
        image = Image.open(io.BytesIO(file)).convert("RGB")
        decoded.append(
            {"name": name, "file": file.hex(), "height": image.height, "width": image.width, "pixels": image.tobytes().hex()}
        )
    for height, width, to_height, to_width in [
        (9, 12, 9, 5), (9, 12, 4, 12), (9, 12, 3, 4), (9, 12, 20, 31), (9, 12, 20, 5), (33, 21, 8, 8), (1, 1, 3, 2), (40, 50, 1, 1),
    ]:  # fmt: skip
        image = picture(height, width).resize((to_width, to_height), Image.Resampling.BILINEAR)
        resized.append(
            {"height": height, "width": width, "to_height": to_height, "to_width": to_width, "pixels": image.tobytes().hex()}
        )
    default = Path(__file__).resolve().parents[2] / "tests/golden/images.json"
    out = Path(sys.argv[1]) if len(sys.argv) > 1 else default
    lists = {"decoded": decoded, "resized": resized}
    text = ",\n".join(f'"{key}": [\n' + ",\n".join(map(json.dumps, rows)) + "\n]" for key, rows in lists.items())
    out.write_text("{\n" + text + "\n}\n")


if __name__ == "__main__":
    main()
