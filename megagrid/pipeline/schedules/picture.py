"""A picture of boxes and labels, as SVG and as PNG. Pure, no torch.

Whoever draws places shapes once, and both formats show them alike. Lengths are in pixels of the
SVG, x to the right and y down.
"""

from __future__ import annotations

import argparse
import io
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from html import escape
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING

from megagrid.pipeline.schedules.action import ScheduleError
from megagrid.pipeline.schedules.text import write

if TYPE_CHECKING:
    from PIL import ImageDraw

_EDGE_COLOUR = "#ffffff"
_PNG_SCALE = 2  # its pixels for one of the SVG: sharp where a screen has twice as many
_PNG_HEIGHT = 2**15  # the most of its pixels; higher ones fill the memory, and few programs open


@dataclass(frozen=True)
class Box:
    """A rectangle.

    Attributes:
        x, y: of the upper left corner.
        colour: "#rrggbb".
        note: what an SVG tells of the box under the pointer.
        has_edge: a thin white line sets it off from its neighbours.
    """

    x: float
    y: float
    width: float
    height: float
    colour: str
    note: str = ""
    has_edge: bool = False


@dataclass(frozen=True)
class Label:
    """A line of text. The font of a PNG has the letters of ASCII and little else.

    Attributes:
        x: where it begins, or its middle if `is_centred`.
        y: of the line that its letters stand on.
        size: of the letters.
    """

    x: float
    y: float
    text: str
    size: int
    is_centred: bool = False


@dataclass(frozen=True)
class Picture:
    """Shapes, later ones on top of earlier ones."""

    width: int
    height: int
    shapes: Sequence[Box | Label]

    def svg(self) -> str:
        """An SVG document; its ground is transparent."""
        elements = (
            _svg_box(shape) if isinstance(shape, Box) else _svg_label(shape)
            for shape in self.shapes
        )
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{self.width}" height="{self.height}" '
            'font-family="sans-serif">\n' + "\n".join(elements) + "\n</svg>\n"
        )

    def png(self) -> bytes:
        """A PNG file; its ground is white.

        Raises:
            ScheduleError: the picture is too high for one.
        """
        from PIL import Image, ImageDraw  # nothing but a PNG has to wait for it

        width, height = self.width * _PNG_SCALE, self.height * _PNG_SCALE
        if height > _PNG_HEIGHT:
            raise ScheduleError(
                f"a PNG of so many ranks would be {height} pixels high, more than {_PNG_HEIGHT}; "
                "draw it by --svg"
            )
        image = Image.new("RGB", (width, height), "#ffffff")
        canvas = ImageDraw.Draw(image)
        for shape in self.shapes:
            if isinstance(shape, Box):
                _paint_box(canvas, shape)
            else:
                _paint_label(canvas, shape)
        file = io.BytesIO()
        image.save(file, "PNG", dpi=(96 * _PNG_SCALE, 96 * _PNG_SCALE))
        return file.getvalue()


def _svg_box(box: Box) -> str:
    place = " ".join(f'{name}="{getattr(box, name):.2f}"' for name in ("x", "y", "width", "height"))
    edge = f' stroke="{_EDGE_COLOUR}"' if box.has_edge else ""
    note = f"<title>{escape(box.note)}</title>" if box.note else ""
    return f'<rect {place} fill="{box.colour}"{edge}>{note}</rect>'


def _svg_label(label: Label) -> str:
    anchor = ' text-anchor="middle"' if label.is_centred else ""
    place = f'x="{label.x:.2f}" y="{label.y:.2f}" font-size="{label.size}"{anchor}'
    return f"<text {place}>{escape(label.text)}</text>"


def _paint_box(canvas: ImageDraw.ImageDraw, box: Box) -> None:
    x0, y0 = round(box.x * _PNG_SCALE), round(box.y * _PNG_SCALE)
    # The last pixels, which belong to the box: one is the least.
    x1 = max(x0, round((box.x + box.width) * _PNG_SCALE) - 1)
    y1 = max(y0, round((box.y + box.height) * _PNG_SCALE) - 1)
    # The edges of a narrow box would leave nothing of it.
    has_edge = box.has_edge and x1 - x0 > 2 * _PNG_SCALE
    canvas.rectangle((x0, y0, x1, y1), box.colour, outline=_EDGE_COLOUR if has_edge else None)


def _paint_label(canvas: ImageDraw.ImageDraw, label: Label) -> None:
    from PIL import ImageFont

    canvas.text(
        (label.x * _PNG_SCALE, label.y * _PNG_SCALE),
        label.text,
        fill="#000000",
        font=ImageFont.load_default(label.size * _PNG_SCALE),
        anchor="ms" if label.is_centred else "ls",  # middle or left, standing on y
    )


# --- On the command line -------------------------------------------------------------------------

FORMATS = MappingProxyType({"svg": Picture.svg, "png": Picture.png})
"""Option, which is the file's suffix too -> what makes the file's content."""


def add_picture_options(parser: argparse.ArgumentParser, what: str) -> None:
    """`--svg FILE` and `--png FILE`, which draw `what`."""
    for name in FORMATS:
        parser.add_argument(
            f"--{name}",
            type=partial(_path, name),
            metavar=f"FILE.{name}",
            help=f"draw {what} as a picture",
        )


def write_pictures(arguments: argparse.Namespace, draw: Callable[[], Picture]) -> None:
    """Write the files that those options name, if any.

    Raises:
        ScheduleError: one can't be written.
    """
    paths = {name: getattr(arguments, name) for name in FORMATS}
    if not any(paths.values()):
        return
    picture = draw()
    for name, path in paths.items():
        if path is not None:
            write(path, FORMATS[name](picture))


def _path(name: str, text: str) -> Path:
    """The file of `--name`. Another suffix would promise another format."""
    path = Path(text)
    if path.suffix.lower() != f".{name}":
        others = " or ".join(f"--{other} for .{other}" for other in FORMATS if other != name)
        raise argparse.ArgumentTypeError(f"{text!r} must end in .{name}; there is {others}")
    return path
