"""The same shapes as SVG and as PNG, and the options that ask for them."""

from __future__ import annotations

import argparse
import io
import re
from xml.etree import ElementTree

import pytest
from PIL import Image

from megagrid.pipeline.schedules import ScheduleError
from megagrid.pipeline.schedules.picture import (
    Box,
    Label,
    Picture,
    add_picture_options,
    write_pictures,
)

RED, BLUE, WHITE = (255, 0, 0), (0, 0, 255), (255, 255, 255)
PICTURE = Picture(
    100,
    40,
    [
        Box(10, 5, 60, 20, "#ff0000", note="red & <wide>", has_edge=True),
        Box(80, 5, 0.2, 20, "#0000ff", has_edge=True),
        Label(12, 38, "two < three", size=12),
    ],
)


def png(picture: Picture) -> Image.Image:
    return Image.open(io.BytesIO(picture.png())).convert("RGB")


def test_svg_has_every_shape_with_its_place_and_text():
    root = ElementTree.fromstring(PICTURE.svg())
    wide, narrow = root.findall("{*}rect")
    assert (float(wide.get("x")), float(wide.get("width"))) == (10, 60)
    assert (float(narrow.get("x")), float(narrow.get("width"))) == (80, 0.2)
    assert wide.find("{*}title").text == "red & <wide>"
    assert root.find("{*}text").text == "two < three"


def test_png_has_two_pixels_for_one_of_the_svg():
    image = png(PICTURE)
    assert image.size == (200, 80)
    assert image.getpixel((0, 0)) == WHITE
    assert image.getpixel((80, 30)) == RED
    # Corners of the box, just inside its edge and just outside of it.
    assert image.getpixel((21, 11)) == image.getpixel((138, 48)) == RED
    assert image.getpixel((19, 30)) == image.getpixel((140, 30)) == WHITE


def test_a_box_too_narrow_for_a_pixel_is_seen_all_the_same():
    """An action that takes next to no time: neither rounding nor its edge hides it."""
    assert png(PICTURE).getpixel((160, 30)) == BLUE


@pytest.mark.parametrize(("is_centred", "start"), [(False, 100), (True, 60)])
def test_a_label_stands_on_its_line_where_it_should(is_centred, start):
    picture = Picture(200, 40, [Label(50, 30, "HHHHHH", size=12, is_centred=is_centred)])
    dark = png(picture).convert("L").point(lambda value: 255 * (value < 128)).getbbox()
    left, top, right, bottom = dark
    assert bottom == pytest.approx(60, abs=1), "capitals stand on the line"
    assert 12 < bottom - top < 24, "and are about 0.7 of their size, twice"
    if is_centred:
        assert (left + right) / 2 == pytest.approx(100, abs=2)
    else:
        assert left == pytest.approx(100, abs=4)


def test_a_picture_too_high_for_a_png_is_refused_with_what_to_do():
    with pytest.raises(ScheduleError, match=r"40000 pixels high, more than 32768; .* --svg"):
        Picture(10, 20_000, []).png()


def parsed(*arguments: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser(exit_on_error=False)
    add_picture_options(parser, "it")
    return parser.parse_args(arguments)


def test_both_formats_are_written_of_one_drawing(tmp_path):
    drawn = []
    paths = tmp_path / "a.svg", tmp_path / "b.PNG"
    arguments = parsed("--svg", str(paths[0]), "--png", str(paths[1]))
    write_pictures(arguments, lambda: drawn.append(PICTURE) or PICTURE)
    assert drawn == [PICTURE]
    assert paths[0].read_text() == PICTURE.svg()
    assert paths[1].read_bytes() == PICTURE.png()


def test_nothing_is_drawn_unless_asked_for():
    write_pictures(parsed(), lambda: pytest.fail("drawn"))


@pytest.mark.parametrize(
    ("option", "name", "other"),
    [
        ("--svg", "x.pdf", "--png for .png"),
        ("--svg", "x.png", "--png for .png"),
        ("--png", "x.svg", "--svg for .svg"),
        ("--png", "x", "--svg for .svg"),
    ],
)
def test_a_name_that_promises_another_format_is_refused(option, name, other):
    told = f"'{name}' must end in .{option[2:]}; there is {other}"
    with pytest.raises(argparse.ArgumentError, match=re.escape(told)):
        parsed(option, name)
